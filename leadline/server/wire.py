"""What the server's process and the engine's process say to each other, and how it becomes bytes.

A frame is the length of its body (4 bytes, little-endian) and the body: one message in MessagePack.
"""

import socket
from collections.abc import Iterator
from select import POLLIN, POLLOUT, poll
from typing import Any, Literal

import msgspec
import numpy as np

from leadline.config import EngineConfig
from leadline.engine.engine import Stats, TokenLogprob
from leadline.engine.sampling import SamplingParams

LENGTH_BYTES = 4
RECEIVE_BYTES = 1 << 18

Question = Literal["stats", "problems", "expert_load", "reset_cache"]

# ------------------------------------------------------------------------------------- to the engine's process


class Message(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages."""


class Start(Message):
    """The first message: load this model. `progress`: show a bar on stderr."""

    config: EngineConfig
    progress: bool


class Generate(Message):
    """Queue a prompt, given as the bytes of int32 token ids. `key` names the call in every later message."""

    key: int
    prompt: bytes
    params: SamplingParams
    priority: int
    salt: str


class Abort(Message):
    """Nobody reads the call any more. Idle if it has ended."""

    key: int


class Ask(Message):
    """Wants an `Answer`: what the engine's method of that name returns."""

    key: int
    what: Question


class Close(Message):
    """Abort what runs, and exit."""


# ----------------------------------------------------------------------------------- from the engine's process


class Ready(Message):
    """The model is loaded. `max_context` in tokens; `memory` is `MemoryPlan.rows`."""

    max_context: int
    memory: list[tuple[str, str, str]]


class Failed(Message):
    """The engine cannot start, or cannot go on; the process exits. `for_people`: the text is a sentence for the user,
    who can do something about it; otherwise it reports a bug."""

    text: str
    for_people: bool


class Refused(Message):
    """A `Generate` was not queued. `kind` says which exception `text` belongs to."""

    key: int
    kind: Literal["ValueError", "QueueFull", "RequestFailed"]
    text: str


class Answer(Message):
    """What `Ask` asked for; None for `reset_cache`."""

    key: int
    value: Stats | list[str | list[int]] | None


class RemoteRequest(msgspec.Struct, array_like=True):
    """What of a `Request` is known outside of the engine's process, by the same names."""

    key: int
    choice: int
    reused: int
    stop_reason: str | int | None


class RemoteUpdate(msgspec.Struct, array_like=True):
    """An `Update` of the engine, or several of one choice joined: what came for it since it was last read."""

    request: RemoteRequest
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprob]] | None = None
    finish_reason: str | None = None
    error: str | None = None
    """What ended it, if `finish_reason` is "error"."""

    def join(self, later: "RemoteUpdate") -> None:
        """Add what came later for the same choice."""
        self.request = later.request
        self.tokens += later.tokens
        self.text += later.text
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs or []) + later.prompt_logprobs
        self.finish_reason, self.error = later.finish_reason, later.error


class Updates(Message):
    """All that one step brought."""

    updates: list[RemoteUpdate]


ToEngine = Start | Generate | Abort | Ask | Close
FromEngine = Ready | Failed | Refused | Answer | Updates

# ------------------------------------------------------------------------------------------------------ frames


def frame(message: Message) -> bytes:
    """A message as bytes. Raises TypeError or ValueError for values that have no form there."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def frames(received: bytearray) -> Iterator[bytes]:
    """Take the complete bodies off the beginning of `received`; a part of a frame stays there."""
    while len(received) >= LENGTH_BYTES:
        end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "little")
        if len(received) < end:
            return
        yield bytes(received[LENGTH_BYTES:end])
        del received[:end]


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
to_engine = msgspec.msgpack.Decoder(ToEngine)
"""Decodes what the engine's process receives,"""
from_engine = msgspec.msgpack.Decoder(FromEngine)
"""and what it sends."""


class Channel:
    """The engine's end of the connection. It never waits for a slow reader: what the socket does not take is kept.

    That is at most what the open requests still generate, since new ones come from that same reader.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._received, self._unsent = bytearray(), bytearray()
        self._poll = poll()
        self._poll.register(connection, POLLIN)

    def send(self, message: Message) -> None:
        """Send, or keep for the next `exchange`. Raises OSError if the other end is closed."""
        self._unsent += frame(message)
        self._push()

    def exchange(self, wait: bool) -> list[ToEngine]:
        """Go on sending what was kept, and return what has arrived; `wait` until anything can be done of that.

        Raises EOFError or OSError if the other end is closed.
        """
        self._poll.modify(self._socket, POLLIN | (POLLOUT if self._unsent else 0))
        if not self._poll.poll(None if wait else 0):
            return []
        self._push()
        self._pull()
        return [to_engine.decode(body) for body in frames(self._received)]

    def finish(self) -> None:
        """Send what was kept, however long that takes. Raises OSError if the other end is closed."""
        self._socket.setblocking(True)
        self._socket.sendall(self._unsent)
        self._unsent.clear()

    def _push(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass

    def _pull(self) -> None:
        try:
            while part := self._socket.recv(RECEIVE_BYTES):
                self._received += part
        except BlockingIOError:
            return
        raise EOFError("the server's process closed the connection")
