"""fp8 weights expanded to bf16, for products of so many tokens that a library's bf16 product is worth the traffic."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.formats import FP8_BLOCK
from leadline.kernels.gpu.bits import e4m3_to_float, e8m0_to_float
from leadline.kernels.project import Weight

ROWS, COLUMNS = 8, 1024


@triton.jit
def expand_kernel(
    p_w, p_scale, p_out, rows, columns, scale_stride, e8m0: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr
):
    """A tile of e4m3 bytes times the scales of their 128 x 128 blocks."""
    o_row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    o_column = tl.program_id(1) * block + tl.arange(0, block)
    mask = (o_row < rows)[:, None] & (o_column < columns)[None, :]
    o_w = o_row[:, None].to(tl.int64) * columns + o_column[None, :]
    o_scale = (o_row // 128)[:, None] * scale_stride + (o_column // 128)[None, :]
    b_scale = tl.load(p_scale + o_scale, mask, other=0)
    b_w = e4m3_to_float(tl.load(p_w + o_w, mask, other=0))
    b_w *= e8m0_to_float(b_scale) if e8m0 else b_scale
    tl.store(p_out + o_w, b_w.to(p_out.dtype.element_ty), mask)


def expanded(weight: Weight) -> Tensor:
    """An fp8 or plain weight [out, in] in bf16: `weight.dense(torch.bfloat16)`."""
    if weight.scale is None or weight.data.dtype != torch.float8_e4m3fn:
        return weight.dense(torch.bfloat16)
    rows, columns = weight.data.shape
    assert weight.scale.shape == (triton.cdiv(rows, FP8_BLOCK), triton.cdiv(columns, FP8_BLOCK))
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.data.device)
    e8m0 = weight.scale.dtype != torch.float32
    expand_kernel[triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)](
        weight.data.view(torch.uint8),
        weight.scale.view(torch.uint8) if e8m0 else weight.scale,
        out,
        rows,
        columns,
        weight.scale.shape[1],
        e8m0,
        ROWS,
        COLUMNS,
        num_warps=4,
    )
    return out
