"""The engine that is measured, and what has to be known of it beside."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.bench.floors import Floors, Machine, RowBytes, experts_hit, wait
from leadline.config import EngineConfig, ModelConfig
from leadline.engine.engine import Engine, as_token_ids
from leadline.engine.llm import LLM, Prompt
from leadline.engine.pretend import fill_state
from leadline.engine.random_weights import official_format, random_engine

Encode = Callable[[Prompt], NDArray[np.int32]]


@dataclass
class Subject:
    """An engine with nothing in it, a name for the report, and how a prompt becomes token ids [P]."""

    engine: Engine
    name: str
    encode: Encode
    weight_bytes: int | None = None
    """None where a checkpoint was loaded, of which nobody counted."""
    counter: Tensor | None = field(default=None, init=False)

    @cached_property
    def floors(self) -> Floors:
        """Of this model on this machine, which is measured when this is first asked for."""
        model = self.engine.model
        rows = RowBytes.of(self.engine.runner.state)
        return Floors(model, official_format(model), rows, Machine.measured(self.device))

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.engine.runner.device

    def prepare(self, seed: int) -> None:
        """Fill the state at random, measure the machine, and let go of the memory that only this took."""
        fill_state(self.engine.runner.state, seed)
        _ = self.floors
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def step(self) -> None:
        """One step. Raises what ended a request, if something did."""
        for update in self.engine.step():
            if update.error:
                raise update.error

    def empty(self) -> None:
        """End every request, whatever it is at, and forget all prefixes."""
        scheduler = self.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self.engine.abort(request)
        while self.engine.busy:
            self.engine.step()
        self.engine.reset_cache()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Experts are counted within, and nowhere else: it costs a launch or two a layer."""
        runner = self.engine.runner
        if self.counter is None:
            self.engine.expert_load()
            self.counter = runner.expert_counts
        runner.expert_counts = self.counter
        try:
            yield
        finally:
            runner.expert_counts = None

    def counts(self) -> NDArray[np.int64]:
        """[L, E] since the first time; within `counting`."""
        wait(self.device)
        return np.array(self.engine.expert_load(), np.int64)

    def experts_hit(self, batch: int) -> float:
        """Distinct experts of all layers that a step of the `batch` running requests reads, from some of its steps.

        256 tokens' choices are enough for any batch: with fewer, experts that are chosen rarely look as if they never
        were. At batch 4 of 256 experts the number comes out 0.6 % low.
        """
        steps = hit_steps(batch)
        with self.counting():
            before = self.counts()
            for _ in range(steps):
                self.step()
            counted = self.counts() - before
        return experts_hit(counted, batch, self.engine.model.num_experts_per_tok)

    def memory(self) -> dict[str, int]:
        """Bytes on the GPU: of weights, of the requests' state, and the most that has been taken beside them since
        `prepare`, graphs and the allocator's reserve included. Empty on a CPU, and for a checkpoint.
        """
        if self.device.type != "cuda" or self.weight_bytes is None:
            return {}
        pools = self.engine.memory.total_bytes
        beyond = torch.cuda.max_memory_reserved(self.device) - pools - self.weight_bytes
        return {"weights": self.weight_bytes, "state": pools, "beyond": beyond}


def hit_steps(batch: int) -> int:
    """Steps over which experts are counted. With one token a step the number of its experts is known."""
    return 4 if batch == 1 else max(8, math.ceil(256 / batch))


def loaded_subject(llm: LLM) -> Subject:
    """Of a checkpoint."""
    return Subject(llm.engine, llm.config.model or "built-in model", llm.encode)


def random_subject(config: EngineConfig, model: ModelConfig, name: str, stacks: int, progress: bool) -> Subject:
    """Of random weights in the geometry `name`, with `stacks` distinct stacks of experts. See `random_engine`."""
    engine, weight_bytes = random_engine(config, model, stacks, progress)
    layers = model.num_hidden_layers
    name = f"{name}, {layers} layers, random weights of {weight_bytes / 1e9:,.3g} GB"
    if stacks < layers:
        name += f"; the layers share {stacks} distinct stacks of experts"
    return Subject(engine, name, _ids_alone, weight_bytes)


def _ids_alone(prompt: Prompt) -> NDArray[np.int32]:
    if isinstance(prompt, str):
        raise ValueError("random weights have no tokenizer: give prompts as lists of token ids")
    return as_token_ids(prompt)
