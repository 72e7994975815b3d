"""Clients that leave, ask to abort or read slowly, an engine that dies, and a server that stops."""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
from servers import Live, ScriptedEngine, live_server, served_model, serving

from leadline.cli.serve import bind, read_keys
from leadline.config import EngineConfig
from leadline.engine.loading import BUILT_IN
from leadline.server.app import Server, create_app
from leadline.server.process import EngineClient

ROOT = Path(__file__).parent.parent
LONG: dict[str, Any] = {"model": "tiny", "prompt": "Once upon", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(max_context=4096) as server:
        yield server


def begin(live: Live, **changes: Any) -> socket.socket:
    """Send a long request by hand, and return the connection."""
    body = json.dumps(LONG | changes)
    connection = socket.create_connection(live.url.removeprefix("http://").split(":"))  # type: ignore[arg-type]
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n{body}".encode())
    return connection


def running(live: Live, count: int, seconds: float = 10) -> None:
    """Wait until so many requests run."""
    deadline = time.monotonic() + seconds
    while live.ask(live.engine.stats).running != count:
        assert time.monotonic() < deadline, f"{live.ask(live.engine.stats).running} run, not {count}"
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_ends_its_request(live: Live, stream: bool) -> None:
    connection = begin(live, stream=stream, prompt=["Once", "The"])
    running(live, 2)
    connection.close()
    assert live.idle()
    live.http.post("/v1/cache/reset")
    assert live.ask(live.engine.stats).pages_used == 0


def test_a_client_that_leaves_the_queue_is_forgotten() -> None:
    with live_server(max_running=1, max_waiting=1) as live:
        first = begin(live, stream=True)
        running(live, 1)
        second = begin(live, stream=True)
        while not live.ask(live.engine.stats).waiting:
            time.sleep(0.005)
        response = live.http.post("/v1/completions", json=LONG)
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
        with pytest.raises(openai.RateLimitError, match="at most 1"):
            live.openai.completions.create(model="tiny", prompt="a", stream=True)
        second.close()
        while live.ask(live.engine.stats).waiting:
            time.sleep(0.005)
        running(live, 1)
        first.close()
        assert live.idle()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("everything", [False, True], ids=["by id", "all"])
def test_an_aborted_request_keeps_what_it_has(live: Live, stream: bool, everything: bool) -> None:
    answers: list[httpx.Response] = []
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": stream, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: answers.append(
            live.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
        )
    )
    thread.start()
    running(live, 2)
    time.sleep(0.2)
    told = live.http.post("/v1/abort", json={"all": True} if everything else {"id": "chatcmpl-mine"})
    assert told.json() == {"aborted": 1}
    thread.join(10)
    (answer,) = answers
    assert answer.status_code == 200
    if stream:
        assert answer.text.count('"finish_reason":"abort"') == 2 and answer.text.endswith("data: [DONE]\n\n")
    else:
        assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["abort"] * 2
        assert answer.json()["usage"]["completion_tokens"] > 0
    assert live.idle()
    assert live.http.post("/v1/abort", json={"id": "chatcmpl-mine"}).json() == {"aborted": 0}


def test_a_request_in_the_queue_can_be_aborted() -> None:
    with live_server(max_running=1) as live:
        first = begin(live, stream=True)
        running(live, 1)
        answers: list[httpx.Response] = []
        headers = {"x-request-id": "second"}
        thread = threading.Thread(
            target=lambda: answers.append(live.http.post("/v1/completions", json=LONG, headers=headers))
        )
        thread.start()
        while not live.ask(live.engine.stats).waiting:
            time.sleep(0.005)
        assert live.http.post("/v1/abort", json={"id": "cmpl-second"}).json() == {"aborted": 1}
        thread.join(2)
        (answer,) = answers
        assert (answer.json()["choices"][0]["finish_reason"], answer.json()["choices"][0]["text"]) == ("abort", "")
        assert live.ask(live.engine.stats).waiting == 0
        first.close()
        assert live.idle()


def test_one_slow_reader_holds_nobody_up(live: Live) -> None:
    slow = begin(live, stream=True, logprobs=5)  # never read
    running(live, 1)
    started = time.monotonic()
    for _ in range(3):
        live.openai.completions.create(model="tiny", prompt="Once", max_tokens=8)
    assert time.monotonic() - started < 10
    assert live.requests._running, "it is still at it, or waits for its reader"
    slow.close()
    assert live.idle()


class EndlessEngine(ScriptedEngine):
    """Says a lot for as long as it is asked for more."""

    updates = 0

    async def generate(self, prompt: Any, params: Any, priority: int = 0, salt: str = "") -> AsyncGenerator[Any, None]:
        """Ends for a single token alone, which is what the server asks for at its start."""
        request = SimpleNamespace(choice=0, reused=0, stop_reason=None)
        while True:
            self.updates += 1
            yield SimpleNamespace(
                request=request, tokens=[300], text="x" * 50_000, logprobs=None, prompt_logprobs=None,
                finish_reason="length" if params.max_tokens == 1 else None,
            )  # fmt: skip
            if params.max_tokens == 1:
                return
            await asyncio.sleep(0)


def test_a_reader_that_has_stopped_is_not_written_for() -> None:
    engine = EndlessEngine()
    with serving(engine, served_model()) as live:
        connection = begin(live, stream=True)
        seen = -1
        while seen != engine.updates:
            seen = engine.updates
            time.sleep(0.3)
        assert 1 < engine.updates < 400, "20 MB: more than the kernel's buffers for a connection"
        assert live.requests._running
        connection.close()
        assert live.idle()


