"""compress on a GPU: one launch closes CSA windows, one folds HCA pieces (see `leadline/kernels/compress.py`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.formats import FP4_BLOCK
from leadline.kernels.compress import Gating, Pieces
from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.gpu.project import wide_product
from leadline.kernels.gpu.rows import (
    hadamard_rows,
    index_target,
    kv_target,
    norm_rows,
    padded,
    put_index_rows,
    rounded,
    triton_dtype,
    turn_rows,
)
from leadline.kernels.gpu.store import finish_kv_row
from leadline.kernels.packed import IndexPool, KvPool
from leadline.kernels.project import row_product
from leadline.kernels.rope import Angles

CLOSE_WARPS = 2
FOLD_WARPS = 4
FOLD_ROWS = 8
"""Rows that are loaded together and then folded one after another."""


@triton.jit
def _overlapping_sum(
    p_pending, p_rows, p_ape, i_window, pending_stride, ape_stride, first, width: tl.constexpr, block: tl.constexpr
):
    """[1, block]: values of eight pending rows from column `first` on, weighted by their scores' softmax."""
    place = tl.arange(0, 8)
    channel = tl.arange(0, block)
    row = tl.load(p_rows + i_window * 8 + place)
    o_column = first + (place // 4 * width)[:, None] + channel[None, :]
    m_ape = (place >= 0)[:, None] & (channel < width)[None, :]
    mask = (row >= 0)[:, None] & m_ape
    p_values = p_pending + row[:, None] * pending_stride + o_column
    b_value = tl.load(p_values, mask, other=0.0)
    b_score = tl.load(p_values + 2 * width, mask, other=0.0)
    b_ape = tl.load(p_ape + (place % 4)[:, None] * ape_stride + o_column + 2 * width, m_ape, other=0.0)
    b_score = tl.where((row >= 0)[:, None], b_score + b_ape, float("-inf"))
    b_weight = tl.exp(b_score - tl.max(b_score, 0)[None, :])
    return (tl.sum(b_weight * b_value, 0) / tl.sum(b_weight, 0))[None, :]


@triton.jit
def close_csa_kernel(
    p_pending,
    p_rows,
    p_ape,
    p_norm,
    p_index_norm,
    p_cos,
    p_sin,
    p_entries,
    p_halves,
    p_keys,
    p_targets,
    pending_stride,
    ape_stride,
    entries_stride,
    keys_stride,
    eps,
    entries_form: tl.constexpr,
    keys_form: tl.constexpr,
    entries_dtype: tl.constexpr,
    keys_dtype: tl.constexpr,
    width: tl.constexpr,
    index_width: tl.constexpr,
    turned: tl.constexpr,
    block: tl.constexpr,
    size: tl.constexpr,
    stages: tl.constexpr,
    overlap: tl.constexpr,
):
    """Program (c, 0) makes the entry of window c, program (c, 1) its index key."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    i_window = tl.program_id(0).to(tl.int64)
    target = tl.load(p_targets + i_window)
    if target >= 0:
        if tl.program_id(1) == 0:
            b_entry = _overlapping_sum(p_pending, p_rows, p_ape, i_window, pending_stride, ape_stride, 0, width, block)
            finish_kv_row(
                rounded(b_entry, entries_dtype),
                p_norm,
                eps,
                p_cos,
                p_sin,
                i_window,
                target,
                p_entries,
                p_halves,
                entries_stride,
                entries_dtype,
                entries_form,
                width,
                turned,
            )
        else:
            b_key = _overlapping_sum(
                p_pending, p_rows, p_ape, i_window, pending_stride, ape_stride, 4 * width, index_width, index_width
            )
            b_key = norm_rows(rounded(b_key, keys_dtype), eps, index_width)
            b_norm = tl.load(p_index_norm + tl.arange(0, index_width)).to(tl.float32)
            b_key = rounded(b_key * b_norm[None, :], keys_dtype)
            one = tl.zeros([1], tl.int64)
            b_key = turn_rows(b_key, p_cos, p_sin, one + i_window, one == 0, index_width, turned)
            b_key = rounded(b_key, keys_dtype)
            if keys_form != "plain":
                b_key = rounded(hadamard_rows(b_key, stages), keys_dtype)
            put_index_rows(b_key, one + target, one == 0, p_keys, keys_stride, keys_form, size)


@triton.jit
def _place_of(i_piece, p_full, full_count):
    """Where `i_piece` stands in `full` [full_count]; -1 where it does not."""
    place = tl.zeros([1], tl.int32) - 1
    for start in range(0, full_count, 128):
        o_full = start + tl.arange(0, 128)
        b_full = tl.load(p_full + o_full, o_full < full_count, other=-1)
        place = tl.maximum(place, tl.max(tl.where(b_full == i_piece, o_full, -1), 0))
    return tl.max(place, 0)


@triton.jit(do_not_specialize=["scratch", "full_count"])
def hca_fold_kernel(
    p_raw,
    p_positions,
    p_ape,
    p_first,
    p_count,
    p_before,
    p_folds,
    p_full,
    p_targets,
    p_norm,
    p_cos,
    p_sin,
    p_entries,
    p_halves,
    scratch,
    full_count,
    entries_stride,
    eps,
    form: tl.constexpr,
    dtype: tl.constexpr,
    ratio: tl.constexpr,
    width: tl.constexpr,
    turned: tl.constexpr,
    block: tl.constexpr,
    batch: tl.constexpr,
    overlap: tl.constexpr,
):
    """A program folds one piece; where that completes its window it also makes the entry."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    i_piece = tl.program_id(0)
    count = tl.load(p_count + i_piece).to(tl.int32)
    if count > 0:
        channel = tl.arange(0, block)
        mask = channel < width
        first = tl.load(p_first + i_piece)
        before = tl.load(p_before + i_piece)
        place = (tl.load(p_positions + first) % ratio).to(tl.int32)
        p_from = p_folds + tl.maximum(before, 0) * (3 * width) + channel
        m_from = channel < tl.where(before >= 0, width, 0)
        b_top = tl.where(mask, tl.load(p_from, m_from, other=float("-inf")), 0.0)
        b_total = tl.where(mask, tl.load(p_from + width, m_from, other=0.0), 1.0)
        b_weighted = tl.load(p_from + 2 * width, m_from, other=0.0)
        p_row = p_raw + first * (2 * width) + channel
        p_place = p_ape + place * (2 * width) + width + channel
        for start in range(0, count, batch):
            for index in tl.static_range(batch):
                # past the piece's end a score is -inf: the maximum stays, the sums are multiplied by 1 and gain 0
                step = start + index
                m_step = channel < tl.where(step < count, width, 0)
                b_value = tl.load(p_row + step * (2 * width), m_step, other=0.0)
                b_score = tl.load(p_row + step * (2 * width) + width, m_step, other=float("-inf"))
                b_score += tl.load(p_place + step * (2 * width), m_step, other=0.0)
                b_new_top = tl.maximum(b_top, b_score)
                b_old, b_new = tl.exp(b_top - b_new_top), tl.exp(b_score - b_new_top)
                b_total = tl.fma(b_total, b_old, b_new)
                b_weighted = tl.fma(b_weighted, b_old, b_new * b_value)
                b_top = b_new_top
        p_to = p_folds + (scratch + i_piece).to(tl.int64) * (3 * width) + channel
        tl.store(p_to, b_top, mask)
        tl.store(p_to + width, b_total, mask)
        tl.store(p_to + 2 * width, b_weighted, mask)
        if place + count == ratio:
            i_turn = _place_of(i_piece, p_full, full_count)
            target = tl.load(p_targets + i_turn, i_turn >= 0, other=-1)
            if target >= 0:
                b_entry = (b_weighted / b_total)[None, :]
                finish_kv_row(
                    rounded(b_entry, dtype),
                    p_norm,
                    eps,
                    p_cos,
                    p_sin,
                    i_turn,
                    target,
                    p_entries,
                    p_halves,
                    entries_stride,
                    dtype,
                    form,
                    width,
                    turned,
                )


def gate_rows(x: Tensor, gating: Gating, out: Tensor) -> None:
    """As the definition. bf16 products are exact in fp32, so that only the order of the sums differs.

    `out` must be contiguous.
    """
    if x.dtype == torch.bfloat16 and gating.matrix.dtype == torch.bfloat16:
        wide_product(x, gating.matrix, gating.deterministic, out)
    elif gating.deterministic:
        out.copy_(row_product(x.float(), gating.matrix.float(), deterministic=True))
    else:
        torch.mm(x.float(), gating.matrix.float().T, out=out)


def close_csa(
    pending: Tensor,
    rows: Tensor,
    gating: Gating,
    norms: tuple[Tensor, Tensor],
    by: Angles,
    eps: float,
    native: bool,
    pools: tuple[KvPool, IndexPool],
    targets: Tensor,
) -> None:
    """As the definition, in one launch."""
    if len(rows) == 0:
        return
    norm, index_norm = norms
    entries, halves, entries_stride, entries_form = kv_target(pools[0], native)
    keys, keys_stride, keys_form = index_target(pools[1], native)
    overlap = early_start(pending.device)
    close_csa_kernel[(len(rows), 2)](
        pending,
        rows,
        gating.ape,
        norm,
        index_norm,
        by.cos,
        by.sin,
        entries,
        halves,
        keys,
        targets,
        pending.stride(0),
        gating.ape.stride(0),
        entries_stride,
        keys_stride,
        eps,
        entries_form,
        keys_form,
        triton_dtype(pools[0]),
        triton_dtype(pools[1]),
        len(norm),
        len(index_norm),
        2 * by.cos.shape[1],
        padded(len(norm)),
        min(FP4_BLOCK, len(index_norm)),
        len(index_norm).bit_length() - 1,
        bool(overlap),
        num_warps=CLOSE_WARPS,
        **overlap,
    )


def hca_fold(
    raw: Tensor,
    positions: Tensor,
    gating: Gating,
    pieces: Pieces,
    folds: Tensor,
    scratch: int,
    norm: Tensor,
    by: Angles,
    eps: float,
    native: bool,
    pool: KvPool,
) -> None:
    """As the definition, in one launch; `pieces.longest` is not looked at."""
    if len(pieces.first) == 0:
        return
    entries, halves, stride, form = kv_target(pool, native)
    overlap = early_start(raw.device)
    hca_fold_kernel[(len(pieces.first),)](
        raw,
        positions,
        gating.ape,
        pieces.first,
        pieces.count,
        pieces.before,
        folds,
        pieces.full,
        pieces.targets,
        norm,
        by.cos,
        by.sin,
        entries,
        halves,
        scratch,
        len(pieces.full),
        stride,
        eps,
        form,
        triton_dtype(pool),
        len(gating.ape),
        len(norm),
        2 * by.cos.shape[1],
        padded(len(norm)),
        FOLD_ROWS,
        bool(overlap),
        num_warps=FOLD_WARPS,
        **overlap,
    )
