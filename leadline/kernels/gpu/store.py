"""store on a GPU: one launch, which may prepare the same tokens' queries too (see `leadline/kernels/store.py`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.gpu.query import QUERY_ROWS, QUERY_WARPS, query_tile
from leadline.kernels.gpu.rows import kv_target, norm_rows, padded, put_kv_rows, rounded, turn_rows
from leadline.kernels.packed import KvPool
from leadline.kernels.rope import Angles


@triton.jit
def finish_kv_row(
    x,
    p_norm,
    eps,
    p_cos,
    p_sin,
    i_turn,
    i_row,
    p_pool,
    p_halves,
    stride,
    dtype: tl.constexpr,
    form: tl.constexpr,
    width: tl.constexpr,
    turned: tl.constexpr,
):
    """Norm `x` [1, block], turn it by row `i_turn` of the angles, and write it to row `i_row` of a pool."""
    channel = tl.arange(0, x.shape[1])
    b_norm = tl.load(p_norm + channel, channel < width, other=0.0).to(tl.float32)
    x = rounded(norm_rows(x, eps, width) * b_norm[None, :], dtype)
    one = tl.zeros([1], tl.int64)
    x = rounded(turn_rows(x, p_cos, p_sin, one + i_turn, one == 0, width, turned), dtype)
    put_kv_rows(x, one + i_row, one == 0, p_pool, p_halves, stride, form, width, turned)


@triton.jit(do_not_specialize=["tokens", "first_row", "q_rows"])
def store_kernel(
    p_kv,
    p_norm,
    p_q,
    p_cos,
    p_sin,
    p_pool,
    p_halves,
    p_out,
    tokens,
    first_row,
    kv_stride,
    pool_stride,
    q_rows,
    token_stride,
    head_stride,
    eps,
    heads: tl.constexpr,
    width: tl.constexpr,
    turned: tl.constexpr,
    block: tl.constexpr,
    form: tl.constexpr,
    tile_rows: tl.constexpr,
    overlap: tl.constexpr,
):
    """The first `tokens` programs store a row each, the others are tiles of queries."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    i_program = tl.program_id(0)
    if i_program < tokens:
        channel = tl.arange(0, block)
        o_kv = i_program.to(tl.int64) * kv_stride
        b_kv = tl.load(p_kv + o_kv + channel, channel < width, other=0.0).to(tl.float32)[None, :]
        row = first_row + i_program
        finish_kv_row(
            b_kv,
            p_norm,
            eps,
            p_cos,
            p_sin,
            i_program,
            row.to(tl.int64),
            p_pool,
            p_halves,
            pool_stride,
            p_kv.dtype.element_ty,
            form,
            width,
            turned,
        )
    else:
        query_tile(
            i_program - tokens,
            p_q,
            p_cos,
            p_sin,
            p_out,
            q_rows,
            token_stride,
            head_stride,
            eps,
            heads,
            width,
            turned,
            block,
            tile_rows,
        )


def store(kv: Tensor, norm: Tensor, by: Angles, eps: float, native: bool, pool: KvPool, first_row: int) -> None:
    """As the definition: `kv` [T, D] bf16 or fp32, channels contiguous."""
    query_and_store(kv[:0, None], kv, norm, by, eps, native, pool, first_row)


def query_and_store(
    q: Tensor, kv: Tensor, norm: Tensor, by: Angles, eps: float, native: bool, pool: KvPool, first_row: int
) -> Tensor:
    """As the definition: both in one launch."""
    tokens, width = kv.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    target, halves, stride, form = kv_target(pool, native)
    q_rows = q.shape[0] * q.shape[1]
    overlap = early_start(kv.device)
    store_kernel[(tokens + triton.cdiv(q_rows, QUERY_ROWS),)](
        kv,
        norm,
        q,
        by.cos,
        by.sin,
        target,
        halves,
        out,
        tokens,
        first_row,
        kv.stride(0),
        stride,
        q_rows,
        q.stride(0),
        q.stride(1),
        eps,
        q.shape[1],
        width,
        2 * by.cos.shape[1],
        padded(width),
        form,
        QUERY_ROWS,
        bool(overlap),
        num_warps=QUERY_WARPS,
        **overlap,
    )
    return out
