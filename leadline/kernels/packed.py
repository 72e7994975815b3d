"""Packed pools: fp8 window rows and entries, and fp4 index keys, as native numerics keep them on a GPU.

Rows lie in blocks: first the data of all rows of a block, then the scales of all its rows, then padding. For
official dimensions this is FlashMLA's layout of V4: 448 e4m3 + 64 bf16 values in 576 bytes and 7 scale bytes (e8m0
per 64 channels, padded to 8) a row, a block's stride a multiple of 576. A row is addressed by its number alone,
whatever a page or a slot is: `row // BLOCK_ROWS` and `row % BLOCK_ROWS`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.formats import (
    e2m1_decode,
    e8m0_decode,
    e8m0_encode,
    fp4_quantize_rows,
    fp8_quantize_rows,
)

BLOCK_ROWS = 64
KV_BLOCK = 64
"""Channels of a row that share one fp8 scale."""
FP4_BLOCK = 32


@dataclass(frozen=True)
class KvRows:
    """Window rows or entries of `width` channels, the last `rotated` in bf16 and the others in e4m3.

    `blocks` is uint8 [rows / 64, block stride]; `data` and `scales` are views of it.
    """

    blocks: Tensor
    width: int
    rotated: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's values."""
        return self.width + self.rotated

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, padding included."""
        return kv_scale_bytes(self.width, self.rotated)

    @property
    def data(self) -> Tensor:
        """[blocks, 64, row_bytes] uint8."""
        return self.blocks[:, : BLOCK_ROWS * self.row_bytes].unflatten(1, (BLOCK_ROWS, -1))

    @property
    def scales(self) -> Tensor:
        """[blocks, 64, scale_bytes] uint8."""
        start = BLOCK_ROWS * self.row_bytes
        return self.blocks[:, start : start + BLOCK_ROWS * self.scale_bytes].unflatten(1, (BLOCK_ROWS, -1))

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Round `values` [N, width] and put them at `rows` [N]. The definition of what kernels write."""
        plain, turned = values.split([self.width - self.rotated, self.rotated], -1)
        codes, scale = fp8_quantize_rows(plain, KV_BLOCK)
        block, place = rows // BLOCK_ROWS, rows % BLOCK_ROWS
        self.data[block, place] = torch.cat([codes.view(torch.uint8), turned.bfloat16().view(torch.uint8)], -1)
        self.scales[block, place, : scale.shape[1]] = e8m0_encode(scale).view(torch.uint8)

    def read(self, rows: Tensor) -> Tensor:
        """Values [N, width] in bf16 of `rows` [N]: what attention reads, exactly. On a GPU zeros where a row is -1."""
        if self.blocks.is_cuda:
            from leadline.kernels.gpu.read import read_rows

            return read_rows(self.blocks, rows, self.width, self.rotated)
        block, place = rows // BLOCK_ROWS, rows % BLOCK_ROWS
        data, plain = self.data[block, place], self.width - self.rotated
        codes = data[:, :plain].contiguous().view(torch.float8_e4m3fn).float()
        scale = e8m0_decode(self.scales[block, place].contiguous()).repeat_interleave(KV_BLOCK, 1)[:, :plain]
        turned = data[:, plain:].contiguous().view(torch.bfloat16)
        return torch.cat([(codes * scale).bfloat16(), turned], -1)


@dataclass(frozen=True)
class IndexRows:
    """Index keys of `width` channels in e2m1, e8m0 scales per 32: uint8 `blocks` [rows / 64, 64 * row bytes]."""

    blocks: Tensor
    width: int

    @property
    def data(self) -> Tensor:
        """[blocks, 64, width / 2] uint8, channel 2j in the low half of byte j."""
        return self.blocks[:, : BLOCK_ROWS * self.width // 2].unflatten(1, (BLOCK_ROWS, -1))

    @property
    def scales(self) -> Tensor:
        """[blocks, 64, width / 32] uint8."""
        return self.blocks[:, BLOCK_ROWS * self.width // 2 :].unflatten(1, (BLOCK_ROWS, -1))

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Round `values` [N, width] (rotated and spread) and put them at `rows` [N]."""
        packed, scale = fp4_quantize_rows(values)
        block, place = rows // BLOCK_ROWS, rows % BLOCK_ROWS
        self.data[block, place] = packed
        self.scales[block, place] = e8m0_encode(scale).view(torch.uint8)

    def read(self, rows: Tensor) -> Tensor:
        """Values [N, width] in bf16 of `rows` [N], exactly."""
        block, place = rows // BLOCK_ROWS, rows % BLOCK_ROWS
        scale = e8m0_decode(self.scales[block, place].contiguous()).repeat_interleave(FP4_BLOCK, 1)
        return (e2m1_decode(self.data[block, place].contiguous()) * scale).bfloat16()


KvPool = Tensor | KvRows
"""Rows as they are used, [rows, D], or packed."""
IndexPool = Tensor | IndexRows


def kv_scale_bytes(width: int, rotated: int) -> int:
    """Bytes of the scales of one row: one per 64 channels, padded to a multiple of 8."""
    scales = -((rotated - width) // KV_BLOCK)
    return -(-scales // 8) * 8


def kv_block_bytes(width: int, rotated: int) -> int:
    """Stride of a block of 64 rows: rounded up to a multiple of a row's bytes, as FlashMLA wants it."""
    row = width + rotated
    return -(-BLOCK_ROWS * (row + kv_scale_bytes(width, rotated)) // row) * row


def kv_rows(rows: int, width: int, rotated: int, device: torch.device) -> KvRows:
    """An uninitialised packed pool of `rows` rows or a few more."""
    blocks = -(-rows // BLOCK_ROWS)
    empty = torch.empty(blocks, kv_block_bytes(width, rotated), dtype=torch.uint8, device=device)
    return KvRows(empty, width, rotated)


def index_rows(rows: int, width: int, device: torch.device) -> IndexRows:
    """An uninitialised packed pool of `rows` index keys or a few more."""
    stride = BLOCK_ROWS * (width // 2 + width // FP4_BLOCK)
    return IndexRows(torch.empty(-(-rows // BLOCK_ROWS), stride, dtype=torch.uint8, device=device), width)
