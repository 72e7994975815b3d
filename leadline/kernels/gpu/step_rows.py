"""The index lists and rotations that all layers of a step share, in one launch (see `leadline/model/rows.py`)."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.rows import padded
from leadline.kernels.rope import Angles

COLUMNS = 256
"""Pages that a program copies at a time."""


@triton.jit
def _turn(p_frequency, position, p_cos, p_sin, row, half: tl.constexpr, block: tl.constexpr):
    """Cosines and sines of `position` times each frequency, to row `row` of [.., half] tensors."""
    o_pair = tl.arange(0, block)
    m_pair = o_pair < half
    b_phase = position.to(tl.float32) * tl.load(p_frequency + o_pair, m_pair, other=0.0)
    tl.store(p_cos + row * half + o_pair, tl.cos(b_phase), m_pair)
    tl.store(p_sin + row * half + o_pair, tl.sin(b_phase), m_pair)


@triton.jit(do_not_specialize=["tokens", "columns", "scratch"])
def step_rows_kernel(
    p_position,
    p_chunk,
    p_start,
    p_first,
    p_slot,
    p_table,
    p_closing,
    p_full,
    p_swa_frequency,
    p_compressed_frequency,
    p_window,
    p_pages,
    p_visible,
    p_hca,
    p_swa_cos,
    p_swa_sin,
    p_cos,
    p_sin,
    tokens,
    closings,
    columns,
    scratch,
    table_stride,
    ring: tl.constexpr,
    ring_block: tl.constexpr,
    half: tl.constexpr,
    half_block: tl.constexpr,
    csa: tl.constexpr,
    hca: tl.constexpr,
    block: tl.constexpr,
):
    """Program i < tokens makes the lists of token i; the next ones turn positions of closed CSA, then HCA windows.

    Rotations of the compressed layers' table are one tensor: of tokens, of closings, of full windows.
    """
    row = tl.program_id(0).to(tl.int64)
    if row < tokens:
        position = tl.load(p_position + row)
        chunk = tl.load(p_chunk + row)
        start, slot = tl.load(p_start + chunk), tl.load(p_slot + chunk)
        o_back = tl.arange(0, ring_block)
        key = position - (ring - 1) + o_back
        b_own = scratch + tl.load(p_first + chunk) + key - start
        b_row = tl.where(key >= start, b_own, slot * ring + key % ring)
        tl.store(p_window + row * ring + o_back, tl.where(key < 0, -1, b_row), o_back < ring)
        seen = (position + 1) // hca
        for begin in range(0, columns, block):
            o_page = begin + tl.arange(0, block)
            m_page = o_page < columns
            b_page = tl.load(p_table + slot * table_stride + o_page, m_page, other=-1)
            tl.store(p_pages + row * columns + o_page, b_page, m_page)
            tl.store(p_hca + row * columns + o_page, tl.where(o_page < seen, b_page, -1), m_page)
        tl.store(p_visible + row, (position + 1) // csa)
        _turn(p_swa_frequency, position, p_swa_cos, p_swa_sin, row, half, half_block)
    elif row < tokens + closings:
        position = tl.load(p_closing + row - tokens)
    else:
        position = tl.load(p_full + row - tokens - closings)
    _turn(p_compressed_frequency, position, p_cos, p_sin, row, half, half_block)


def step_rows(
    per_token: tuple[Tensor, Tensor],
    per_chunk: tuple[Tensor, Tensor, Tensor],
    table: Tensor,
    windows: tuple[Tensor, Tensor],
    frequencies: tuple[Tensor, Tensor],
    columns: int,
    ring: int,
    scratch: int,
    ratios: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Angles, Sequence[Angles]]:
    """`per_token` are positions and chunks [T], `per_chunk` starts, firsts and slots [R], `windows` the positions of
    closed CSA windows [C] and of full HCA windows [Z], `frequencies` of SWA and of compressed layers [R / 2] fp32.

    Returns window rows [T, ring], pages [T, columns] int32 (at a million tokens of context they are a step's longest
    lists), visible CSA entries [T], HCA rows [T, columns], the others int64; the rotations of tokens in SWA layers; and
    those of tokens, closed and full windows in the others, fp32.
    """
    tokens, counts = len(per_token[0]), [len(per_token[0]), *map(len, windows)]
    device, half = table.device, len(frequencies[0])
    rows, hca = (torch.empty(tokens, width, dtype=torch.int64, device=device) for width in (ring, columns))
    pages = torch.empty(tokens, columns, dtype=torch.int32, device=device)
    visible = torch.empty(tokens, dtype=torch.int64, device=device)
    swa = Angles(*(torch.empty(tokens, half, device=device) for _ in range(2)))
    turns = Angles(*(torch.empty(sum(counts), half, device=device) for _ in range(2)))
    step_rows_kernel[(sum(counts),)](
        *(*per_token, *per_chunk, table, *windows, *frequencies, rows, pages, visible, hca),
        *(swa.cos, swa.sin, turns.cos, turns.sin),
        *(tokens, counts[1], columns, scratch, table.stride(0)),
        ring=ring,
        ring_block=padded(ring),
        half=half,
        half_block=padded(half),
        csa=ratios[0],
        hca=ratios[1],
        block=COLUMNS,
        num_warps=4,
    )
    parts = [Angles(*pair) for pair in zip(turns.cos.split(counts), turns.sin.split(counts), strict=True)]
    return rows, pages, visible, hca, swa, parts
