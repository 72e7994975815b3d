"""The engine's process under load: many streaming clients that cancel and stall, and what the way there costs.

    python benchmarks/serve_load.py [--clients 200] [--seconds 60] [--model FOLDER]

First the same requests through `LLM` and through `EngineClient`, in turn: tokens/s, and the share that is lost. Then
clients for a while, a quarter of whose requests are cancelled and a tenth read slowly: the lag of the event loop, and
what remains. Every stream that ends by itself must say what `LLM` said. Exits with 1 for an error, a wrong token, a
leak, or more lag or loss than `MOST_LAG` and `MOST_LOST`. Without a model: the built-in one, or a small random one.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from folders import write_model

from leadline.config import EngineConfig
from leadline.engine.llm import LLM
from leadline.engine.loading import BUILT_IN
from leadline.engine.sampling import SamplingParams
from leadline.server.process import EngineClient

MOST_LAG = 0.100
"""Seconds, at the 99th percentile."""
MOST_LOST = 0.15
SAMPLE_SECONDS = 0.005
ROUNDS = 3

Job = tuple[NDArray[np.int32], SamplingParams]


@dataclass
class Report:
    """What the clients and the sampler saw."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)


def draw_jobs(count: int, rng: random.Random) -> list[Job]:
    """Prompts of 1 to 200 tokens, a third with a common beginning, for 8 to 64 tokens each."""
    stem = [rng.randrange(3, 250) for _ in range(150)]
    jobs = []
    for number in range(count):
        own = [rng.randrange(3, 250) for _ in range(rng.randint(1, 50))]
        prompt = np.array(stem + own if rng.random() < 0.33 else own, np.int32)
        params = SamplingParams(
            max_tokens=rng.randint(8, 64), seed=number, temperature=rng.choice([0, 1]), ignore_eos=True
        )
        jobs.append((prompt, params))
    return jobs


async def read(client: EngineClient, job: Job, pause: float = 0.0) -> list[int]:
    """All tokens of a job, with `pause` seconds after each update."""
    tokens: list[int] = []
    async with aclosing(client.generate(*job)) as updates:
        async for update in updates:
            tokens += update.tokens
            if pause:
                await asyncio.sleep(pause)
    return tokens


async def run_all(client: EngineClient, jobs: list[Job], clients: int) -> list[list[int]]:
    """Every job, `clients` of them at a time."""
    left = iter(range(len(jobs)))
    results: list[list[int]] = [[] for _ in jobs]

    async def work() -> None:
        for number in left:
            results[number] = await read(client, jobs[number])

    await asyncio.gather(*(work() for _ in range(clients)))
    return results


async def misbehave(
    client: EngineClient, jobs: list[Job], expected: list[list[int]], until: float, report: Report
) -> None:
    """One client: a request after the other, now and then cancelled or read slowly."""
    rng = random.Random(id(asyncio.current_task()))
    while time.monotonic() < until:
        number = rng.randrange(len(jobs))
        mood = rng.choices(["finished", "cancelled", "stalled"], [65, 25, 10])[0]
        task = asyncio.create_task(read(client, jobs[number], rng.random() * 0.5 if mood == "stalled" else 0.0))
        if mood == "cancelled":
            await asyncio.wait({task}, timeout=rng.random() * 2)
            task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            report.ends["cancelled"] += 1
        elif error := task.exception():
            report.ends["error"] += 1
            report.wrong.append(f"{type(error).__name__}: {error}")
        else:
            report.ends["slowly" if mood == "stalled" else "finished"] += 1
            if task.result() != expected[number]:
                report.wrong.append(f"request {number}: {task.result()} instead of {expected[number]}")


async def sample_lag(report: Report) -> None:
    """How late the event loop wakes up, over and over."""
    while True:
        due = time.perf_counter() + SAMPLE_SECONDS
        await asyncio.sleep(SAMPLE_SECONDS)
        report.lags.append(time.perf_counter() - due)


