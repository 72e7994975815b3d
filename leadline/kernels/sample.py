"""sample: choose each row's next token from its logits, and report log-probabilities.

A row's token depends on that row alone, to the last bit: every operation across the vocabulary is a maximum, a sort
or a sum of integers, so no rounding changes with the number of rows, and the noise is a hash of
(seed, position, token id) instead of a generator that rows would share.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = float("-inf")
MASS_BITS = 40  # probabilities are summed as whole multiples of 2**-40: exact in int64 up to 2**22 tokens


@dataclass(frozen=True)
class TokenCounts:
    """What requests with penalties have seen: one slot each, kept on the device and updated in place.

    `output` [S, V] int32 counts the tokens generated so far, `prompt` [S, V] bool marks those of the prompt.
    """

    output: Tensor
    prompt: Tensor

    @classmethod
    def empty(cls, slots: int, vocab_size: int, device: torch.device | str) -> "TokenCounts":
        """Zeroed tables for `slots` requests (5 bytes per slot and token id)."""
        shape = (slots, vocab_size)
        return cls(
            torch.zeros(shape, dtype=torch.int32, device=device), torch.zeros(shape, dtype=torch.bool, device=device)
        )

    def start(self, slot: int, prompt: Tensor, output: Tensor) -> None:
        """Give `slot` to a request with the token ids `prompt` [P] and `output` [O], both int64 (O > 0 if resumed)."""
        self.prompt[slot].zero_()[prompt] = True
        self.output[slot].zero_().index_put_((output,), torch.ones_like(output, dtype=torch.int32), accumulate=True)

    def add(self, slots: Tensor, tokens: Tensor, taken: Tensor) -> None:
        """Count `tokens` [B] int64 in `slots` [B] int64 where `taken` [B] bool; elsewhere the slot is ignored."""
        self.output.index_put_((slots.where(taken, 0), tokens), taken.int(), accumulate=True)


@dataclass(frozen=True)
class Penalties:
    """Per row of the batch; a row without penalties has the neutral factors 1, 0, 0 and any valid slot.

    `drafted_row`, `drafted_token` [D] int64: draft tokens that stand before a row although `counts` lacks them yet.
    """

    counts: TokenCounts
    slot: Tensor  # [B] int64
    repetition: Tensor  # [B] fp32
    presence: Tensor  # [B] fp32
    frequency: Tensor  # [B] fp32
    drafted_row: Tensor
    drafted_token: Tensor


@dataclass(frozen=True)
class Bias:
    """Entry i adds `value[i]` fp32 (-inf: ban) to token `token[i]` int64 of row `row[i]` int64; all [N]."""

    row: Tensor
    token: Tensor
    value: Tensor


@dataclass(frozen=True)
class Allowed:
    """Row `row[i]` int64 [M] may only become a token whose bit is set: bit `t % 32` of `bits[i, t // 32]` for token t.

    `bits` [M, ceil(V / 32)] int32; at least one bit of a row is set.
    """

    row: Tensor
    bits: Tensor


@dataclass(frozen=True)
class SamplingTensors:
    """How to sample each of B rows. The two flags are known on the host, so that choosing a path waits for nothing."""

    temperature: Tensor  # [B] fp32; 0 = greedy
    top_k: Tensor  # [B] int64; 0 or at least V = off
    top_p: Tensor  # [B] fp32; 1 = off
    min_p: Tensor  # [B] fp32; 0 = off
    seed: Tensor  # [B] int64
    position: Tensor  # [B] int64; index of the token in its request's output
    any_random: bool  # some temperature is above 0
    any_truncated: bool  # some random row has top_k or top_p on
    penalties: Penalties | None = None
    bias: Bias | None = None
    allowed: Allowed | None = None


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """`logits` [B, V] fp32 (not changed) -> token ids [B] int64.

    Order: penalties, bias and bans, what is allowed, then for random rows temperature, min_p, top_k, top_p and the
    draw. Greedy rows take the highest logit, ties by lower id. The draw is the Gumbel-max trick: argmax(scores + Gumbel
    noise) is distributed as softmax(scores) (Gumbel 1954; Maddison et al., arXiv:1411.0030).
    """
    assert logits.dtype == torch.float32 and logits.dim() == 2
    if logits.is_cuda:
        from leadline.kernels.gpu import sample as gpu

        return gpu.sample(logits, how)
    if how.penalties is not None:
        logits = penalise(logits, how.penalties)
    if how.bias is not None:
        logits = logits.index_put((how.bias.row, how.bias.token), how.bias.value, accumulate=True)
    if how.allowed is not None:
        logits = constrain(logits, how.allowed)
    best = logits.argmax(-1)
    if not how.any_random:
        return best
    random = how.temperature > 0
    scores = logits - logits.gather(-1, best[:, None])
    scores = scores / how.temperature.where(random, 1.0)[:, None]
    scores = scores.masked_fill(scores < how.min_p.log()[:, None], NEVER)  # p / p_max < min_p
    if how.any_truncated:
        scores = scores.masked_fill(scores < cutoff(scores, how.top_k, how.top_p), NEVER)
    drawn = (scores + gumbel(how.seed, how.position, scores.shape[1])).argmax(-1)
    return drawn.where(random, best)


def penalise(logits: Tensor, how: Penalties) -> Tensor:
    """`logits` [B, V] fp32 -> [B, V].

    A token of the prompt or output has its logit divided (if positive) or multiplied by `repetition` (Keskar et al.,
    arXiv:1909.05858, section 4.1); then count * `frequency` + (count > 0) * `presence` is taken off, count in the
    output alone (OpenAI API reference, "frequency and presence penalties").
    """
    count = how.counts.output[how.slot]
    ones = torch.ones_like(how.drafted_row, dtype=torch.int32)
    count.index_put_((how.drafted_row, how.drafted_token), ones, accumulate=True)
    seen = how.counts.prompt[how.slot] | (count > 0)
    repetition = how.repetition[:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - count * how.frequency[:, None] - (count > 0) * how.presence[:, None]


def constrain(logits: Tensor, how: Allowed) -> Tensor:
    """`logits` [B, V] fp32 -> [B, V], -inf for the tokens that are not allowed."""
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = (how.bits[:, token // 32] >> (token % 32)) & 1
    return logits.index_copy(0, how.row, logits[how.row].masked_fill(allowed == 0, NEVER))


def cutoff(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The lowest score each row keeps: `scores` [B, V] fp32 with maximum 0, `top_k` and `top_p` [B] -> [B, 1].

    top_k keeps scores no lower than the k-th highest; of these, top_p keeps the highest until they hold at least
    `top_p` of the probability (Holtzman et al., arXiv:1904.09751). Equal scores are kept or dropped together, and
    the highest is always kept.
    """
    size = scores.shape[1]
    ordered = scores.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, size).clamp(max=size) - 1
    lowest = ordered.gather(-1, last[:, None])
    mass = ordered.masked_fill(ordered < lowest, NEVER).exp().mul(2.0**MASS_BITS).long()
    total = mass.sum(-1, keepdim=True)
    share = (top_p.double()[:, None] * total).long().clamp(min=1)
    share = share.where(top_p[:, None] < 1, total + 1)
    kept = (mass.cumsum(-1) - mass < share).sum(-1, keepdim=True)
    return lowest.maximum(ordered.gather(-1, kept - 1))


