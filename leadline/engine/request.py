"""A request inside the engine: its tokens, how far they are computed, and what of the cache it holds."""

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leadline.cache.prefix import Node
from leadline.engine.detokenize import Detokenizer
from leadline.engine.grammar import Matcher
from leadline.engine.sampling import SamplingParams

_numbers = itertools.count()


@dataclass(eq=False, slots=True)
class Request:
    """One sequence being generated: a prompt, or one of the `n` choices of a prompt.

    Two counters say where it stands; every other length follows from them.

        tokens    [ prompt ........ | output .... ]              `known` of them are known
        computed  [ in the cache, or in the step that runs ]     `computed` tokens
        sampled but not read yet: `in_flight` (0 or 1) tokens after `known`
    """

    prompt_length: int
    tokens: NDArray[np.int32]
    params: SamplingParams
    seed: int
    last_position: int
    """The most tokens that it may reach, prompt and output together."""
    choice: int = 0
    priority: int = 0
    salt: str = ""
    reuse: bool = True
    """Whether it may take part in prefix reuse,"""
    shares: bool = False
    """and whether it does in its present life."""
    bad_words: list[list[int]] = field(default_factory=list)
    matcher: Matcher | None = None
    """Follows its output along `params.constraint`."""
    leader: "Request | None" = None
    """The choice that runs the prompt for this one, until it has."""
    followers: list["Request"] = field(default_factory=list)
    """The choices whose prompt this one runs, until it has."""

    detokenizer: Detokenizer = field(default_factory=lambda: Detokenizer(None, SamplingParams()))
    known: int = 0
    computed: int = 0
    in_flight: int = 0
    number: int = field(default_factory=lambda: next(_numbers))
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reused: int = -1
    """Tokens of the prompt that were found in the cache at first admission; -1 before it."""
    preemptions: int = 0

    slot: int = -1
    pages: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    fulfilled: int = 0
    """Nodes at the beginning of `path` whose tokens this request has computed or found."""
    trailing: Node | None = None
    """Where its own last snapshot of the output lies."""
    counts_row: int = -1
    """Its row in the penalties' token counts."""

    @property
    def output(self) -> NDArray[np.int32]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_length : self.known]

    @property
    def output_length(self) -> int:
        """Tokens generated so far, with one that is still on the device."""
        return self.known + self.in_flight - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that a step could compute now."""
        return self.known + self.in_flight - self.computed

    @property
    def complete(self) -> bool:
        """Whether it has, or will have once the device is read, as many tokens as it may."""
        return self.known + self.in_flight >= self.last_position

    @property
    def sequential(self) -> bool:
        """Whether its next token cannot be sampled before the last one has been read on the host."""
        return self.matcher is not None or any(len(word) > 1 for word in self.bad_words)

    def append(self, token: int) -> None:
        """Add a sampled token."""
        if self.known == len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(64, self.known // 2), np.int32)])
        self.tokens[self.known] = token
        self.known += 1