def resident_bytes(pid: int) -> int:
    """Memory of a process that is resident now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def compare(client: EngineClient, llm: LLM, jobs: list[Job], clients: int) -> tuple[list[list[int]], float]:
    """The jobs through both, in turn, from empty caches; prints the best round of each, and processor time per round.

    Returns what `LLM` said and the share of time lost.
    """
    prompts, params = [job[0] for job in jobs], [job[1] for job in jobs]
    pids = [os.getpid(), client.pid]
    seconds: dict[str, list[float]] = {"LLM": [], "EngineClient": []}
    used = {name: np.zeros(2) for name in seconds}
    for _ in range(ROUNDS):
        for name in seconds:
            llm.engine.reset_cache()
            await client.reset_cache()
            start, before = time.perf_counter(), np.array(list(map(cpu_seconds, pids)))
            if name == "LLM":
                expected = [result.token_ids for result in llm.generate(prompts, params)]
            else:
                assert await run_all(client, jobs, clients) == expected
            seconds[name].append(time.perf_counter() - start)
            used[name] += np.array(list(map(cpu_seconds, pids))) - before
    tokens = sum(map(len, expected))
    for name, values in seconds.items():
        here, there = used[name] / ROUNDS
        rounds = ", ".join(f"{value:.2f}" for value in values)
        print(f"{name:12}  {tokens / min(values):7,.0f} tokens/s; rounds of {rounds} s; ", end="")
        print(f"processor time {here:.2f} s here, {there:.2f} s in the engine's process")
    lost = 1 - min(seconds["LLM"]) / min(seconds["EngineClient"])
    print(f"lost on the way: {lost:.1%}")
    return expected, lost


async def load(client: EngineClient, jobs: list[Job], expected: list[list[int]], clients: int, seconds: float) -> bool:
    """Let the clients loose, and print what came of it; whether all is well."""
    report = Report()
    before = [resident_bytes(pid) for pid in (os.getpid(), client.pid)]
    first = await client.stats()
    sampler = asyncio.create_task(sample_lag(report))
    until = time.monotonic() + seconds
    await asyncio.gather(*(misbehave(client, jobs, expected, until, report) for _ in range(clients)))
    sampler.cancel()
    stats = await client.stats()
    generated, steps = stats.tokens_generated - first.tokens_generated, stats.steps - first.steps
    print(f"{clients} clients, {seconds:.0f} s: {dict(report.ends)}; {generated:,} tokens in {steps:,} steps")
    median, high = np.percentile(report.lags, [50, 99])
    print(
        f"event loop's lag: median {1e3 * median:.1f} ms, p99 {1e3 * high:.1f} ms, max {1e3 * max(report.lags):.1f} ms"
    )
    await client.reset_cache()
    stats, problems = await client.stats(), await client.problems()
    growth = [resident_bytes(pid) - old for pid, old in zip((os.getpid(), client.pid), before, strict=True)]
    print(f"left: {stats.running + stats.waiting} requests, {stats.pages_used} pages, {stats.slots_used} slots")
    print(f"memory: server {growth[0]:+,} B, engine {growth[1]:+,} B; problems: {problems or 'none'}")
    for sentence in report.wrong[:10]:
        print("WRONG:", sentence)
    leaked = stats.running or stats.waiting or stats.pages_used or stats.slots_used or problems
    return not (leaked or report.wrong or high > MOST_LAG)


async def measure(model: str, clients: int, seconds: float) -> int:
    """Both parts. Returns the exit status."""
    options = {"model": model, "device": "cpu", "state_bytes": 1 << 26, "max_running": 64, "step_tokens": 512}
    llm = LLM(progress=False, **options)
    client = await EngineClient.start(EngineConfig(**options))
    jobs = draw_jobs(2 * clients, random.Random(0))
    expected, lost = await compare(client, llm, jobs, clients)
    well = await load(client, jobs, expected, clients, seconds)
    await client.close()
    return 0 if well and lost < MOST_LOST else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", help="a model's folder")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by PyTorch in the engine's process: both run on one core
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        built_in = BUILT_IN if (BUILT_IN / "config.json").is_file() else None
        model = arguments.model or str(built_in or write_model(Path(folder)))
        return asyncio.run(measure(model, arguments.clients, arguments.seconds))


if __name__ == "__main__":
    sys.exit(main())
