"""`leadline serve` under load: many streaming clients that cancel and stall, and what the way there costs.

    python benchmarks/serve_load.py [--clients 200] [--seconds 60] [--model FOLDER] [--busy]

First the same requests through `LLM` and through the server, in turn: tokens/s, and the share that is lost. Then
clients for a while, a quarter of whose requests are cancelled and a tenth read slowly: the lag of the server's event
loop, and what remains. Every stream that ends by itself must say what `LLM` said. Exits with 1 for an error, a wrong
text, a leak, or more lag or loss than `MOST_LAG` and `MOST_LOST`. The loss is one of time, or with `--busy`, for a
machine that others use as well, of the engine's processor time.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray

from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams

MOST_LAG = 0.1
"""Seconds, at the 99th percentile."""
MOST_LOST = 0.15
STATE_MEMORY = 1 << 28
MAX_RUNNING = 64
ROUNDS = 3

Job = tuple[NDArray[np.int32], SamplingParams]


@dataclass
class Report:
    """What the clients saw."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Command:
    """`leadline serve` in a process of its own, and what can be seen of it from outside."""

    def __init__(self, model: str | None) -> None:
        """Start it, and wait until it says that it is ready."""
        options = f"--port 0 --device cpu --max-running {MAX_RUNNING} --state-memory {STATE_MEMORY}".split()
        arguments = [sys.executable, "-m", "leadline", "serve", *([model] if model else []), *options]
        self.process = subprocess.Popen(
            arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        said = ""
        while "ready: http://" not in said:
            assert self.process.stderr is not None
            line = self.process.stderr.readline()
            if not line:
                raise RuntimeError(said)
            said += line
        self.url = said.split("ready: ")[1].strip().removesuffix("/v1")
        self.port = int(self.url.rsplit(":", 1)[1])
        pid = self.process.pid
        self.pids = [pid, int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])]

    def reset_cache(self) -> None:
        """Forget every prefix."""
        httpx.post(f"{self.url}/v1/cache/reset", timeout=60).raise_for_status()

    def metrics(self) -> dict[str, float]:
        """The values of /metrics; a bucket's name ends in its bound."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        values = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, value = line.removeprefix("leadline:").rsplit(" ", 1)
                bound = re.search(r'le="([^"]*)"', name)
                values[name.split("{")[0] + (bound[1] if bound else "")] = float(value)
        return values

    def stop(self) -> None:
        """End it in order."""
        self.process.terminate()
        self.process.communicate(timeout=60)


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


async def stream(port: int, job: Job) -> AsyncGenerator[str, None]:
    """The texts of a streamed completion over a connection of its own, as they come.

    Raises RuntimeError for a status other than 200, an error in the stream, or a stream without an end. A client
    library would take more processor time than the server does.
    """
    prompt, params = job
    fields = "max_tokens seed temperature top_p top_k min_p repetition_penalty ignore_eos".split()
    body = json.dumps({"prompt": prompt.tolist(), "stream": True, **{name: getattr(params, name) for name in fields}})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(status.decode() + (await reader.read()).decode())
        async for line in reader:  # an event is one line of one chunk; the other lines say how long chunks are
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event["choices"][0]["text"]
        raise RuntimeError("the stream has no end")
    finally:
        writer.close()


async def read(port: int, job: Job, pause: float = 0.0) -> str:
    """All of what a job says, with `pause` seconds after each event."""
    texts = []
    async with aclosing(stream(port, job)) as events:
        async for text in events:
            texts.append(text)
            if pause:
                await asyncio.sleep(pause)
    return "".join(texts)


async def run_all(port: int, jobs: list[Job], clients: int) -> list[str]:
    """Every job, `clients` of them at a time."""
    left = iter(range(len(jobs)))
    results = [""] * len(jobs)

    async def work() -> None:
        for number in left:
            results[number] = await read(port, jobs[number])

    await asyncio.gather(*(work() for _ in range(clients)))
    return results


async def misbehave(port: int, jobs: list[Job], expected: list[str], until: float, report: Report) -> None:
    """One client: a request after the other, now and then cancelled or read slowly."""
    rng = random.Random(id(asyncio.current_task()))
    while time.monotonic() < until:
        number = rng.randrange(len(jobs))
        mood = rng.choices(["finished", "cancelled", "stalled"], [65, 25, 10])[0]
        task = asyncio.create_task(read(port, jobs[number], rng.random() * 0.5 if mood == "stalled" else 0.0))
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
                report.wrong.append(f"request {number}: {task.result()!r} instead of {expected[number]!r}")


def resident_bytes(pid: int) -> int:
    """Memory of a process that is resident now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, over all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(command: Command, llm: LLM, jobs: list[Job], clients: int, busy: bool) -> tuple[list[str], float]:
    """The jobs through both, in turn, from empty caches; prints the best round of each, and processor time per round.

    Returns what `LLM` said and the share of time lost, or with `busy` of processor time.
    """
    prompts, params = [job[0] for job in jobs], [job[1] for job in jobs]
    pids = [os.getpid(), *command.pids]
    seconds: dict[str, list[float]] = {"LLM": [], "server": []}
    used: dict[str, list[NDArray[np.float64]]] = {name: [] for name in seconds}
    for _ in range(ROUNDS):
        for name in seconds:
            llm.engine.reset_cache()
            command.reset_cache()
            start, before = time.perf_counter(), np.array(list(map(cpu_seconds, pids)))
            if name == "LLM":
                results = llm.generate(prompts, params)
                expected = [result.text for result in results]
            else:
                texts = asyncio.run(run_all(command.port, jobs, clients))
                assert texts == expected, "the server says something else"
            seconds[name].append(time.perf_counter() - start)
            used[name].append(np.array(list(map(cpu_seconds, pids))) - before)
    tokens = sum(result.completion_tokens for result in results)
    for name, values in seconds.items():
        here, server, engine = np.min(used[name], axis=0)
        rounds = ", ".join(f"{value:.2f}" for value in values)
        print(f"{name:6}  {tokens / min(values):7,.0f} tokens/s; rounds of {rounds} s; ", end="")
        print(f"least processor time {here:.2f} s here, {server:.2f} s in the server, {engine:.2f} s in its engine")
    lost = 1 - min(seconds["LLM"]) / min(seconds["server"])
    lost_processor = 1 - np.min(used["LLM"], axis=0)[0] / np.min(used["server"], axis=0)[2]
    print(f"lost on the way: {lost:.1%} of the time, {lost_processor:.1%} of the engine's processor time")
    return expected, float(lost_processor) if busy else lost


