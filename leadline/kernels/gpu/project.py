"""project on a GPU: linear layers over weights as stored, by kernels that stream the weights, or by a library."""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from leadline.kernels.gpu.chips import Chip, chip_of, processors
from leadline.kernels.gpu.expand import expanded
from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.gpu.product import product_kernel
from leadline.kernels.gpu.product_plan import (
    FEW_TOKENS,
    MOST_TOKENS,
    Plan,
    Product,
    constants,
    plan_hopper,
    plan_product,
)
from leadline.kernels.gpu.quantize import quantize_rows, round_rows
from leadline.kernels.project import Weight

WIDE_TOKENS = 16
"""bf16 weights: with more rows cuBLAS is as fast (H200, 129280 x 4096: 247 against 242 us at 16, 286 against 403 at
128; 1024 x 4096: 7.9 against 6.4, and 8.6 against 12.2)."""
SCALES_MULTIPLE = 128
"""Codes' scales have room for whole tiles of tokens, so that reading them needs no mask."""
LIBRARY_MULTIPLE = 16
STREAMS = 64
MOST_COUNTERS = 4096
"""More tiles than any product has whose columns are split."""


class Input(NamedTuple):
    """What a product reads: `values` [T, groups * columns], and their `scales` [T, blocks] if `form` is "codes"."""

    values: Tensor
    scales: Tensor | None
    form: str


def project(x: Tensor, weight: Weight) -> Tensor:
    """See `leadline.kernels.project.project`; `x` is bf16. More than MOST_TOKENS rows are a library's work, unless
    the weight is deterministic: libraries choose by size."""
    if len(x) <= MOST_TOKENS or weight.deterministic:
        return multiply(taken(x, weight), weight, 1, x.dtype)
    if weight.round_input and has_block_scaled_product(weight):
        return block_scaled_product(x, weight)
    return F.linear(round_rows(x) if weight.round_input else x, expanded(weight))


def wide_product(x: Tensor, matrix: Tensor, deterministic: bool = False, out: Tensor | None = None) -> Tensor:
    """See `leadline.kernels.project.wide_product`; both are bf16."""
    if len(x) <= WIDE_TOKENS or deterministic:
        weight = Weight(matrix, deterministic=deterministic)
        return multiply(Input(x, None, "plain"), weight, 1, torch.float32, out=out)
    return torch.mm(x, matrix.T, out_dtype=torch.float32, out=out)


def taken(x: Tensor, weight: Weight) -> Input:
    """bf16 `x` as the product with `weight` reads it: as is, to be rounded in the kernel, or rounded by a launch."""
    if not weight.round_input:
        return Input(x, None, "plain")
    if len(x) <= FEW_TOKENS:
        return Input(x, None, "round")
    if chip_of(x.device).fp8_dot and weight.data.dtype == torch.float8_e4m3fn:
        return Input(*quantize_rows(x, SCALES_MULTIPLE), "codes")
    return Input(round_rows(x), None, "plain")


def has_block_scaled_product(weight: Weight) -> bool:
    """Whether cuBLASLt multiplies fp8 with scales per 128 on this chip, with a weight of this kind and shape."""
    rows, columns = weight.data.shape
    fits = rows % 128 == 0 and columns % 512 == 0 and weight.data.dtype == torch.float8_e4m3fn
    return fits and chip_of(weight.data.device).name == "sm90" and hasattr(F, "scaled_mm")


def block_scaled_product(x: Tensor, weight: Weight) -> Tensor:
    """`x` [T, in], rounded to fp8 here, times an fp8 weight, by cuBLASLt, which takes a multiple of 16 rows."""
    assert weight.scale is not None
    tokens = len(x)
    missing = -tokens % LIBRARY_MULTIPLE
    codes, scales = quantize_rows(F.pad(x, (0, 0, 0, missing)) if missing else x)
    kinds = F.ScalingType
    wide = weight.scale.to(torch.float32)
    product = F.scaled_mm(
        codes, weight.data.T, scales, kinds.BlockWise1x128, wide.T, kinds.BlockWise128x128, output_dtype=x.dtype
    )
    return product[:tokens]


