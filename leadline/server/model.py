"""What the server knows of the model that it serves: names, tokenizer, chat format, limits, defaults of sampling."""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from leadline.chat import ChatFormat
from leadline.config import ModelConfig
from leadline.engine.detokenize import TokenBytes
from leadline.engine.loading import read_tokenizer
from leadline.server.errors import ApiError

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model folder's generation_config.json may say of sampling."""


@dataclass(frozen=True)
class ServedModel:
    """A model under the names that clients call it; the first one is what the server calls it."""

    names: Sequence[str]
    config: ModelConfig
    tokenizer: Tokenizer
    tokens: TokenBytes
    chat: ChatFormat | None
    """None if its tokenizer lacks tokens of the chat format: `chat_problem` says which."""
    chat_problem: str
    max_context: int
    defaults: dict[str, Any]
    """Sampling parameters of requests that name none."""

    @classmethod
    def from_folder(cls, folder: Path, names: Sequence[str], max_context: int) -> "ServedModel":
        """Read all but the weights. Raises ValueError if there is no tokenizer, or the files make no sense."""
        config = ModelConfig.from_folder(folder)
        tokenizer = read_tokenizer(folder, config)
        if tokenizer is None:
            raise ValueError(f"{folder} has no tokenizer.json, and a server needs one")
        chat, problem = None, ""
        try:
            chat = ChatFormat(tokenizer, config.eos_token_ids, two_tiers=config.dspark is None)
        except ValueError as error:
            problem = str(error)
        defaults = sampling_defaults(folder)
        return cls(names, config, tokenizer, TokenBytes(tokenizer), chat, problem, max_context, defaults)

    @property
    def name(self) -> str:
        """What the server calls it."""
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 if a client wants another model."""
        if name is not None and name not in self.names:
            message = f"there is no model {name!r}; this server has {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def chat_format(self) -> ChatFormat:
        """The chat format. Raises ValueError if the model has none."""
        if self.chat is None:
            raise ValueError(self.chat_problem)
        return self.chat

    def encode(self, text: str, add_bos: bool = True) -> NDArray[np.int32]:
        """A text as token ids [P], after BOS unless it begins with it. Raises ValueError for lone surrogates."""
        try:
            # A batch, because for a single text the tokenizer would keep all other threads waiting.
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            raise ValueError("the prompt holds text without a UTF-8 form") from error
        bos = self.config.bos_token_id
        return np.array([bos, *ids] if add_bos and ids[:1] != [bos] else ids, np.int32)

    def token_text(self, token: int) -> str:
        """What a token alone says; bytes that are no whole characters as `bytes:\\xf0\\x9f`, as OpenAI does."""
        data = self.tokens[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def text(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """What token ids say; bytes that are no whole character as U+FFFD. Raises ValueError for ids outside."""
        outside = sorted({token for token in ids if not 0 <= token < self.config.vocab_size})
        if outside:
            raise ValueError(f"tokens holds {outside}; allowed are 0 to {self.config.vocab_size - 1}")
        said = [token for token in ids if not (skip_special and token in self.tokens.special)]
        return codecs.decode(b"".join(self.tokens[token] for token in said), "utf-8", "replace")


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What generation_config.json says of sampling, if there is one. Raises ValueError if it is no JSON object."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        said = json.loads(path.read_text())
        return {name: said[name] for name in SAMPLING_DEFAULTS if said.get(name) is not None}
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
