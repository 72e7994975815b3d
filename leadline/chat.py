"""Conversations: from messages to a prompt's tokens, and from generated tokens back to what the assistant says.

The encoding and the parsing are those of DeepSeek's own `deepseek_recipe`; what it takes for granted is seen to here.
"""

import codecs
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from leadline import tool_calls
from leadline.engine.detokenize import TokenBytes

NEEDED_TOKENS = (
    recipe.SpecialToken.Bos,
    recipe.SpecialToken.Eos,
    recipe.SpecialToken.User,
    recipe.SpecialToken.Assistant,
    recipe.SpecialToken.ThinkingStart,
    recipe.SpecialToken.ThinkingEnd,
)

FINISH_REASONS = {"stop": recipe.InferenceFinishReason.Stop, "length": recipe.InferenceFinishReason.Length}

TWO_TIERS: dict[str, Literal["low", "high"]] = {"low": "low", "high": "low", "xhigh": "high", "max": "high"}
"""What each effort of a request is called in the encoding for checkpoints that were trained with two tiers, of which
the lower one adds nothing to the prompt. Those of three tiers have the encoding's own names."""

_NAME = "leadline"  # recipe wants a model name that it knows, and uses it only to choose between V4 and V4.1


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation ready to be answered: its token ids [P], and how the answer is to be read."""

    token_ids: NDArray[np.int32]
    request: recipe.ConversationRequest


class ChatFormat:
    """V4's conversation format with one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], two_tiers: bool = False) -> None:
        """`two_tiers`: the checkpoint knows two tiers of effort and not three, see TWO_TIERS.

        Raises ValueError without a tokenizer, for one that is no byte-level BPE, or naming every token of the format
        that it lacks.
        """
        if tokenizer is None:
            raise ValueError("a chat needs a tokenizer, and this model folder has no tokenizer.json")
        spellings = [token.default_str() for token in NEEDED_TOKENS]
        missing = [spelling for spelling in spellings if tokenizer.token_to_id(spelling) is None]
        if missing:
            raise ValueError(f"the tokenizer lacks tokens of V4's chat format: {', '.join(missing)}")
        self.eos_token_ids = frozenset(eos_token_ids)
        self.two_tiers = two_tiers
        self.think_end = tokenizer.token_to_id(recipe.SpecialToken.ThinkingEnd.default_str())
        self.token_bytes = TokenBytes(tokenizer)
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer.to_str())
        self._encoding = recipe.DeepseekV4Encoding().with_tokenizer(self.tokenizer)
        self._options = recipe.ConversionOptions().with_model_alias(_NAME, recipe.ModelVersion.DeepseekV4Pro)

    def prompt(self, body: Mapping[str, Any]) -> ChatPrompt:
        """Encode the conversation of a chat completion request: `messages`, `tools`, `thinking`, `stop` and the like.

        Thinking is on unless `thinking` is {"type": "disabled"}. `reasoning_effort` is "low" unless given, which adds
        nothing to the prompt; recipe's own default adds a paragraph. Raises ValueError for what the format cannot say.
        """
        return self.convert(recipe.ChatCompletionRequest, {"reasoning_effort": "low", **body})

    def convert(self, protocol: Any, body: Mapping[str, Any]) -> ChatPrompt:
        """Encode the conversation of a request in any protocol that recipe reads (`recipe.ResponsesRequest`, ...).

        Effort is "high" unless given, as in DeepSeek's own service. Raises ValueError as `prompt` does.
        """
        try:
            request = protocol({**body, "model": _NAME}).convert(self._options)
            conversation = request.conversation
            if self.two_tiers and conversation.reasoning_effort is not None:
                conversation = _with_effort(conversation, TWO_TIERS[conversation.reasoning_effort])
            ids = self._encoding.encode(conversation)
        except recipe.ConversionError as error:
            raise ValueError(json.loads(error.body)["error"]["message"]) from error
        except UnicodeEncodeError as error:
            raise ValueError(f"the conversation holds text without a UTF-8 form: {error}") from error
        except OverflowError as error:
            raise ValueError(f"the conversation holds a number that is too large: {error}") from error
        return ChatPrompt(np.array(ids, np.int32), request)


def _with_effort(conversation: Any, effort: Literal["low", "high"]) -> Any:
    """The same conversation with another effort."""
    return recipe.Conversation(
        conversation.messages,
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=effort,
        response_format="json_object" if conversation.response_format == "json_object" else "text",
        response_schema=conversation.response_schema,
        response_regex=conversation.response_regex,
    )


