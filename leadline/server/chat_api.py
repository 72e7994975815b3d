"""/v1/chat/completions: a conversation is answered."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from deepseek_recipe import ChatCompletionRequest, SpecialToken

from leadline.chat import ChatFormat, ChatParser, ChatPrompt
from leadline.engine.engine import TokenLogprob
from leadline.engine.sampling import SamplingParams
from leadline.server.constraint import answer_constraint, split_choice
from leadline.server.conversation import chat_request
from leadline.server.engine import Piece, Requests
from leadline.server.model import ServedModel
from leadline.server.protocol import ChatBody
from leadline.server.streams import event
from leadline.server.usage import Usage

PASSED = ("tools", "response_format", "stop")
"""Fields that the chat format reads as they are."""


class Chat:
    """One request with its `n` answers."""

    def __init__(self, requests: Requests, model: ServedModel, body: ChatBody, id: str) -> None:
        """Raises ValueError or ApiError for what is wrong with the body. Encodes nothing yet."""
        model.check_name(body.model)
        self._requests, self._model, self._body, self._id = requests, model, body, id
        self._created = int(time.time())
        self._usage = Usage()
        self._asked, self._forced = _chat_body(body)
        self._format = model.chat_format()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Its events."""
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model.name}
        usage: dict[str, Any] = {"usage": None} if self._body.include_usage else {}
        async with aclosing(self._deltas()) as deltas:
            async for choice in deltas:
                yield event({**head, "choices": [choice], **usage})
        if self._body.include_usage:
            yield event({**head, "choices": [], "usage": self._usage.report()})

    async def whole(self) -> dict[str, Any]:
        """Its response."""
        answers: dict[int, _Whole] = {}
        async with aclosing(self._deltas()) as deltas:
            async for choice in deltas:
                answers.setdefault(choice["index"], _Whole()).take(choice)
        choices = [{"index": index, **answers[index].report()} for index in sorted(answers)]
        head = {"id": self._id, "object": "chat.completion", "created": self._created, "model": self._model.name}
        return {**head, "choices": choices, "usage": self._usage.report()}

    async def _deltas(self) -> AsyncGenerator[dict[str, Any], None]:
        """Parts of choices, each with its `delta`, as they come."""
        prompt, params = await asyncio.to_thread(self._prepare)
        answers = [_Answer(self._model, self._format, prompt, choice) for choice in range(params.n)]
        self._usage.prompt_tokens = len(prompt.token_ids)
        if prompt.request.parsing_options.thinking_initial_stage is not None:
            self._usage.reasoning_tokens = 0
        pieces = self._requests.generate(
            self._id, prompt.token_ids, params, self._body.priority or 0, self._body.cache_salt or ""
        )
        async with aclosing(pieces):
            async for piece in pieces:
                answer = answers[piece.choice]
                for delta in answer.take(piece, self._usage):
                    yield delta
                if all(answer.finished for answer in answers):
                    break

    def _prepare(self) -> tuple[ChatPrompt, SamplingParams]:
        """Encode the prompt, and see what the answer must look like."""
        prompt = self._format.convert(ChatCompletionRequest, self._asked)
        body = self._body
        constraint = answer_constraint(self._format, prompt, self._forced, body.parallel_tool_calls is not False)
        banned = None
        if body.tool_choice == "none" and body.tools:
            banned = self._model.tokenizer.token_to_id(SpecialToken.Dsml.default_str())
        defaults = {"top_p": recommended_top_p(prompt), **self._model.defaults}
        return prompt, body.params(defaults, banned, constraint)


class _Answer:
    """One choice, from pieces to deltas."""

    def __init__(self, model: ServedModel, format: ChatFormat, prompt: ChatPrompt, choice: int) -> None:
        self._model, self._choice = model, choice
        self._parser = ChatParser(format, prompt, "", "")
        self._logprobs: list[dict[str, Any]] | None = None
        self._begun = self.finished = False

    def take(self, piece: Piece, usage: Usage) -> list[dict[str, Any]]:
        """What a piece brings, and what it adds to the usage. Nothing once the answer is finished."""
        if self.finished:
            return []
        chunks = []
        if not self._begun:
            self._begun = True
            usage.begin(piece)
            chunks = self._parser.begin(piece.cached_tokens)
        usage.completion_tokens += len(piece.tokens)
        if piece.logprobs is not None:
            self._logprobs = (self._logprobs or []) + [self._entry(logprob) for logprob in piece.logprobs]
        chunks += self._parser.push(piece.tokens)
        if piece.finish_reason is not None:
            chunks += self._parser.finish("stop" if piece.finish_reason == "stop" else "length")
        self.finished = self._parser.finished
        return [self._delta(chunk, piece, usage) for chunk in chunks]

    def _delta(self, chunk: dict[str, Any], piece: Piece, usage: Usage) -> dict[str, Any]:
        """A chunk of the parser as a part of the answer, with the log-probabilities that have come for it."""
        (told,) = chunk["choices"]
        reason = told["finish_reason"]
        if reason is not None:
            details = chunk["usage"].get("completion_tokens_details") or {}
            if usage.reasoning_tokens is not None:
                usage.reasoning_tokens += details.get("reasoning_tokens", 0)
            if piece.finish_reason == "abort":
                reason = "abort"
        delta = {name: value for name, value in told["delta"].items() if value is not None}
        logprobs = None
        if self._logprobs is not None and ("role" not in delta or reason is not None):
            logprobs, self._logprobs = {"content": self._logprobs}, None
        part = {"index": self._choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return part if reason is None else {**part, "stop_reason": piece.stop_reason}

    def _entry(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in logprob.top]
        return {**self._token(logprob.token, logprob.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._model.tokens[token]
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class _Whole:
    """One choice, collected from its deltas."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._end: dict[str, Any] = {}

    def take(self, choice: dict[str, Any]) -> None:
        """Add a part."""
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                self._texts.setdefault(name, []).append(delta[name])
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(self._calls):
                self._calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
            call = self._calls[part["index"]]["function"]
            call["name"] += part["function"].get("name") or ""
            call["arguments"] += part["function"].get("arguments") or ""
        if choice["logprobs"] is not None:
            self._logprobs = (self._logprobs or []) + choice["logprobs"]["content"]
        if choice["finish_reason"] is not None:
            self._end = {name: choice[name] for name in ("finish_reason", "stop_reason")}

    def report(self) -> dict[str, Any]:
        """The choice but for its index."""
        content = "".join(self._texts.get("content", []))
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if "reasoning_content" in self._texts:
            message["reasoning_content"] = "".join(self._texts["reasoning_content"])
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = None if self._logprobs is None else {"content": self._logprobs}
        return {"message": message, "logprobs": logprobs, **self._end}


def recommended_top_p(prompt: ChatPrompt) -> float:
    """What DeepSeek's service samples such a conversation with where the client says nothing: less with tools."""
    top_p = prompt.request.inference_options.top_p
    return 1.0 if top_p is None else round(top_p, 6)  # it comes in single precision


def _chat_body(body: ChatBody) -> tuple[dict[str, Any], str | None]:
    """(what the chat format reads, the forced tool call if any). Raises ValueError for contradictions."""
    asked = chat_request(body.messages, body.thinking, body.reasoning_effort, body.chat_template_kwargs)
    choice, forced = split_choice(body.tool_choice)
    if choice is not None:
        asked["tool_choice"] = choice
    asked |= {name: value for name in PASSED if (value := getattr(body, name)) is not None}
    return asked, forced
