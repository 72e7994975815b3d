"""The engine in a process of its own: what it says is what the offline engine says, and every way that it can die."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import write_model
from numpy.typing import NDArray

from leadline.config import EngineConfig
from leadline.engine.async_engine import EngineStopped
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams
from leadline.engine.scheduler import QueueFull
from leadline.server import process
from leadline.server.engine_loop import EngineLoop
from leadline.server.process import EngineClient, RequestFailed
from leadline.server.wire import Abort, Channel, Close, Generate, Refused, RemoteUpdate, frame, frames, from_engine

LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
MANY = SamplingParams(max_tokens=3000, ignore_eos=True, n=128)
PROMPT = np.arange(20, 31, dtype=np.int32)
POISON = 77
"""The token that the broken engines of these tests cannot stand."""

BROKEN = f"""
import os, signal
from leadline.engine.engine import Engine
from leadline.model.transformer import Transformer
from leadline.server import engine_loop

forward, add, step = Transformer.forward, Engine.add, Engine.step

def poisoned_forward(self, batch, state):
    if {POISON} in batch.ids.tolist():
        raise ArithmeticError("a poisonous token")
    return forward(self, batch, state)

def poisoned_add(self, prompt, *rest):
    if prompt[0] == {POISON}:
        raise ArithmeticError("a poisonous prompt")
    return add(self, prompt, *rest)

def poisoned_step(self):
    if any(request.priority == {POISON} for request in self.scheduler.waiting):
        raise ArithmeticError("a bug of ours")
    return step(self)

Transformer.forward, Engine.add, Engine.step = poisoned_forward, poisoned_add, poisoned_step
engine_loop.main()
"""

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def config(folder: Path, **options: Any) -> EngineConfig:
    small = {"device": "cpu", "state_bytes": 1 << 25, "step_tokens": 128, "chunk_tokens": 64}
    small |= {"max_running": 8, "max_waiting": 200}
    return EngineConfig(str(folder), **small | options)


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """Of the processes that are started: one thread each, and scripts find the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(process.__file__).parents[2]))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs coroutines in one event loop, since a client belongs to the loop that started it."""
    with asyncio.Runner() as runner:
        yield lambda main: runner.run(asyncio.wait_for(main, 60))


@pytest.fixture(scope="module")
def client(folder: Path, run: Run) -> Iterator[EngineClient]:
    """An engine that the tests share; each leaves it idle."""
    started = run(EngineClient.start(config(folder)))
    yield started
    run(started.close())


async def collect(client: EngineClient, prompt: NDArray[np.int32], params: SamplingParams) -> list[RemoteUpdate]:
    async with aclosing(client.generate(prompt, params)) as updates:
        return [update async for update in updates]


async def started(client: EngineClient) -> "asyncio.Task[list[RemoteUpdate]]":
    """A long generation that is under way."""
    before = (await client.stats()).tokens_generated
    task = asyncio.create_task(collect(client, PROMPT, LONG))
    while (await client.stats()).tokens_generated <= before:
        await asyncio.sleep(0.001)
    return task


def tokens(updates: list[RemoteUpdate]) -> list[int]:
    return [token for update in updates for token in update.tokens]


async def assert_idle(client: EngineClient) -> None:
    """Nothing runs, nothing contradicts, and nothing is held that is not for reuse."""
    stats = await client.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert await client.problems() == []
    await client.reset_cache()
    assert (await client.stats()).pages_used == 0


def exists(pid: int) -> bool:
    """Whether a process runs; one that has exited and is only waiting to be asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while exists(pid) and time.monotonic() < limit:
        await asyncio.sleep(0.02)
    return not exists(pid)


# ------------------------------------------------------------------------------------------------ a good day


def test_the_load_of_experts_crosses_the_processes(client: EngineClient, run: Run) -> None:
    async def main() -> list[list[int]]:
        before = await client.expert_load()
        await collect(client, PROMPT, SHORT)
        after = await client.expert_load()
        return [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(before, after, strict=True)]

    chosen = [sum(row) for row in run(main())]
    assert len(set(chosen)) == 1 and chosen[0] >= len(PROMPT)


