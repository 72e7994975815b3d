"""A soak: minutes of random load on one engine, refitted while it serves, and nothing leaks, breaks or gets slower.

    python benchmarks/gpu_soak.py --seconds 600                                      the built-in model
    python benchmarks/gpu_soak.py --seconds 600 --random-weights flash --layers 8 --state-bytes 12e9

Requests of mixed lengths and shared beginnings come and go, some cancelled, with penalties, choices, log-probabilities
and grammars, in chunks of changing size. The engine is audited as it runs. After every tenth of the time the load runs
out: what is held then is compared, and a fixed prompt, alone, must give the same tokens. The last line says how it
went; exits with 1 if anything was wrong. On a CPU (`--device cpu`) memory is the process's, and speed is not judged.
"""

import argparse
import functools
import gc
import importlib.util
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from leadline.checkpoint.loader import load
from leadline.checkpoint.reader import Checkpoint
from leadline.config import EngineConfig, ModelConfig
from leadline.engine.constraint import Constraint
from leadline.engine.engine import Engine, Update
from leadline.engine.loading import BUILT_IN, build_engine, read_tokenizer
from leadline.engine.random_weights import RandomWeights, fill_random, geometry, official_format
from leadline.engine.request import Request
from leadline.engine.sampling import SamplingParams
from leadline.engine.start import Start
from leadline.model.weights import WeightStore

LAPS = 10
"""How often the load runs out. The first lap only warms up; of the others the last third is compared with the first."""
AUDIT_STEPS = 50
CHUNKS, CHUNK_STEPS = (16, 100, 128, 700), 100
"""Sizes of chunks beside the engine's own, and for how many steps each is kept."""
PROBE_TOKENS, PROBE_PROMPT = 64, 300
MOST_GROWTH = 32 << 20
"""Bytes that may be in use more after the last lap than after the first on a GPU, and four times as many of a process.
PyTorch's reserve may be eight times as much larger."""
MOST_SLOWER = 1.2
GRAMMAR = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-c]{2,9}"}})


@dataclass(frozen=True)
class Lap:
    """Tokens and steps that were run, in how many seconds, and what the idle engine holds and says afterwards."""

    tokens: int
    steps: int
    seconds: float
    allocated: int
    reserved: int
    pages: int
    slots: int
    probe: list[int]
    probe_seconds: float
    """The same work in every lap, with nothing beside it."""


def build(options: argparse.Namespace) -> tuple[Engine, Callable[[], None]]:
    """The engine, and what puts its weights, the same again, in their places."""
    config = EngineConfig(
        device=options.device,
        state_bytes=options.state_bytes,
        max_running=options.max_running,
        max_context=options.max_context,
    )
    stores: list[WeightStore] = []
    put: Callable[[WeightStore], None]

    def fill(weights: WeightStore) -> None:
        stores.append(weights)
        put(weights)

    if options.random_weights:
        model = geometry(options.random_weights, options.layers)
        put = functools.partial(fill_random, seed=0)
        store = functools.partial(RandomWeights, model.num_hidden_layers)
        engine = build_engine(model, config, official_format(model), store, fill, None, Start(progress=False))
    else:
        model, checkpoint = ModelConfig.from_folder(BUILT_IN), Checkpoint(BUILT_IN)
        put = functools.partial(_load, model, checkpoint)
        tokenizer = read_tokenizer(BUILT_IN, model)
        engine = build_engine(model, config, checkpoint.format, WeightStore, fill, tokenizer, Start(progress=False))

    def refit() -> None:
        with stores[0].filling():
            put(stores[0])

    return engine, refit


def _load(model: ModelConfig, checkpoint: Checkpoint, weights: WeightStore) -> None:
    load(model, weights.slots, checkpoint)


