"""Conversations: from messages to a prompt's tokens, and from generated tokens back to what the assistant says.

The encoding and the parsing are those of DeepSeek's own `deepseek_recipe`; what it takes for granted is seen to here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

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

        Raises ValueError without a tokenizer, or naming every token of the format that it lacks.
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


class ChatParser:
    """Reads one answer, token by token, into chunks of the OpenAI chat completion protocol.

    A chunk is a dictionary; `choices[0].delta` holds new `reasoning_content`, `content` or `tool_calls`. Only whole
    characters come out, and stop strings are looked for in the content, not in the thinking.
    """

    def __init__(self, format: ChatFormat, prompt: ChatPrompt, id: str, model: str) -> None:
        """`id` and `model` are what the chunks say of themselves."""
        self._eos = format.eos_token_ids
        frames = recipe.ChatCompletionRequest.chunk_generator(prompt.request, id, model)
        self._processor = recipe.StreamProcessor(frames, prompt.request.parsing_options, format.tokenizer)
        self._prompt_tokens = len(prompt.token_ids)

    @property
    def finished(self) -> bool:
        """Whether the last chunk is out; early after a stop string, when the request is to be aborted."""
        return bool(self._processor.finished)

    def begin(self, cached_tokens: int) -> list[dict[str, Any]]:
        """The first chunks, which name the role; `cached_tokens` of the prompt were reused. To be called first."""
        usage = recipe.PromptUsage(prompt_tokens=self._prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        return _chunks(self._processor.push(recipe.InferenceChunk.ready(prompt_usage=usage)))

    def push(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """The chunks that further tokens bring. EOS may be among them and says nothing."""
        said = [token for token in tokens if token not in self._eos]
        if not said or self.finished:
            return []
        return _chunks(self._processor.push(recipe.InferenceChunk.tokens(said)))

    def finish(self, reason: str) -> list[dict[str, Any]]:
        """The last chunks, for an engine's finish reason: "stop" or "length". None if `finished` already."""
        if self.finished:
            return []
        last = self._processor.push(recipe.InferenceChunk.finish(FINISH_REASONS[reason]))
        return _chunks(last + self._processor.finish())


def _chunks(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    return [json.loads(chunk.to_json()) for chunk in chunks]
