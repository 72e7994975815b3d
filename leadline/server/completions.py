"""/v1/completions: a text goes on."""

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline.engine.engine import TokenLogprob, as_token_ids
from leadline.engine.sampling import SamplingParams
from leadline.server.engine import Piece, Requests
from leadline.server.model import ServedModel
from leadline.server.protocol import MOST_CHOICES, CompletionBody
from leadline.server.streams import event, merged
from leadline.server.usage import Usage


@dataclass
class _Prompt:
    """A prompt [P], the text that stands for it in an echo, and its log-probabilities as they come."""

    ids: NDArray[np.int32]
    text: str
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)


class _LogprobLists:
    """Log-probabilities of one choice in parallel lists, as this protocol has them."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, Any]:
        """The lists for further (token, its log-probability)."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in entries:
            lists["tokens"].append(self._model.token_text(token))
            lists["token_logprobs"].append(None if entry is None else entry.logprob)
            lists["top_logprobs"].append(None if entry is None else self._top(entry))
            lists["text_offset"].append(self._offset)
            if token not in self._model.tokens.special:
                self._offset += len(self._decoder.decode(self._model.tokens[token]))
        return lists

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        pairs = [*entry.top, (entry.token, entry.logprob)]
        return {self._model.token_text(token): logprob for token, logprob in pairs}


class Completion:
    """One request: any number of prompts with `n` choices each."""

    def __init__(self, requests: Requests, model: ServedModel, body: CompletionBody, id: str) -> None:
        """Raises ValueError or ApiError for what is wrong with the body. Encodes nothing yet."""
        model.check_name(body.model)
        self._requests, self._model, self._body = requests, model, body
        self._params: SamplingParams = body.params(model.defaults)
        self._given = _prompts(body.prompt, self._params.n)
        self._prompts: list[_Prompt] = []
        self._head = {"id": id, "object": "text_completion", "created": int(time.time()), "model": model.name}
        count = len(self._given) * self._params.n
        self._lists = [_LogprobLists(model) for _ in range(count)]
        self._begun = [False] * count
        self._usage = Usage()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Its events."""
        usage: dict[str, Any] = {"usage": None} if self._body.include_usage else {}
        async with aclosing(self._choices()) as choices:
            async for choice in choices:
                yield event({**self._head, "choices": [choice], **usage})
        if self._body.include_usage:
            yield event({**self._head, "choices": [], "usage": self._usage.report()})

    async def whole(self) -> dict[str, Any]:
        """Its response."""
        whole: dict[int, dict[str, Any]] = {}
        async with aclosing(self._choices()) as choices:
            async for part in choices:
                if (choice := whole.setdefault(part["index"], part)) is not part:
                    _join(choice, part)
        in_order = [whole[index] for index in sorted(whole)]
        return {**self._head, "choices": in_order, "usage": self._usage.report()}

    async def _choices(self) -> AsyncGenerator[dict[str, Any], None]:
        """Parts of choices as they come."""
        self._prompts = await asyncio.to_thread(lambda: [self._encode(prompt) for prompt in self._given])
        body = self._body
        streams = [
            self._requests.generate(
                str(self._head["id"]), prompt.ids, self._params, body.priority or 0, body.cache_salt or ""
            )
            for prompt in self._prompts
        ]
        for prompt in self._prompts:
            self._usage.prompt_tokens += len(prompt.ids)
        async with aclosing(merged(streams)) as pieces:
            async for number, piece in pieces:
                if (part := self._part(number, piece)) is not None:
                    yield part

    def _encode(self, given: str | list[int]) -> _Prompt:
        if isinstance(given, str):
            return _Prompt(self._model.encode(given), given)
        ids = as_token_ids(given)
        inside = [token for token in given if 0 <= token < self._model.config.vocab_size]
        return _Prompt(ids, self._model.text(inside) if self._body.echo else "")

    def _part(self, number: int, piece: Piece) -> dict[str, Any] | None:
        """What a piece of prompt `number` brings for one choice; None if nothing that can be told yet."""
        prompt, index = self._prompts[number], number * self._params.n + piece.choice
        prompt.logprobs.update(piece.prompt_logprobs or ())
        if not piece.tokens and piece.finish_reason is None:
            return None
        text = piece.text
        scored: list[tuple[int, TokenLogprob | None]] = []
        if self._body.logprobs is not None and piece.logprobs is not None:
            scored = list(zip(piece.tokens, piece.logprobs, strict=True))
        if not self._begun[index]:
            self._begun[index] = True
            self._usage.begin(piece)
            if self._body.echo:
                text = prompt.text + text
                scored = [*((int(token), prompt.logprobs.get(i)) for i, token in enumerate(prompt.ids)), *scored]
        self._usage.completion_tokens += len(piece.tokens)
        logprobs = None if self._body.logprobs is None else self._lists[index].take(scored)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


def _prompts(prompt: str | list[str] | list[int] | list[list[int]], choices: int) -> list[str | list[int]]:
    """The prompts of a body, each to have so many choices. Raises ValueError if there is none, or too many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValueError("prompt is an empty list; allowed: a text, token ids, or a list of either")
    texts_or_ids: list[Any] = prompt
    prompts = [texts_or_ids] if isinstance(prompt[0], int) else texts_or_ids
    if len(prompts) * choices > MOST_CHOICES:
        raise ValueError(
            f"prompt holds {len(prompts)} prompts with n = {choices}; allowed: {MOST_CHOICES} choices in all"
        )
    return prompts


def _join(choice: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a later part of the same choice."""
    choice["text"] += part["text"]
    choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
    if part["logprobs"] is not None:
        for name, values in part["logprobs"].items():
            choice["logprobs"][name] += values