class Load:
    """Random requests for an engine, and what is found wrong with their results."""

    def __init__(self, engine: Engine, most: int, seed: int) -> None:
        self.engine, self.most, self.rng = engine, most, random.Random(seed)
        self.longest = min(engine.max_context - 200, 6000)
        self.limits = engine.scheduler.limits
        self.grammars = engine.tokenizer is not None and importlib.util.find_spec("xgrammar") is not None
        self.stems = [self.ids(self.longest) for _ in range(4)]
        self.ends: Counter[str] = Counter()
        self.problems: list[str] = []
        self.live: dict[Request, int] = {}
        self.steps = 0

    def ids(self, length: int) -> NDArray[np.int32]:
        return np.array([self.rng.randrange(3, self.engine.model.vocab_size) for _ in range(length)], np.int32)

    def add(self) -> None:
        """One request, of which a quarter is to be cancelled at some moment."""
        rng = self.rng
        length = rng.choice([rng.randint(1, 40), rng.randint(1, 500), rng.randint(1, self.longest)])
        prompt = np.concatenate([rng.choice(self.stems)[: rng.randint(0, length)], self.ids(rng.randint(1, 20))])
        constrained = self.grammars and rng.random() < 0.1
        params = SamplingParams(
            temperature=rng.choice([0, 0.7, 1.0]),
            top_k=rng.choice([0, 0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            max_tokens=rng.choice([1, rng.randint(1, 30), rng.randint(1, 150)]),
            ignore_eos=not constrained and rng.random() < 0.7,
            logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=0 if rng.random() < 0.05 else None,
            n=rng.choice([1, 1, 1, 3]),
            seed=rng.randrange(1000),
            constraint=Constraint(GRAMMAR) if constrained else None,
        )
        for request in self.engine.add(prompt, params):
            self.live[request] = self.steps + rng.randrange(200) if rng.random() < 0.25 else -1

    def step(self, feeding: bool) -> None:
        """Bring requests if there is room, cancel those whose moment has come, and take a step."""
        if self.steps % CHUNK_STEPS == 0:
            size = min(self.rng.choice([*CHUNKS, self.limits.chunk_tokens]), self.limits.chunk_tokens)
            self.engine.scheduler.limits = replace(self.limits, chunk_tokens=size)
        while feeding and len(self.live) < self.most and self.rng.random() < 0.6:
            self.add()
        for request in [request for request, moment in self.live.items() if moment == self.steps]:
            self.engine.abort(request)
        for update in self.engine.step():
            self.take(update)
        self.steps += 1
        if self.steps % AUDIT_STEPS == 0:
            self.problems += self.engine.problems()

    def run_out(self) -> None:
        """Steps without new requests until all have ended; then chunks are as large as the engine makes them."""
        while self.engine.busy:
            self.step(feeding=False)
        self.engine.scheduler.limits = self.limits

    def take(self, update: Update) -> None:
        """Look at what a step brought."""
        scores = [entry.logprob for entry in update.logprobs or []]
        scores += [entry.logprob for _, entry in update.prompt_logprobs or []]
        if not all(map(math.isfinite, scores)):
            self.problems.append(f"request {update.request.number} got log-probabilities {scores[:5]}")
        if update.error is not None:
            self.problems.append(f"request {update.request.number} failed: {update.error!r}")
        if update.finish_reason:
            self.ends[update.finish_reason] += 1
            self.live.pop(update.request, None)


def held(engine: Engine) -> tuple[int, int]:
    """Bytes in use and bytes taken: of PyTorch on a GPU, of the process on a CPU."""
    gc.collect()
    device = engine.runner.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return resident, resident


def run_lap(engine: Engine, load: Load, until: float, refit: Callable[[], None]) -> Lap:
    """Load until the moment `until` or until something is wrong, with a refit half-way; then see what is left."""
    before, half, fitted = engine.stats(), (time.monotonic() + until) / 2, False
    while time.monotonic() < until and not load.problems:
        load.step(feeding=True)
        if not fitted and time.monotonic() > half:  # requests are under way
            refit()
            fitted = True
    load.run_out()
    after = engine.stats()
    engine.reset_cache()
    load.problems += engine.problems()
    idle = engine.stats()
    allocated, reserved = held(engine)
    begun = time.monotonic()
    said = probe(engine)
    return Lap(
        after.tokens_run - before.tokens_run,
        after.steps - before.steps,
        after.busy_seconds - before.busy_seconds,
        allocated,
        reserved,
        idle.pages_used,
        idle.slots_used,
        said,
        time.monotonic() - begun,
    )


def probe(engine: Engine) -> list[int]:
    """What a fixed prompt gives, alone."""
    prompt = np.arange(3, 3 + PROBE_PROMPT, dtype=np.int32) % engine.model.vocab_size
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=PROBE_TOKENS, ignore_eos=True))
    tokens: list[int] = []
    while engine.busy:
        for update in engine.step():
            tokens += update.tokens
    engine.reset_cache()
    return tokens


