"""Live servers for tests, in a thread of this process, over a real model or an engine that says what it is told."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai

from leadline.cli.serve import bind
from leadline.engine.async_engine import AsyncEngine
from leadline.engine.engine import Stats, TokenLogprob
from leadline.engine.llm import LLM
from leadline.engine.loading import model_folder
from leadline.engine.sampling import SamplingParams
from leadline.server.app import Server, create_app
from leadline.server.engine import Generation, Requests
from leadline.server.model import ServedModel

SMALL = {"device": "cpu", "state_bytes": 1 << 26, "max_running": 16}


@dataclass
class Live:
    """A server that runs, and clients of it."""

    url: str
    engine: Any
    model: ServedModel
    requests: Requests
    server: Server

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(self, call: Any) -> Any:
        """The result of a coroutine function of the engine, such as `stats`."""
        return asyncio.run(call())

    def idle(self, seconds: float = 10) -> bool:
        """Whether nothing runs any more, or will within some seconds, and the engine is sound."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.ask(self.engine.stats)
            if stats.running == stats.waiting == 0 and not self.requests._running:
                return self.ask(self.engine.problems) == []
            time.sleep(0.01)
        return False


@contextmanager
def serving(engine: Generation, model: ServedModel, keys: Sequence[str] = (), seconds: int = 2) -> Iterator[Live]:
    """Serve an engine until the end of the block."""
    app = create_app(engine, model, keys)
    server = Server(seconds)
    listener = bind("127.0.0.1", 0)

    async def main() -> None:
        await server.open(app)
        await server.serve([listener])

    thread = threading.Thread(target=asyncio.run, args=[main()], daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield Live(url, engine, model, app.state.requests, server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


@contextmanager
def live_server(folder: Path | None = None, keys: Sequence[str] = (), **options: Any) -> Iterator[Live]:
    """Serve a model folder, or the built-in model, until the end of the block."""
    name = None if folder is None else str(folder)
    llm = LLM(name, progress=False, **SMALL | options)
    engine = AsyncEngine(llm.engine)
    try:
        with serving(engine, served_model(folder, llm.engine.max_context), keys) as live:
            yield live
    finally:
        engine.close()


def served_model(folder: Path | None = None, max_context: int = 4096) -> ServedModel:
    """A model folder, or the built-in model, by the names "tiny" and "org/tiny", without defaults of sampling."""
    path = model_folder(None if folder is None else str(folder))
    return replace(ServedModel.from_folder(path, ["tiny", "org/tiny"], max_context), defaults={})


@dataclass
class ScriptedEngine:
    """Answers every request with `script`, a list of tokens for each step, then ends it with `reason`."""

    script: list[list[int]] = field(default_factory=list)
    reason: str = "stop"
    cached: int = 0
    error: Exception | None = None
    """Raised instead of the end."""
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    closed: int = 0
    """Requests that were left before their end."""

    async def generate(
        self, prompt: Any, params: SamplingParams, priority: int = 0, salt: str = ""
    ) -> AsyncGenerator[Any, None]:
        self.prompts.append(prompt.tolist())
        self.params.append(params)
        requests = [SimpleNamespace(choice=i, reused=self.cached, stop_reason=None) for i in range(params.n)]
        ended = False
        try:
            for number, tokens in enumerate(self.script):
                last = number == len(self.script) - 1 and self.error is None
                for request in requests:
                    ended = last and request is requests[-1]
                    logprobs = [TokenLogprob(t, -0.5, [(t, -0.5)]) for t in tokens] if params.logprobs else None
                    yield SimpleNamespace(
                        request=request,
                        tokens=tokens,
                        text="",
                        logprobs=logprobs,
                        prompt_logprobs=None,
                        finish_reason=self.reason if last else None,
                    )
                await asyncio.sleep(0)
            ended = True
            if self.error is not None:
                raise self.error
        finally:
            self.closed += not ended

    async def stats(self) -> Stats:
        return Stats(0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0)

    async def problems(self) -> list[str]:
        return []

    async def expert_load(self) -> list[list[int]]:
        return [[0, 0]]

    async def reset_cache(self) -> None:
        pass
