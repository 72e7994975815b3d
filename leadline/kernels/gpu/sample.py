"""sample on a GPU: rows split over many programs for what needs every logit, and one program per row for the rest.

Launches: the highest logit of each part of a row (and the logits as penalties, bias and masks change them); one program
per row that takes greedy rows' tokens and, where top_k, top_p or min_p keep few tokens, lists these, cuts and draws;
for the other random rows a draw from each part, and the choice among the parts. Noise and order are those of
`leadline.kernels.sample`, so a seed draws the same tokens there and here, except where the rounding of exponentials,
logarithms and quotients decides.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.sample import MASS_BITS, SamplingTensors

PART = 4096
"""Tokens of a row that one program reads."""
GROUP = 32
"""Tokens of which the highest logit is kept: 128 bytes, what a read from memory brings at least."""
FEW = 1024
"""Groups among which one program looks for the tokens that top_p or min_p keep; top_k always takes that way."""
BLOCK = 4096
"""Entries of a list that a row's program holds at once."""
LISTED = 256
"""Entries of a list (bias, drafts, masks) that are looked at together."""
WAYS, ROUNDS = 8, 3
"""Where top_p keeps many, each pass over the row divides the range of its cutoff by WAYS: 28 / 8^3 = 0.05 is left."""
NEVER = tl.constexpr(float("-inf"))
CHOSEN = tl.constexpr(float("inf"))
"""In place of the lowest logit to draw from: the row has its token."""
MASS = tl.constexpr(2.0**MASS_BITS)
NO_MASS = tl.constexpr(-28.0)
"""Scores below have an exponential below 2^-40."""


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """See `leadline.kernels.sample.sample`; no value on the device is waited for."""
    batch, vocab = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch == 0:
        return tokens
    parts, settings = triton.cdiv(vocab, PART), constants(vocab)
    floats = torch.empty(3, batch, parts, dtype=torch.float32, device=logits.device)
    tops, weights, times = floats.unbind()
    ids = torch.empty(2, batch, parts, dtype=torch.int32, device=logits.device)
    groups = torch.empty(batch if how.any_random else 0, parts * (PART // GROUP), device=logits.device)
    logits = _find_tops(logits.contiguous(), how, tops, ids[0], weights, groups)
    cutoffs = torch.empty(batch, dtype=torch.float32, device=logits.device)
    listed = torch.empty(
        batch if how.any_random else 0, groups.shape[1] + vocab, dtype=torch.int32, device=logits.device
    )
    noise = (how.seed, how.position)
    _choose_kernel[(batch,)](
        logits, tops, ids, weights, groups, how.temperature, how.top_k, how.top_p, how.min_p, *noise, listed, cutoffs,
        tokens, vocab, parts, any_random=how.any_random, **settings["choose"], num_warps=16,
    )  # fmt: skip
    if how.any_random:
        _draw_kernel[(parts, batch)](
            logits, tops, how.temperature, *noise, cutoffs, times, ids[1], vocab, parts, **settings["draw"],
            num_warps=4,
        )  # fmt: skip
        _pick_kernel[(batch,)](times, ids[1], cutoffs, tokens, parts, **settings["pick"], num_warps=1)
    return tokens


def constants(vocab: int) -> dict[str, dict[str, int]]:
    """The constants of each launch for rows of `vocab` logits, besides the flags."""
    parts = triton.next_power_of_2(triton.cdiv(vocab, PART))
    choose = {"few": FEW, "ways": WAYS, "rounds": ROUNDS, "part": PART, "group": GROUP, "block": BLOCK}
    return {
        "tops": {"part": PART, "group": GROUP, "listed": LISTED},
        "choose": {"parts_padded": parts, **choose},
        "draw": {"parts_padded": parts, "part": PART},
        "pick": {"parts_padded": parts},
    }


def _find_tops(
    logits: Tensor, how: SamplingTensors, tops: Tensor, ids: Tensor, weights: Tensor, groups: Tensor
) -> Tensor:
    """Fill what `_tops_kernel` finds of each part; the logits after penalties, bias and masks."""
    batch, vocab = logits.shape
    penalties, bias, allowed = how.penalties, how.bias, how.allowed
    changed = torch.empty_like(logits) if penalties or bias or allowed else logits
    _tops_kernel[(triton.cdiv(vocab, PART), batch)](
        logits, changed, tops, ids, weights, groups, how.temperature,
        *((penalties.counts.output, penalties.counts.prompt, penalties.slot, penalties.repetition, penalties.presence,
           penalties.frequency, penalties.drafted_row, penalties.drafted_token, len(penalties.drafted_row))
          if penalties else (None,) * 8 + (0,)),
        *((bias.row, bias.token, bias.value, len(bias.row)) if bias else (None,) * 3 + (0,)),
        *((allowed.row, allowed.bits, allowed.bits.stride(0), len(allowed.row)) if allowed else (None,) * 2 + (0, 0)),
        vocab,
        penalised=penalties is not None, biased=bias is not None, constrained=allowed is not None,
        any_random=how.any_random, **constants(vocab)["tops"], num_warps=4,
    )  # fmt: skip
    return changed


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
def _tops_kernel(
    p_logit, p_changed, p_top, p_id, p_weight, p_group, p_temperature, p_output, p_prompt, p_slot, p_repetition,
    p_presence, p_frequency, p_drafted_row, p_drafted_token, drafted, p_bias_row, p_bias_token, p_bias_value, entries,
    p_mask_row, p_bits, bits_stride, masks, vocab, penalised: tl.constexpr, biased: tl.constexpr,
    constrained: tl.constexpr, any_random: tl.constexpr, part: tl.constexpr, group: tl.constexpr, listed: tl.constexpr,
):  # fmt: skip
    """One part of a row: its highest logit, the lowest id that has it, its weight if that had probability 1, groups."""
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
    top, at = tl.max(b_x, 0, return_indices=True)
    tl.store(p_top + place, top)
    tl.store(p_id + place, tl.minimum(i_part * part + at, vocab - 1))  # NaN could leave the row
    if any_random:
        temperature = tl.load(p_temperature + row)
        if temperature > 0:
            b_weight = tl.where(b_x == NEVER, 0.0, tl.exp((b_x - top) * (1 / temperature)))
            tl.store(p_weight + place, tl.sum(b_weight))
            b_group = tl.max(tl.reshape(b_x, (part // group, group)), 1)
            tl.store(p_group + place * (part // group) + tl.arange(0, part // group), b_group)


@triton.jit
def _order(x):
    """fp32 -> int64 in the same order (scalar)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(order):
    """The fp32 of an order (scalar)."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(b_score):
    """Probabilities of scores in whole multiples of 2^-40 (`MASS_BITS`)."""
    return (tl.exp(b_score) * MASS).to(tl.int64)


@triton.jit
def _listed(p_x, p_id, start, count, best, temperature, block: tl.constexpr):
    """Ids and scores of entries `start` to `start + block` of a list of tokens, or of all `p_x` if `p_id` is None."""
    o_entry = start + tl.arange(0, block)
    m_entry = o_entry < count
    b_id = o_entry
    if p_id is not None:
        b_id = tl.load(p_id + o_entry, m_entry, other=0)
    b_x = tl.load(p_x + b_id, m_entry, other=NEVER)
    return b_id, m_entry, tl.div_rn(b_x - best, temperature)


@triton.jit
def _weigh(p_x, p_id, count, best, temperature, least, by_mass: tl.constexpr, block: tl.constexpr):
    """(weight, number) of a list's scores that are no lower than `least`; each weighs its probability, or 1."""
    b_weight, b_number = tl.zeros([block], tl.int64), tl.zeros([block], tl.int32)
    for start in range(0, count, block):
        _, m_entry, b_score = _listed(p_x, p_id, start, count, best, temperature, block)
        m_kept = m_entry & (b_score >= least)
        if by_mass:
            b_weight += tl.where(m_kept, _mass(b_score), 0)
        b_number += m_kept.to(tl.int32)
    number = tl.sum(b_number)
    weight = number.to(tl.int64)
    if by_mass:
        weight = tl.sum(b_weight)
    return weight, number


@triton.jit
def _search(p_x, p_id, count, best, temperature, low, target, by_mass: tl.constexpr, block: tl.constexpr):
    """The lowest score at which those no lower weigh at least `target`, or a lower number that keeps the same.

    Bisection from `low`, which is the answer if even that keeps too little, to just above 0, the highest score.
    """
    low, high = _order(low), tl.full([], 1, tl.int64)
    most, fewest = count, 0
    while (high - low > 1) & (most - fewest > 1):
        middle = (low + high) >> 1
        weight, number = _weigh(p_x, p_id, count, best, temperature, _number(middle), by_mass, block)
        enough = weight >= target
        low, most = tl.where(enough, middle, low), tl.where(enough, number, most)
        high, fewest = tl.where(enough, high, middle), tl.where(enough, fewest, number)
    return _number(low)


@triton.jit
def _narrow(
    p_logit, vocab, best, temperature, floor, top_p, ways: tl.constexpr, rounds: tl.constexpr, block: tl.constexpr
):
    """Scores `low`, which keeps more than `top_p` of the probability, and `high`, which keeps less.

    Sums in fp32, so that shares within 1e-4 of `top_p` count as neither.
    """
    low, high, target = tl.maximum(floor, NO_MASS), 0.01, 0.0
    for i_round in range(rounds):
        b_step = low + (high - low) * (tl.arange(0, ways).to(tl.float32) / ways)
        b_sum = tl.zeros([block, ways], tl.float32)
        for start in range(0, vocab, block):
            _, _, b_score = _listed(p_logit, None, start, vocab, best, temperature, block)
            b_sum += tl.where(b_score[:, None] >= b_step[None, :], tl.exp(b_score)[:, None], 0.0)
        b_share = tl.sum(b_sum, 0)
        target = tl.where(i_round == 0, top_p * tl.max(b_share), target)
        low = tl.maximum(low, tl.max(tl.where(b_share >= target * 1.0001, b_step, NEVER)))
        high = tl.minimum(high, tl.min(tl.where(b_share < target * 0.9999, b_step, 0.01)))
    return low, high


@triton.jit
def _list_groups(p_group, p_list, groups, best, temperature, least, block: tl.constexpr):
    """List the groups whose highest score is at least `least`; their number."""
    listed = 0
    for start in range(0, groups, block):
        b_id, m_group, b_score = _listed(p_group, None, start, groups, best, temperature, block)
        m_group = m_group & (b_score >= least)
        tl.store(p_list + listed + tl.cumsum(m_group.to(tl.int32)) - 1, b_id, m_group)
        listed += tl.sum(m_group.to(tl.int32))
    tl.debug_barrier()  # other threads read what was stored
    return listed


@triton.jit
def _list_tokens(
    p_logit, p_groups, p_list, listed, vocab, best, temperature, least, low, high, group: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """List the tokens of the listed groups with scores from `low` to below `high`.

    Their number, the mass of scores from `high` on, and that of scores from `least` on.
    """
    tokens = 0
    b_above, b_total = tl.zeros([block], tl.int64), tl.zeros([block], tl.int64)
    for start in range(0, listed * group, block):
        o_entry = start + tl.arange(0, block)
        m_token = o_entry < listed * group
        b_token = tl.load(p_groups + o_entry // group, m_token, other=0) * group + o_entry % group
        m_token = m_token & (b_token < vocab)
        b_score = tl.div_rn(tl.load(p_logit + b_token, m_token, other=NEVER) - best, temperature)
        b_mass = _mass(b_score)
        b_total += tl.where(m_token & (b_score >= least), b_mass, 0)
        b_above += tl.where(m_token & (b_score >= high), b_mass, 0)
        m_token = m_token & (b_score >= low) & (b_score < high)
        tl.store(p_list + tokens + tl.cumsum(m_token.to(tl.int32)) - 1, b_token, m_token)
        tokens += tl.sum(m_token.to(tl.int32))
    tl.debug_barrier()
    return tokens, tl.sum(b_above), tl.sum(b_total)


@triton.jit
def _mix(x):
    """`leadline.kernels.sample.mix` on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _hash_words(seed, position, start: tl.constexpr):
    """`leadline.kernels.sample.hash_words` of the seed's halves and the position, in uint32."""
    state = _mix(seed.to(tl.uint32) ^ start)
    state = _mix(state ^ (seed >> 32).to(tl.uint32))
    return _mix(state ^ position.to(tl.uint32))


@triton.jit
def _times(b_score, seed, position, o_token):
    """exp(-(score + noise)) of tokens, with the noise of `leadline.kernels.sample.gumbel`: the lowest is drawn.

    With E = -log(1 - u), whose negative logarithm the noise is, that is E exp(-score), for one logarithm less. E is a
    polynomial for u below 1/8, whose error is below 1e-8 of it, and a logarithm of the exact complement above.
    """
    first, second = _hash_words(seed, position, 0x243F6A88), _hash_words(seed, position, 0x05A308D3)
    bits = _mix(_mix(o_token.to(tl.uint32) ^ first) ^ second) & 0x7FFFFFFF
    uniform = tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    small = uniform * (1 / 9)
    for divisor in tl.static_range(8, 1, -1):
        small = uniform * (1 / divisor + small)
    return tl.where(uniform < 0.125, uniform + uniform * small, -tl.log(1.0 - uniform)) * tl.exp(-b_score)


@triton.jit
def _draw_listed(p_logit, p_list, count, best, temperature, lowest, seed, position, otherwise, block: tl.constexpr):
    """The token of a list that is drawn from the scores from `lowest` on; `otherwise` if there is none."""
    earliest, token = float("inf"), otherwise
    for start in range(0, count, block):
        b_token, m_entry, b_score = _listed(p_logit, p_list, start, count, best, temperature, block)
        b_time = _times(b_score, seed, position, b_token)
        b_time = tl.where(m_entry & (b_score >= lowest), b_time, float("inf"))
        time = tl.min(b_time)
        first = tl.min(tl.where(b_time == time, b_token, 0x7FFFFFFF))
        token = tl.where(time < earliest, first, token)
        earliest = tl.minimum(time, earliest)
    return token


@triton.jit
def _lowest_logit(p_logit, p_list, count, best, temperature, lowest, block: tl.constexpr):
    """The lowest logit of a list whose score is at least `lowest`."""
    logit = float("inf")
    for start in range(0, count, block):
        b_token, m_entry, b_score = _listed(p_logit, p_list, start, count, best, temperature, block)
        m_kept = m_entry & (b_score >= lowest)
        logit = tl.minimum(logit, tl.min(tl.load(p_logit + b_token, m_kept, other=float("inf"))))
    return logit


@triton.jit
def _choose_kernel(
    p_logit, p_top, p_id, p_weight, p_group, p_temperature, p_top_k, p_top_p, p_min_p, p_seed, p_position, p_list,
    p_cutoff, p_token, vocab, parts, any_random: tl.constexpr, parts_padded: tl.constexpr, few: tl.constexpr,
    ways: tl.constexpr, rounds: tl.constexpr, part: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A row's token if it is greedy or has few tokens to draw from; else the lowest logit to draw from."""
    row = tl.program_id(0).to(tl.int64)
    o_part = tl.arange(0, parts_padded)
    b_top = tl.load(p_top + row * parts + o_part, o_part < parts, other=NEVER)
    best = tl.max(b_top)
    token = tl.load(p_id + row * parts + tl.minimum(tl.argmax(b_top, 0), parts - 1))
    cutoff = CHOSEN
    if any_random:
        temperature = tl.load(p_temperature + row)
        if temperature > 0:
            top_k, top_p = tl.load(p_top_k + row), tl.load(p_top_p + row)
            by_k = (top_k > 0) & (top_k < vocab)
            floor = tl.log(tl.load(p_min_p + row))
            cutoff = NEVER
            if by_k | (top_p < 1) | (floor > NEVER):
                groups = parts * (part // group)
                p_list += row * (groups + vocab)
                b_weight = tl.load(p_weight + row * parts + o_part, o_part < parts, other=0.0)
                b_weight = tl.where(b_top == NEVER, 0.0, b_weight * tl.exp((b_top - best) * (1 / temperature)))
                token, cutoff = _choose_filtered(
                    p_logit + row * vocab, p_group + row * groups, p_list, p_list + groups, vocab, groups, best,
                    tl.sum(b_weight), temperature, top_k, by_k, top_p, floor, tl.load(p_seed + row),
                    tl.load(p_position + row), token, few, ways, rounds, group, block,
                )  # fmt: skip
    tl.store(p_token + row, token.to(tl.int64))
    tl.store(p_cutoff + row, cutoff)


@triton.jit
def _choose_filtered(
    p_logit, p_group, p_groups, p_list, vocab, groups, best, weight, temperature, top_k, by_k, top_p, floor, seed,
    position, token, few: tl.constexpr, ways: tl.constexpr, rounds: tl.constexpr, group: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """What `_choose_kernel` finds for a row with top_k, top_p or min_p.

    `least` is a score that every token to be kept has: k groups have no lower a highest score, so have k tokens; or the
    highest of some groups already hold top_p of the row's probability.
    """
    never = tl.full([], NEVER, tl.float32)
    least = floor
    if by_k:
        if top_k <= groups:
            least = tl.maximum(floor, _search(p_group, None, groups, best, temperature, never, top_k, False, block))
    elif (top_p < 1) & (floor == NEVER):
        target = (top_p * weight * 1.0001 * MASS).to(tl.int64)
        least = _search(p_group, None, groups, best, temperature, never, target, True, block)
    listed = _list_groups(p_group, p_groups, groups, best, temperature, least, block)
    low, high = least, 1.0  # the highest score is 0
    many = (listed > few) & (by_k == 0)
    if many & (top_p < 1):
        low, high = _narrow(p_logit, vocab, best, temperature, floor, top_p, ways, rounds, block)
    cutoff = best + temperature * floor
    if (many == 0) | (top_p < 1):
        count, above, total = _list_tokens(
            p_logit, p_groups, p_list, listed, vocab, best, temperature, least, low, high, group, block
        )
        lowest = low
        if by_k:
            lowest = _search(p_logit, p_list, count, best, temperature, low, top_k, False, block)
            total, _ = _weigh(p_logit, p_list, count, best, temperature, lowest, True, block)
        elif least > floor:  # what was left out counts too
            total = (weight.to(tl.float64) * MASS).to(tl.int64)
        if top_p < 1:
            share = tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1) - above
            lowest = tl.maximum(lowest, _search(p_logit, p_list, count, best, temperature, low, share, True, block))
        if many:
            cutoff = _lowest_logit(p_logit, p_list, count, best, temperature, lowest, block)
        else:
            cutoff = CHOSEN
            token = _draw_listed(p_logit, p_list, count, best, temperature, lowest, seed, position, token, block)
    return token, cutoff


@triton.jit
def _draw_kernel(
    p_logit, p_top, p_temperature, p_seed, p_position, p_cutoff, p_time, p_drawn, vocab, parts,
    parts_padded: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """The lowest time in one part of a row that has no token yet, and the token it belongs to."""
    i_part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cutoff = tl.load(p_cutoff + row)
    if cutoff < CHOSEN:
        o_part = tl.arange(0, parts_padded)
        best = tl.max(tl.load(p_top + row * parts + o_part, o_part < parts, other=NEVER))
        time, at = float("inf"), 0
        if tl.load(p_top + row * parts + i_part) >= cutoff:
            o_token = i_part * part + tl.arange(0, part)
            b_x = tl.load(p_logit + row * vocab + o_token, o_token < vocab, other=NEVER)
            b_score = tl.where(b_x < cutoff, NEVER, (b_x - best) * (1 / tl.load(p_temperature + row)))
            b_time = _times(b_score, tl.load(p_seed + row), tl.load(p_position + row), o_token)
            time, at = tl.min(b_time, 0, return_indices=True)
        tl.store(p_time + row * parts + i_part, time)
        tl.store(p_drawn + row * parts + i_part, tl.minimum(i_part * part + at, vocab - 1))


@triton.jit
def _pick_kernel(p_time, p_drawn, p_cutoff, p_token, parts, parts_padded: tl.constexpr):
    """The token of a row that was drawn part by part."""
    row = tl.program_id(0)
    if tl.load(p_cutoff + row) < CHOSEN:
        o_part = tl.arange(0, parts_padded)
        b_time = tl.load(p_time + row * parts + o_part, o_part < parts, other=float("inf"))
        at = tl.minimum(tl.argmin(b_time, 0), parts - 1)
        tl.store(p_token + row, tl.load(p_drawn + row * parts + at).to(tl.int64))
