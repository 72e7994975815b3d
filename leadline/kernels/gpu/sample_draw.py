"""sample, last launches: rows of which min_p or top_p keep many tokens, by many programs a row.

The probability from each of some scores on is summed, so that two of these enclose top_p's cutoff; the tokens between
them are listed, and one is drawn from those above; at last each token of the list that would have been drawn sooner is
looked at.
"""

import triton
import triton.language as tl

from leadline.kernels.gpu.sample_choose import CHOSEN
from leadline.kernels.gpu.sample_lists import NEVER, NO_MASS, share_of, token_mass
from leadline.kernels.gpu.sample_race import NOBODY, draw_listed, earliest, times


@triton.jit(do_not_specialize=["batch"])
def sample_weigh_kernel(
    p_logit, p_top, p_temperature, p_top_p, p_min_p, p_step, p_whole, p_sum, vocab, parts, batch,
    parts_padded: tl.constexpr, ways: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """The probability in one part of a row, relative to its best token's, of all tokens and from each step on."""
    i_part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if (tl.load(p_step + row * ways) < CHOSEN) & (tl.load(p_top_p + row) < 1):
        best, temperature, floor = _row(p_top, p_temperature, p_min_p, row, parts, parts_padded)
        _, b_score = _scores(p_logit + row * vocab, i_part, vocab, best, temperature, part)
        b_weight = tl.where(b_score >= floor, tl.exp(b_score), 0.0)
        tl.store(p_whole + row * parts + i_part, tl.sum(b_weight, 0))
        for way in tl.static_range(ways):
            step = tl.load(p_step + row * ways + way)
            reached = tl.sum(tl.where(b_score >= step, b_weight, 0.0), 0)
            tl.store(p_sum + (way * batch + row) * parts + i_part, reached)


@triton.jit(do_not_specialize=["batch"])
def sample_draw_kernel(
    p_logit, p_top, p_temperature, p_top_p, p_min_p, p_seed, p_position, p_step, p_whole, p_sum, p_list, p_count,
    p_mass, p_drawn, vocab, parts, batch, list_size, parts_padded: tl.constexpr, ways: tl.constexpr,
    part: tl.constexpr,
):  # fmt: skip
    """Of one part of a row without a token: the token drawn from the scores that are certainly kept.

    And the list of those that may be, the mass of those certainly kept, and that of all.
    """
    i_part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(p_step + row * ways) < CHOSEN:
        place, top_p = row * parts + i_part, tl.load(p_top_p + row)
        best, temperature, floor = _row(p_top, p_temperature, p_min_p, row, parts, parts_padded)
        low, high = _range(p_step, p_whole, p_sum, row, top_p, floor, parts, batch, parts_padded, ways)
        token, count = i_part * part, 0
        above, total = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
        if tl.div_rn(tl.load(p_top + place) - best, temperature) >= floor:
            o_token, b_score = _scores(p_logit + row * vocab, i_part, vocab, best, temperature, part)
            kept = tl.where(b_score >= high, b_score, NEVER)
            token = earliest(kept, o_token, tl.load(p_seed + row), tl.load(p_position + row))
            if top_p < 1:
                b_mass = tl.where(b_score >= floor, token_mass(b_score), 0)
                above, total = tl.sum(tl.where(b_score >= high, b_mass, 0), 0), tl.sum(b_mass, 0)
                m_listed = ((b_score >= low) & (b_score < high)).to(tl.int32)
                p_own = p_list + row * list_size + i_part * part
                tl.store(p_own + tl.cumsum(m_listed, 0) - 1, o_token, m_listed > 0)
                count = tl.sum(m_listed, 0)
        tl.store(p_drawn + place, tl.minimum(token, vocab - 1))
        tl.store(p_count + place, count)
        tl.store(p_mass + place, above)
        tl.store(p_mass + batch * parts + place, total)


@triton.jit(do_not_specialize=["batch"])
def sample_pick_kernel(
    p_logit, p_top, p_temperature, p_top_p, p_min_p, p_seed, p_position, p_step, p_whole, p_sum, p_list, p_count,
    p_mass, p_drawn, p_token, vocab, parts, batch, list_size, parts_padded: tl.constexpr, ways: tl.constexpr,
    wide: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """The token of a row that was drawn part by part, or one of the lists that comes sooner and is kept.

    A token is kept if those with higher scores hold less than top_p; if one is not, nor is any with a lower score.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(p_step + row * ways) < CHOSEN:
        top_p = tl.load(p_top_p + row)
        seed, position = tl.load(p_seed + row), tl.load(p_position + row)
        best, temperature, floor = _row(p_top, p_temperature, p_min_p, row, parts, parts_padded)
        _, high = _range(p_step, p_whole, p_sum, row, top_p, floor, parts, batch, parts_padded, ways)
        p_own = p_logit + row * vocab
        token, time = draw_listed(
            p_own, p_drawn + row * parts, parts, best, temperature, high, seed, position, 0, parts_padded
        )
        if top_p < 1:
            o_part = tl.arange(0, parts_padded)
            m_part, o_place = o_part < parts, row * parts + o_part
            b_count = tl.load(p_count + o_place, m_part, other=0)
            above = tl.sum(tl.load(p_mass + o_place, m_part, other=0), 0)
            total = tl.sum(tl.load(p_mass + batch * parts + o_place, m_part, other=0), 0)
            share = share_of(top_p, total)
            p_list += row * list_size
            passed, looking = tl.full([], NEVER, tl.float32), True
            while looking:
                other, other_time, score = _sooner(
                    p_own, p_list, b_count, o_part, best, temperature, passed, seed, position, wide, part
                )
                looking = (other_time < time) | ((other_time == time) & (other < token))
                if looking:
                    mass = _mass_above(p_own, p_list, b_count, o_part, best, temperature, score, wide, part)
                    passed = score
                    if above + mass < share:
                        token, looking = other, False
        tl.store(p_token + row, token.to(tl.int64))


@triton.jit
def _row(p_top, p_temperature, p_min_p, row, parts, parts_padded: tl.constexpr):
    """(highest logit, temperature, lowest score that min_p keeps) of a row."""
    o_part = tl.arange(0, parts_padded)
    best = tl.max(tl.load(p_top + row * parts + o_part, o_part < parts, other=NEVER), 0)
    return best, tl.load(p_temperature + row), tl.maximum(tl.log(tl.load(p_min_p + row)), NO_MASS)


@triton.jit
def _scores(p_logit, i_part, vocab, best, temperature, part: tl.constexpr):
    """(ids, scores) of the tokens of one part."""
    o_token = i_part * part + tl.arange(0, part)
    b_x = tl.load(p_logit + o_token, o_token < vocab, other=NEVER)
    return o_token, tl.div_rn(b_x - best, temperature)


@triton.jit
def _range(
    p_step, p_whole, p_sum, row, top_p, floor, parts, batch, parts_padded: tl.constexpr, ways: tl.constexpr
):  # fmt: skip
    """Scores `low` and `high`: below the first nothing is kept, from the second on everything; between, top_p decides.

    Sums in fp32, so that shares within 1e-4 of `top_p` count as neither.
    """
    o_part, o_step = tl.arange(0, parts_padded), tl.arange(0, ways)
    low, high = floor, floor
    if top_p < 1:
        target = top_p * tl.sum(tl.load(p_whole + row * parts + o_part, o_part < parts, other=0.0), 0)
        b_step = tl.load(p_step + row * ways + o_step)
        o_sum = (o_step[:, None] * batch + row) * parts + o_part[None, :]
        b_reached = tl.sum(tl.load(p_sum + o_sum, (o_part < parts)[None, :], other=0.0), 1)
        low = tl.maximum(floor, tl.max(tl.where(b_reached >= target * 1.0001, b_step, NEVER), 0))
        high = tl.min(tl.where(b_reached < target * 0.9999, b_step, 1.0), 0)  # the highest score is 0
    return low, high


@triton.jit
def _entries(p_logit, p_list, b_count, o_part, start, best, temperature, wide: tl.constexpr, part: tl.constexpr):
    """Ids, validity and scores [parts, wide] of entries `start` to `start + wide` of every part's list."""
    o_entry = start + tl.arange(0, wide)
    m_entry = o_entry[None, :] < b_count[:, None]
    b_token = tl.load(p_list + o_part[:, None] * part + o_entry[None, :], m_entry, other=0)
    b_x = tl.load(p_logit + b_token, m_entry, other=NEVER)
    return b_token, m_entry, tl.div_rn(b_x - best, temperature)


@triton.jit
def _sooner(
    p_logit, p_list, b_count, o_part, best, temperature, passed, seed, position, wide: tl.constexpr,
    part: tl.constexpr,
):  # fmt: skip
    """(token, its time, its score) of the first in the lists with a score above `passed`; the time may be infinite."""
    time, token, found = float("inf"), NOBODY, NEVER
    for start in range(0, tl.max(b_count, 0), wide):
        b_token, m_entry, b_score = _entries(
            p_logit, p_list, b_count, o_part, start, best, temperature, wide, part
        )  # fmt: skip
        b_time = times(b_score, seed, position, b_token)
        b_time = tl.where(m_entry & (b_score > passed), b_time, float("inf"))
        other_time = tl.min(tl.min(b_time, 1), 0)
        m_other = b_time == other_time
        other = tl.min(tl.min(tl.where(m_other, b_token, NOBODY), 1), 0)
        score = tl.max(tl.max(tl.where(m_other & (b_token == other), b_score, NEVER), 1), 0)
        sooner = (other_time < time) | ((other_time == time) & (other < token))
        time, token = tl.where(sooner, other_time, time), tl.where(sooner, other, token)
        found = tl.where(sooner, score, found)
    return token, time, found


@triton.jit
def _mass_above(
    p_logit, p_list, b_count, o_part, best, temperature, score, wide: tl.constexpr, part: tl.constexpr
):  # fmt: skip
    """The mass of the lists' tokens with higher scores than `score`."""
    mass = tl.full([], 0, tl.int64)
    for start in range(0, tl.max(b_count, 0), wide):
        _, m_entry, b_score = _entries(p_logit, p_list, b_count, o_part, start, best, temperature, wide, part)
        mass += tl.sum(tl.sum(tl.where(m_entry & (b_score > score), token_mass(b_score), 0), 1), 0)
    return mass
