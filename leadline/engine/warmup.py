"""Warm-up before anybody waits: every kernel is compiled or found in the cache, and decode steps are recorded."""

from time import perf_counter

import numpy as np
import rich.progress as rich_progress
import torch
from rich.console import Console

from leadline.config import PAGE_TOKENS
from leadline.engine.engine import Engine
from leadline.engine.sampling import SamplingParams

VARIETIES = (
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, max_tokens=2, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.1, max_tokens=2, ignore_eos=True),
)
"""Requests that take turns: together they use every part of sampling."""


RECORDED_TOKENS = 8192
"""Contexts up to which decode graphs are recorded at once; longer ones when the first request reaches them."""


def warm_up(engine: Engine, progress: bool) -> None:
    """Run prompts of up to a whole chunk, then short requests in growing numbers, and record decode graphs.

    Leaves the engine empty: no request, no reusable prefix. Says on stderr what it took if `progress`.
    """
    begun, graphs = perf_counter(), engine.runner.graphs
    classes = graphs.classes(-(-RECORDED_TOKENS // PAGE_TOKENS)) if graphs else []
    runs = _runs(engine)
    console = Console(stderr=True)
    with rich_progress.Progress(
        transient=True, console=console, disable=not progress or not console.is_terminal
    ) as bar:
        task = bar.add_task("compiling kernels", total=len(runs) + len(classes))
        for shape in runs:
            _run(engine, *shape)
            bar.advance(task)
        bar.update(task, description="recording steps")
        before = _reserved(engine)
        for size in reversed(classes):  # the largest first: smaller ones find room in its memory
            engine.runner.record(size)
            bar.advance(task)
    engine.reset_cache()
    if progress:
        took, memory = perf_counter() - begun, _reserved(engine) - before
        console.print(f"warm after {took:.1f} s; {len(classes)} decode graphs in {memory / 2**20:,.0f} MiB")


def _reserved(engine: Engine) -> int:
    """Bytes that PyTorch has taken from the GPU, 0 on a CPU."""
    device = engine.runner.device
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _runs(engine: Engine) -> list[tuple[int, int]]:
    """(requests, tokens of each): numbers of requests, then lengths of a prompt."""
    running = min(engine.memory.running, engine.config.max_waiting)
    longest = min(engine.memory.chunk_tokens, engine.max_context - 2)
    lengths = [length for length in (*sizes(longest), longest) if length > running]
    # The largest first: whatever else runs finds room in its memory.
    return [(1, length) for length in reversed(lengths)] + [(number, 1) for number in sizes(running)]


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