def test_a_hundred_streams_with_random_cancels_say_what_the_offline_engine_says(
    folder: Path, client: EngineClient, run: Run
) -> None:
    rng = random.Random(5)
    prompts = [
        np.array([rng.randrange(2, 260) for _ in range(rng.choice([1, 5, 40, 140]))], np.int32) for _ in range(100)
    ]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 12), seed=number, temperature=rng.choice([0, 1]), stop=["e"])
        for number in range(100)
    ]
    cancelled = set(rng.sample(range(100), 30))
    kept = [number for number in range(100) if number not in cancelled]
    offline = LLM(str(folder), progress=False, state_bytes=1 << 25, device="cpu")
    expected = dict(zip(kept, offline.generate([prompts[i] for i in kept], [params[i] for i in kept]), strict=True))

    async def main() -> list[Any]:
        tasks = [
            asyncio.create_task(collect(client, prompts[number], LONG if number in cancelled else params[number]))
            for number in range(100)
        ]
        for number in cancelled:
            await asyncio.sleep(rng.random() * 0.05)
            tasks[number].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await assert_idle(client)
        return results

    results = run(main())
    assert all(isinstance(results[number], asyncio.CancelledError) for number in cancelled)
    for number in kept:
        choice = expected[number].choices[0]
        assert tokens(results[number]) == choice.token_ids
        assert "".join(update.text for update in results[number]) == choice.text
        last = results[number][-1]
        assert (last.finish_reason, last.request.stop_reason) == (choice.finish_reason, choice.stop_reason)


def test_choices_log_probabilities_and_cached_tokens_arrive_as_offline(
    folder: Path, client: EngineClient, run: Run
) -> None:
    prompt = np.arange(3, 203, dtype=np.int32)
    params = SamplingParams(max_tokens=5, n=3, seed=4, ignore_eos=True, logprobs=3, logit_bias={9: -1, 260: 2.5})
    scored = SamplingParams(max_tokens=1, prompt_logprobs=2, seed=-(2**63))
    offline = LLM(str(folder), progress=False, state_bytes=1 << 25, device="cpu")
    expected, repeated, first = (offline.generate(prompt, each)[0] for each in (params, params, scored))

    async def main() -> list[list[RemoteUpdate]]:
        await client.reset_cache()
        return [await collect(client, prompt, each) for each in (params, params, scored)]

    got, again, prompt_scores = run(main())
    for number, choice in enumerate(expected.choices):
        own = [update for update in got if update.request.choice == number]
        assert tokens(own) == choice.token_ids
        assert [entry for update in own for entry in update.logprobs or []] == choice.logprobs
    assert repeated.cached_tokens == 128
    assert {update.request.reused for update in again if update.request.choice == 0} == {128}
    entries = [pair for update in prompt_scores for pair in update.prompt_logprobs or []]
    assert first.prompt_logprobs is not None
    assert dict(entries) == dict(enumerate(first.prompt_logprobs[1:], 1))


@pytest.mark.parametrize("wait", [False, True], ids=["before the process has looked", "while it runs"])
def test_cancelling_a_task_frees_its_pages(client: EngineClient, run: Run, wait: bool) -> None:
    async def main() -> None:
        tasks = [await started(client) if wait else asyncio.create_task(collect(client, PROMPT, LONG))]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        first = await client.stats()
        await asyncio.sleep(0.1)
        assert (first.running, first.waiting) == (0, 0)
        assert (await client.stats()).steps <= first.steps + 1  # the one that reports what was aborted
        await assert_idle(client)

    run(main())


def test_leaving_the_iterator_frees_its_pages(client: EngineClient, run: Run) -> None:
    async def main() -> None:
        async with aclosing(client.generate(PROMPT, LONG)) as updates:
            async for update in updates:
                assert update.tokens
                break
        await assert_idle(client)

    run(main())


