"""What the server needs of an engine, and one request's way through it: counted, timed, and ended when asked."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from leadline.engine.async_engine import EngineStopped
from leadline.engine.engine import Stats, TokenLogprob
from leadline.engine.sampling import SamplingParams
from leadline.engine.scheduler import QueueFull
from leadline.server.metrics import Metrics


class AnyRequest(Protocol):
    """What of a request the server reads."""

    @property
    def choice(self) -> int:
        """Which of the choices."""

    @property
    def reused(self) -> int:
        """Tokens of the prompt found in the cache; below 0 if not known."""

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended it."""


class AnyUpdate(Protocol):
    """What of an update the server reads; see `leadline.engine.engine.Update`."""

    @property
    def request(self) -> AnyRequest:
        """Whose it is."""

    @property
    def tokens(self) -> list[int]:
        """New tokens."""

    @property
    def text(self) -> str:
        """New text."""

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Of the new tokens."""

    @property
    def prompt_logprobs(self) -> list[tuple[int, TokenLogprob]] | None:
        """Of prompt tokens."""

    @property
    def finish_reason(self) -> str | None:
        """In its last update."""


class Generation(Protocol):
    """An engine as the server uses it: `AsyncEngine` within the process, `EngineClient` outside of it."""

    def generate(
        self, prompt: NDArray[np.int32], params: SamplingParams, priority: int = 0, salt: str = ""
    ) -> AsyncGenerator[AnyUpdate, None]:
        """The updates of a prompt [P]."""

    async def stats(self) -> Stats:
        """Counts, and what is in use."""

    async def problems(self) -> list[str]:
        """Contradictions; empty when all is well."""

    async def expert_load(self) -> list[list[int]]:
        """[L][E] how often each layer chose each expert since the first call."""

    async def reset_cache(self) -> None:
        """Forget prefixes."""


@dataclass(slots=True)
class Piece:
    """What came for one choice of a request. `finish_reason` is "stop", "length" or "abort", in its last piece."""

    choice: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0


@dataclass(eq=False)
class _Running:
    """A request that may be aborted by its id: `task` is the one that waits for the engine at the moment, if any."""

    task: "asyncio.Task[object] | None" = None
    aborted: bool = False


class Requests:
    """Runs requests on an engine."""

    def __init__(self, engine: Generation, metrics: Metrics) -> None:
        self.engine, self.metrics = engine, metrics
        self.proven = False
        """Whether the engine has produced a token since it was last found to be down."""
        self.stopping = False
        self._running: dict[str, list[_Running]] = {}

    async def prove(self, bos: int) -> None:
        """See that the engine produces a token. Raises what `generate` does."""
        if self.proven:
            await self.engine.stats()
            return
        try:
            async with aclosing(self.engine.generate(np.array([bos], np.int32), SamplingParams(max_tokens=1))) as got:
                async for _ in got:
                    self.proven = True
        except EngineStopped:
            self.proven = False
            raise

    def abort(self, id: str | None) -> int:
        """End the requests with this id, or all of them; how many there were. They get finish reason "abort"."""
        ids = list(self._running) if id is None else [id] if id in self._running else []
        running = [entry for known in ids for entry in self._running[known]]
        for entry in running:
            if not entry.aborted and entry.task is not None:
                entry.task.cancel()
            entry.aborted = True
        return len(running)

    async def generate(
        self, id: str, prompt: NDArray[np.int32], params: SamplingParams, priority: int, salt: str
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of a prompt [P] as they come. Raises what the engine's `generate` does.

        Cancelling the task or closing the iterator (`contextlib.aclosing`) aborts it.
        """
        entry = _Running()
        self._running.setdefault(id, []).append(entry)
        clock = self.metrics.start(len(prompt), perf_counter())
        open_choices, reason = set(range(params.n)), "abort"
        try:
            async with aclosing(self.engine.generate(prompt, params, priority, salt)) as updates:
                while open_choices and (update := await self._next(updates, entry)) is not None:
                    piece = _piece(update)
                    if piece.finish_reason is not None:
                        open_choices.discard(piece.choice)
                    clock.took(
                        piece.choice, len(piece.tokens), piece.cached_tokens, piece.finish_reason, perf_counter()
                    )
                    self.proven = True
                    yield piece
            for choice in sorted(open_choices):
                yield Piece(choice, finish_reason="abort")
        except Exception as error:
            reason = "refused" if isinstance(error, ValueError | QueueFull) else "error"
            self.proven &= not isinstance(error, EngineStopped)
            raise
        finally:
            clock.left(len(open_choices), reason)
            self._running[id].remove(entry)
            if not self._running[id]:
                del self._running[id]

    async def _next(self, updates: AsyncGenerator[AnyUpdate, None], entry: _Running) -> AnyUpdate | None:
        """The next update; None once the request has been aborted by its id.

        `abort` cancels the wait alone: the task goes on, unless somebody else has cancelled it as well.
        """
        if entry.aborted:
            return None
        entry.task = asyncio.current_task()
        try:
            return await anext(updates)
        except asyncio.CancelledError:
            if _cancelled_by_abort(entry):
                return None
            raise
        finally:
            entry.task = None


def _cancelled_by_abort(entry: _Running) -> bool:
    """Whether its task was cancelled by `abort` and by nobody else; it is not cancelled any more then."""
    return entry.aborted and entry.task is not None and entry.task.uncancel() == 0


def _piece(update: AnyUpdate) -> Piece:
    request = update.request
    return Piece(
        request.choice,
        update.tokens,
        update.text,
        update.logprobs,
        update.prompt_logprobs,
        update.finish_reason,
        request.stop_reason,
        max(0, request.reused),
    )
