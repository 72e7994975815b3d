"""Following outputs along their grammars: which tokens may come next. The grammars are those of xgrammar."""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from leadline.engine.constraint import Bits, Constraint
from leadline.engine.detokenize import TokenBytes


class Matcher:
    """Follows one output along its constraint."""

    def __init__(self, compiled: "Future[Any]", after: int | None, vocab_size: int, ends: Sequence[int]) -> None:
        """`compiled` holds the grammar as `Grammars` compiles it; `ends` are the model's EOS ids."""
        self._compiled, self._after, self._ends = compiled, after, ends
        self._bits = np.full((1, -(-vocab_size // 32)), -1, np.int32)
        self._matcher: Any = None
        self._ended = False
        self.error: Exception | None = None
        """Why the grammar could not be compiled; everything is allowed then, and the request is to be ended."""

    @property
    def ready(self) -> bool:
        """Whether the grammar is compiled, or could not be: `allowed` need not wait for it."""
        return self._compiled.done()

    def allowed(self) -> Bits | None:
        """The tokens that may come next; None if all may. Waits for the grammar where it is not compiled yet."""
        if self._ended:
            return None
        if self._after is not None:
            for end in self._ends:
                self._bits[0, end // 32] &= ~np.int32(np.uint32(1 << end % 32).view(np.int32))
            return self._bits[0].copy()
        if self._matcher is None:
            import xgrammar

            try:
                self._matcher = xgrammar.GrammarMatcher(self._compiled.result())
            except Exception as error:  # too large, too deep: only this request's concern
                self.error, self._ended = error, True
                return None
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._bits[0].copy()

    def accept(self, token: int) -> None:
        """The next token of the output; one of those that were allowed."""
        if self._ended:
            return
        if self._after is not None:
            if token == self._after:
                self._after = None
            return
        accepted = self._matcher.accept_token(token)
        assert accepted, f"token {token} was not allowed"
        self._ended = self._matcher.is_terminated()


def wait_for_one(matchers: Iterable[Matcher], seconds: float) -> None:
    """Return when one of the matchers is ready, or after `seconds`."""
    wait({matcher._compiled for matcher in matchers}, seconds, FIRST_COMPLETED)


class Grammars:
    """Compiles grammars for one vocabulary in a thread of its own, so that steps go on meanwhile; keeps the latest.

    Tokens that were added to the vocabulary, such as the marks of a chat, are in no grammar, but for MARK. Only as that
    one token does it make a tool call, so a grammar must not let it be spelled by others: in the grammars that are
    compiled here it is the character STAND_IN, which no other token may say.
    """

    MARK = "｜DSML｜"
    STAND_IN = "\1"  # a NUL would end the texts of xgrammar
    CACHE_BYTES = 1 << 28

    def __init__(self, tokens: TokenBytes, vocab_size: int, ends: Sequence[int]) -> None:
        self._tokens, self._vocab_size, self._ends = tokens, vocab_size, list(ends)
        self._compiler: Any = None
        self._thread = ThreadPoolExecutor(1, "leadline-grammar")

    def start(self, constraint: Constraint, count: int) -> list[Matcher]:
        """Begin to compile a constraint that was checked; `count` matchers, one for each output."""
        compiled = self._thread.submit(self._compile, constraint.grammar)
        return [Matcher(compiled, constraint.after, self._vocab_size, self._ends) for _ in range(count)]

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, grammar: str) -> Any:
        if self._compiler is None:
            self._compiler = self._new_compiler()
        return self._compiler.compile_grammar(self._with_stand_in(grammar))

    def _with_stand_in(self, structural_tag: str) -> Any:
        import xgrammar

        grammar = xgrammar.Grammar.from_structural_tag(structural_tag)
        text = str(grammar)  # in which characters beyond ASCII are escaped
        mark, stand_in = (string.encode("unicode_escape").decode() for string in (self.MARK, self.STAND_IN))
        return xgrammar.Grammar.from_ebnf(text.replace(mark, stand_in)) if mark in text else grammar

    def _spelling(self, token: int) -> bytes:
        """What a token says in a grammar; nothing if it is in none."""
        spelling = self._tokens[token]
        if spelling == self.MARK.encode():
            return self.STAND_IN.encode()
        in_none = token in self._tokens.added or self.STAND_IN.encode() in spelling
        return b"" if in_none else spelling

    def _new_compiler(self) -> Any:
        import xgrammar

        tokens = [self._spelling(token) for token in range(self._vocab_size)]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=self._vocab_size, stop_token_ids=self._ends)
        return xgrammar.GrammarCompiler(info, cache_limit_bytes=self.CACHE_BYTES)
