"""Packed rows brought into bf16 by a launch of its own (see `leadline.kernels.packed.KvRows.read`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.attend import unpacked, widths
from leadline.kernels.gpu.chips import chip_of

ROWS = 16
"""Rows of a program."""


@triton.jit
def read_kernel(
    p_blocks,
    p_row,
    p_out,
    rows,
    stride,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Rows `p_row` of a packed pool; zeros for -1."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b_row = tl.load(p_row + o_row, o_row < rows, other=-1)
    b_value = unpacked(p_blocks, b_row, stride, D, R, BLOCK_D, ASSEMBLY)
    o_channel = tl.arange(0, BLOCK_D)
    tl.store(p_out + o_row[:, None] * D + o_channel, b_value, (o_row < rows)[:, None] & (o_channel < D))


def read_rows(blocks: Tensor, rows: Tensor, width: int, rotated: int) -> Tensor:
    """Rows `rows` [N] int64 of a packed pool's `blocks` -> bf16 [N, width]; zeros where -1."""
    out = torch.empty(len(rows), width, dtype=torch.bfloat16, device=rows.device)
    if len(rows):
        constants = {**widths(width, rotated), "ROWS": ROWS}
        assembly = rows.is_cuda and chip_of(rows.device).backend == "cuda"
        read_kernel[(triton.cdiv(len(rows), ROWS),)](
            blocks, rows, out, len(rows), blocks.stride(0), **constants, ASSEMBLY=assembly, num_warps=4
        )
    return out
