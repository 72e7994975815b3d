"""query on a GPU: one launch each (see `leadline/kernels/query.py`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.formats import FP4_BLOCK
from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.gpu.rows import fp4_rounded, hadamard_rows, norm_rows, padded, rounded, turn_rows
from leadline.kernels.rope import Angles

QUERY_ROWS = 8
QUERY_WARPS = 4
"""A head's 512 channels lie in one warp, so norms need no shared memory. The cut does not depend on the batch."""
INDEX_ROWS = 16
INDEX_WARPS = 4


@triton.jit
def query_tile(
    i_tile,
    p_q,
    p_cos,
    p_sin,
    p_out,
    rows,
    token_stride,
    head_stride,
    eps,
    heads: tl.constexpr,
    width: tl.constexpr,
    turned: tl.constexpr,
    block: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Norm and turn rows `i_tile * tile_rows ..` of `q` [T * heads, width]."""
    dtype: tl.constexpr = p_out.dtype.element_ty
    o_row = i_tile.to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    channel = tl.arange(0, block)
    m_row = o_row < rows
    mask = m_row[:, None] & (channel < width)[None, :]
    o_q = o_row // heads * token_stride + o_row % heads * head_stride
    b_q = tl.load(p_q + o_q[:, None] + channel[None, :], mask, other=0.0).to(tl.float32)
    b_q = rounded(norm_rows(b_q, eps, width), dtype)
    b_q = turn_rows(b_q, p_cos, p_sin, o_row // heads, m_row, width, turned)
    tl.store(p_out + o_row[:, None] * width + channel[None, :], b_q.to(dtype), mask)


@triton.jit(do_not_specialize=["rows"])
def query_kernel(
    p_q,
    p_cos,
    p_sin,
    p_out,
    rows,
    token_stride,
    head_stride,
    eps,
    heads: tl.constexpr,
    width: tl.constexpr,
    turned: tl.constexpr,
    block: tl.constexpr,
    tile_rows: tl.constexpr,
    overlap: tl.constexpr,
):
    """A program is a tile of heads."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    query_tile(
        tl.program_id(0),
        p_q,
        p_cos,
        p_sin,
        p_out,
        rows,
        token_stride,
        head_stride,
        eps,
        heads,
        width,
        turned,
        block,
        tile_rows,
    )


@triton.jit(do_not_specialize=["rows"])
def index_query_kernel(
    p_q,
    p_cos,
    p_sin,
    p_out,
    rows,
    token_stride,
    head_stride,
    heads: tl.constexpr,
    width: tl.constexpr,
    turned: tl.constexpr,
    size: tl.constexpr,
    stages: tl.constexpr,
    native: tl.constexpr,
    tile_rows: tl.constexpr,
    overlap: tl.constexpr,
):
    """Turn a tile of index heads; if native spread them by Hadamard and round them to fp4 in groups of `size`."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = p_out.dtype.element_ty
    o_row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    channel = tl.arange(0, width)
    m_row = o_row < rows
    o_q = o_row // heads * token_stride + o_row % heads * head_stride
    b_q = tl.load(p_q + o_q[:, None] + channel[None, :], m_row[:, None], other=0.0).to(tl.float32)
    b_q = rounded(turn_rows(b_q, p_cos, p_sin, o_row // heads, m_row, width, turned), dtype)
    if native:
        b_q = fp4_rounded(rounded(hadamard_rows(b_q, stages), dtype), size)
    tl.store(p_out + o_row[:, None] * width + channel[None, :], b_q.to(dtype), m_row[:, None])


def query(q: Tensor, by: Angles, eps: float) -> Tensor:
    """As the definition: `q` [T, H, D] bf16 or fp32, channels contiguous -> the same shape, contiguous."""
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    overlap = early_start(q.device)
    query_kernel[(triton.cdiv(tokens * heads, QUERY_ROWS),)](
        q,
        by.cos,
        by.sin,
        out,
        tokens * heads,
        q.stride(0),
        q.stride(1),
        eps,
        heads,
        width,
        2 * by.cos.shape[1],
        padded(width),
        QUERY_ROWS,
        bool(overlap),
        num_warps=QUERY_WARPS,
        **overlap,
    )
    return out


def index_query(q: Tensor, by: Angles, native: bool) -> Tensor:
    """As the definition: `q` [T, heads, c] bf16 or fp32, c a power of two -> the same shape, contiguous."""
    tokens, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.numel() == 0:
        return out
    overlap = early_start(q.device)
    index_query_kernel[(triton.cdiv(tokens * heads, INDEX_ROWS),)](
        q,
        by.cos,
        by.sin,
        out,
        tokens * heads,
        q.stride(0),
        q.stride(1),
        heads,
        width,
        2 * by.cos.shape[1],
        min(FP4_BLOCK, width),
        width.bit_length() - 1,
        native,
        INDEX_ROWS,
        bool(overlap),
        num_warps=INDEX_WARPS,
        **overlap,
    )
    return out
