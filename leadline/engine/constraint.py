"""What a request may ask of the form of its output: a grammar, as xgrammar understands it."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.int32]
"""A set of token ids [ceil(vocab_size / 32)]: bit `id % 32` of word `id // 32`."""


@dataclass(frozen=True)
class Constraint:
    """What an output must look like.

    `grammar` is a structural tag of xgrammar as JSON. It holds for the output after the first token `after` (thinking's
    end), before which the output may not end, or for all of it if that is None.
    """

    grammar: str
    after: int | None = None

    def check(self) -> None:
        """Raise ValueError if the grammar is none, or cannot be read because xgrammar is not installed."""
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError("constrained output needs xgrammar: pip install 'leadline[server]'") from error
        try:
            xgrammar.Grammar.from_structural_tag(self.grammar)
        except RuntimeError as error:
            raise ValueError(f"the grammar is not valid: {_sentence(error)}") from error


def _sentence(error: RuntimeError) -> str:
    """What xgrammar says, without the place in its source."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