def test_a_slow_reader_gets_everything_in_few_updates_and_keeps_nobody_waiting(client: EngineClient, run: Run) -> None:
    params = SamplingParams(max_tokens=60, n=2, seed=3, ignore_eos=True, logprobs=1)

    async def main() -> None:
        expected = await collect(client, PROMPT, params)
        slow = client.generate(PROMPT, params)
        got = [await anext(slow)]
        for _ in range(2):
            assert len(tokens(await collect(client, PROMPT, params))) == 2 * 60
        got += [update async for update in slow]
        assert len(got) <= 4 < len(expected)
        for choice in range(2):
            joined, single = ([u for u in updates if u.request.choice == choice] for updates in (got, expected))
            assert tokens(joined) == tokens(single)
            assert "".join(u.text for u in joined) == "".join(u.text for u in single)
            assert [e for u in joined for e in u.logprobs or []] == [e for u in single for e in u.logprobs or []]
            assert [u.finish_reason for u in joined if u.finish_reason] == ["length"]

    run(main())


def test_steps_go_on_while_the_server_is_busy(client: EngineClient, run: Run) -> None:
    async def main() -> None:
        tasks = [await started(client) for _ in range(4)]
        before = await client.stats()
        time.sleep(1.0)  # what a heavy prompt encoding does to the loop
        asked = time.monotonic()
        after = await client.stats()
        assert time.monotonic() - asked < 0.5
        assert after.tokens_generated - before.tokens_generated > 100
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await assert_idle(client)

    run(main())


def test_sending_never_waits_for_a_reader() -> None:
    """Nor does it lose or reorder anything, whatever parts the socket takes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, sent = Channel(ours), [Refused(key, "ValueError", "é" * 7001 * key) for key in range(40)]
        began = time.monotonic()
        for message in sent:
            channel.send(message)
        assert time.monotonic() - began < 1.0
        assert channel.exchange(wait=False) == []
        theirs.sendall(frame(Abort(5))[:3])
        theirs.setblocking(False)
        received, got = bytearray(), []
        while len(got) < len(sent):
            received += theirs.recv(100_003)
            got += [from_engine.decode(body) for body in frames(received)]
            assert channel.exchange(wait=False) == []
        assert got == sent
        theirs.sendall(frame(Abort(5))[3:] + frame(Abort(6)))
        assert channel.exchange(wait=True) == [Abort(5), Abort(6)]


def test_the_loop_forgets_requests_that_have_ended(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    engine = LLM(str(folder), progress=False, state_bytes=1 << 25, device="cpu").engine
    loop = EngineLoop(engine, Channel(ours))
    thread = threading.Thread(target=loop.run)
    with ours, theirs:
        thread.start()
        for key, params in enumerate([SHORT, SamplingParams(max_tokens=2, n=3), LONG]):
            theirs.sendall(frame(Generate(key, PROMPT.tobytes(), params, 0, "")))
        theirs.sendall(frame(Abort(2)) + frame(Abort(7)))
        received, ends = bytearray(), 0
        while ends < 4:
            received += theirs.recv(1 << 16)
            messages = [from_engine.decode(body) for body in frames(received)]
            ends += sum(update.finish_reason is not None for each in messages for update in each.updates)
        left = (dict(loop._requests), dict(loop._keys))
        theirs.sendall(frame(Close()))
        thread.join(10)
    assert not thread.is_alive()
    assert left == ({}, {})


def test_a_prompt_larger_than_the_socket_holds_arrives(client: EngineClient, run: Run) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="the prompt has 1000000 tokens and 3 more"):
            await collect(client, np.full(1_000_000, 5, np.int32), SHORT)

    run(main())


# ------------------------------------------------------------------------------------------- refusals and errors


def test_refusals_reach_the_caller_and_nobody_else(client: EngineClient, run: Run) -> None:
    refused: list[tuple[Any, SamplingParams, str]] = [
        (np.empty(0, np.int32), LONG, "empty"),
        (np.array([5, 999]), LONG, r"\[999\]"),
        (np.array([5, 2**40]), LONG, "not token ids"),
        (PROMPT, SamplingParams(stop_token_ids=[3, 5000]), "stop_token_ids contains 5000"),
    ]

    async def main() -> None:
        running = await started(client)
        for prompt, params, sentence in refused:
            with pytest.raises(ValueError, match=sentence):
                await collect(client, prompt, params)
        waiting = asyncio.create_task(collect(client, PROMPT, MANY))
        while not (await client.stats()).waiting:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFull, match="at most 200"):
            await collect(client, PROMPT, MANY)
        assert not running.done() and not waiting.done()
        running.cancel()
        waiting.cancel()
        await asyncio.wait({running, waiting})
        await assert_idle(client)

    run(main())


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines started now are broken as `BROKEN` says."""
    (tmp_path / "broken.py").write_text(BROKEN)
    monkeypatch.setattr(process, "COMMAND", [sys.executable, str(tmp_path / "broken.py")])


