"""The bodies of requests, as OpenAI and its imitators define them. Fields that are not here are ignored, as they do."""

import logging
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from leadline.engine.constraint import Constraint
from leadline.engine.sampling import SamplingParams

log = logging.getLogger(__name__)

COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
MOST_CHOICES = 2048
"""Of one request, over all of its prompts."""
MOST_LOGGED_FIELDS = 100

# One wrong entry of a list is told, and not a million.
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]

_logged: set[str] = set()


class Body(BaseModel):
    """Base of all bodies. Types are meant as they are: a number in quotes is no number."""

    model_config = ConfigDict(extra="allow", strict=True)

    def model_post_init(self, context: Any) -> None:
        """Log the first time that a field is ignored."""
        new = set(self.model_extra or ()) - _logged
        if new and len(_logged) < MOST_LOGGED_FIELDS:
            _logged.update(new)
            log.info("fields of a request that are not known here and ignored: %s", ", ".join(map(repr, sorted(new))))


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = None


class SamplingBody(Body):
    """What completions and chat completions have in common. None is as good as absent.

    `cache_salt`: prefixes are shared only among requests with the same one. `priority`: lower ones run first.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None

    _SAMPLING = (
        "n max_tokens temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty seed "
        "stop_token_ids min_tokens ignore_eos bad_words skip_special_tokens"
    ).split()

    @property
    def streams(self) -> bool:
        """Whether to stream. Raises ValueError for stream options without streaming."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are given, but stream is not true")
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, defaults: dict[str, Any], **fixed: Any) -> SamplingParams:
        """The sampling parameters: `fixed` ones, what the body says, then `defaults`. Raises ValueError as they do."""
        said = {name: value for name in self._SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**defaults, **said, "logit_bias": self._logit_bias(), **fixed})

    def _logit_bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        wrong = [key for key in self.logit_bias if not (key.isascii() and key.isdigit())]
        if wrong:
            raise ValueError(f"logit_bias has the keys {', '.join(map(repr, wrong))}; allowed: token ids")
        return {int(key): value for key, value in self.logit_bias.items()}


class CompletionBody(SamplingBody):
    """/v1/completions."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    include_stop_str_in_output: bool | None = None

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The sampling parameters. Raises ValueError for what cannot be."""
        if self.suffix:
            raise ValueError("suffix is given: this model completes texts at their end only")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of is {self.best_of}; allowed: none, or the value of n")
        scored = self.logprobs if self.echo else None
        if self.echo and self.max_tokens == 0 and scored is None:
            scored = 0
        return self.sampling(
            {"max_tokens": COMPLETION_TOKENS, **defaults},
            stop=self.stop or [],
            logprobs=self.logprobs,
            prompt_logprobs=scored,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
        )


class ChatBody(SamplingBody):
    """/v1/chat/completions. `messages`, `tools` and the like are read by the chat format."""

    messages: Objects
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    thinking: bool | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def params(self, defaults: dict[str, Any], banned: int | None, constraint: Constraint | None) -> SamplingParams:
        """The sampling parameters; `banned` is a token that must not come. Raises ValueError for what cannot be."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given, but logprobs is not true")
        bias = self._logit_bias()
        if banned is not None:
            bias = {**(bias or {}), banned: -100.0}
        fixed: dict[str, Any] = {"logit_bias": bias, "constraint": constraint}
        if self.logprobs:
            fixed["logprobs"] = self.top_logprobs or 0
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ValueError(
                    f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; "
                    "give one of them, or the same value"
                )
            fixed["max_tokens"] = self.max_completion_tokens
        return self.sampling(defaults, **fixed)


class TokenizeBody(Body):
    """/tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    thinking: bool | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """/detokenize."""

    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool | None = None


class AbortBody(Body):
    """/v1/abort: the id of a response, or all of them."""

    id: str | None = None
    all: bool | None = None
