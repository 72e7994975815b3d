"""The speed of long prompts: tokens per second over all of it, and what a token costs at its start and at its end."""

from dataclasses import dataclass
from time import perf_counter

import numpy as np

from leadline.bench.latency import NoRoom
from leadline.bench.subject import Subject
from leadline.engine.sampling import SamplingParams
from leadline.model.state import pages_for

PART = 8
"""Start and end are this part of a prompt's steps, one step at least."""


@dataclass(frozen=True)
class PrefillRow:
    """One prompt of `tokens`, alone. `seconds` go from sending it to its first token.

    Microseconds a token are the mean over the first and the last eighth of its steps. `floor_seconds` is the time of
    its operations at the rate of a large bf16 product (see `Floors.prefill`).
    """

    tokens: int
    chunk: int
    seconds: float
    tokens_per_second: float
    start_us: float
    end_us: float
    floor_seconds: float
    ratio: float


def prefill_row(subject: Subject, tokens: int, seed: int) -> PrefillRow:
    """Run one prompt of random tokens and forget it. Raises NoRoom if the engine cannot hold it."""
    engine = subject.engine
    if tokens + 1 > engine.max_context or pages_for(tokens + 1) > engine.scheduler.pages.size:
        raise NoRoom(f"needs a context of {tokens + 1:,} tokens; there is room for {engine.max_context:,}")
    try:
        _run(subject, min(engine.memory.chunk_tokens, tokens), seed)
        times, run = _run(subject, tokens, seed)
    finally:
        subject.empty()
    seconds, floor = sum(times), subject.floors.prefill(tokens)
    part = max(1, len(times) // PART)
    return PrefillRow(
        tokens,
        max(run),
        seconds,
        tokens / seconds,
        sum(times[:part]) / sum(run[:part]) * 1e6,
        sum(times[-part:]) / sum(run[-part:]) * 1e6,
        floor,
        seconds / floor,
    )


def _run(subject: Subject, tokens: int, seed: int) -> tuple[list[float], list[int]]:
    """Seconds from the end of each step to that of the next, and the tokens of each step."""
    engine, scheduler = subject.engine, subject.engine.scheduler
    prompt = np.random.default_rng(seed).integers(0, engine.model.vocab_size, tokens, dtype=np.int32)
    moments = [perf_counter()]
    engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    planned = []
    while engine.busy:
        before = scheduler.tokens_run
        subject.step()
        moments.append(perf_counter())
        planned.append(scheduler.tokens_run - before)
    engine.reset_cache()
    run = [count for count in planned if count]
    # Where steps overlap, a step ends in the call after the one that began it: the last calls are the ends.
    return np.diff([moments[0], *moments[-len(run) :]]).tolist(), run
