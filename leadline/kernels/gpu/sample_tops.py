"""sample, first launch: each part of a row, with penalties, bias and masks applied, and what is highest in it."""

import triton
import triton.language as tl

from leadline.kernels.gpu.sample_lists import NEVER
from leadline.kernels.gpu.sample_race import NOBODY, earliest

LOWEST = tl.constexpr(-3e38)
"""In place of -inf as the highest logit of a part, so that no difference is NaN."""


@triton.jit
def _penalise(
    b_x, row, o_token, m_token, p_output, p_prompt, p_slot, repetition, presence, frequency, p_drafted_row,
    p_drafted_token, drafted, vocab, listed: tl.constexpr
):  # fmt: skip
    """`leadline.kernels.sample.penalise` for the tokens `o_token` of a row."""
    slot = tl.load(p_slot + row).to(tl.int64)
    count = tl.load(p_output + slot * vocab + o_token, m_token, other=0)
    for start in range(0, drafted, listed):
        o_entry = start + tl.arange(0, listed)
        hit = tl.load(p_drafted_row + o_entry, o_entry < drafted, other=-1) == row
        while tl.max(hit.to(tl.int32)) > 0:
            entry = tl.min(tl.where(hit, o_entry, 0x7FFFFFFF))
            count += (o_token == tl.load(p_drafted_token + entry)).to(tl.int32)
            hit = hit & (o_entry > entry)
    seen = (tl.load(p_prompt + slot * vocab + o_token, m_token, other=0) != 0) | (count > 0)
    b_x = tl.where(seen, tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition), b_x)
    b_x = b_x - count.to(tl.float32) * frequency
    return b_x - (count > 0).to(tl.float32) * presence


@triton.jit
def _add_bias(b_x, row, first, o_token, p_row, p_token, p_value, entries, part: tl.constexpr, listed: tl.constexpr):
    """Add the bias entries of a row to its tokens `first` to `first + part`, in the order of the list."""
    for start in range(0, entries, listed):
        o_entry = start + tl.arange(0, listed)
        m_entry = o_entry < entries
        token = tl.load(p_token + o_entry, m_entry, other=-1)
        hit = (tl.load(p_row + o_entry, m_entry, other=-1) == row) & (token >= first) & (token < first + part)
        while tl.max(hit.to(tl.int32)) > 0:
            entry = tl.min(tl.where(hit, o_entry, 0x7FFFFFFF))
            b_x = tl.where(o_token == tl.load(p_token + entry), b_x + tl.load(p_value + entry), b_x)
            hit = hit & (o_entry > entry)
    return b_x


@triton.jit
def _constrain(b_x, row, o_token, m_token, p_row, p_bits, bits_stride, rows, listed: tl.constexpr):
    """-inf for the tokens that the row's mask, if it has one, does not allow."""
    found = -1
    for start in range(0, rows, listed):
        o_mask = start + tl.arange(0, listed)
        own = tl.load(p_row + o_mask, o_mask < rows, other=-1) == row
        found = tl.maximum(found, tl.max(tl.where(own, o_mask, -1)))
    p_own = p_bits + tl.maximum(found, 0).to(tl.int64) * bits_stride
    bits = tl.load(p_own + o_token // 32, m_token, other=-1)
    return tl.where(found < 0, b_x, tl.where(((bits >> (o_token % 32)) & 1) == 0, NEVER, b_x))


@triton.jit(do_not_specialize=["drafted", "entries", "masks"])
def sample_tops_kernel(
    p_logit, p_changed, p_top, p_id, p_weight, p_group, p_temperature, p_top_k, p_top_p, p_min_p, p_seed, p_position,
    p_output, p_prompt, p_slot, p_repetition, p_presence, p_frequency, p_drafted_row, p_drafted_token, drafted,
    p_bias_row, p_bias_token, p_bias_value, entries, p_mask_row, p_bits, bits_stride, masks, vocab,
    penalised: tl.constexpr, biased: tl.constexpr, constrained: tl.constexpr, any_random: tl.constexpr,
    part: tl.constexpr, group: tl.constexpr, listed: tl.constexpr,
):  # fmt: skip
    """One part of a row: its highest logit, and a token of it.

    The token is the lowest with that logit if the row is greedy, and the one drawn from the part if it has no filters.
    A row with filters gets the part's weight, if its highest had probability 1, and the highest logit of each group.
    """
    i_part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = row * tl.num_programs(0) + i_part
    o_token = i_part * part + tl.arange(0, part)
    m_token = o_token < vocab
    b_x = tl.load(p_logit + row * vocab + o_token, m_token, other=NEVER)
    if penalised:
        repetition, presence = tl.load(p_repetition + row), tl.load(p_presence + row)
        frequency = tl.load(p_frequency + row)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            b_x = _penalise(
                b_x, row, o_token, m_token, p_output, p_prompt, p_slot, repetition, presence, frequency,
                p_drafted_row, p_drafted_token, drafted, vocab, listed
            )  # fmt: skip
    if biased:
        first = i_part * part
        b_x = _add_bias(b_x, row, first, o_token, p_bias_row, p_bias_token, p_bias_value, entries, part, listed)
    if constrained:
        b_x = _constrain(b_x, row, o_token, m_token, p_mask_row, p_bits, bits_stride, masks, listed)
    if penalised or biased or constrained:
        tl.store(p_changed + row * vocab + o_token, b_x, m_token)
        b_x = tl.where(m_token, b_x, NEVER)
    top = tl.max(b_x, 0)
    tl.store(p_top + place, top)
    greedy = True
    if any_random:
        temperature = tl.load(p_temperature + row)
        greedy = (temperature > 0) == 0
        if temperature > 0:
            top_k = tl.load(p_top_k + row)
            unfiltered = (top_k <= 0) | (top_k >= vocab)
            unfiltered = unfiltered & (tl.load(p_top_p + row) >= 1) & (tl.load(p_min_p + row) <= 0)
            b_score = (b_x - tl.maximum(top, LOWEST)) * (1 / temperature)
            if unfiltered:
                token = earliest(b_score, o_token, tl.load(p_seed + row), tl.load(p_position + row))
                tl.store(p_id + place, tl.minimum(token, vocab - 1))
            else:
                tl.store(p_weight + place, tl.sum(tl.exp(b_score)))
                b_group = tl.max(tl.reshape(b_x, (part // group, group)), 1)
                tl.store(p_group + place * (part // group) + tl.arange(0, part // group), b_group)
    if greedy:
        token = tl.min(tl.where(b_x == top, o_token, NOBODY), 0)
        tl.store(p_id + place, tl.minimum(token, vocab - 1))  # NaN could leave the row
