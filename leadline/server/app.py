"""The server: its endpoints, who may call them, and how it starts and stops."""

import asyncio
import hmac
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import uvicorn
from deepseek_recipe import ChatCompletionRequest
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import leadline
from leadline.engine.async_engine import EngineStopped
from leadline.server import errors
from leadline.server.chat_api import Chat
from leadline.server.completions import Completion
from leadline.server.conversation import chat_request
from leadline.server.engine import Generation, Requests
from leadline.server.errors import ApiError, error_response
from leadline.server.framed import MESSAGES, RESPONSES, Framed, Protocol
from leadline.server.json_response import JsonResponse
from leadline.server.metrics import Metrics
from leadline.server.model import ServedModel
from leadline.server.pages import page_routes
from leadline.server.protocol import AbortBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from leadline.server.streams import DONE, EventStream, unless_gone

MOST_ID_LENGTH = 128
BODY_BYTES = 1 << 20
BODY_BYTES_PER_TOKEN = 32
"""A body may have so many bytes, and so many more for each token of the context. Prompts that fit are shorter, and
reading what is longer would only take time from others."""


def create_app(engine: Generation, model: ServedModel, keys: Sequence[str] = ()) -> FastAPI:
    """The application. With `keys` clients must send one of them.

    `app.state.requests` are the requests that run, `app.state.model` is the model, `app.state.keys` are the keys.
    """
    requests = Requests(engine, Metrics(model.name))
    app = FastAPI(title="Leadline", version=leadline.__version__)
    app.state.requests, app.state.model = requests, model
    app.state.keys = [key.encode() for key in keys]
    errors.install(app)
    app.add_middleware(BodyLimit, most_bytes=BODY_BYTES + BODY_BYTES_PER_TOKEN * model.max_context)
    app.include_router(_open_routes(requests, model))
    app.include_router(page_routes(requests, model))
    for router in (_model_routes(model), _generation_routes(requests, model), _control_routes(requests)):
        app.include_router(router)
    return app


class Guarded(APIRoute):
    """A route for those alone who have a key. It is asked for before the body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, after a look at the key."""
        handler = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            _check_key(request, request.app.state.keys)
            return await handler(request)

        return guarded


def _open_routes(requests: Requests, model: ServedModel) -> APIRouter:
    """What anybody may ask, such as whoever watches over the server."""
    router = APIRouter()

    @router.get("/health", summary="The process lives.")
    async def health() -> Response:
        return JsonResponse({"status": "ok"})

    @router.get("/ready", summary="The model is loaded and has produced a token.")
    async def ready() -> Response:
        if requests.stopping:
            raise ApiError(503, "the server is shutting down", "server_error", "stopping")
        await requests.prove(model.config.bos_token_id)
        return JsonResponse({"status": "ready"})

    @router.get("/metrics", summary="For Prometheus.")
    async def metrics() -> Response:
        try:
            stats = await requests.engine.stats()
        except EngineStopped:
            stats = None
        return Response(requests.metrics.text(stats), media_type="text/plain; version=0.0.4")

    return router


def _model_routes(model: ServedModel) -> APIRouter:
    """What the model is, and its tokens."""
    router = APIRouter(route_class=Guarded)
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "leadline",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_context,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card(name) for name in model.names]})

    @router.get("/v1/models/{name:path}")
    async def model_by_name(name: str) -> Response:
        model.check_name(name)
        return JsonResponse(card(name))

    @router.post("/tokenize")
    def tokenize(body: TokenizeBody) -> Response:  # no coroutine: long texts take their time in a thread
        model.check_name(body.model)
        ids = _tokens(model, body)
        told: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": model.max_context}
        if body.return_token_strs:
            told["token_strs"] = [model.token_text(token) for token in ids]
        return JsonResponse(told)

    @router.post("/detokenize")
    def detokenize(body: DetokenizeBody) -> Response:
        model.check_name(body.model)
        text = model.text(body.tokens, skip_special=body.skip_special_tokens is True)
        return JsonResponse({"text": text, "prompt": text})

    return router


def _tokens(model: ServedModel, body: TokenizeBody) -> list[int]:
    """The tokens of a text or of a chat's prompt. Raises ValueError unless there is exactly one of them."""
    if (body.prompt is None) == (body.messages is None):
        raise ValueError("give either prompt or messages")
    if body.prompt is not None:
        ids: list[int] = model.encode(body.prompt, body.add_special_tokens is not False).tolist()
        return ids
    assert body.messages is not None
    asked = chat_request(body.messages, body.thinking, body.reasoning_effort, body.chat_template_kwargs)
    tools = {"tools": body.tools} if body.tools is not None else {}
    chat: list[int] = model.chat_format().convert(ChatCompletionRequest, {**asked, **tools}).token_ids.tolist()
    return chat


