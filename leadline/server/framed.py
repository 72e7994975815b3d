"""/v1/responses and /v1/messages: conversations in the protocols that deepseek_recipe frames itself."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from leadline.chat import AnswerReader, ChatPrompt
from leadline.engine.sampling import SamplingParams
from leadline.server.chat_api import recommended_top_p
from leadline.server.constraint import answer_constraint, split_choice
from leadline.server.engine import Piece, Requests
from leadline.server.model import ServedModel
from leadline.server.streams import event


@dataclass(frozen=True)
class Protocol:
    """What recipe has for one protocol, and what of it this server cannot do: field -> why."""

    request: Any
    response: Any
    refused: Mapping[str, str]


RESPONSES = Protocol(
    recipe.ResponsesRequest,
    recipe.ResponsesResponse,
    {
        "previous_response_id": "responses are not stored here: send the whole conversation as input",
        "conversation": "conversations are not stored here: send the whole conversation as input",
        "background": "responses are not stored here, so that none can be fetched later",
        "prompt": "prompts are not stored here: send the conversation as input",
    },
)
MESSAGES = Protocol(recipe.MessagesRequest, recipe.MessagesResponse, {})


class Framed:
    """One request in a protocol that recipe reads and writes."""

    def __init__(
        self, requests: Requests, model: ServedModel, protocol: Protocol, body: Mapping[str, Any], id: str
    ) -> None:
        """Raises ValueError or ApiError for what is wrong with the body. Encodes nothing yet."""
        name = body.get("model")
        model.check_name(name if isinstance(name, str) else None)
        refused = [f"{field} is given, but {why}" for field, why in protocol.refused.items() if body.get(field)]
        if refused:
            raise ValueError("\n".join(refused))
        self._requests, self._model, self._protocol, self._id = requests, model, protocol, id
        self._format = model.chat_format()
        self._created = int(time.time())
        choice, self._forced = split_choice(body.get("tool_choice"))
        self._body = {**body, **({"tool_choice": choice} if choice is not None else {})}

    @property
    def streams(self) -> bool:
        """Whether to stream."""
        return self._body.get("stream") is True

    async def count(self) -> int:
        """The tokens of the prompt."""
        return len((await asyncio.to_thread(self._format.convert, self._protocol.request, self._body)).token_ids)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Its events."""
        async with aclosing(self._chunks()) as chunks:
            async for chunk, _ in chunks:
                yield event(json.loads(chunk.to_json()), self._protocol.response.sse_event_name(chunk))

    async def whole(self) -> dict[str, Any]:
        """Its response."""
        response = None
        async with aclosing(self._chunks()) as chunks:
            async for chunk, usage in chunks:
                if response is None:
                    counts = (usage.prompt_tokens, usage.prompt_cache_hit_tokens)
                    response = self._protocol.response(self._id, self._model.name, self._created, *counts)
                response.accumulate(chunk)
        assert response is not None
        told: dict[str, Any] = json.loads(response.to_json())
        return told

    async def _chunks(self) -> AsyncGenerator[tuple[Any, recipe.PromptUsage], None]:
        """recipe's chunks as they come, with the usage of the prompt."""
        prompt, params = await asyncio.to_thread(self._prepare)
        reader = AnswerReader(self._format, prompt, self._frames(prompt))
        usage = None
        async with aclosing(self._requests.generate(self._id, prompt.token_ids, params, 0, "")) as pieces:
            async for piece in pieces:
                chunks = []
                if usage is None:
                    usage = recipe.PromptUsage(
                        prompt_tokens=len(prompt.token_ids), prompt_cache_hit_tokens=piece.cached_tokens
                    )
                    chunks = reader.begin(usage)
                for chunk in chunks + self._push(reader, piece):
                    yield chunk, usage
                if reader.finished:
                    break

    def _push(self, reader: AnswerReader, piece: Piece) -> list[Any]:
        """What a piece makes of the answer."""
        scored = piece.logprobs
        chunks = reader.push(piece.tokens, scored and [(logprob.logprob, logprob.top) for logprob in scored])
        if piece.finish_reason is not None and not reader.finished:
            chunks += reader.finish("stop" if piece.finish_reason == "stop" else "length")
        return chunks

    def _frames(self, prompt: ChatPrompt) -> Any:
        """recipe's generator of chunks for this request."""
        frames = self._protocol.request.chunk_generator(prompt.request, self._id, self._model.name)
        if self._protocol is not RESPONSES:
            return frames
        return frames.with_echo(recipe.ResponsesRequest({**self._body, "model": self._model.name}).echo())

    def _prepare(self) -> tuple[ChatPrompt, SamplingParams]:
        """Encode the prompt, and see what the answer must look like."""
        prompt = self._format.convert(self._protocol.request, self._body)
        options = prompt.request.inference_options
        said = {name: self._body[name] for name in ("temperature", "top_p") if self._body.get(name) is not None}
        fixed = {
            "top_k": self._body.get("top_k") or 0,
            "max_tokens": options.max_tokens,
            "seed": options.seed,
            "logprobs": (options.top_logprobs or 0) if options.logprobs else None,
            "constraint": answer_constraint(self._format, prompt, self._forced, self._parallel()),
        }
        defaults = {"top_p": recommended_top_p(prompt), **self._model.defaults}
        return prompt, SamplingParams(**{**defaults, **said, **fixed})

    def _parallel(self) -> bool:
        """Whether there may be several tool calls."""
        choice = self._body.get("tool_choice")
        alone = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use") is True
        return self._body.get("parallel_tool_calls") is not False and not alone
