"""The engine in a process of its own: the way there from asyncio. What runs there is `leadline.server.engine_loop`.

    the server's process                                 the engine's process
    EngineClient: starts the engine again if it dies
      EngineProcess: one engine  -- Generate, Abort -->  EngineLoop: between two steps, obeys what has arrived
      _Stream: one call          <-- Updates of a step --  one frame a step, sent without waiting

Both ends see the other's death at once: the kernel closes the socket pair and reports the exit.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leadline.config import EngineConfig
from leadline.engine.async_engine import EngineStopped
from leadline.engine.engine import Stats, as_token_ids
from leadline.engine.sampling import SamplingParams
from leadline.engine.scheduler import QueueFull
from leadline.server.wire import (
    LENGTH_BYTES,
    Abort,
    Answer,
    Ask,
    Close,
    Failed,
    FromEngine,
    Generate,
    Message,
    Question,
    Ready,
    Refused,
    RemoteUpdate,
    Start,
    Updates,
    frame,
    from_engine,
)

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "leadline.server.engine_loop"]
LAST_WORDS_SECONDS = 1.0
"""How long, after a process has exited or closed its connection, to wait for the other to say why it ended."""
CLOSE_SECONDS = 5.0
"""How long a process that is to exit may take for a last step and for freeing its memory."""
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 60.0
"""A process that has lived this long was sound: the next one is started after the first delay again."""


class RequestFailed(RuntimeError):
    """The engine could not compute this request, for a reason that is no fault of the caller. Others go on."""


class _Stream:
    """The way back to one `generate` call. A reader that is slow gets one joined update per choice for what it missed,
    so what waits for it is never more than its own output, and nobody else waits."""

    def __init__(self) -> None:
        self._waiting: dict[int, RemoteUpdate] = {}
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def put(self, update: RemoteUpdate) -> None:
        """Add what a step brought."""
        choice = update.request.choice
        if choice in self._waiting:
            self._waiting[choice].join(update)
        else:
            self._waiting[choice] = update
        self._wake.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come: `take` raises this when all that came before has been read."""
        self._error = error
        self._wake.set()

    async def take(self) -> list[RemoteUpdate]:
        """Wait for updates and return all there are, one per choice at most."""
        await self._wake.wait()
        if self._waiting:
            updates, self._waiting = list(self._waiting.values()), {}
            if self._error is None:
                self._wake.clear()
            return updates
        assert self._error is not None
        raise self._error