class AnswerReader:
    """Reads one answer, token by token, into chunks of any protocol that recipe writes.

    recipe's parser takes for granted that a model spells the markup of tool calls right, and drops what it does not
    understand. So it gets the answer only as far as there is no markup; the rest is taken apart when it is whole
    (`leadline.tool_calls`): content first, then calls, in a spelling that no model knows. A call in the thinking counts
    if the thinking ends with it. Where there are no tools only half characters are held back.
    """

    def __init__(self, format: ChatFormat, prompt: ChatPrompt, frames: Any) -> None:
        """`frames` is recipe's generator of chunks for the request, which this takes over."""
        self._format = format
        options = prompt.request.parsing_options
        stage = options.thinking_initial_stage
        self._parses = options.parse_tool_calls
        self._mark = f"｜{secrets.token_hex(8)}｜"
        self._thinks = stage is not None and stage.starts_in_reasoning()
        self._stops = tuple(options.stop_sequences or ())
        self._held: list[tuple[int, Any]] = []  # tokens with their log-probabilities
        self._bytes = b""  # those of the held tokens
        self._in_markup = False
        own = recipe.ParsingOptions(
            parse_tool_calls=self._parses,
            parse_json_output=options.parse_json_output,
            thinking_initial_stage=stage,
            stop_sequences=options.stop_sequences,
            special_tokens=recipe.SpecialTokens(dsml=self._mark),
        )
        self._processor = recipe.StreamProcessor(frames, own, format.tokenizer)

    @property
    def finished(self) -> bool:
        """Whether the last chunk is out; early after a stop string, when the request is to be aborted."""
        return bool(self._processor.finished)

    def begin(self, usage: recipe.PromptUsage) -> list[Any]:
        """The first chunks. To be called first."""
        return list(self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def push(self, tokens: Sequence[int], logprobs: Sequence[Any] | None = None) -> list[Any]:
        """The chunks that further tokens bring. EOS may be among them and says nothing.

        `logprobs` has a pair (log-probability, alternatives) for each, as `recipe.InferenceChunk.tokens` takes them.
        """
        ready: list[tuple[int, Any]] = []
        for i, token in enumerate(tokens):
            if token in self._format.eos_token_ids:
                continue
            self._held.append((token, None if logprobs is None else logprobs[i]))
            if self._may_go(token):
                ready += self._released()
        return self._say(ready)

    def finish(self, reason: str) -> list[Any]:
        """The last chunks, for an engine's finish reason: "stop" or "length". None if `finished` already."""
        if self._in_markup:
            chunks = self._read_markup(cut=reason == "length")
        else:  # one by one, since recipe would lose what comes in one push with half a character
            chunks = [chunk for held in self._released() for chunk in self._say([held])]
        if self.finished:
            return chunks
        last = self._processor.push(recipe.InferenceChunk.finish(FINISH_REASONS[reason]))
        return [*chunks, *last, *self._processor.finish()]

    def _may_go(self, token: int) -> bool:
        """Whether all held tokens, `token` the newest, are certain to be no markup."""
        if self._thinks and token == self._format.think_end:
            self._thinks = self._in_markup = False
            return True
        new = self._format.token_bytes[token]
        self._bytes += new
        if self._in_markup:
            return False
        text = self._bytes[-len(new) - tool_calls.MOST_MARK_BYTES :].decode("utf-8", "replace")
        if not self._parses:
            return not text.endswith("\ufffd")  # at an end with half a character recipe would lose the text before it
        self._in_markup = tool_calls.BEGINNING.search(text) is not None
        return not self._in_markup and tool_calls.PERHAPS_BEGINNING.search(text) is None

    def _released(self) -> list[tuple[int, Any]]:
        held, self._held, self._bytes = self._held, [], b""
        return held

    def _say(self, tokens: list[tuple[int, Any]]) -> list[Any]:
        """What recipe makes of tokens that are no markup."""
        if not tokens or self.finished:
            return []
        ids, logprobs = zip(*tokens, strict=True)
        scored = None if logprobs[0] is None else list(logprobs)
        return list(self._processor.push(recipe.InferenceChunk.tokens(list(ids), scored)))

    def _read_markup(self, cut: bool) -> list[Any]:
        """Say what the held tokens, markup and what follows it, come to."""
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(self._bytes)  # leaves half a character out
        written = tool_calls.read(text, cut, self._mark)
        held = self._released()
        if written.content == text:
            return self._say(held)
        content, count = written.content, len(held)
        if written.calls:  # stop strings are recipe's to find, but it would stop before the calls
            content = content[: min((i for stop in self._stops if (i := content.find(stop)) >= 0), default=None)]
        chunks = []
        for said in (content, written.calls):
            if said and not self.finished:
                chunks += self._processor.push(recipe.InferenceChunk.text(said, count))
                count = 0
        if count and not self.finished:  # tokens that say nothing count all the same
            chunks += self._processor.push(recipe.InferenceChunk.text("", count))
        return chunks


class ChatParser:
    """Reads one answer, token by token, into chunks of the OpenAI chat completion protocol.

    A chunk is a dictionary; `choices[0].delta` holds new `reasoning_content`, `content` or `tool_calls`. Only whole
    characters come out, stop strings are looked for in the content, not in the thinking, and tool calls come last.
    """

    def __init__(self, format: ChatFormat, prompt: ChatPrompt, id: str, model: str) -> None:
        """`id` and `model` are what the chunks say of themselves."""
        frames = recipe.ChatCompletionRequest.chunk_generator(prompt.request, id, model)
        self._reader = AnswerReader(format, prompt, frames)
        self._prompt_tokens = len(prompt.token_ids)

    @property
    def finished(self) -> bool:
        """Whether the last chunk is out; early after a stop string, when the request is to be aborted."""
        return self._reader.finished

    def begin(self, cached_tokens: int) -> list[dict[str, Any]]:
        """The first chunks, which name the role; `cached_tokens` of the prompt were reused. To be called first."""
        usage = recipe.PromptUsage(prompt_tokens=self._prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        return _chunks(self._reader.begin(usage))

    def push(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """The chunks that further tokens bring. EOS may be among them and says nothing."""
        return [] if self.finished else _chunks(self._reader.push(tokens))

    def finish(self, reason: str) -> list[dict[str, Any]]:
        """The last chunks, for an engine's finish reason: "stop" or "length". None if `finished` already."""
        return [] if self.finished else _chunks(self._reader.finish(reason))


def _chunks(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    return [json.loads(chunk.to_json()) for chunk in chunks]
