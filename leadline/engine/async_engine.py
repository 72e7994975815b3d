"""An engine in a thread of its own, for callers in asyncio: many streams at once, each cancelled like any task."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from leadline.engine.engine import Engine, Stats, Update
from leadline.engine.request import Request
from leadline.engine.sampling import SamplingParams

T = TypeVar("T")


class EngineStopped(RuntimeError):
    """The engine's thread has ended: it was closed, or died of the error that is this one's cause."""


@dataclass(eq=False)
class _Stream:
    """The way back to one `generate` call. `requests` belongs to the engine's thread, the rest to the loop's."""

    loop: asyncio.AbstractEventLoop
    arrived: "asyncio.Queue[Update | EngineStopped]" = field(default_factory=asyncio.Queue)
    requests: list[Request] = field(default_factory=list)


class _Command(Generic[T]):
    """Something to do in the engine's thread, and the future for whoever asked."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.future: Future[T] = Future()

    def run(self) -> None:
        """Do it, unless the one who asked has been cancelled."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(self.function())
            except Exception as error:  # handed over, whatever it is
                self.future.set_exception(error)

    def refuse(self, stopped: EngineStopped) -> None:
        """It will not be done."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(_again(stopped))


class AsyncEngine:
    """Runs `engine` in a thread, which from now on alone may touch it.

        callers' loops                          the engine's thread
        generate, stats, ... -- _commands -->   between two steps: run what has arrived, in its order
        _Stream.arrived      <-- one call_soon_threadsafe per loop and step -- updates of the step

    The thread sleeps while there is nothing to do. If it dies, whatever waits or comes later raises EngineStopped.
    """

    def __init__(self, engine: Engine) -> None:
        """Start the thread. It ends with `close`, or with the process."""
        self._engine = engine
        self._streams: dict[Request, _Stream] = {}
        self._wake = threading.Condition()
        self._commands: deque[_Command[Any]] = deque()  # this and the next two under _wake
        self._closing = False
        self._stopped: EngineStopped | None = None
        self._thread = threading.Thread(target=self._run, name="leadline-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------- from the callers' loops

    async def generate(
        self, prompt: NDArray[np.int32], params: SamplingParams, priority: int = 0, salt: str = ""
    ) -> AsyncGenerator[Update, None]:
        """The updates of a prompt [P] as they come, over all `params.n` choices, until each has its finish reason.

        Cancelling the task, or closing the iterator (`contextlib.aclosing`), aborts the request before the next step.
        Raises what `Engine.add` raises, the error that ended a choice (and aborts the others), or EngineStopped.
        """
        stream = _Stream(asyncio.get_running_loop())
        unfinished = params.n
        try:
            await self._call(lambda: self._add(stream, prompt, params, priority, salt))
            while unfinished:
                update = await stream.arrived.get()
                if isinstance(update, EngineStopped):
                    raise update
                unfinished -= update.finish_reason is not None
                if update.error:
                    raise update.error
                yield update
        finally:
            if unfinished:
                self._post(lambda: self._abort(stream))

    async def stats(self) -> Stats:
        """What `Engine.stats` says between two steps."""
        return await self._call(self._engine.stats)

    async def problems(self) -> list[str]:
        """What `Engine.problems` says between two steps."""
        return await self._call(self._engine.problems)

    async def expert_load(self) -> list[list[int]]:
        """What `Engine.expert_load` says between two steps."""
        return await self._call(self._engine.expert_load)

    async def reset_cache(self) -> None:
        """Forget every prefix that no running request uses."""
        await self._call(self._engine.reset_cache)

    def close(self) -> None:
        """Abort what runs, end the thread and close the engine. Waits for the step that is under way."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run `function` in the engine's thread between two steps; returns or raises what it does."""
        return await asyncio.wrap_future(self._post(function))

    def _post(self, function: Callable[[], T]) -> "Future[T]":
        """Queue `function` for the engine's thread. Where that has ended, the future holds EngineStopped."""
        command = _Command(function)
        with self._wake:
            stopped = self._stopped
            if stopped is None:
                self._commands.append(command)
                self._wake.notify()
        if stopped is not None:
            command.refuse(stopped)
        return command.future

    # ----------------------------------------------------------------------------------- in the engine's thread

    def _run(self) -> None:
        stopped = EngineStopped("the engine was closed")
        try:
            while self._wait():
                self._obey()
                if self._engine.busy:
                    self._deliver(self._engine.step())
        except BaseException as error:  # the thread dies, and everyone is told why
            stopped = EngineStopped(f"the engine stopped: {type(error).__name__}: {error}")
            stopped.__cause__ = error
        finally:
            self._stop(stopped)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False once the engine is to close."""
        with self._wake:
            while not (self._closing or self._commands or self._engine.busy):
                self._wake.wait()
            return not self._closing

    def _obey(self) -> None:
        """Run the commands that have arrived by now."""
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command.run()

    def _add(
        self, stream: _Stream, prompt: NDArray[np.int32], params: SamplingParams, priority: int, salt: str
    ) -> None:
        stream.requests = self._engine.add(prompt, params, priority, salt)
        self._streams |= dict.fromkeys(stream.requests, stream)

    def _abort(self, stream: _Stream) -> None:
        """End what is left of a stream that nobody reads any more; it was never added if `add` refused it."""
        for request in stream.requests:
            self._streams.pop(request, None)
            self._engine.abort(request)

    def _deliver(self, updates: list[Update]) -> None:
        """Send a step's updates to their streams, loop by loop."""
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Update | EngineStopped]]] = {}
        for update in updates:
            stream = self._streams.get(update.request)
            if stream is not None:
                parcels.setdefault(stream.loop, []).append((stream, update))
                if update.finish_reason is not None:
                    del self._streams[update.request]
        for loop, parcel in parcels.items():
            if not _send(loop, parcel):
                for stream, _ in parcel:
                    self._abort(stream)

    def _stop(self, stopped: EngineStopped) -> None:
        """Refuse whatever comes from now on, and tell everyone who waits."""
        with self._wake:
            self._stopped = stopped
            commands, self._commands = self._commands, deque()
        for stream in dict.fromkeys(self._streams.values()):
            _send(stream.loop, [(stream, _again(stopped))])
        for command in commands:
            command.refuse(stopped)
        if stopped.__cause__ is None:
            for request in list(self._streams):
                self._engine.abort(request)
            while self._engine.busy:
                self._engine.step()
        self._engine.close()


def _again(stopped: EngineStopped) -> EngineStopped:
    """A copy to raise: every waiting task adds its own traceback."""
    copy = EngineStopped(*stopped.args)
    copy.__cause__ = stopped.__cause__
    return copy


def _send(loop: asyncio.AbstractEventLoop, parcel: list[tuple[_Stream, Update | EngineStopped]]) -> bool:
    """Hand a parcel over to its loop; False if that has been closed."""

    def unpack() -> None:
        for stream, content in parcel:
            stream.arrived.put_nowait(content)

    try:
        loop.call_soon_threadsafe(unpack)
    except RuntimeError:
        return False
    return True