class EngineProcess:
    """One process with an engine, from its start to its end. Belongs to the event loop that started it."""

    def __init__(self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        """Use `start`."""
        self._process, self._writer = process, writer
        self._keys = itertools.count()
        self._streams: dict[int, _Stream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._failed: Failed | None = None
        self._closing = False
        self._stopped: EngineStopped | None = None
        self._watch: asyncio.Task[None]

    @classmethod
    async def start(cls, config: EngineConfig, progress: bool = False) -> "EngineProcess":
        """Start a process, and wait until it has loaded the model. `progress`: it shows a bar on stderr.

        Raises ValueError with the sentence for whatever cannot be served, as `load_engine` does, and EngineStopped
        if the process dies otherwise. Being cancelled ends the process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                str(theirs.fileno()),
                str(os.getpid()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the server, which closes its engine in order
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        started = cls(process, writer)
        started._watch = asyncio.create_task(started._run(reader))
        started._send(Start(config, progress))
        try:
            await started._ready
        except asyncio.CancelledError:
            await started._kill()
            raise
        return started

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether calls may succeed: it has neither ended nor been told to."""
        return self._stopped is None and not self._closing

    @property
    def ready(self) -> Ready:
        """What the engine said of itself when it was ready."""
        return self._ready.result()

    async def generate(
        self, prompt: NDArray[np.integer[Any]] | Sequence[int], params: SamplingParams, priority: int, salt: str
    ) -> AsyncGenerator[RemoteUpdate, None]:
        """See `EngineClient.generate`."""
        self._check(generating=True)
        key = next(self._keys)
        message = Generate(key, as_token_ids(prompt).astype("<i4").tobytes(), params, priority, salt)
        self._send(message)
        stream = self._streams[key] = _Stream()
        self._idle.clear()
        unfinished = params.n
        try:
            while unfinished:
                for update in await stream.take():
                    unfinished -= update.finish_reason is not None
                    if update.error is not None:
                        raise RequestFailed(update.error)
                    yield update
        finally:
            del self._streams[key]
            if not self._streams:
                self._idle.set()
            if unfinished and self._stopped is None:
                self._send(Abort(key))

    async def ask(self, what: Question) -> Any:
        """The engine's answer to an `Ask`. Raises EngineStopped if it does not live to give it."""
        self._check()
        key = next(self._keys)
        self._send(Ask(key, what))
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            del self._answers[key]

    async def close(self, seconds: float) -> None:
        """Refuse what comes, let what runs go on for `seconds` at most, and end the process."""
        self._closing = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        if self._stopped is None:
            self._send(Close())
            await asyncio.wait({self._watch}, timeout=CLOSE_SECONDS)
        await self._kill()

    async def ended(self) -> EngineStopped:
        """Wait for its end, and say why it came."""
        await asyncio.wait({self._watch})
        assert self._stopped is not None
        return self._stopped

    async def _kill(self) -> None:
        """End the process at once; idle if it has ended."""
        self._watch.cancel()
        await asyncio.wait({self._watch})
        await self._process.wait()

    def _check(self, generating: bool = False) -> None:
        if self._stopped is not None:
            raise EngineStopped(*self._stopped.args)
        if generating and self._closing:
            raise EngineStopped("the engine is being closed")

    def _send(self, message: Message) -> None:
        self._writer.write(frame(message))

    async def _run(self, reader: asyncio.StreamReader) -> None:
        """Read what the process says until it ends. Whatever goes wrong here ends it."""
        reading = asyncio.create_task(self._read(reader))
        exiting = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({reading, exiting}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading, exiting}, timeout=LAST_WORDS_SECONDS)
            self._stop(reading)
            await asyncio.wait({exiting}, timeout=CLOSE_SECONDS)
        finally:
            self._stop(reading)
            if self._process.returncode is None:
                self._process.kill()
            for task in (reading, exiting):
                task.cancel()
            self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                self._take(from_engine.decode(await reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # it has closed the connection, or died

    def _take(self, message: FromEngine) -> None:
        """Give a message to whom it concerns. Those who have left in the meantime are in no table."""
        match message:
            case Updates(updates):
                for update in updates:
                    if update.request.key in self._streams:
                        self._streams[update.request.key].put(update)
            case Refused(key, kind, text):
                if key in self._streams:
                    self._streams[key].fail(_REFUSALS[kind](text))
            case Answer(key, value):
                if key in self._answers and not self._answers[key].done():
                    self._answers[key].set_result(value)
            case Ready() if not self._ready.done():
                self._ready.set_result(message)
            case Failed():
                self._failed = message

    def _reason(self, reading: "asyncio.Task[None]") -> str:
        """Why the process has ended, or is being ended."""
        status = self._process.returncode
        if self._failed is not None:
            return f"the engine {'stopped' if self._ready.done() else 'could not start'}: {self._failed.text}"
        if reading.done() and not reading.cancelled() and (error := reading.exception()) is not None:
            return f"the engine's process was ended: what it said made no sense: {type(error).__name__}: {error}"
        if self._closing and status in (None, 0):
            return "the engine was closed"
        if status is None:
            return "the engine's process was ended" if not reading.done() else "the engine's process hung up"
        if status < 0:
            return f"the engine's process was killed by signal {-status} ({signal.strsignal(-status)})"
        return f"the engine's process exited with status {status}"

    def _stop(self, reading: "asyncio.Task[None]") -> None:
        """Tell everyone who waits; idle if they have been told."""
        if self._stopped is not None:
            return
        stopped = self._stopped = EngineStopped(self._reason(reading))
        for stream in self._streams.values():
            stream.fail(EngineStopped(*stopped.args))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineStopped(*stopped.args))
        if not self._ready.done():
            told = self._failed if self._failed is not None and self._failed.for_people else None
            self._ready.set_exception(ValueError(told.text) if told else stopped)


_REFUSALS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "QueueFull": QueueFull,
    "RequestFailed": RequestFailed,
}


class EngineClient:
    """An engine in a process of its own, with the interface of `AsyncEngine`. Belongs to one event loop.

    When the process dies every open call raises EngineStopped, and so does every later one. With `restart` a new
    process is started then, after a delay that doubles while they die young, and calls succeed again from when it is
    ready; it knows no requests and no prefixes of the old one.
    """

    def __init__(self, process: EngineProcess, config: EngineConfig, restart: bool) -> None:
        """Use `start`."""
        self.config = config
        self.restarts = 0
        """How often a new process has taken the place of one that died."""
        self._process = process
        self._restarting = asyncio.create_task(self._restart()) if restart else None

    @classmethod
    async def start(cls, config: EngineConfig, restart: bool = False, progress: bool = False) -> "EngineClient":
        """Start the process and wait until the model is loaded. `progress`: a bar on stderr.

        Raises ValueError with the sentence for whatever cannot be served, EngineStopped if the process dies otherwise;
        a first start is not tried again. Being cancelled ends the process.
        """
        return cls(await EngineProcess.start(config, progress), config, restart)

    @property
    def alive(self) -> bool:
        """Whether there is an engine now."""
        return self._process.alive

    @property
    def pid(self) -> int:
        """The number of the engine's process: the present one, or the last."""
        return self._process.pid

    @property
    def max_context(self) -> int:
        """The most tokens of prompt and output together."""
        return self._process.ready.max_context

    @property
    def memory(self) -> list[tuple[str, str, str]]:
        """The memory plan as (what, how many, bytes) lines."""
        return self._process.ready.memory

    def generate(
        self,
        prompt: NDArray[np.integer[Any]] | Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        salt: str = "",
    ) -> AsyncGenerator[RemoteUpdate, None]:
        """The updates of a prompt of token ids [P] as they come, until each of its `params.n` choices has ended.

        Whoever reads slowly gets several steps' updates of a choice as one. Cancelling the task, or closing the
        iterator (`contextlib.aclosing`), aborts the request before the step after the one that runs. Raises ValueError
        or QueueFull as `Engine.add` does, RequestFailed for an error that ended a choice (the others are aborted), and
        EngineStopped if the process has ended.
        """
        return self._process.generate(prompt, params, priority, salt)

    async def stats(self) -> Stats:
        """What `Engine.stats` says between two steps."""
        stats: Stats = await self._process.ask("stats")
        return stats

    async def problems(self) -> list[str]:
        """What `Engine.problems` says between two steps."""
        problems: list[str] = await self._process.ask("problems")
        return problems

    async def expert_load(self) -> list[list[int]]:
        """What `Engine.expert_load` says between two steps."""
        load: list[list[int]] = await self._process.ask("expert_load")
        return load

    async def reset_cache(self) -> None:
        """Forget every prefix that no running request uses."""
        await self._process.ask("reset_cache")

    async def close(self, seconds: float = 0.0) -> None:
        """Refuse what comes, let what runs go on for `seconds` at most, then end the process, by force if need be.

        Whatever is not finished then raises EngineStopped.
        """
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait({self._restarting})
        await self._process.close(seconds)

    async def _restart(self) -> None:
        """Put a new process in the place of each that ends."""
        delay = FIRST_DELAY_SECONDS
        while True:
            since = time.monotonic()
            stopped = await self._process.ended()
            if time.monotonic() - since >= LONGEST_DELAY_SECONDS:
                delay = FIRST_DELAY_SECONDS
            log.error("%s; starting it again", stopped)
            delay = await self._replace(delay)
            self.restarts += 1

    async def _replace(self, delay: float) -> float:
        """Start a process, however often that takes, after growing delays; returns the next delay in seconds."""
        while True:
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)
            try:
                self._process = await EngineProcess.start(self.config)
                return delay
            except (EngineStopped, OSError, ValueError) as error:
                log.error("the engine did not start, trying again in %.1f s: %s", delay, error)
