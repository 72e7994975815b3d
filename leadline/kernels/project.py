"""project: linear layers over weights as the checkpoint stores them (fp8 or fp4 with scales, bf16, fp32)."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.formats import fp4_dequantize, fp8_dequantize, fp8_round_trip
from leadline.kernels.rowwise import high

ROW_MULTIPLE = 8
"""CPU matrix products see a multiple of this many rows. BLAS then sums each row in the same order however many
rows there are, so that a token's result does not depend on its batch (fewer rows take other code paths; checked
for fp32, fp64 and bf16 by `tests/test_invariance.py`)."""

ROWS_OF_A_PRODUCT = 64
"""Rows of the one shape in which deterministic products of a library run on a GPU."""


@dataclass
class Weight:
    """A matrix [out, in], or a stack of them [E, out, in].

    `data` is a float tensor, or e4m3 with `scale` [ceil(out/128), ceil(in/128)], or packed e2m1 (int8 [out, in/2])
    with `scale` [out, in/32]. `round_input` says that products take their input rounded to fp8 (native numerics);
    `deterministic` that a row's products have the same bits on a GPU whatever other rows there are.
    Arranged fp4 (see `leadline.kernels.gpu.experts_arrange`) is the same bytes as int32 [out, in/8] and [out, in/128].
    """

    data: Tensor
    scale: Tensor | None = None
    round_input: bool = False
    deterministic: bool = False

    @property
    def form(self) -> Literal["plain", "fp8", "fp4", "arranged"]:
        """How the numbers are stored: the dtype of `data` says it."""
        if self.scale is None:
            return "plain"
        if self.data.dtype == torch.int32:
            return "arranged"
        return "fp8" if self.data.dtype == torch.float8_e4m3fn else "fp4"

    def expert(self, index: int) -> "Weight":
        """One matrix of a stack, as a view."""
        scale = None if self.scale is None else self.scale[index]
        return Weight(self.data[index], scale, self.round_input, self.deterministic)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix in `dtype`, expanded from its stored format where it has one."""
        if self.scale is None:
            return self.data.to(dtype)
        if self.form == "fp8":
            return fp8_dequantize(self.data, self.scale, dtype)
        if self.form == "arranged":
            from leadline.kernels.gpu.experts_arrange import restore  # only a GPU has arranged weights

            return fp4_dequantize(*restore(self.data, self.scale), dtype)
        return fp4_dequantize(self.data, self.scale, dtype)


def row_product(x: Tensor, matrix: Tensor, deterministic: bool = False) -> Tensor:
    """`x` [T, in] times `matrix` [out, in] transposed -> [T, out], each row independent of the others.

    On a GPU, where a library chooses by the number of rows, to the bit only if `deterministic`.
    """
    if x.is_cuda and deterministic:
        tiles = F.pad(x, (0, 0, 0, -len(x) % ROWS_OF_A_PRODUCT)).split(ROWS_OF_A_PRODUCT)
        return torch.cat([F.linear(tile, matrix) for tile in tiles])[: len(x)]
    missing = -len(x) % ROW_MULTIPLE
    if missing == 0 or x.is_cuda:
        return F.linear(x, matrix)
    if len(x) == 1:
        return F.linear(x.expand(ROW_MULTIPLE, -1), matrix)[:1]
    return F.linear(F.pad(x, (0, 0, 0, missing)), matrix)[: len(x)]


def wide_product(x: Tensor, matrix: Tensor, deterministic: bool = False, out: Tensor | None = None) -> Tensor:
    """`x` [T, in] times `matrix` [out, in] transposed -> [T, out] in fp32 (fp64 in fp64 models), summed in fp32.

    In `out` if given, contiguous and of that dtype.
    """
    if x.is_cuda and x.dtype == matrix.dtype == torch.bfloat16:
        from leadline.kernels.gpu import project as gpu

        return gpu.wide_product(x, matrix, deterministic, out)
    product = row_product(high(x), high(matrix), deterministic)
    return product if out is None else out.copy_(product)


def round_input(x: Tensor, weight: Weight) -> Tensor:
    """`x` as the product with `weight` takes it: rounded to fp8 in blocks of 128 (official `act_quant`), or as is."""
    if not weight.round_input:
        return x
    if x.is_cuda and x.dtype == torch.bfloat16:
        from leadline.kernels.gpu.quantize import round_rows

        return round_rows(x)
    return fp8_round_trip(x)


def project(x: Tensor, weight: Weight) -> Tensor:
    """`x` [T, in] -> [T, out] in the dtype of `x`."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        from leadline.kernels.gpu import project as gpu

        return gpu.project(x, weight)
    return row_product(round_input(x, weight), weight.dense(x.dtype), weight.deterministic)
