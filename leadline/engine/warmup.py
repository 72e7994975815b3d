"""Warm-up before anybody waits: every kernel is compiled or found in the cache, and decode steps are recorded."""

from dataclasses import dataclass

import numpy as np
import rich.progress as rich_progress
from rich.console import Console

from leadline.config import PAGE_TOKENS
from leadline.engine.engine import Engine
from leadline.engine.pretend import fill_state, pretend_prefilled
from leadline.engine.sampling import SamplingParams
from leadline.engine.start import Start

VARIETIES = (
    SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, max_tokens=2, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, presence_penalty=0.5, repetition_penalty=1.1, max_tokens=2, ignore_eos=True),
)
"""Requests that take turns: together they use every part of sampling."""


RECORDED_TOKENS = 8192
"""Contexts up to which decode graphs are recorded at once; longer ones when the first request reaches them."""
LAST_TOKENS = 1024
"""What runs of a prompt whose earlier tokens are taken as run: as many as `select` scores at once."""


@dataclass(frozen=True)
class Run:
    """`requests` prompts of `length` tokens each; of a single one `before` tokens are taken as run."""

    requests: int
    length: int
    before: int = 0


def warm_up(engine: Engine, start: Start) -> None:
    """Run ends of long prompts, prompts of up to a whole chunk, and short requests in growing numbers; record steps.

    Leaves the engine empty: no request, no reusable prefix. Its pools hold random rows, since a long prompt needs
    tokens before it. Says on stderr where the time of the whole start went, if progress is shown.
    """
    graphs = engine.runner.graphs
    classes = graphs.classes(-(-RECORDED_TOKENS // PAGE_TOKENS)) if graphs else []
    runs = _runs(engine)
    fill_state(engine.runner.state, 0)
    console = Console(stderr=True)
    shown = start.progress and console.is_terminal
    with rich_progress.Progress(transient=True, console=console, disable=not shown) as bar:
        task = bar.add_task("compiling kernels", total=len(runs) + len(classes))
        for shape in runs:
            _run(engine, shape)
            bar.advance(task)
        start.done("kernels")
        bar.update(task, description="recording steps")
        for size in reversed(classes):  # the largest first: smaller ones find room in its memory
            engine.runner.record(size)
            bar.advance(task)
    start.done("decode graphs")
    engine.reset_cache()
    if start.progress:
        kept = f"; {graphs.recorded} decode graphs in {graphs.memory / 2**20:,.0f} MiB" if graphs else ""
        console.print(start.report() + kept, soft_wrap=True)


def _runs(engine: Engine) -> list[Run]:
    """The largest first: whatever else runs finds room in its memory.

    Ends of long prompts only where prefixes are reused, since that is how a run finds the tokens before it.
    """
    running = min(engine.memory.running, engine.config.max_waiting)
    most = engine.max_context - 2
    longest = min(engine.memory.chunk_tokens, most)
    lengths = [length for length in (*sizes(longest), longest) if length > running]
    runs = [Run(1, length) for length in reversed(lengths)] + [Run(number, 1) for number in sizes(running)]
    if not engine.config.prefix_cache:
        return runs
    return long_runs(longest, min(most, engine.scheduler.pages.free * PAGE_TOKENS - 2)) + runs


def long_runs(chunk: int, most: int) -> list[Run]:
    """Ends of prompts of twice, four times .. a `chunk`, and of `most` tokens, the longest first."""
    lengths = [chunk << power for power in range(1, 64) if chunk << power < most] + [most]
    last = min(chunk, LAST_TOKENS)
    return [Run(1, length, length - last) for length in reversed(lengths) if length > chunk]


def sizes(most: int) -> list[int]:
    """1, 2, 4 and so on up to `most` at most."""
    return [1 << power for power in range(most.bit_length())] if most else []


def _run(engine: Engine, run: Run) -> None:
    engine.reset_cache()  # a prompt that is found as another's prefix would run as one token
    for number in range(run.requests):
        prompt = np.full(run.length, number % engine.model.vocab_size, np.int32)
        if run.before:
            pretend_prefilled(engine, prompt[: run.before])
        engine.add(prompt, VARIETIES[number % len(VARIETIES)])
    while engine.busy:
        for update in engine.step():
            if update.error:
                raise update.error
