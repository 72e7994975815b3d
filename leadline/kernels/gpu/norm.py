"""The row norm on a GPU (`rms_norm` of `leadline/kernels/rowwise.py`): one launch, each row read and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.overlap import early_start

ELEMENTS = 4096
"""A program norms as many rows as hold about this many elements: small rows alone would leave its lanes idle."""


def cut(width: int) -> tuple[int, int]:
    """Rows and warps of a program for rows of `width` elements."""
    block = triton.next_power_of_2(width)
    rows = max(1, min(16, ELEMENTS // block))
    return rows, max(1, min(8, rows * block // 512))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As the definition, over the last dimension of `x` [..., d], bf16 or fp32; the result is contiguous.

    A view whose rows lie at one distance (a slice of columns, say) is read where it is.
    """
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = x.reshape(-1, width)
    rows = len(flat)
    if rows == 0:
        return out
    if width > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    block_rows, warps = cut(width)
    overlap = early_start(x.device)
    _rms_norm[(triton.cdiv(rows, block_rows),)](
        flat,
        weight,
        out,
        rows,
        flat.stride(0),
        eps,
        D=width,
        B_ROWS=block_rows,
        B_D=triton.next_power_of_2(width),
        OVERLAP=bool(overlap),
        num_warps=warps,
        **overlap,
    )
    return out


@triton.jit
def _rms_norm(
    p_x,
    p_weight,
    p_out,
    rows,
    s_row,
    eps,
    D: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_row = (tl.program_id(0) * B_ROWS + tl.arange(0, B_ROWS)).to(tl.int64)[:, None]
    o_channel = tl.arange(0, B_D)[None, :]
    mask = (o_row < rows) & (o_channel < D)
    weight = 1.0
    if p_weight is not None:
        weight = tl.load(p_weight + o_channel, o_channel < D, 0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(p_x + o_row * s_row + o_channel, mask, 0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * weight
    tl.store(p_out + o_row * D + o_channel, x.to(p_out.dtype.element_ty), mask)
