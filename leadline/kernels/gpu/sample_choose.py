"""sample, second launch: a program per row takes the token of most rows, or guesses where top_p's cutoff is."""

import triton
import triton.language as tl

from leadline.kernels.gpu.sample_lists import (
    MASS,
    NEVER,
    NO_MASS,
    read_list,
    search,
    share_of,
    token_mass,
    weigh,
)
from leadline.kernels.gpu.sample_race import draw_listed, first_of, times

CHOSEN = tl.constexpr(float("inf"))
"""In place of the steps of a cutoff: the row has its token."""


@triton.jit
def sample_choose_kernel(
    p_logit, p_top, p_id, p_weight, p_group, p_temperature, p_top_k, p_top_p, p_min_p, p_seed, p_position, p_list,
    p_step, p_token, vocab, parts, list_size, any_random: tl.constexpr, parts_padded: tl.constexpr, few: tl.constexpr,
    chunk: tl.constexpr, sampled: tl.constexpr, ways: tl.constexpr, rounds: tl.constexpr, halvings: tl.constexpr,
    part: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A row's token, unless min_p or top_p keep many tokens; then scores of which two enclose the cutoff, `p_step`."""
    row = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, parts_padded)
    b_top = tl.load(p_top + row * parts + o_part, o_part < parts, other=NEVER)
    best = tl.max(b_top, 0)
    token = tl.load(p_id + row * parts + tl.minimum(tl.argmax(b_top, 0), parts - 1)).to(tl.int32)
    if any_random:
        low, high = tl.full([], CHOSEN, tl.float32), tl.full([], CHOSEN, tl.float32)
        temperature = tl.load(p_temperature + row)
        if temperature > 0:
            top_k, top_p = tl.load(p_top_k + row), tl.load(p_top_p + row)
            by_k = (top_k > 0) & (top_k < vocab)
            min_p = tl.load(p_min_p + row)
            seed, position = tl.load(p_seed + row), tl.load(p_position + row)
            p_own = p_logit + row * vocab
            if by_k | (top_p < 1) | (min_p > 0):
                b_weight = tl.load(p_weight + row * parts + o_part, o_part < parts, other=0.0)
                b_weight = tl.where(b_top == NEVER, 0.0, b_weight * tl.exp((b_top - best) * (1 / temperature)))
                token, low, high = _choose_filtered(
                    p_own, p_group + row * parts * (part // group), p_list + row * list_size, vocab,
                    parts * (part // group), best, tl.sum(b_weight, 0), temperature, top_k, by_k, top_p,
                    tl.maximum(tl.log(min_p), NO_MASS), seed, position, few, chunk, sampled, ways, rounds, halvings,
                    parts_padded * (part // group), group, block,
                )  # fmt: skip
            else:
                token, _ = draw_listed(
                    p_own, p_id + row * parts, parts, best, temperature, NO_MASS, seed, position, token, parts_padded
                )
        o_step = tl.arange(0, ways)
        b_step = tl.where(low < CHOSEN, low + (high - low) * (o_step.to(tl.float32) / (ways - 1)), CHOSEN)
        tl.store(p_step + row * ways + o_step, b_step)
    tl.store(p_token + row, token.to(tl.int64))


@triton.jit
def _choose_filtered(
    p_logit, p_group, p_list, vocab, groups, best, weight, temperature, top_k, by_k, top_p, floor, seed, position,
    few: tl.constexpr, chunk: tl.constexpr, sampled: tl.constexpr, ways: tl.constexpr, rounds: tl.constexpr,
    halvings: tl.constexpr, groups_padded: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """(token, low, high) of a row with top_k, top_p or min_p; `low` and `high` are infinite if it has its token.

    `least` is a score that every token to be kept has: k groups have no lower a highest score, so have k tokens; or the
    highest of some groups already hold top_p of the row's probability.
    """
    o_group = tl.arange(0, groups_padded)
    b_score = tl.div_rn(tl.load(p_group + o_group, o_group < groups, other=NEVER) - best, temperature)
    least = floor
    if by_k:
        least = tl.maximum(floor, _reached(b_score, b_score * 0 + 1, top_k.to(tl.float32), halvings))
    elif (top_p < 1) & (floor == NO_MASS):
        least = _reached(b_score, tl.exp(b_score), top_p * weight * 1.0001, halvings)
    listed = _list_groups(b_score, o_group, p_list, least)
    token, chosen = tl.full([], 0, tl.int32), False
    if by_k | (listed <= few):
        p_tokens = p_list + groups
        count, total = _list_tokens(p_logit, p_list, p_tokens, listed, vocab, best, temperature, least, group, block)
        if (least > floor) & (by_k == 0):  # what was left out counts too
            total = (weight.to(tl.float64) * MASS).to(tl.int64)
        chosen = count <= few
        if chosen:
            token = _draw_few(
                p_logit, p_tokens, count, best, temperature, top_k, by_k, top_p, total, seed, position, few, chunk
            )
        elif by_k:
            token = _draw_many_of_k(
                p_logit, p_tokens, count, best, temperature, least, top_k, top_p, seed, position, block
            )
            chosen = True
    low, high = tl.full([], CHOSEN, tl.float32), tl.full([], CHOSEN, tl.float32)
    if chosen == 0:
        low, high = floor, floor
        if top_p < 1:
            low, high = _guess(p_logit, vocab, best, temperature, floor, weight, top_p, sampled, ways, rounds, group)
    return token, low, high


@triton.jit
def _reached(b_score, b_weight, target, halvings: tl.constexpr):
    """A score that entries which weigh `target` reach, and few others; `NO_MASS` if all above weigh less."""
    low, high = tl.full([], NO_MASS, tl.float32), tl.full([], 0, tl.float32)
    left = tl.where(tl.sum(tl.where(b_score >= low, b_weight, 0.0), 0) >= target, halvings, 0)
    while left > 0:
        middle = (low + high) * 0.5
        enough = tl.sum(tl.where(b_score >= middle, b_weight, 0.0), 0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        left -= 1
    return low


@triton.jit
def _list_groups(b_score, o_group, p_list, least):
    """List the groups whose highest score is at least `least`; their number."""
    m_group = b_score >= least
    tl.store(p_list + tl.cumsum(m_group.to(tl.int32), 0) - 1, o_group, m_group)
    tl.debug_barrier()  # other threads read what was stored
    return tl.sum(m_group.to(tl.int32), 0)


@triton.jit
def _list_tokens(
    p_logit, p_groups, p_list, listed, vocab, best, temperature, least, group: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """List the tokens of the listed groups with scores from `least` on; their number, and their mass."""
    tokens = 0
    b_total = tl.zeros([block], tl.int64)
    for start in range(0, listed * group, block):
        o_entry = start + tl.arange(0, block)
        m_token = o_entry < listed * group
        b_token = tl.load(p_groups + o_entry // group, m_token, other=0) * group + o_entry % group
        m_token = m_token & (b_token < vocab)
        b_score = tl.div_rn(tl.load(p_logit + b_token, m_token, other=NEVER) - best, temperature)
        m_token = m_token & (b_score >= least)
        b_total += tl.where(m_token, token_mass(b_score), 0)
        tl.store(p_list + tokens + tl.cumsum(m_token.to(tl.int32), 0) - 1, b_token, m_token)
        tokens += tl.sum(m_token.to(tl.int32), 0)
    tl.debug_barrier()
    return tokens, tl.sum(b_total, 0)


@triton.jit
def _draw_few(
    p_logit, p_list, count, best, temperature, top_k, by_k, top_p, total, seed, position, few: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """The token drawn from a list of at most `few`: each is compared with each.

    Kept are those with fewer than k higher ones, which hold less than top_p of the probability.
    """
    b_token, m_kept, b_score = read_list(p_logit, p_list, 0, count, best, temperature, few)
    b_number, b_above = tl.zeros([few], tl.int32), tl.zeros([few], tl.int64)
    for start in range(0, count, chunk):
        _, m_other, b_other = read_list(p_logit, p_list, start, count, best, temperature, chunk)
        b_mass = tl.where(m_other, token_mass(b_other), 0)
        m_above = m_other[None, :] & (b_other[None, :] > b_score[:, None])
        b_number += tl.sum(m_above.to(tl.int32), 1)
        b_above += tl.sum(tl.where(m_above, b_mass[None, :], 0), 1)
    if by_k:
        m_kept = m_kept & (b_number < top_k)
        total = tl.sum(tl.where(m_kept, token_mass(b_score), 0), 0)
    if top_p < 1:
        m_kept = m_kept & (b_above < share_of(top_p, total))
    b_time = tl.where(m_kept, times(b_score, seed, position, b_token), float("inf"))
    token, _ = first_of(b_time, b_token, 0)
    return token


@triton.jit
def _draw_many_of_k(
    p_logit, p_list, count, best, temperature, least, top_k, top_p, seed, position, block: tl.constexpr
):  # fmt: skip
    """The token drawn from a longer list, of which top_k and then top_p keep the highest."""
    lowest = search(p_logit, p_list, count, best, temperature, least, top_k, False, block)
    if top_p < 1:
        total, _ = weigh(p_logit, p_list, count, best, temperature, lowest, True, block)
        share = share_of(top_p, total)
        lowest = tl.maximum(lowest, search(p_logit, p_list, count, best, temperature, lowest, share, True, block))
    token, _ = draw_listed(p_logit, p_list, count, best, temperature, lowest, seed, position, 0, block)
    return token


@triton.jit
def _guess(
    p_logit, vocab, best, temperature, floor, weight, top_p, sampled: tl.constexpr, ways: tl.constexpr,
    rounds: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    """Scores `low`, which very likely keeps more than `top_p` of the probability, and `high`, which keeps less.

    What is not kept, of many improbable tokens, is guessed from a sample of the row: groups of tokens at equal
    distances. Its error is taken as 4 standard deviations of a sum of independent draws.
    """
    o_entry = tl.arange(0, sampled)
    o_token = o_entry // group * tl.maximum(group, (vocab.to(tl.int64) * group // sampled).to(tl.int32))
    o_token += o_entry % group
    m_token = o_token < vocab
    b_score = tl.div_rn(tl.load(p_logit + o_token, m_token, other=NEVER) - best, temperature)
    scale = vocab.to(tl.float32) / tl.sum(m_token.to(tl.int32), 0).to(tl.float32)
    b_weight = tl.exp(b_score) * scale
    target = (1 - top_p) * (weight - tl.sum(tl.where(b_score < floor, b_weight, 0.0), 0))
    b_weight = tl.where(b_score < floor, 0.0, b_weight)
    low, high = floor, tl.full([], 0.01, tl.float32)
    for _ in range(rounds):
        b_step = low + (high - low) * (tl.arange(0, ways).to(tl.float32) / ways)
        b_below = tl.where(b_score[:, None] < b_step[None, :], b_weight[:, None], 0.0)
        b_left, b_error = tl.sum(b_below, 0), 4 * tl.sqrt(tl.sum(b_below * b_below, 0))
        low = tl.maximum(low, tl.max(tl.where(b_left + b_error < target * 0.999, b_step, NEVER), 0))
        high = tl.minimum(high, tl.min(tl.where(b_left - b_error > target * 1.001, b_step, 0.01), 0))
    return low, high
