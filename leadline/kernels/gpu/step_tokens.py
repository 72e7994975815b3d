"""A step's token ids from what the last steps sampled, and what it leaves (see `leadline.model.tokens`)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.overlap import early_start

ROWS = 128
"""Tokens of a program."""


@triton.jit(do_not_specialize=["tokens"])
def take_kernel(
    p_id, p_position, p_chunk, p_slot, p_last, p_chosen, tokens, block: tl.constexpr, overlap: tl.constexpr
):
    """Ids as given, or the slot's last token where -1; -1 in padding."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    o_row = tl.program_id(0) * block + tl.arange(0, block)
    m_row = o_row < tokens
    b_id = tl.load(p_id + o_row, m_row, other=0)
    m_real = m_row & (tl.load(p_position + o_row, m_row, other=-1) >= 0)
    m_last = m_real & (b_id < 0)
    b_slot = tl.load(p_slot + tl.load(p_chunk + o_row, m_last, other=0), m_last, other=0)
    b_id = tl.where(m_last, tl.load(p_last + b_slot, m_last, other=0), b_id)
    tl.store(p_chosen + o_row, tl.where(m_real, b_id, -1), m_row)


@triton.jit(do_not_specialize=["tokens"])
def leave_kernel(p_token, p_position, p_slot, p_last, tokens, block: tl.constexpr, overlap: tl.constexpr):
    """Each row's token to its slot; nothing of padding."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    o_row = tl.program_id(0) * block + tl.arange(0, block)
    m_real = (o_row < tokens) & (tl.load(p_position + o_row, o_row < tokens, other=-1) >= 0)
    b_slot = tl.load(p_slot + o_row, m_real, other=0)
    tl.store(p_last + b_slot, tl.load(p_token + o_row, m_real, other=0), m_real)


def take_tokens(ids: Tensor, positions: Tensor, chunks: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    """`ids`, `positions`, `chunks` [T], `slots` [R], `last_tokens` [slots] -> ids [T], all int64 and contiguous."""
    chosen = torch.empty_like(ids)
    if len(ids):
        overlap = early_start(ids.device)
        take_kernel[(triton.cdiv(len(ids), ROWS),)](
            *(ids, positions, chunks, slots, last_tokens, chosen, len(ids)),
            block=ROWS,
            overlap=bool(overlap),
            num_warps=4,
            **overlap,
        )
    return chosen


def leave_tokens(tokens: Tensor, positions: Tensor, slots: Tensor, last_tokens: Tensor) -> None:
    """`tokens`, `positions`, `slots` [T] -> `last_tokens` [slots] of the real rows, all int64 and contiguous."""
    if len(tokens):
        overlap = early_start(tokens.device)
        leave_kernel[(triton.cdiv(len(tokens), ROWS),)](
            *(tokens, positions, slots, last_tokens, len(tokens)),
            block=ROWS,
            overlap=bool(overlap),
            num_warps=4,
            **overlap,
        )
