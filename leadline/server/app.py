"""The server: its endpoints, who may call them, and how it starts and stops."""

import asyncio
import hmac
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from deepseek_recipe import ChatCompletionRequest
from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import leadline
from leadline.engine.async_engine import EngineStopped
from leadline.server import errors
from leadline.server.chat_api import Chat
from leadline.server.completions import Completion
from leadline.server.conversation import chat_request
from leadline.server.engine import Generation, Requests
from leadline.server.errors import ApiError
from leadline.server.framed import MESSAGES, RESPONSES, Framed, Protocol
from leadline.server.json_response import JsonResponse
from leadline.server.metrics import Metrics
from leadline.server.model import ServedModel
from leadline.server.protocol import AbortBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from leadline.server.streams import DONE, EventStream, unless_gone

log = logging.getLogger(__name__)

MOST_BODY_BYTES = 64 << 20
MOST_ID_LENGTH = 128


def create_app(
    engine: Generation,
    model: ServedModel,
    keys: Sequence[str] = (),
    on_shutdown: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """The application. With `keys` clients must send one of them; `on_shutdown` is awaited at the end.

    `app.state.requests` are the requests that run.
    """
    requests = Requests(engine, Metrics(model.name))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await requests.prove(model.config.bos_token_id)
        yield
        if on_shutdown is not None:
            await on_shutdown()

    app = FastAPI(title="Leadline", version=leadline.__version__, lifespan=lifespan)
    app.state.requests = requests
    errors.install(app)
    app.add_middleware(BodyLimit)
    app.include_router(_open_routes(requests, model))
    guarded = [Depends(_authorisation(keys))] if keys else []
    for router in (_model_routes(model), _generation_routes(requests, model), _control_routes(requests)):
        app.include_router(router, dependencies=guarded)
    return app


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
    router = APIRouter()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
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
    router = APIRouter()

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
    router = APIRouter()

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


def _authorisation(keys: Sequence[str]) -> Callable[[Request], None]:
    """A dependency that refuses whoever has none of the keys."""
    known = [key.encode() for key in keys]

    def check(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token if scheme.lower() == "bearer" else ""
        given = (bearer or request.headers.get("x-api-key", "")).encode("utf-8", "replace")
        if not sum(hmac.compare_digest(given, key) for key in known):  # all are compared: time tells nothing
            headers = {"WWW-Authenticate": "Bearer"}
            message = "the API key is missing or wrong"
            raise ApiError(401, message, "authentication_error", "invalid_api_key", headers=headers)

    return check


class BodyLimit:
    """Refuses bodies that are too long, before they are held in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
            if seen > MOST_BODY_BYTES:
                raise ApiError(413, f"the body has more than {MOST_BODY_BYTES} bytes", code="body_too_long")
            return message

        await self._app(scope, limited, send)


class Server(uvicorn.Server):
    """Serves an application from bound sockets until SIGINT or SIGTERM.

    Then it takes no more requests and gives those that run `seconds` to finish; what is left gets finish reason
    "abort". A second SIGINT ends it at once.
    """

    GRACE_SECONDS = 5
    """How long clients of aborted requests may take to read their end."""

    def __init__(self, app: FastAPI, seconds: int, on_ready: Callable[[], None]) -> None:
        grace = seconds + self.GRACE_SECONDS
        super().__init__(uvicorn.Config(app, log_config=None, log_level="warning", timeout_graceful_shutdown=grace))
        self._requests: Requests = app.state.requests
        self._seconds, self._on_ready = seconds, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and tell."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish, and end them when the time is over."""
        self._requests.stopping = True
        asyncio.get_running_loop().call_later(self._seconds, self._requests.abort, None)
        await super().shutdown(sockets)
