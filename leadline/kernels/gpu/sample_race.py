"""sample's draw: a race in which a token's time follows from its noise in `leadline.kernels.sample`; the first wins."""

import triton
import triton.language as tl

from leadline.kernels.gpu.sample_lists import read_list

NOBODY = tl.constexpr(0x7FFFFFFF)
"""Above every token id."""


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
def _uniform(seed, position, o_token):
    """The uniform number u in (0, 1) of each token."""
    first, second = _hash_words(seed, position, 0x243F6A88), _hash_words(seed, position, 0x05A308D3)
    bits = _mix(_mix(o_token.to(tl.uint32) ^ first) ^ second) & 0x7FFFFFFF
    return tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)


@triton.jit
def _exponential(uniform):
    """E = -log(1 - u): a polynomial for u below 1/8, whose error is below 1e-8 of it, and a logarithm above."""
    small = uniform * (1 / 9)
    for divisor in tl.static_range(8, 1, -1):
        small = uniform * (1 / divisor + small)
    return tl.where(uniform < 0.125, uniform + uniform * small, -tl.log(1.0 - uniform))


@triton.jit
def times(b_score, seed, position, o_token):
    """exp(-(score + noise)) of tokens, with the noise of `leadline.kernels.sample.gumbel`: the lowest is drawn.

    The noise is -log(E), so that is E exp(-score), for one logarithm less.
    """
    return _exponential(_uniform(seed, position, o_token)) * tl.exp(-b_score)


@triton.jit
def earliest(b_score, o_token, seed, position):
    """The token of a block with the lowest of `times`; some token if none has a score above -inf.

    E exceeds u, by little where u is small, as it mostly is for the first: the lowest u exp(-score) names it unless
    another token is below its time by that measure too. Only then does every token need its logarithm.
    """
    b_uniform, b_grown = _uniform(seed, position, o_token), tl.exp(-b_score)
    b_bound = b_uniform * b_grown
    bound = tl.min(b_bound, 0)
    token = tl.min(tl.where(b_bound == bound, o_token, NOBODY), 0)
    uniform = _uniform(seed, position, token)
    time = bound / uniform * _exponential(uniform)
    if tl.sum((b_bound < time * 1.00001).to(tl.int32), 0) > 1:
        b_time = _exponential(b_uniform) * b_grown
        token = tl.min(tl.where(b_time == tl.min(b_time, 0), o_token, NOBODY), 0)
    return token


@triton.jit
def first_of(b_time, b_token, otherwise):
    """(token, time) with the lowest time of a block of one dimension, `otherwise` if all are infinite."""
    time = tl.min(b_time, 0)
    token = tl.min(tl.where(b_time == time, b_token, NOBODY), 0)
    return tl.where(time < float("inf"), token, otherwise), time


@triton.jit
def draw_listed(p_logit, p_list, count, best, temperature, lowest, seed, position, otherwise, block: tl.constexpr):
    """(token, time) that is drawn from the scores of a list from `lowest` on; `otherwise` if there is none."""
    time, token = float("inf"), otherwise
    for start in range(0, count, block):
        b_token, m_entry, b_score = read_list(p_logit, p_list, start, count, best, temperature, block)
        b_time = tl.where(m_entry & (b_score >= lowest), times(b_score, seed, position, b_token), float("inf"))
        other, other_time = first_of(b_time, b_token, otherwise)
        token = tl.where(other_time < time, other, token)
        time = tl.minimum(other_time, time)
    return token, time