def test_a_poisonous_request_fails_alone_and_a_bug_ends_the_process_with_its_name(
    folder: Path, run: Run, broken: None
) -> None:
    async def main() -> None:
        client = await EngineClient.start(config(folder, step_tokens=64))
        with pytest.raises(RequestFailed, match="ArithmeticError: a poisonous prompt"):
            await collect(client, np.array([POISON], np.int32), SHORT)
        with pytest.raises(RequestFailed, match="ArithmeticError: a poisonous token"):
            await collect(client, np.array([5, POISON], np.int32), SHORT)
        assert len(tokens(await collect(client, PROMPT, SHORT))) == 3
        await assert_idle(client)
        other = await started(client)
        with pytest.raises(EngineStopped, match="the engine stopped: ArithmeticError: a bug of ours"):
            await anext(client.generate(PROMPT, SHORT, priority=POISON))
        with pytest.raises(EngineStopped, match="a bug of ours"):
            await other
        assert not client.alive
        await client.close()

    run(main())


def test_a_model_that_cannot_be_served_is_refused_with_the_engines_sentence(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ValueError, match="is neither a folder nor a hub id") as caught:
        run(EngineClient.start(EngineConfig(str(tmp_path / "no such model"))))
    assert "no such model" in str(caught.value)


@pytest.mark.parametrize("holder", [False, True], ids=["alone", "its own child holds the connection"])
def test_a_process_that_dies_while_it_starts_is_reported(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: bool
) -> None:
    hold = "import os, time\nif os.fork() == 0: time.sleep(4); os._exit(0)\n" if holder else ""
    (tmp_path / "dies.py").write_text(f"{hold}raise SystemExit(3)")
    monkeypatch.setattr(process, "COMMAND", [sys.executable, str(tmp_path / "dies.py")])
    began = time.monotonic()
    with pytest.raises(EngineStopped, match="exited with status 3"):
        run(EngineClient.start(config(folder), restart=True))
    assert time.monotonic() - began < 2.0


# ------------------------------------------------------------------------------------------------- a bad day


