"""Offline throughput and latency over a workload, synthetic or from a file."""

import json
import reprlib
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from leadline.bench.subject import Encode, Subject
from leadline.engine.engine import Engine, Stats
from leadline.engine.request import Request
from leadline.engine.sampling import SamplingParams

MOST_CULPRITS = 5
"""Bad requests that an error message names one by one."""


@dataclass(frozen=True)
class Job:
    """A request to be sent: its prompt [P] and sampling parameters."""

    prompt: NDArray[np.int32]
    params: SamplingParams


@dataclass
class Record:
    """What became of a job. Times are seconds since the run began."""

    prompt_tokens: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    """The moment of each generated token; tokens of one step share it."""
    cached_tokens: int = 0
    """Prompt tokens whose computation was reused."""

    @property
    def ttft(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        """From sending to the last token."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Mean time per token after the first one, of which there must be one."""
        return (self.arrivals[-1] - self.arrivals[0]) / (len(self.arrivals) - 1)


@dataclass(frozen=True)
class Summary:
    """A distribution, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Summary":
        """Of durations in seconds, of which there must be one."""
        median, p90, p99 = np.percentile(seconds, (50, 90, 99)) * 1e3
        return cls(float(np.mean(seconds) * 1e3), float(median), float(p90), float(p99))


@dataclass(frozen=True)
class Report:
    """Everything that `leadline bench` shows. `latency` is by name: TTFT, TPOT, ITL, E2E; empty ones are left out.

    Rates are per second of `duration`, which is seconds from the first request to the last token. `prefix_hit_share`
    is that of all prompt tokens whose computation was reused.
    """

    model: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    duration: float
    request_rate: float
    output_rate: float
    total_rate: float
    latency: dict[str, Summary]
    prefix_hit_share: float
    steps: int
    preemptions: int


def run(
    subject: Subject,
    source: "Lengths | Path",
    max_tokens: int,
    rate: float | None,
    concurrency: int | None,
    seed: int,
) -> tuple[dict[str, Any], Callable[[Path], None]]:
    """Run a workload and print its report; returns (the report as JSON holds it, what draws a plot of it).

    `source` are a synthetic workload's lengths, or a file of requests, of which those without a length generate
    `max_tokens` tokens. Raises ValueError naming every request that is bad.
    """
    engine, rng = subject.engine, np.random.default_rng(seed)
    if isinstance(source, Path):
        jobs = read_jobs(source, subject.encode, max_tokens, seed)
    else:
        jobs = synthetic_jobs(source, engine.model.vocab_size, rng, seed)
    check_jobs(engine, jobs)
    due = np.zeros(len(jobs)) if rate is None else np.cumsum(rng.exponential(1 / rate, len(jobs)))
    warm_up(engine, jobs[0])
    before = engine.stats()
    with _bar(sys.stderr.isatty()) as bar:
        task = bar.add_task("running", total=sum(job.params.max_tokens or 0 for job in jobs))
        records = measure(engine, jobs, due.tolist(), concurrency, lambda count: bar.advance(task, count))
    report = summarise(subject.name, records, before, engine.stats())
    show(report, Console())
    return asdict(report), lambda path: draw(records, path)


# ---------------------------------------------------------------------------------------------- the workload


@dataclass(frozen=True)
class Lengths:
    """A synthetic workload's shape; `spread` 0.2 draws each length evenly from 80 % to 120 % of the one given."""

    requests: int
    input: int
    output: int
    prefix: int
    spread: float

    def draw(self, rng: np.random.Generator, mean: int) -> list[int]:
        """A length of at least 1 for each request."""
        low, high = max(1, round(mean * (1 - self.spread))), round(mean * (1 + self.spread))
        return [int(length) for length in rng.integers(low, high + 1, self.requests)]


def synthetic_jobs(lengths: Lengths, vocab_size: int, rng: np.random.Generator, seed: int) -> list[Job]:
    """Prompts of random token ids, the first `lengths.prefix` of them the same in all; outputs run to full length."""
    prefix = rng.integers(0, vocab_size, lengths.prefix)
    sizes = zip(lengths.draw(rng, lengths.input), lengths.draw(rng, lengths.output), strict=True)
    return [
        Job(
            np.concatenate([prefix, rng.integers(0, vocab_size, input)]).astype(np.int32),
            SamplingParams(max_tokens=output, ignore_eos=True, seed=seed + number),
        )
        for number, (input, output) in enumerate(sizes)
    ]


def read_jobs(path: Path, encode: Encode, max_tokens: int, seed: int) -> list[Job]:
    """The requests of a JSON-lines file; a line's own `max_tokens` goes before the one given.

    Raises ValueError naming every bad line.
    """
    jobs, culprits = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or "prompt" not in record:
                raise ValueError(f"it must be a JSON object with a prompt, not {reprlib.repr(record)}")
            params = SamplingParams(max_tokens=record.get("max_tokens", max_tokens), seed=seed + number)
            jobs.append(Job(encode(record["prompt"]), params))
        except ValueError as error:
            culprits.append(f"line {number}: {error}")
    if not jobs and not culprits:
        culprits.append("there are no lines")
    if culprits:
        raise ValueError(f"{path}: {_several(culprits)}")
    return jobs


def check_jobs(engine: Engine, jobs: Sequence[Job]) -> None:
    """Raise ValueError naming every job that the engine would refuse."""
    culprits = []
    for number, job in enumerate(jobs, 1):
        try:
            engine.check(job.prompt, job.params)
        except ValueError as error:
            culprits.append(f"request {number}: {error}")
    if culprits:
        raise ValueError(_several(culprits))


def _several(culprits: Sequence[str]) -> str:
    more = [f"and {len(culprits) - MOST_CULPRITS} more"] if len(culprits) > MOST_CULPRITS else []
    return "\n".join([*culprits[:MOST_CULPRITS], *more])


# ---------------------------------------------------------------------------------------------------- the run


def warm_up(engine: Engine, job: Job) -> None:
    """Run a little of a job, so that what happens only once is not measured, and forget it."""
    prompt = job.prompt[: engine.memory.chunk_tokens]
    engine.add(prompt, SamplingParams(max_tokens=min(4, job.params.max_tokens or 4), ignore_eos=True))
    while engine.busy:
        engine.step()
    engine.reset_cache()


def measure(
    engine: Engine,
    jobs: Sequence[Job],
    due: Sequence[float],
    concurrency: int | None,
    advance: Callable[[int], None],
) -> list[Record]:
    """Send each job when it is due, in seconds from now, with at most `concurrency` of them under way; run them all.

    A job that has to wait for others to end counts as sent when it may go. `advance` is told of tokens generated, or
    given up by an early end.
    """
    queue = deque(zip(jobs, due, strict=True))
    most = engine.config.max_waiting if concurrency is None else min(concurrency, engine.config.max_waiting)
    records: list[Record] = []
    open_records: dict[Request, Record] = {}
    begun = time.perf_counter()
    while queue or open_records:
        now = time.perf_counter() - begun
        while queue and queue[0][1] <= now and len(open_records) < most:
            job, moment = queue.popleft()
            record = Record(len(job.prompt), moment if concurrency is None else now)
            [request] = engine.add(job.prompt, job.params)
            open_records[request] = record
            records.append(record)
        if not open_records:
            time.sleep(max(0.0, queue[0][1] - now))
            continue
        for update in engine.step():
            if update.error:
                raise update.error
            request, record = update.request, open_records[update.request]
            record.arrivals += [time.perf_counter() - begun] * len(update.tokens)
            advance(len(update.tokens))
            if update.finish_reason:
                record.cached_tokens = max(0, request.reused)
                advance((request.params.max_tokens or 0) - len(record.arrivals))
                del open_records[request]
    return records


def summarise(model: str, records: Sequence[Record], before: Stats, after: Stats) -> Report:
    """The figures of a run, of which `before` and `after` are the engine's counts."""
    prompt = sum(record.prompt_tokens for record in records)
    output = sum(len(record.arrivals) for record in records)
    duration = max(record.arrivals[-1] for record in records) - min(record.sent for record in records)
    latency = {
        "TTFT": [record.ttft for record in records],
        "TPOT": [record.tpot for record in records if len(record.arrivals) > 1],
        "ITL": [gap for record in records for gap in np.diff(record.arrivals).tolist()],
        "E2E": [record.e2e for record in records],
    }
    return Report(
        model=model,
        requests=len(records),
        prompt_tokens=prompt,
        output_tokens=output,
        duration=duration,
        request_rate=len(records) / duration,
        output_rate=output / duration,
        total_rate=(prompt + output) / duration,
        latency={name: Summary.of(values) for name, values in latency.items() if values},
        prefix_hit_share=sum(record.cached_tokens for record in records) / prompt,
        steps=after.steps - before.steps,
        preemptions=after.preemptions - before.preemptions,
    )


# ------------------------------------------------------------------------------------------------- the figures


def _bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)