def rate(laps: list[Lap]) -> float:
    """Tokens a second; 0 if no step was made."""
    return sum(each.tokens for each in laps) / max(1e-9, sum(each.seconds for each in laps))


def verdict(laps: list[Lap], on_gpu: bool) -> list[str]:
    """Every way in which laps are worse than the first after the warm-up."""
    first, last, found = laps[1], laps[-1], []
    before, after = rate(laps[1:4]), rate(laps[-3:])
    for each in laps:
        if each.pages or each.slots:
            found.append(f"{each.pages} pages and {each.slots} slots are held by nobody")
        if each.probe != first.probe:
            found.append(f"the probe gave {each.probe[:8]} instead of {first.probe[:8]}")
    if last.allocated - first.allocated > MOST_GROWTH * (1 if on_gpu else 4):
        found.append(f"{last.allocated - first.allocated:+,} bytes in use since the first lap")
    if last.reserved - first.reserved > 8 * MOST_GROWTH:
        found.append(f"{last.reserved - first.reserved:+,} bytes taken since the first lap")
    if on_gpu and before > MOST_SLOWER * after:
        found.append(f"{after:,.0f} tokens/s in the last third, {before:,.0f} in the first")
    return found


def summary(engine: Engine, load: Load, laps: list[Lap], problems: list[str]) -> str:
    """The last line."""
    stats, ends = engine.stats(), ", ".join(f"{count:,} {end}" for end, count in load.ends.items())
    rates = " / ".join(f"{rate(laps[first : first + 3]):,.0f}" for first in (1, 4, 7))
    grown = laps[-1].allocated - laps[1].allocated, laps[-1].reserved - laps[1].reserved
    return (
        f"{'BAD' if problems else 'OK '} {stats.steps:,} steps; requests: {ends}; {stats.preemptions:,} preemptions; "
        f"tokens run {stats.tokens_run:,}, reused {stats.tokens_reused:,}; tokens/s by thirds {rates}; "
        f"bytes in use {grown[0]:+,}, taken {grown[1]:+,}; problems: {'; '.join(problems[:5]) or 'none'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600, help="of the whole run, loading included")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--random-weights", help="a preset's geometry instead of the built-in model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--state-bytes", type=lambda text: int(float(text)), help="what is left on a GPU by default")
    parser.add_argument("--max-running", type=int, default=48)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    engine, refit = build(options)
    load, laps, begun = Load(engine, 2 * options.max_running, options.seed), [], time.monotonic()
    for number in range(1, LAPS + 1):
        laps.append(run_lap(engine, load, begun + (end - begun) * number / LAPS, refit))
        last = laps[-1]
        speed = f"{rate([last]):,.0f} tokens/s, {last.seconds / max(1, last.steps) * 1e3:.2f} ms a step"
        alone = f"the probe alone {last.probe_seconds * 1e3:.0f} ms"
        print(f"{speed}, {alone}; in use {last.allocated:,} B, taken {last.reserved:,} B", flush=True)
    problems = list(dict.fromkeys(load.problems + verdict(laps, engine.runner.device.type == "cuda")))
    print(summary(engine, load, laps, problems))
    engine.close()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