def test_a_killed_process_is_noticed_at_once_and_started_again(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FIRST_DELAY_SECONDS", 0.05)

    async def main() -> None:
        client = await EngineClient.start(config(folder), restart=True)
        expected = tokens(await collect(client, PROMPT, SamplingParams(max_tokens=20, seed=3)))
        first = client.pid
        tasks = [await started(client) for _ in range(20)]
        os.kill(first, signal.SIGKILL)
        killed = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - killed < 0.5
        assert {str(result) for result in results} == {"the engine's process was killed by signal 9 (Killed)"}
        assert {type(result) for result in results} == {EngineStopped}
        assert not client.alive
        questions = (client.stats, client.problems, client.expert_load, client.reset_cache)
        for call in (*questions, lambda: collect(client, PROMPT, SHORT)):
            with pytest.raises(EngineStopped, match="signal 9"):
                await call()
        while not client.alive:
            await asyncio.sleep(0.02)
        assert client.restarts == 1 and client.pid != first
        assert tokens(await collect(client, PROMPT, SamplingParams(max_tokens=20, seed=3))) == expected
        await client.close()
        assert not exists(client.pid)

    run(main())


def test_a_start_that_fails_is_tried_again_after_growing_delays(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    delays: list[float] = []
    outcomes = iter([OSError("no memory"), EngineStopped("died"), ValueError("no file"), "a process"])

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    async def start(config: EngineConfig) -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def main() -> None:
        client = EngineClient(None, EngineConfig(), restart=False)  # type: ignore[arg-type]
        monkeypatch.setattr(asyncio, "sleep", sleep)
        monkeypatch.setattr(process.EngineProcess, "start", start)
        assert await client._replace(10.0) == process.LONGEST_DELAY_SECONDS
        assert client._process == "a process"  # type: ignore[comparison-overlap]

    run(main())
    assert delays == [10.0, 20.0, 40.0, 60.0]


def test_signals_for_the_server_do_not_end_its_engine(client: EngineClient, run: Run) -> None:
    """A terminal interrupts all processes of a session, a service manager terminates all of a service."""
    assert os.getsid(client.pid) != os.getsid(0)
    os.kill(client.pid, signal.SIGTERM)
    assert len(tokens(run(collect(client, PROMPT, SHORT)))) == 3


def test_closing_lets_requests_finish_within_the_limit_and_ends_the_others(folder: Path, run: Run) -> None:
    async def main() -> None:
        client = await EngineClient.start(config(folder))
        long = await started(client)
        short = asyncio.create_task(collect(client, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True)))
        await client.stats()
        began = time.monotonic()
        closing = asyncio.create_task(client.close(2.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped, match="being closed"):
            await collect(client, PROMPT, SHORT)
        assert len(tokens(await short)) == 20
        with pytest.raises(EngineStopped, match="the engine was closed"):
            await long
        await closing
        assert 2.0 <= time.monotonic() - began < 5.0
        assert client._process._process.returncode == 0
        with pytest.raises(EngineStopped, match="the engine was closed"):
            await client.stats()
        await client.close()

    run(main())


def test_closing_ends_a_process_that_does_not_answer(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CLOSE_SECONDS", 0.3)

    async def main() -> None:
        client = await EngineClient.start(config(folder))
        task = await started(client)
        os.kill(client.pid, signal.SIGSTOP)
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < 1.5
        assert not exists(client.pid)
        with pytest.raises(EngineStopped, match="closed"):
            await task

    run(main())


def test_cancelling_a_start_ends_the_process(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    real = asyncio.create_subprocess_exec

    async def noted(*arguments: Any, **options: Any) -> Any:
        created = await real(*arguments, **options)
        pids.append(created.pid)
        return created

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)

    async def main() -> None:
        task = asyncio.create_task(EngineClient.start(config(folder)))
        while not pids:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert not exists(pids[0])

    run(main())


PARENT = """
import asyncio, sys
from leadline.config import EngineConfig
from leadline.engine.sampling import SamplingParams
from leadline.server.process import EngineClient

async def main():
    config = EngineConfig(sys.argv[1], device="cpu", state_bytes=1 << 25, step_tokens=128)
    client = await EngineClient.start(config)
    async for update in client.generate([5, 6, 7], SamplingParams(max_tokens=3000, ignore_eos=True)):
        print(client.pid, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_the_process_ends_with_its_parent(folder: Path, run: Run) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert run(gone(pid, 3.0))


STUCK = """
import os, time
from leadline.server import engine_loop

def load_engine(config, progress):
    print(os.getpid(), flush=True)
    time.sleep(1000)

engine_loop.load_engine = load_engine
engine_loop.main()
"""


def test_a_process_that_is_stuck_ends_with_its_parent(folder: Path, run: Run, tmp_path: Path) -> None:
    """It is not looking at its connection: it is loading, or in a step that hangs."""
    (tmp_path / "stuck.py").write_text(STUCK)
    script = f"from leadline.server import process\nprocess.COMMAND[1:] = [{str(tmp_path / 'stuck.py')!r}]\n{PARENT}"
    parent = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert exists(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert run(gone(pid, 3.0))


def test_idle_processes_take_no_time(client: EngineClient, run: Run) -> None:
    def used() -> float:
        fields = Path(f"/proc/{client.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + time.process_time()

    async def main() -> None:
        await collect(client, PROMPT, SHORT)
        await asyncio.sleep(0.1)
        before = used()
        await asyncio.sleep(0.5)
        assert used() - before < 0.1

    run(main())
