"""The engine in its thread: many streams, cancelled at random, errors, refusals, and a thread that dies."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import write_model
from numpy.typing import NDArray

from leadline.engine.async_engine import AsyncEngine, EngineStopped
from leadline.engine.engine import Engine, Update
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams
from leadline.engine.scheduler import QueueFull

LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
PROMPT = np.arange(20, 31, dtype=np.int32)

Build = Callable[..., AsyncEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def load(folder: Path, **options: Any) -> LLM:
    small = {"device": "cpu", "state_bytes": 1 << 25, "step_tokens": 128, "chunk_tokens": 64, "max_running": 8}
    return LLM(str(folder), progress=False, **small | options)


@pytest.fixture
def build(folder: Path) -> Iterator[Build]:
    """Makes async engines and closes them."""
    built = []

    def make(**options: Any) -> AsyncEngine:
        built.append(AsyncEngine(load(folder, **options).engine))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


async def collect(engine: AsyncEngine, prompt: NDArray[np.int32], params: SamplingParams) -> list[Update]:
    async with aclosing(engine.generate(prompt, params)) as updates:
        return [update async for update in updates]


async def started(engine: AsyncEngine, prompt: NDArray[np.int32] = PROMPT) -> "asyncio.Task[list[Update]]":
    """A long generation that is under way."""
    before = (await engine.stats()).tokens_generated
    task = asyncio.create_task(collect(engine, prompt, LONG))
    while (await engine.stats()).tokens_generated <= before:
        await asyncio.sleep(0.001)
    return task


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_fifty_streams_with_random_cancels_say_what_the_offline_engine_says(
    folder: Path, build: Build, overlap: bool
) -> None:
    rng = random.Random(overlap)
    prompts = [
        np.array([rng.randrange(2, 260) for _ in range(rng.choice([1, 5, 40, 140]))], np.int32) for _ in range(50)
    ]
    params = [
        SamplingParams(max_tokens=rng.randint(1, 12), seed=number, temperature=rng.choice([0, 1]))
        for number in range(50)
    ]
    cancelled = set(rng.sample(range(50), 20))
    kept = [number for number in range(50) if number not in cancelled]
    offline = load(folder)
    expected = dict(zip(kept, offline.generate([prompts[i] for i in kept], [params[i] for i in kept]), strict=True))

    async def one(engine: AsyncEngine, number: int) -> list[Update]:
        await asyncio.sleep(rng.random() * 0.3)
        return await collect(engine, prompts[number], LONG if number in cancelled else params[number])

    async def main() -> list[Any]:
        engine = build(overlap=overlap)
        tasks = [asyncio.create_task(one(engine, number)) for number in range(50)]
        for number in cancelled:
            await asyncio.sleep(rng.random() * 0.05)
            tasks[number].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert await engine.problems() == []
        assert engine._streams == {}
        await engine.reset_cache()
        assert (await engine.stats()).pages_used == 0
        return results

    results = run(main())
    assert all(isinstance(results[number], asyncio.CancelledError) for number in cancelled)
    for number in kept:
        updates = results[number]
        assert [token for update in updates for token in update.tokens] == expected[number].token_ids
        assert "".join(update.text for update in updates) == expected[number].text
        assert [update.finish_reason for update in updates if update.finish_reason] == [expected[number].finish_reason]


def test_cancelling_a_task_ends_its_request_before_the_next_step(build: Build) -> None:
    async def main() -> None:
        engine = build()
        task = await started(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        first = await engine.stats()
        await asyncio.sleep(0.1)
        assert first.running == 0
        assert (await engine.stats()).steps == first.steps

    run(main())


def test_closing_the_iterator_ends_its_request(build: Build) -> None:
    async def main() -> None:
        engine = build()
        async with aclosing(engine.generate(PROMPT, LONG)) as updates:
            async for update in updates:
                assert update.tokens
                break
        assert (await engine.stats()).running == 0

    run(main())


def test_cancelling_before_the_thread_has_looked_queues_nothing(build: Build) -> None:
    async def main() -> None:
        engine = build()
        tasks = [asyncio.create_task(collect(engine, PROMPT, LONG)) for _ in range(5)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)

    run(main())


def test_every_choice_of_a_prompt_is_delivered_to_its_end(folder: Path, build: Build) -> None:
    params = SamplingParams(max_tokens=5, n=3, seed=4, ignore_eos=True)
    expected = load(folder).generate(PROMPT, params)[0].choices

    async def main() -> list[Update]:
        return await collect(build(), PROMPT, params)

    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for update in run(main()):
        got[update.request.choice] += update.tokens
    assert list(got.values()) == [choice.token_ids for choice in expected]


def test_refusals_reach_the_caller_and_nobody_else(build: Build) -> None:
    async def main() -> None:
        engine = build(max_running=1, max_waiting=1)
        running = await started(engine)
        with pytest.raises(ValueError, match="empty"):
            await collect(engine, np.empty(0, np.int32), LONG)
        with pytest.raises(ValueError, match=r"\[999\]"):
            await collect(engine, np.array([5, 999], np.int32), LONG)
        waiting = asyncio.create_task(collect(engine, PROMPT, LONG))
        while not (await engine.stats()).waiting:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFull, match="at most 1"):
            await collect(engine, PROMPT, LONG)
        assert not running.done() and not waiting.done()
        running.cancel()
        waiting.cancel()

    run(main())


def test_an_error_of_a_step_reaches_its_requests_and_later_ones_run(build: Build) -> None:
    async def main() -> None:
        engine = build()
        task = await started(engine)
        runner = engine._engine.runner
        forward = runner.forward

        def broken(*arguments: Any) -> Any:
            runner.forward = forward
            raise ArithmeticError("a broken step")

        runner.forward = broken
        with pytest.raises(ArithmeticError, match="a broken step"):
            await task
        assert len(await collect(engine, PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))) == 3
        assert await engine.problems() == []

    run(main())


def test_when_the_thread_dies_everything_that_waits_or_comes_raises(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = build()
        tasks = [await started(engine), await started(engine)]

        def broken(self: Engine) -> list[Update]:
            raise ArithmeticError("a bug of ours")

        monkeypatch.setattr(Engine, "step", broken)
        for task in tasks:
            with pytest.raises(EngineStopped, match="a bug of ours") as caught:
                await task
            assert isinstance(caught.value.__cause__, ArithmeticError)
        for call in (engine.stats, engine.problems, engine.reset_cache, lambda: collect(engine, PROMPT, LONG)):
            with pytest.raises(EngineStopped, match="a bug of ours"):
                await call()

    run(main())


def test_closing_ends_what_runs_and_refuses_what_comes(build: Build) -> None:
    async def main() -> None:
        engine = build(overlap=True)
        task = await started(engine)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineStopped, match="closed"):
            await task
        with pytest.raises(EngineStopped, match="closed"):
            await engine.stats()
        assert engine._engine.problems() == []
        assert not engine._engine.busy
        engine.close()

    run(main())


def test_a_step_costs_one_wake_up_of_the_loop_whatever_it_brings(build: Build) -> None:
    async def main() -> None:
        engine = build()
        loop = asyncio.get_running_loop()
        original, calls = loop.call_soon_threadsafe, 0

        def counted(*arguments: Any, **options: Any) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return original(*arguments, **options)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        results = await asyncio.gather(*(collect(engine, PROMPT, params) for _ in range(8)))
        assert sum(len(update.tokens) for updates in results for update in updates) == 160
        steps = (await engine.stats()).steps
        assert calls <= steps + 8 + 1  # a step, an `add` or `stats` each

    run(main())


def test_an_idle_engine_takes_no_time(build: Build) -> None:
    async def main() -> None:
        engine = build()
        await collect(engine, PROMPT, SamplingParams(max_tokens=2))
        await asyncio.sleep(0.05)
        before = time.process_time()
        await asyncio.sleep(0.4)
        assert time.process_time() - before < 0.1

    run(main())


def test_requests_of_a_closed_loop_are_dropped(build: Build) -> None:
    engine = build()
    loop = asyncio.new_event_loop()
    updates = engine.generate(PROMPT, LONG)
    assert loop.run_until_complete(anext(updates)).tokens
    loop.close()

    async def main() -> None:
        while (await engine.stats()).running:
            await asyncio.sleep(0.001)
        assert (await engine.stats()).tokens_generated < 1000
        assert await collect(engine, PROMPT, SamplingParams(max_tokens=1))

    run(main())
