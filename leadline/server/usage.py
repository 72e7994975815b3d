"""What a request took, as OpenAI reports it and as DeepSeek's service does besides."""

from dataclasses import dataclass
from typing import Any

from leadline.server.engine import Piece


@dataclass
class Usage:
    """Tokens, over all prompts and choices of a request. `reasoning_tokens` is None where nothing thinks."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None

    def begin(self, piece: Piece) -> None:
        """Take the first piece of a choice: the cache served the prompt once, for the first choice."""
        if piece.choice == 0:
            self.cached_tokens += piece.cached_tokens

    def report(self) -> dict[str, Any]:
        """The `usage` object."""
        report: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
        }
        if self.reasoning_tokens is not None:
            report["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return report