def multiply(
    x: Input,
    weight: Weight,
    groups: int,
    dtype: torch.dtype,
    plan: Plan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x` times `weight` [groups * rows, columns], each group of rows with its part of the input -> [T, groups * rows].

    Sums are in fp32 and rounded once to `dtype`. `plan` is chosen by `plan_product` unless given. The result goes to
    `out`, contiguous and of that dtype, if given.
    """
    device, tokens, all_rows = x.values.device, len(x.values), weight.data.shape[-2]
    columns = x.values.shape[1] // groups
    product = Product(tokens, all_rows // groups, columns, groups, x.form, weight.form, weight.deterministic)
    if out is None:
        out = torch.empty(tokens, all_rows, dtype=dtype, device=device)
    assert out.is_contiguous() and out.dtype == dtype
    if tokens == 0:
        return out
    chip = chip_of(device)
    x = x._replace(values=x.values.contiguous())
    hopper = plan_hopper(product, chip, processors(device)) if plan is None and device.type == "cuda" else None
    if hopper is not None:
        _launch_hopper(x.values, weight, product, hopper, out)
    else:
        _launch(x, weight, product, plan or plan_product(product, chip, processors(device)), chip, out)
    return out


def _launch(x: Input, weight: Weight, product: Product, plan: Plan, chip: Chip, out: Tensor) -> None:
    e8m0 = weight.scale is not None and weight.scale.dtype != torch.float32
    fixed = constants(product, plan, chip, e8m0, interpreted=out.device.type == "cpu")
    seen = {"asm": torch.int16, "bits": torch.uint8}.get(str(fixed["unpack"]))
    scale = out if weight.scale is None else weight.scale.view(torch.uint8) if e8m0 else weight.scale
    tiles = product.groups * triton.cdiv(product.rows, plan.block_rows)
    product_kernel[tiles, 1 if plan.alone else plan.splits, triton.cdiv(product.tokens, plan.block_tokens)](
        x.values,
        x.values if x.scales is None else x.scales,
        weight.data if seen is None else weight.data.view(seen),
        scale,
        out,
        _sums(plan, out),
        arrivals(out.device),
        product.tokens,
        product.rows,
        product.columns,
        x.values.stride(0),
        0 if x.scales is None else x.scales.stride(1),
        scale.shape[-1],
        plan.steps,
        **fixed,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **early_start(out.device),
    )


def _launch_hopper(x: Tensor, weight: Weight, product: Product, plan: Plan, out: Tensor) -> None:
    from leadline.kernels.gpu.product_hopper import few_product  # Gluon is Triton's for the newest chips only

    assert weight.scale is not None
    e8m0 = weight.scale.dtype != torch.float32
    few_product[len(weight.data) // plan.block_rows, plan.splits](
        x,
        weight.data,
        weight.scale.view(torch.uint8) if e8m0 else weight.scale,
        out,
        _sums(plan, out),
        arrivals(out.device),
        product.tokens,
        len(weight.data),
        product.rows,
        product.columns,
        x.stride(0),
        weight.scale.shape[1],
        plan.steps,
        e8m0,
        plan.block_rows,
        plan.block_tokens,
        plan.warps,
        plan.stages,
        plan.steps,
        plan.splits,
        product.input == "plain",
        num_warps=plan.warps,
        **early_start(out.device),
    )


def _sums(plan: Plan, out: Tensor) -> Tensor:
    """Scratch for the sums of every split that is a program's own."""
    if plan.splits == 1 or plan.alone:
        return out
    return torch.empty(plan.splits, *out.shape, dtype=torch.float32, device=out.device)


def arrivals(device: torch.device) -> Tensor:
    """Counters of finished programs for the current stream of `device`, all zero between launches.

    Launches of one stream never overlap where they count; graphs captured on one stream must not run side by side.
    Raises RuntimeError for the first use on a device within a graph capture, and for more than STREAMS streams.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    place = _places.setdefault((device, stream), len(_places))
    if place >= STREAMS:
        raise RuntimeError(f"linear layers were launched on more than {STREAMS} streams of this process")
    return _counters(device)[place]


_places: dict[tuple[torch.device, int], int] = {}


@functools.cache
def _counters(device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"run a linear layer on {device} once before capturing a graph: its counters must be zeroed")
    counters = torch.zeros(STREAMS, MOST_COUNTERS, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams use them too
    return counters
