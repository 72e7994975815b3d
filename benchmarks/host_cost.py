"""What a step costs on the host: scheduling, planning and reading results, with a model that answers at once.

    python benchmarks/host_cost.py

Prints the median over steady decode steps for growing numbers of running requests, at a short and a long context: the
cost per request must not grow with either.
"""

import argparse
import statistics
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch

from leadline.config import EngineConfig, ModelConfig
from leadline.engine.engine import Engine
from leadline.engine.memory import plan_memory
from leadline.engine.plan import StepPlan
from leadline.engine.runner import Sampling, StepResult
from leadline.engine.sampling import SamplingParams
from leadline.engine.transfer import joined, send
from leadline.model.state import State, StateSize, pages_for
from leadline.presets import PRESETS

TARGETS_MS = {256: 1.5, 1024: 5.0}


class StandIn:
    """A runner whose steps are done when they are launched: every request gets token 7. The plan is sent, as ever."""

    def __init__(self) -> None:
        self.result: list[int] = []

    def launch(self, plan: StepPlan, sampling: Sampling) -> "Future[StepResult]":
        """Copy the plan as for a device, and as often, and answer."""
        device = torch.device("cpu")
        if plan.prepares:
            plan.to_batch(device)
        send(joined(list(plan.arrays().values())), device)
        future: Future[StepResult] = Future()
        future.set_result(StepResult([7] * len(sampling.rows), None, None))
        return future

    def close(self) -> None:
        """Nothing to stop."""


def stand_in_engine(running: int, context: int, chunk: int = 8192) -> Engine:
    """An engine of V4-Flash's config with bookkeeping for `running` requests of `context` tokens, and no model."""
    model = ModelConfig.from_dict(PRESETS["flash"])
    pages = running * pages_for(context + 1024)
    config = EngineConfig(max_running=running, step_tokens=max(chunk, running), chunk_tokens=chunk, state_bytes=1 << 42)
    memory = plan_memory(model, config, torch.bfloat16)
    memory = replace(memory, size=replace(memory.size, pages=pages, slots=2 * running), running=running)
    memory = replace(memory, max_context=min(memory.max_context, pages * 128))
    nothing = ModelConfig.from_dict(
        {
            **PRESETS["flash"],
            "num_hidden_layers": 1,
            "compress_ratios": [0, 0],
            "head_dim": 64,
            "sliding_window": 1,
            "max_position_embeddings": 128,
            "num_hash_layers": 0,
        }
    )
    state = State(nothing, StateSize(1, 2 * running, 1, 1), torch.float32, torch.device("cpu"))
    engine = Engine(_no_forward, model, config, memory, state)
    engine.runner = StandIn()  # type: ignore[assignment]
    return engine


def _no_forward(*_: object) -> torch.Tensor:
    raise AssertionError("the stand-in runs no model")


def decode_step_ms(running: int, context: int, steps: int = 200) -> float:
    """Median milliseconds of a step in which `running` requests of `context` tokens decode one token each."""
    engine = stand_in_engine(running, context)
    draw = np.random.default_rng(0)
    params = SamplingParams(max_tokens=900, temperature=0.7, seed=1, ignore_eos=True)
    for _ in range(running):
        engine.add(draw.integers(2, 1000, context, dtype=np.int32), params)
    while engine.scheduler.waiting or any(r.known == r.prompt_length for r in engine.scheduler.running):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    assert len(engine.scheduler.running) == running
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    print(f"{'running':>8} {'context':>8} {'ms/step':>8} {'us/request':>11} {'target ms':>10}")
    for running in (1, 16, 64, 256, 1024):
        for context in (200, 4000) if running < 1024 else (200, 1000):
            cost = decode_step_ms(running, context, steps)
            target = TARGETS_MS.get(running)
            print(f"{running:8} {context:8} {cost:8.3f} {cost / running * 1e3:11.2f} {target or '':>10}")


if __name__ == "__main__":
    main()