def show(report: Report, console: Console) -> None:
    """Print a report as tables."""
    figures = {
        "requests": f"{report.requests:,} in {report.duration:.2f} s, {report.request_rate:.2f} /s",
        "prompt tokens": f"{report.prompt_tokens:,}, {report.prefix_hit_share:.1%} from the prefix cache",
        "output tokens": f"{report.output_tokens:,}, {report.output_rate:,.1f} /s",
        "all tokens": f"{report.prompt_tokens + report.output_tokens:,}, {report.total_rate:,.1f} /s",
        "steps": f"{report.steps:,}, {report.preemptions:,} preemptions",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in figures.items():
        table.add_row(name, value)
    console.print(f"[bold]{report.model}[/bold]")
    console.print(table)
    latency = Table("ms", box=SIMPLE_HEAD, pad_edge=False)
    for column in (column.name for column in fields(Summary)):
        latency.add_column(column, justify="right")
    for name, summary in report.latency.items():
        latency.add_row(name, *(f"{value:,.1f}" for value in asdict(summary).values()))
    console.print(latency)


def draw(records: Sequence[Record], path: Path) -> None:
    """Write a PNG: output tokens per second over the run, and the share of requests within each latency."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    arrivals = np.sort(np.concatenate([record.arrivals for record in records]))
    counts, edges = np.histogram(arrivals, bins=min(100, max(1, len(arrivals) // 20)), range=(0, arrivals[-1]))
    left.stairs(counts / np.diff(edges), edges)
    left.set(xlabel="time [s]", ylabel="output tokens/s", ylim=(0, None))
    several = [record for record in records if len(record.arrivals) > 1]
    for name, values in (
        ("TTFT", [record.ttft for record in records]),
        ("TPOT", [record.tpot for record in several]),
        ("E2E", [record.e2e for record in records]),
    ):
        if values:
            right.ecdf(np.array(values) * 1e3, label=name)
    right.set(xlabel="latency [ms]", ylabel="share of requests", xscale="log")
    right.legend()
    figure.savefig(path, format="png", dpi=150)