def test_many_streams_with_random_ends_leave_nothing_behind(live: Live) -> None:
    rng = random.Random(5)

    async def one(client: httpx.AsyncClient, number: int) -> str:
        await asyncio.sleep(rng.random())
        body = {"prompt": [rng.randrange(20, 3000) for _ in range(rng.choice([1, 30, 140]))], "stream": True}
        limit = rng.choice([1, 5, 20])
        if number % 2:
            body |= {"max_tokens": limit, "ignore_eos": True}
        else:
            body |= {"max_tokens": 2000, "ignore_eos": True}
        text = ""
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                text += line + "\n"
                if not number % 2 and text.count("data: ") >= limit:
                    return ""  # leaves
        assert text.count('"finish_reason":"length"') == 1 and "[DONE]" in text
        return text

    async def main() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=live.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(60)))

    asyncio.run(main())
    assert live.idle()
    live.http.post("/v1/cache/reset")
    assert live.ask(live.engine.stats).pages_used == 0


def test_a_killed_engine_is_told_to_everyone_at_once() -> None:
    async def main() -> None:
        config = EngineConfig(model=str(BUILT_IN), device="cpu", state_bytes=1 << 26, max_running=8)
        engine = await EngineClient.start(config)
        server = Server(1, on_shutdown=engine.close)
        listener = bind("127.0.0.1", 0)
        await server.open(create_app(engine, served_model()))
        serving = asyncio.create_task(server._serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            streamed = asyncio.create_task(client.post("/v1/completions", json=LONG | {"stream": True}))
            whole = asyncio.create_task(client.post("/v1/completions", json=LONG))
            while (await engine.stats()).running < 2:
                await asyncio.sleep(0.01)
            killed = time.monotonic()
            os.kill(engine.pid, signal.SIGKILL)
            answer = await whole
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_down")
            assert '"code":"engine_down"' in (await streamed).text
            assert time.monotonic() - killed < 2
            assert (await client.post("/v1/completions", json=LONG)).status_code == 503
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            assert "leadline:engine_up" in (metrics := (await client.get("/metrics")).text)
            assert 'leadline:engine_up{model_name="tiny"} 0.0' in metrics
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(main(), 60))


# ------------------------------------------------------------------------------------------------- the command


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "leadline", "serve", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_serves_and_stops_in_order() -> None:
    with command("--port", "0", "--grace", "1", "--state-memory", "64M", "--device", "cpu") as process:
        assert process.stderr is not None
        said = ""
        while "ready: " not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        for words in ("context", "thinking on, effort high", "temperature 0.7", "history pages"):
            assert words in said
        url = said.split("ready: ")[1].strip()
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        (model,) = client.models.list()
        assert client.completions.create(model=model.id, prompt="Once", max_tokens=3).choices[0].text
        long = client.completions.create(
            model=model.id, prompt="a", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(long))
        process.send_signal(signal.SIGTERM)
        reasons = [chunk.choices[0].finish_reason for chunk in long]
        assert reasons[-1] == "abort", "it was given a second, and then its end"
        assert process.wait(20) in (0, -signal.SIGTERM)
        rest = process.stderr.read()
        assert "Traceback" not in rest, rest


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def first_answer(url: str, process: subprocess.Popen[str]) -> httpx.Response:
    """What a server says as soon as it says anything."""
    while process.poll() is None:
        try:
            return httpx.get(url, timeout=30)
        except httpx.TransportError:
            time.sleep(0.02)
    raise AssertionError("it ended")


def test_while_the_model_is_loaded_the_command_lives_and_is_not_ready() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with command("--port", str(port), "--state-memory", "64M", "--device", "cpu") as process:
        loading = first_answer(f"{url}/ready", process)
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "loading")
        assert int(loading.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="being loaded"):
            client.completions.create(model="tiny", prompt="Once")
        while (ready := httpx.get(f"{url}/ready")).status_code == 503:
            assert process.poll() is None
            time.sleep(0.1)
        assert ready.json() == {"status": "ready"}
        assert client.completions.create(model="tiny", prompt="Once", max_tokens=2).choices[0].text
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 130, -signal.SIGINT)


def test_the_command_can_be_stopped_while_it_loads() -> None:
    port = free_port()
    with command("--port", str(port), "--device", "cpu") as process:
        assert first_answer(f"http://127.0.0.1:{port}/ready", process).status_code == 503
        (engine,) = psutil.Process(process.pid).children()
        engine.suspend()  # it will never have loaded
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) in (0, -signal.SIGTERM)
        assert not psutil.pid_exists(engine.pid) or engine.status() == psutil.STATUS_ZOMBIE
        assert process.stderr is not None and "Traceback" not in process.stderr.read()


def test_a_model_that_cannot_be_loaded_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "tiny"
    shutil.copytree(BUILT_IN, broken)
    (broken / "model.safetensors").write_bytes(b"x" * 100)
    with command(str(broken), "--port", "0", "--device", "cpu") as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "leadline: " in errors and "model.safetensors" in errors
        assert "Traceback" not in errors


def test_a_port_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, command("--port", str(taken.getsockname()[1])) as process:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert errors.startswith("leadline: cannot listen on 127.0.0.1, port")
        assert "Traceback" not in errors


def test_a_model_that_is_not_there_is_a_sentence() -> None:
    with command("/nowhere/at/all") as process:
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors.startswith("leadline: '/nowhere/at/all'")) == (1, True)


def test_keys_are_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n one \n\ntwo\n")
    assert read_keys(path) == ["one", "two"]
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no API key"):
        read_keys(path)
