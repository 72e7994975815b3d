"""Warm-up: steps of every size class before anybody waits, so that every kernel is compiled or found in the cache."""

import numpy as np
import rich.progress as rich_progress
from rich.console import Console

from leadline.engine.engine import Engine
from leadline.engine.sampling import SamplingParams

VARIETIES = (
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, max_tokens=2, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.1, max_tokens=2, ignore_eos=True),
)
"""Requests that take turns: together they use every part of sampling."""


def warm_up(engine: Engine, progress: bool) -> None:
    """Run short requests of one token each in growing numbers, then prompts of growing length up to a whole chunk.

    Leaves the engine empty: no request, no reusable prefix.
    """
    running = min(engine.memory.running, engine.config.max_waiting)
    numbers = sizes(running)
    longest = min(engine.config.chunk_tokens, engine.max_context - 2)
    lengths = [length for length in (*sizes(longest), longest) if length > running]
    console = Console(stderr=True)
    with rich_progress.Progress(
        transient=True, console=console, disable=not progress or not console.is_terminal
    ) as bar:
        task = bar.add_task("compiling kernels", total=len(numbers) + len(lengths))
        for shape in [(number, 1) for number in numbers] + [(1, length) for length in lengths]:
            _run(engine, *shape)
            bar.advance(task)
    engine.reset_cache()


def sizes(most: int) -> list[int]:
    """1, 2, 4 and so on up to `most` at most."""
    return [1 << power for power in range(most.bit_length())] if most else []


def _run(engine: Engine, requests: int, length: int) -> None:
    for number in range(requests):
        prompt = np.full(length, number % engine.model.vocab_size, np.int32)
        engine.add(prompt, VARIETIES[number % len(VARIETIES)])
    while engine.busy:
        for update in engine.step():
            if update.error:
                raise update.error
