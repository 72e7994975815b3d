"""Long answers: server-sent events, and leaving off when nobody listens any more."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leadline.server.errors import api_error, error_response
from leadline.server.json_response import encode

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event with a JSON value, with a name or without."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + encode(value) + b"\n\n"


class EventStream(Response):
    """Sends events as they come.

    The first one is waited for: until then an exception becomes an error response with its status code, afterwards an
    event with the error object, named `error_name`, and `last`. When the client leaves, `events` is closed; while it
    reads slowly, `events` is not asked for more.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], last: bytes, error_name: str | None) -> None:
        super().__init__()
        self._events, self._last, self._error_name = events, last, error_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the response."""
        await _while_connected(self._send_all(scope, receive, send), receive)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                first = await anext(events)
            except Exception as error:
                await error_response(error)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await _send_body(send, first)
            try:
                async for data in events:
                    await _send_body(send, data)
            except Exception as error:
                await _send_body(send, event(api_error(error).body, self._error_name))
            await _send_body(send, self._last, more=False)


async def _send_body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, which is cancelled if the client leaves; None then. The body must have been read."""
    return await _while_connected(work, request.receive)


async def _while_connected(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()  # idle if it is done
        leaving.cancel()
        await asyncio.wait({working, leaving})
    return None if working.cancelled() else working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item) of several streams as they come. Whatever one raises ends them all."""
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(len(streams))

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await arrived.put((number, item))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    unfinished = len(tasks)
    try:
        while unfinished:
            entry = await arrived.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                unfinished -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