async def crowd(port: int, jobs: list[Job], expected: list[str], clients: int, seconds: float) -> Report:
    """Let the clients loose."""
    report = Report()
    until = time.monotonic() + seconds
    await asyncio.gather(*(misbehave(port, jobs, expected, until, report) for _ in range(clients)))
    return report


def load(command: Command, jobs: list[Job], expected: list[str], clients: int, seconds: float) -> bool:
    """Let the clients loose, and print what came of it; whether all is well."""
    memory = [resident_bytes(pid) for pid in command.pids]
    first = command.metrics()
    report = asyncio.run(crowd(command.port, jobs, expected, clients, seconds))
    time.sleep(1)  # the last of those who left are noticed
    last = command.metrics()
    grown = {name: value - first.get(name, 0) for name, value in last.items()}
    print(f"{clients} clients, {seconds:.0f} s: {dict(report.ends)}; {grown['generation_tokens_total']:,.0f} tokens")
    lag = "event_loop_lag_seconds_"
    late = 1 - grown[f"{lag}bucket{MOST_LAG}"] / grown[f"{lag}count"]
    mean = grown[f"{lag}sum"] / grown[f"{lag}count"]
    print(f"event loop's lag: mean {1e3 * mean:.1f} ms; {late:.2%} of {grown[f'{lag}count']:,.0f} beyond {MOST_LAG} s")
    command.reset_cache()
    names = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc kv_cache_reusable_perc slot_usage_perc".split()
    )
    left = {name: value for name, value in command.metrics().items() if name in names and value}
    growth = [resident_bytes(pid) - old for pid, old in zip(command.pids, memory, strict=True)]
    print(f"left: {left or 'nothing'}; memory: server {growth[0]:+,} B, engine {growth[1]:+,} B")
    for sentence in report.wrong[:10]:
        print("WRONG:", sentence)
    return not (left or report.wrong or late > 0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", help="a model's folder; default: the built-in model")
    parser.add_argument("--busy", action="store_true", help="judge by processor time")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by PyTorch in the engine's process: both run on one core
    torch.set_num_threads(1)
    command = Command(arguments.model)
    try:
        llm = LLM(arguments.model, progress=False, device="cpu", state_bytes=STATE_MEMORY, max_running=MAX_RUNNING)
        jobs = draw_jobs(2 * arguments.clients, random.Random(0))
        expected, lost = compare(command, llm, jobs, arguments.clients, arguments.busy)
        well = load(command, jobs, expected, arguments.clients, arguments.seconds)
    finally:
        command.stop()
    return 0 if well and lost < MOST_LOST else 1


if __name__ == "__main__":
    sys.exit(main())
