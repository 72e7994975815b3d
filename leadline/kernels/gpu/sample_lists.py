"""sample's lists of a row's tokens: their scores, their probabilities, and the score at which enough are kept."""

import triton
import triton.language as tl

from leadline.kernels.sample import MASS_BITS

NEVER = tl.constexpr(float("-inf"))
MASS = tl.constexpr(2.0**MASS_BITS)
NO_MASS = tl.constexpr(-28.0)
"""Scores below have no probability in multiples of 2^-40, nor are they ever drawn: noise is between -2.9 and 22.2."""


@triton.jit
def score_order(x):
    """fp32 -> int64 in the same order (scalar)."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def score_of(order):
    """The fp32 of an order (scalar)."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def token_mass(b_score):
    """Probabilities of scores in whole multiples of 2^-40 (`MASS_BITS`)."""
    return (tl.exp(b_score) * MASS).to(tl.int64)


@triton.jit
def share_of(top_p, total):
    """The mass that top_p must keep of `total`."""
    return tl.maximum((top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def read_list(p_logit, p_list, start, count, best, temperature, block: tl.constexpr):
    """Ids, validity and scores of entries `start` to `start + block` of a list of tokens."""
    o_entry = start + tl.arange(0, block)
    m_entry = o_entry < count
    b_id = tl.load(p_list + o_entry, m_entry, other=0)
    b_x = tl.load(p_logit + b_id, m_entry, other=NEVER)
    return b_id, m_entry, tl.div_rn(b_x - best, temperature)


@triton.jit
def weigh(p_logit, p_list, count, best, temperature, least, by_mass: tl.constexpr, block: tl.constexpr):
    """(weight, number) of a list's scores that are no lower than `least`; each weighs its probability, or 1."""
    b_weight, b_number = tl.zeros([block], tl.int64), tl.zeros([block], tl.int32)
    for start in range(0, count, block):
        _, m_entry, b_score = read_list(p_logit, p_list, start, count, best, temperature, block)
        m_kept = m_entry & (b_score >= least)
        if by_mass:
            b_weight += tl.where(m_kept, token_mass(b_score), 0)
        b_number += m_kept.to(tl.int32)
    number = tl.sum(b_number)
    weight = number.to(tl.int64)
    if by_mass:
        weight = tl.sum(b_weight)
    return weight, number


@triton.jit
def search(p_logit, p_list, count, best, temperature, low, target, by_mass: tl.constexpr, block: tl.constexpr):
    """The lowest score at which those no lower weigh at least `target`, or a lower number that keeps the same.

    Bisection from `low`, which is the answer if even that keeps too little, to just above 0, the highest score.
    """
    low, high = score_order(low), tl.full([], 1, tl.int64)
    most, fewest = count, 0
    while (high - low > 1) & (most - fewest > 1):
        middle = (low + high) >> 1
        weight, number = weigh(p_logit, p_list, count, best, temperature, score_of(middle), by_mass, block)
        enough = weight >= target
        low, most = tl.where(enough, middle, low), tl.where(enough, number, most)
        high, fewest = tl.where(enough, high, middle), tl.where(enough, fewest, number)
    return score_of(low)