def _generation_routes(requests: Requests, model: ServedModel) -> APIRouter:
    """What generates. A client that leaves ends its request."""
    router = APIRouter(route_class=Guarded)

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        completion = Completion(requests, model, body, _id(request, "cmpl"))
        return await _answer(request, completion, body.streams)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        chat = Chat(requests, model, body, _id(request, "chatcmpl"))
        return await _answer(request, chat, body.streams)

    def framed(request: Request, protocol: Protocol, body: dict[str, Any], prefix: str) -> Framed:
        return Framed(requests, model, protocol, body, _id(request, prefix))

    @router.post("/v1/responses")
    async def responses(request: Request, body: dict[str, Any]) -> Response:
        response = framed(request, RESPONSES, body, "resp")
        return await _answer(request, response, response.streams, last=b"", error_name="error")

    @router.post("/v1/messages")
    async def messages(request: Request, body: dict[str, Any]) -> Response:
        message = framed(request, MESSAGES, body, "msg")
        return await _answer(request, message, message.streams, last=b"", error_name="error")

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: dict[str, Any]) -> Response:
        count = await framed(request, MESSAGES, {"max_tokens": 1, **body}, "msg").count()
        return JsonResponse({"input_tokens": count})

    return router


def _control_routes(requests: Requests) -> APIRouter:
    """What steers the server."""
    router = APIRouter(route_class=Guarded)

    @router.post("/v1/abort")
    async def abort(body: AbortBody) -> Response:
        if (body.id is None) == (body.all is not True):
            raise ValueError('give either the id of a response, or "all": true')
        return JsonResponse({"aborted": requests.abort(body.id)})

    @router.post("/v1/cache/reset")
    async def reset_cache() -> Response:
        await requests.engine.reset_cache()
        return JsonResponse({"status": "ok"})

    return router


async def _answer(
    request: Request,
    work: Completion | Chat | Framed,
    streams: bool,
    last: bytes = DONE,
    error_name: str | None = None,
) -> Response:
    """The response of a request, at once or as events."""
    if streams:
        return EventStream(work.stream(), last, error_name)
    whole = await unless_gone(request, work.whole())
    return JsonResponse(whole) if whole is not None else Response(status_code=499)  # nobody reads it


def _id(request: Request, prefix: str) -> str:
    """The id of a response: what the client asks for in X-Request-Id after a prefix, or a new one."""
    asked = request.headers.get("x-request-id", "")
    if not asked:
        return f"{prefix}-{uuid.uuid4().hex}"
    if len(asked) > MOST_ID_LENGTH or not asked.isascii() or not asked.isprintable():
        raise ValueError(f"X-Request-Id is {asked[:MOST_ID_LENGTH]!r}; allowed: {MOST_ID_LENGTH} ASCII characters")
    return f"{prefix}-{asked}"


def _check_key(request: Request, keys: Sequence[bytes]) -> None:
    """Refuse whoever has none of the keys, if there are keys."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    bearer = token if scheme.lower() == "bearer" else ""
    given = (bearer or request.headers.get("x-api-key", "")).encode("utf-8", "replace")
    if keys and not sum(hmac.compare_digest(given, key) for key in keys):  # all are compared: time tells nothing
        headers = {"WWW-Authenticate": "Bearer"}
        message = "the API key is missing or wrong"
        raise ApiError(401, message, "authentication_error", "invalid_api_key", headers=headers)


class BodyLimit:
    """Refuses bodies that are too long, before they are held in memory."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most_bytes:
                raise ApiError(413, f"the body has more than {self._most_bytes} bytes", code="body_too_long")
            return message

        await self._app(scope, limited, send)


class Server(uvicorn.Server):
    """Serves from bound sockets until SIGINT or SIGTERM; until there is an application, that the model is loaded.

    Then it takes no more requests and gives those that run `seconds` to finish; what is left gets finish reason
    "abort". A second SIGINT ends it at once. `on_shutdown` is awaited at the end.
    """

    GRACE_SECONDS = 5
    """How long clients of aborted requests may take to read their end."""
    LAG_SECONDS = 0.05
    """How often the lag of the event loop is measured."""

    def __init__(self, seconds: int, on_shutdown: Callable[[], Awaitable[None]] | None = None) -> None:
        config = uvicorn.Config(
            self._call,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=seconds + self.GRACE_SECONDS,
        )
        super().__init__(config)
        self._app: FastAPI | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._seconds, self._on_shutdown = seconds, on_shutdown

    async def open(self, app: FastAPI) -> None:
        """Let clients in to an application whose engine has produced a token. Raises what `Requests.prove` does."""
        await app.state.requests.prove(app.state.model.config.bos_token_id)
        self._measuring = asyncio.create_task(self._measure_lag(app.state.requests.metrics))
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish, and end them when the time is over."""
        if self._app is not None:
            requests: Requests = self._app.state.requests
            requests.stopping = True
            asyncio.get_running_loop().call_later(self._seconds, requests.abort, None)
        await super().shutdown(sockets)
        if self._measuring is not None:
            self._measuring.cancel()
        if self._on_shutdown is not None:
            await self._on_shutdown()

    async def _measure_lag(self, metrics: Metrics) -> None:
        while True:
            due = time.perf_counter() + self.LAG_SECONDS
            await asyncio.sleep(self.LAG_SECONDS)
            metrics.loop_lag.observe(max(0.0, time.perf_counter() - due))

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        answer: ASGIApp
        if self._app is not None:
            answer = self._app
        elif scope["type"] == "http" and scope["path"] == "/health":
            answer = JsonResponse({"status": "ok"})
        else:
            wait = {"Retry-After": str(errors.RETRY_SECONDS)}
            answer = error_response(ApiError(503, "the model is being loaded", "server_error", "loading", headers=wait))
        await answer(scope, receive, send)
