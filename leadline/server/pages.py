"""The web pages: a chat at `/`, a view of the engine at `/status`, and the numbers that it shows.

The files lie in the folder `pages`. They load nothing from elsewhere and hold no script or style within the HTML, and
the policy that is sent with them forbids both.
"""

from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from fastapi import APIRouter
from prometheus_client import Counter
from starlette.responses import Response

import leadline
from leadline.engine.async_engine import EngineStopped
from leadline.server.engine import Requests
from leadline.server.errors import ApiError
from leadline.server.json_response import JsonResponse
from leadline.server.model import ServedModel

FOLDER = Path(__file__).with_name("pages")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes(requests: Requests, model: ServedModel) -> APIRouter:
    """The pages, and what `/status` reads each second. They are open to anybody, as `/metrics` is: the chat asks for
    an API key when the server does."""
    router = APIRouter()
    files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS}

    def page(name: str) -> Response:
        kind = KINDS[Path(name).suffix]
        return Response(files[name], media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    @router.get("/", include_in_schema=False)
    async def chat() -> Response:
        return page("chat.html")

    @router.get("/status", include_in_schema=False)
    async def status() -> Response:
        return page("status.html")

    @router.get("/pages/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"there is no page {name!r}", code="not_found")
        return page(name)

    @router.get("/status/numbers", summary="What the engine has counted, and what is in use now.")
    async def numbers() -> Response:
        return JsonResponse(await _numbers(requests, model), headers={"Cache-Control": "no-store"})

    @router.get("/status/experts", summary="How often each layer chose each expert since this was first asked for.")
    async def experts() -> Response:
        counts = await requests.engine.expert_load()
        return JsonResponse({"counts": counts}, headers={"Cache-Control": "no-store"})

    return router


async def _numbers(requests: Requests, model: ServedModel) -> dict[str, object]:
    """`seconds` is a clock of its own beginning, for rates; `engine` is null and `problem` says why if it is down."""
    problem, stats = None, None
    try:
        stats = await requests.engine.stats()
    except EngineStopped as error:
        problem = str(error)
    return {
        "model": model.name,
        "version": leadline.__version__,
        "seconds": perf_counter(),
        "problem": problem,
        "engine": None if stats is None else asdict(stats),
        "prompt_tokens": _count(requests.metrics.looked_up_tokens),
        "cached_tokens": _count(requests.metrics.cached_tokens),
    }


def _count(counter: Counter) -> int:
    return int(next(iter(counter.collect())).samples[0].value)