def gumbel(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise of each token: `seed`, `position` [B] int64 -> [B, vocab_size] fp32, finite.

    Two 32-bit keys per row are hashed from the seed's halves and the position; a token's bits are its id hashed with
    one key, then with the other. E = -log(1 - u) is exponential and -log(E) is Gumbel; the form keeps full relative
    precision for the small E that let an improbable token win.
    """
    words = [word.int() for word in (low_half(seed), low_half(seed >> 32), low_half(position))]
    first, second = hash_words(words, 0x243F6A88), hash_words(words, 0x05A308D3)  # digits of pi
    token = torch.arange(vocab_size, dtype=torch.int32, device=seed.device)
    bits = mix(mix(token ^ first[:, None]) ^ second[:, None])
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def low_half(x: Tensor) -> Tensor:
    """The low 32 bits of int64 `x`, as the int64 in -2**31 .. 2**31 - 1 with the same bits."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def hash_words(words: list[Tensor], start: int) -> Tensor:
    """Hash 32-bit words, each an int32 tensor of one shape, into one int32 of that shape."""
    state = torch.full_like(words[0], start)
    for word in words:
        state = mix(state ^ word)
    return state


def mix(x: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 (A. Appleby, public domain) on int32 `x` of any shape.

    uint32 arithmetic by its bits: products wrap alike, and the mask turns the arithmetic shift into a logical one.
    """
    x = ((x >> 16) & 0xFFFF).bitwise_xor_(x).mul_(0x85EBCA6B - 2**32)
    x = ((x >> 13) & 0x7FFFF).bitwise_xor_(x).mul_(0xC2B2AE35 - 2**32)
    return ((x >> 16) & 0xFFFF).bitwise_xor_(x)


def child_seed(seed: int, choice: int) -> int:
    """The seed (int64 range) of choice `choice` >= 0 of a request with `seed`: choice 0 keeps it.

    Others get output number `choice` of SplitMix64 started at `seed` (Steele et al., OOPSLA 2014).
    """
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return ((z ^ (z >> 31)) ^ 2**63) - 2**63


def logprobs(logits: Tensor, tokens: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """`logits` [B, V] fp32 as the model gave them, `tokens` [B] int64, 0 <= `top_n` <= V.

    -> (log-softmax of each token [B] fp32, the `top_n` highest [B, top_n] fp32 in falling order, their ids int64).
    Equal logits are ordered by lower id.
    """
    assert logits.dtype == torch.float32
    logs = logits.log_softmax(-1)
    # topk leaves the order of equals open, so each logit becomes a distinct integer: its rank bits, then its id.
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    ids = torch.arange(logits.shape[1], device=logits.device)
    top = (rank - ids).topk(top_n, -1).indices
    return logs.gather(-1, tokens[:, None])[:, 0], logs.gather(-1, top), top
