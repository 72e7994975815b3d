"""What a request asks of sampling, and the tensors that tell the `sample` operation to do it."""

import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from leadline.engine.constraint import Bits, Constraint
from leadline.engine.transfer import send
from leadline.kernels.sample import NEVER, Allowed, Bias, Penalties, SamplingTensors, TokenCounts

INT64 = 2**63
GREEDY_BELOW = 1e-5  # a lower temperature cannot be told from greedy in fp32 and could round to 0
MOST_LOGPROBS = 20  # the OpenAI limit for top_logprobs
MOST_STOPS = 16
MOST_CHOICES = 128


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. Names and meanings are those of the OpenAI API and, beyond it, of vLLM.

    Raises ValueError that names every field out of range with its value and what is allowed.
    """

    temperature: float = 1.0  # below 1e-5: greedy
    top_k: int = 0  # 0, -1 or beyond the vocabulary: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on tokens of prompt and output
    presence_penalty: float = 0.0  # on tokens of the output, as is the next
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None  # None: the engine draws one
    n: int = 1
    max_tokens: int | None = None  # None: up to the context
    min_tokens: int = 0  # before them no EOS, stop token or stop string ends the output
    stop: str | list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    bad_words: list[str] = field(default_factory=list)
    logprobs: int | None = None  # None: off; 0: the chosen token; N: the N most probable as well
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    constraint: Constraint | None = None  # not together with min_tokens, ignore_eos or bad_words

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {reprlib.repr(getattr(self, name))}; allowed: {allowed}"
            for name, valid, allowed in (*self._number_checks(), *self._other_checks())
            if not valid
        ]
        for name, entries, valid_entry, allowed in self._list_checks():
            culprits = [entry for entry in entries if not valid_entry(entry)]
            wrong += [_contains(name, culprits, allowed)] if culprits else []
        if wrong:
            raise ValueError("\n".join(wrong))

    def _number_checks(self) -> Iterator[tuple[str, bool, str]]:
        """(field, whether its value is allowed, what is allowed)."""
        yield "temperature", _number(self.temperature, 0, 2), "a number from 0 to 2"
        yield "top_k", _whole(self.top_k, -1, INT64 - 1), "a whole number from 1, or 0 or -1 for off"
        yield "top_p", _number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0 and at most 1"
        yield "min_p", _number(self.min_p, 0, 1), "a number from 0 to 1"
        yield "repetition_penalty", _number(self.repetition_penalty, 0.1, 10), "a number from 0.1 to 10"
        yield "presence_penalty", _number(self.presence_penalty, -2, 2), "a number from -2 to 2"
        yield "frequency_penalty", _number(self.frequency_penalty, -2, 2), "a number from -2 to 2"
        yield "n", _whole(self.n, 1, MOST_CHOICES), f"a whole number from 1 to {MOST_CHOICES}"
        fewest = 1 if self.prompt_logprobs is None else 0
        bounded = self.max_tokens is None or _whole(self.max_tokens, fewest, INT64 - 1)
        yield "max_tokens", bounded, "none, or a whole number from 1 (from 0 with prompt_logprobs)"
        most = self.max_tokens if bounded and self.max_tokens is not None else INT64 - 1
        yield "min_tokens", _whole(self.min_tokens, 0, most), "a whole number from 0 to max_tokens"

    def _other_checks(self) -> Iterator[tuple[str, bool, str]]:
        """(field, whether its value is allowed, what is allowed); the entries of lists are checked elsewhere."""
        yield "seed", self.seed is None or _whole(self.seed, -INT64, INT64 - 1), "none, or a whole number of 64 bits"
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            yield name, value is None or _whole(value, 0, MOST_LOGPROBS), f"none, or 0 to {MOST_LOGPROBS}"
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            yield name, isinstance(getattr(self, name), bool), "true or false"
        for name in ("stop_token_ids", "bad_words"):
            yield name, isinstance(getattr(self, name), list | tuple), "a list"
        few = isinstance(self.stop, str) or (isinstance(self.stop, list | tuple) and len(self.stop) <= MOST_STOPS)
        yield "stop", few, f"a text or a list of at most {MOST_STOPS}"
        yield "logit_bias", self.logit_bias is None or isinstance(self.logit_bias, dict), "none, or a dictionary"
        known = self.constraint is None or isinstance(self.constraint, Constraint)
        yield "constraint", known, "none, or a Constraint"
        free = self.constraint is None
        for name in ("min_tokens", "ignore_eos", "bad_words"):
            yield name, free or not getattr(self, name), "nothing, since a constraint says what may come next"

    def _list_checks(self) -> Iterator[tuple[str, Iterable[Any], Callable[[Any], bool], str]]:
        """(field, its entries, whether an entry is allowed, what is allowed); no entries where it is no list at all."""
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            texts = [value] if name == "stop" and isinstance(value, str) else _entries(value)
            yield name, texts, _text, "texts that are not empty and have a UTF-8 form"
        yield "stop_token_ids", _entries(self.stop_token_ids), _token, "token ids"
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else ()
        allowed = "pairs of a token id and a number from -100 to 100"
        yield "logit_bias", pairs, lambda pair: _token(pair[0]) and _number(pair[1], -100, 100), allowed

    def validate(self, vocab_size: int) -> None:
        """Raise ValueError that names every token id that is not below `vocab_size`."""
        wrong = []
        for name, ids in (("logit_bias", self.logit_bias or {}), ("stop_token_ids", self.stop_token_ids)):
            beyond = [token for token in ids if token >= vocab_size]
            wrong += [_contains(name, beyond, f"token ids from 0 to {vocab_size - 1}")] if beyond else []
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether sampling needs the tokens seen so far (a slot of TokenCounts)."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _contains(name: str, culprits: Iterable[object], allowed: str) -> str:
    return f"{name} contains {', '.join(map(reprlib.repr, culprits))}; allowed: {allowed}"


def _entries(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _number(value: object, low: float, high: float) -> bool:
    """Whether `value` is a number in low..high; NaN is in no range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and _number(value, low, high)


