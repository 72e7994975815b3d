"""What clients are told when something is wrong: OpenAI's error object, with the status code that fits.

The `type` beside it is what clients of Anthropic's protocol look for.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from leadline.engine.async_engine import EngineStopped
from leadline.engine.scheduler import QueueFull
from leadline.server.json_response import JsonResponse
from leadline.server.process import RequestFailed

log = logging.getLogger(__name__)

RETRY_SECONDS = 1
"""When a client that was refused for load may come back."""
MOST_REASONS = 4
"""How many things that are wrong with one field are told."""


class ApiError(HTTPException):
    """A refusal: `status` and what becomes of the other arguments in the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.body = {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}


def api_error(error: Exception) -> ApiError:
    """The refusal that an exception means. Whatever is not known to be the client's fault or load is ours: 500."""
    wait = {"Retry-After": str(RETRY_SECONDS)}
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            first = error.errors()[0]
            param = _field(first["loc"]) if first["type"] != "json_invalid" else ""
            return ApiError(400, _reasons(error), param=param or None)
        case RecursionError():
            return ApiError(400, "the body is nested too deeply", code="invalid_value")
        case HTTPException(status_code=400):  # FastAPI's, for whatever goes wrong while it parses
            return ApiError(400, "the body is not valid JSON in UTF-8, or nested too deeply")
        case HTTPException():
            message = f"{error.detail}: see /docs for what there is"
            return ApiError(error.status_code, message, code=_code(error.status_code), headers=error.headers)
        case QueueFull():
            return ApiError(429, str(error), "rate_limit_error", "queue_full", headers=wait)
        case EngineStopped():
            return ApiError(503, str(error), "server_error", "engine_down", headers=wait)
        case ValueError():
            return ApiError(400, str(error), code="invalid_value")
        case RequestFailed():
            return ApiError(500, f"the engine could not compute this request: {error}", "server_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"this request failed: {type(error).__name__}", "server_error")


def error_response(error: Exception) -> JsonResponse:
    """The response that an exception means."""
    told = api_error(error)
    return JsonResponse(told.body, told.status_code, told.headers)


def install(app: FastAPI) -> None:
    """Answer every exception of `app` with an error object."""

    async def answer(request: Request, error: Exception) -> JsonResponse:
        return error_response(error)

    known = (ApiError, RequestValidationError, HTTPException, ValueError, RecursionError, QueueFull, EngineStopped)
    for kind in (Exception, *known):
        app.add_exception_handler(kind, answer)


def _code(status: int) -> str:
    return HTTPStatus(status).phrase.lower().replace(" ", "_")


def _reasons(error: RequestValidationError) -> str:
    """Every field that is wrong, and why. A field that may be of several types has a reason for each."""
    reasons: dict[str, list[str]] = {}
    for problem in error.errors():
        if problem["type"] == "json_invalid":
            return f"the body is not valid JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
        told = reasons.setdefault(_field(problem["loc"]), [])
        text = str(problem["msg"]).removeprefix("Value error, ")
        if text not in told:
            told.append(text)
    return "\n".join(
        f"{field or 'the body'}: {' or '.join(told[:MOST_REASONS])}{' ...' if len(told) > MOST_REASONS else ''}"
        for field, told in reasons.items()
    )


def _field(location: tuple[Any, ...]) -> str:
    """The field of the body that an error is about; of nested ones the outermost."""
    return str(location[1]) if len(location) > 1 else ""
