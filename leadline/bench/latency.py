"""The time of a decode step, by batch and context, as requests see it: from one token to the next."""

from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np

from leadline.bench.breakdown import busy_seconds, shares, watched
from leadline.bench.subject import Subject, hit_steps
from leadline.config import CSA_RATIO, PAGE_TOKENS
from leadline.engine.pretend import pretend_prefilled
from leadline.engine.request import Request
from leadline.engine.sampling import SamplingParams
from leadline.model.state import pages_for

WARM_STEPS = 8
PROFILED_STEPS = 4
SPARE_STEPS = 8
"""Steps that a request may take part in beside all that are planned, as the first and the last overlap others."""


@dataclass(frozen=True)
class OperationRow:
    """One operation in a decode step; times in milliseconds."""

    operation: str
    launches: float
    ms: float
    floor_ms: float


@dataclass(frozen=True)
class DecodeRow:
    """Decode steps of `batch` requests at `context` tokens. Times are milliseconds of one step.

    `experts_hit` are distinct routed experts per layer, `floor_ms` the bytes of `Floors.decode` over the bandwidth, by
    operation in `floors_ms`, and `ratio` the median over the floor. `gpu_ms` is the time in which the GPU did
    something, and `idle_share` what of the median step is left of it: None until `profiled`, as are `operations`.
    """

    batch: int
    context: int
    steps: int
    median_ms: float
    mean_ms: float
    p99_ms: float
    tokens_per_second: float
    experts_hit: float
    floor_ms: float
    floors_ms: dict[str, float]
    ratio: float
    gpu_ms: float | None = None
    idle_share: float | None = None
    operations: list[OperationRow] = field(default_factory=list)


class NoRoom(ValueError):
    """A row that this engine cannot hold; the message says what it would need."""


def decode_row(subject: Subject, batch: int, context: int, steps: int, seed: int) -> DecodeRow:
    """Measure one row; the engine is empty before and after. Raises NoRoom."""
    try:
        requests = start(subject, batch, context, steps, seed)
        for _ in range(WARM_STEPS):
            subject.step()
        times = timed(subject, steps)
        hit = subject.experts_hit(batch)
        assert all(request.finish_reason is None for request in requests), "a request ended before its row"
    finally:
        subject.empty()
    floors = {name: seconds * 1e3 for name, seconds in subject.floors.decode(batch, context, hit).items()}
    median, floor_ms = float(np.median(times)) * 1e3, sum(floors.values())
    return DecodeRow(
        batch,
        context,
        len(times),
        median,
        float(np.mean(times)) * 1e3,
        float(np.percentile(times, 99)) * 1e3,
        batch / median * 1e3,
        hit / subject.engine.model.num_hidden_layers,
        floor_ms,
        floors,
        median / floor_ms,
    )


def profiled(subject: Subject, row: DecodeRow, seed: int, breakdown: bool) -> DecodeRow:
    """`row` with what the GPU did in such steps, by operation if `breakdown`. Raises NoRoom.

    To be called when all rows are measured: once PyTorch's profiler has run in a process, launches cost the host more.
    """
    try:
        start(subject, row.batch, row.context, row.steps, seed)
        for _ in range(WARM_STEPS):
            subject.step()
        kernels = watched(subject.engine, PROFILED_STEPS)
    finally:
        subject.empty()
    busy = busy_seconds(kernels) / PROFILED_STEPS * 1e3
    parts = shares(kernels, PROFILED_STEPS) if breakdown else {}
    operations = [
        OperationRow(name, part.launches, part.seconds * 1e3, row.floors_ms[name]) for name, part in parts.items()
    ]
    return replace(row, gpu_ms=busy, idle_share=max(0.0, 1 - busy / row.median_ms), operations=operations)


def most_steps(subject: Subject, batch: int, steps: int) -> int:
    """Tokens that a request of such a row may generate: in all its steps, and while others are still on their prompt's
    rest, of less than a page and a CSA window.
    """
    rest = batch * (PAGE_TOKENS + CSA_RATIO)
    starting = 2 * -(-rest // subject.engine.memory.size.step_tokens)
    return starting + WARM_STEPS + steps + PROFILED_STEPS + hit_steps(batch) + SPARE_STEPS


def lengths(subject: Subject, batch: int, context: int, steps: int) -> list[int]:
    """The prompts' lengths: `context` or, where that is all that a request can have, a little less.

    They differ by up to three tokens, so that the requests' CSA windows do not all close in the same step; one token
    of a prompt whose pages are full is left to run.
    """
    longest = subject.engine.max_context - most_steps(subject, batch, steps) - CSA_RATIO
    base = context if context <= longest else max(0, longest) // PAGE_TOKENS * PAGE_TOKENS
    return [base + 1 + number % CSA_RATIO for number in range(batch)]


def needs(subject: Subject, batch: int, context: int, steps: int) -> None:
    """Raise NoRoom if the engine cannot hold such a row."""
    engine, most = subject.engine, most_steps(subject, batch, steps)
    if batch > engine.memory.running:
        raise NoRoom(f"{batch} requests are more than the {engine.memory.running} that may run")
    if context > engine.model.max_position_embeddings:
        raise NoRoom(f"the model has contexts up to {engine.model.max_position_embeddings:,} tokens")
    size, wanted = engine.scheduler.pages.size, batch * pages_for(context + 1)
    prompts = lengths(subject, batch, context, steps)
    pages = sum(pages_for(length + most) for length in prompts)
    if max(pages, wanted) > size:
        missing = (max(pages, wanted) - size) * engine.memory.page_bytes
        raise NoRoom(f"needs {max(pages, wanted):,} pages, there are {size:,}: {missing / 2**30:.2g} GiB are missing")
    if context > engine.max_context or max(prompts) + most > engine.max_context:
        raise NoRoom(f"contexts here go up to {engine.max_context:,} tokens, of which {most:,} are for the steps")


def start(subject: Subject, batch: int, context: int, steps: int, seed: int) -> list[Request]:
    """Requests that decode: their prompts are taken as run, up to the last page's remainder. Raises NoRoom."""
    needs(subject, batch, context, steps)
    engine, rng = subject.engine, np.random.default_rng(seed)
    vocabulary = engine.model.vocab_size
    requests: list[Request] = []
    prompts = [rng.integers(0, vocabulary, size, dtype=np.int32) for size in lengths(subject, batch, context, steps)]
    pretended = [pretend_prefilled(engine, prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=most_steps(subject, batch, steps), ignore_eos=True, seed=seed + number)
        requests += engine.add(prompt, params)
    while any(request.known == request.prompt_length for request in requests):
        subject.step()
    reused = [request.reused for request in requests]
    assert reused == pretended, f"{reused} tokens were found, {pretended} pretended"
    return requests


def timed(subject: Subject, steps: int) -> list[float]:
    """Seconds of each of `steps` steps, from the tokens of one to those of the next."""
    moments = [perf_counter()]
    for _ in range(steps):
        subject.step()
        moments.append(perf_counter())
    return np.diff(moments).tolist()
