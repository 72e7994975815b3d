"""Conversations: from messages to a prompt's tokens, and from generated tokens back to what the assistant says.

The encoding and the parsing are those of DeepSeek's own `deepseek_recipe`; what it takes for granted is seen to here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

_NAME = "leadline"  # recipe wants a model name that it knows, and uses it only to choose between V4 and V4.1


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation ready to be answered: its token ids [P], and how the answer is to be read."""

    token_ids: NDArray[np.int32]
    request: recipe.ConversationRequest


class ChatFormat:
    """V4's conversation format with one model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> None:
        """Raises ValueError without a tokenizer, or naming every token of the format that it lacks."""
        if tokenizer is None:
            raise ValueError("a chat needs a tokenizer, and this model folder has no tokenizer.json")
        spellings = [token.default_str() for token in NEEDED_TOKENS]
        missing = [spelling for spelling in spellings if tokenizer.token_to_id(spelling) is None]
        if missing:
            raise ValueError(f"the tokenizer lacks tokens of V4's chat format: {', '.join(missing)}")
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = recipe.Tokenizer.from_str(tokenizer.to_str())
        self._encoding = recipe.DeepseekV4Encoding().with_tokenizer(self.tokenizer)
        self._options = recipe.ConversionOptions().with_model_alias(_NAME, recipe.ModelVersion.DeepseekV4Pro)

    def prompt(self, body: Mapping[str, Any]) -> ChatPrompt:
        """Encode the conversation of a chat completion request: `messages`, `tools`, `thinking`, `stop` and the like.

        Thinking is on unless `thinking` is {"type": "disabled"}. `reasoning_effort` is "low" unless given, which adds
        nothing to the prompt; recipe's own default adds a paragraph. Raises ValueError for what the format cannot say.
        """
        try:
            request = recipe.ChatCompletionRequest({"reasoning_effort": "low", **body, "model": _NAME})
            conversation = request.convert(self._options)
            ids = self._encoding.encode(conversation.conversation)
        except recipe.ConversionError as error:
            raise ValueError(json.loads(error.body)["error"]["message"]) from error
        except UnicodeEncodeError as error:
            raise ValueError(f"the conversation holds text without a UTF-8 form: {error}") from error
        return ChatPrompt(np.array(ids, np.int32), conversation)


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