def _token(value: object) -> bool:
    return _whole(value, 0, INT64 - 1)


def _text(value: object) -> bool:
    """Whether `value` is a string that text can contain: JSON can spell lone surrogates, which have no UTF-8 form."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= char <= "\udfff" for char in value)


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The token id sequences to ban for `words`: each word at the start of a text and after a space.

    Other ways of spelling a word with tokens stay open.
    """
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip(" "))]
    return [tokenizer.encode(spelling, add_special_tokens=False).ids for spelling in dict.fromkeys(spellings)]


def banned_tokens(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], ends: Sequence[int], output: Sequence[int]
) -> list[int]:
    """The token ids that must not follow `output`, the request's token ids so far.

    These are the last tokens of the `bad_words` (as encoded) whose other tokens stand at the end of `output`, and while
    `output` is shorter than `min_tokens` also `ends` (the model's EOS ids) and the stop tokens.
    """
    banned = [word[-1] for word in bad_words if list(output[len(output) - len(word) + 1 :]) == list(word[:-1])]
    if len(output) < params.min_tokens:
        banned += [*ends, *params.stop_token_ids]
    return banned


@dataclass(frozen=True)
class SamplingRow:
    """One row of logits that a step samples from."""

    params: SamplingParams
    seed: int  # the choice's seed, see `child_seed`
    position: int  # index of the token in the output
    banned: Sequence[int] = ()
    slot: int = 0  # in TokenCounts, if the request is `penalised`
    allowed: Bits | None = None  # None: every token

    @property
    def plain(self) -> bool:
        """Whether its logits are taken as they are: no penalties, no bias, no bans, no mask."""
        return not (self.params.penalised or self.params.logit_bias or self.banned or self.allowed is not None)


def sampling_tensors(
    rows: Sequence[SamplingRow], counts: TokenCounts | None, device: torch.device | str
) -> SamplingTensors:
    """The rows' parameters on `device`, row i of the result for row i of the logits.

    `counts` may be None when no row is penalised.
    """
    params = [row.params for row in rows]
    how = plain_tensors(
        send(packed_rows(rows, len(rows)), device),
        any_random=any(not p.greedy for p in params),
        any_truncated=any(not p.greedy and (p.top_k > 0 or p.top_p < 1) for p in params),
    )
    return replace(
        how, penalties=_penalties(rows, counts, device), bias=_bias(rows, device), allowed=_allowed(rows, device)
    )


def packed_rows(rows: Sequence[SamplingRow], room: int) -> NDArray[np.int64]:
    """What `plain_tensors` takes apart, in one array [5, room] to be sent at once; rows beyond `rows` are greedy."""
    packed = np.zeros((5, room), np.int64)
    real = packed[3:].view(np.float32)
    for i, row in enumerate(rows):
        p = row.params
        packed[0, i], packed[1, i], packed[2, i] = max(p.top_k, 0), row.seed, row.position
        real[0, i], real[0, room + i], real[1, i] = 0.0 if p.greedy else p.temperature, p.top_p, p.min_p
    return packed


def plain_tensors(packed: Tensor, any_random: bool, any_truncated: bool) -> SamplingTensors:
    """Sampling without penalties, bias and masks of the rows in `packed` [5, B] int64, of which the result is views."""
    room = packed.shape[1]
    temperature, top_p, min_p, _ = packed[3:].view(-1).view(torch.float32).view(4, room)
    return SamplingTensors(
        temperature=temperature,
        top_k=packed[0],
        top_p=top_p,
        min_p=min_p,
        seed=packed[1],
        position=packed[2],
        any_random=any_random,
        any_truncated=any_truncated,
    )


def _penalties(rows: Sequence[SamplingRow], counts: TokenCounts | None, device: torch.device | str) -> Penalties | None:
    if not any(row.params.penalised for row in rows):
        return None
    assert counts is not None
    real = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in (row.params for row in rows)]
    repetition, presence, frequency = send(np.array(real, np.float32).T.copy(), device)
    slot = send(np.array([row.slot for row in rows], np.int64), device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    return Penalties(counts, slot, repetition, presence, frequency, drafted_row=none, drafted_token=none)


def _allowed(rows: Sequence[SamplingRow], device: torch.device | str) -> Allowed | None:
    masks = [(i, row.allowed) for i, row in enumerate(rows) if row.allowed is not None]
    if not masks:
        return None
    bits = send(np.stack([mask for _, mask in masks]), device)
    return Allowed(send(np.array([i for i, _ in masks], np.int64), device), bits)


def _bias(rows: Sequence[SamplingRow], device: torch.device | str) -> Bias | None:
    entries = [
        (i, token, value)
        for i, row in enumerate(rows)
        for token, value in [*(row.params.logit_bias or {}).items(), *((token, NEVER) for token in row.banned)]
    ]
    if not entries:
        return None
    row, token, value = zip(*entries, strict=True)
    where = send(np.array([row, token], np.int64), device)
    return Bias(where[0], where[1], send(np.array(value, np.float32), device))
