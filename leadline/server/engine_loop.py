"""The main program of the engine's process: obey, step, tell. At the other end is `leadline.server.process`."""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

import numpy as np

from leadline.engine.engine import Engine, Update
from leadline.engine.loading import load_engine
from leadline.engine.request import Request
from leadline.engine.scheduler import QueueFull
from leadline.server.wire import (
    Abort,
    Answer,
    Ask,
    Channel,
    Close,
    Failed,
    Generate,
    Ready,
    Refused,
    RemoteRequest,
    RemoteUpdate,
    Start,
    ToEngine,
    Updates,
)


class EngineLoop:
    """Runs an engine for the process at the other end of `channel`: obey, step, tell."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._requests: dict[int, list[Request]] = {}
        self._keys: dict[Request, int] = {}
        self._closing = False

    def run(self) -> None:
        """Go on until `Close` arrives. Raises EOFError or OSError if the other end is closed, or an engine's bug."""
        while not self._closing:
            for message in self._channel.exchange(wait=not self._engine.busy):
                self._obey(message)
            if self._engine.busy:
                self._tell(self._engine.step())
        for key in list(self._requests):
            self._abort(key)
        while self._engine.busy:
            self._engine.step()
        self._engine.close()

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Generate():
                self._generate(message)
            case Abort(key):
                self._abort(key)
            case Ask(key, what):
                self._channel.send(Answer(key, getattr(self._engine, what)()))
            case Close():
                self._closing = True
            case Start():
                raise AssertionError("an engine starts once")

    def _generate(self, message: Generate) -> None:
        prompt = np.frombuffer(message.prompt, "<i4").astype(np.int32)
        try:
            requests = self._engine.add(prompt, message.params, message.priority, message.salt)
        except ValueError as error:
            self._channel.send(Refused(message.key, "ValueError", str(error)))
        except QueueFull as error:
            self._channel.send(Refused(message.key, "QueueFull", str(error)))
        except Exception as error:  # a bug that this prompt brings out must not end the others
            traceback.print_exc()
            self._channel.send(Refused(message.key, "RequestFailed", _sentence(error)))
        else:
            self._requests[message.key] = requests
            self._keys |= dict.fromkeys(requests, message.key)

    def _abort(self, key: int) -> None:
        for request in self._requests.pop(key, []):
            self._keys.pop(request, None)
            self._engine.abort(request)

    def _tell(self, updates: list[Update]) -> None:
        """Send a step's updates, but for requests that were aborted."""
        remote = [_remote(update, self._keys[update.request]) for update in updates if update.request in self._keys]
        for error in dict.fromkeys(update.error for update in updates if update.error is not None):
            traceback.print_exception(error)
        for update in updates:
            if update.finish_reason is not None and update.request in self._keys:
                key = self._keys.pop(update.request)
                self._requests[key].remove(update.request)
                if not self._requests[key]:
                    del self._requests[key]
        if remote:
            self._channel.send(Updates(remote))


def _remote(update: Update, key: int) -> RemoteUpdate:
    request = update.request
    return RemoteUpdate(
        RemoteRequest(key, request.choice, max(0, request.reused), request.stop_reason),
        update.tokens,
        update.text,
        update.logprobs,
        update.prompt_logprobs,
        update.finish_reason,
        _sentence(update.error) if update.error is not None else None,
    )


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _exit_with(parent: int) -> NoReturn:
    """Exit when the parent does, whatever the main thread is doing: loading may take minutes, a step may hang."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _serve(channel: Channel) -> None:
    """Load the engine that the first message asks for, and run it."""
    while not (messages := channel.exchange(wait=True)):
        pass
    start = messages[0]
    assert isinstance(start, Start)
    try:
        engine = load_engine(start.config, start.progress)
    except (ValueError, OSError) as error:
        channel.send(Failed(str(error), for_people=True))
        channel.finish()
        sys.exit(1)
    channel.send(Ready(engine.max_context, engine.memory.rows()))
    EngineLoop(engine, channel).run()
    channel.finish()


def main() -> None:
    """`python -m leadline.server.engine_loop FD PARENT`: serve an engine to process PARENT over the socket FD."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # service managers send it to all; the parent says when to close
    threading.Thread(target=_exit_with, args=[int(sys.argv[2])], name="leadline-parent", daemon=True).start()
    channel = Channel(connection)
    try:
        _serve(channel)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the parent has gone
    except Exception as error:
        channel.send(Failed(_sentence(error), for_people=False))
        channel.finish()
        raise


if __name__ == "__main__":
    main()
