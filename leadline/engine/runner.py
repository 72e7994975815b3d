"""The runner: executes a step plan on the device, samples, and brings the results back when they are asked for."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.engine.graphs import DecodeGraphs, SizeClass
from leadline.engine.plan import StepPlan
from leadline.engine.sampling import SamplingRow, sampling_tensors
from leadline.engine.transfer import Receipt, send
from leadline.kernels.sample import TokenCounts, logprobs, sample
from leadline.model.state import Forward, State
from leadline.model.tokens import chosen_ids

LOGPROB_ROWS = 64
"""Rows whose log-probabilities are made together."""

LogprobTensors = tuple[Tensor, Tensor, Tensor]
"""What `logprobs` gives."""


@dataclass(frozen=True)
class Sampling:
    """What to do with a step's logits rows [N, V]: rows `0 .. len(rows) - 1` are sampled, the others only scored."""

    rows: list[SamplingRow]
    slots: list[int]
    """The frontier slot in which each sampled token's request runs on."""
    top_logprobs: int | None
    """The most log-probabilities that any sampled row wants; None for none."""
    scored_tokens: list[int]
    """For each further row the prompt token that follows it, whose log-probability is wanted."""
    scored_top: int


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of some rows: of the token itself, and of the most probable ones with their ids."""

    chosen: NDArray[np.float32]
    top: NDArray[np.float32]
    top_ids: NDArray[np.int64]


@dataclass(frozen=True)
class StepResult:
    """What a step brought back: sampled tokens, and log-probabilities where wanted."""

    tokens: list[int]
    sampled: Logprobs | None
    scored: Logprobs | None


class Launched(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Wait for it. Raises whatever it raised."""


class Runner:
    """Owns the state tensors and the last sampled token of every slot; steps run in the order of their launch.

    A GPU works behind the host anyway: a launch returns when the step's work is queued, and its result waits for it.
    """

    def __init__(
        self, forward: Forward, state: State, vocab_size: int, running: int, device: torch.device, overlap: bool
    ) -> None:
        self.forward, self.state, self.device = forward, state, device
        self.vocab_size, self.running = vocab_size, running
        self.last_tokens = torch.zeros(state.size.slots, dtype=torch.int64, device=device)
        self.counts: TokenCounts | None = None
        self.expert_counts: Tensor | None = None
        self.graphs: DecodeGraphs | None = None
        if device.type == "cuda":
            self.graphs = DecodeGraphs(forward, state, running, state.page_table.shape[1], vocab_size)
        # On a CPU a thread of its own is the device while the host plans the next step.
        self._worker = ThreadPoolExecutor(1, "leadline-step") if overlap and device.type == "cpu" else None

    def record(self, size: SizeClass) -> None:
        """Record the graph of a size class, if steps are recorded at all."""
        if self.graphs is not None:
            with torch.inference_mode():
                self.graphs.record(size, self.last_tokens, self.expert_counts)

    def start_counts(self, row: int, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        """Before its next step: `row` of the penalties' counts belongs to a request with these tokens."""
        if self.counts is None:
            self.counts = TokenCounts.empty(self.running, self.vocab_size, self.device)
        counts = self.counts
        values = [send(tokens.astype(np.int64), self.device) for tokens in (prompt, output)]
        self._submit(lambda: counts.start(row, *values))

    def expert_load(self, layers: int, experts: int) -> list[list[int]]:
        """How often each of the layers chose each of its experts since the first call, which begins to count."""
        if self.expert_counts is None:
            self.expert_counts = torch.zeros(layers, experts, dtype=torch.int64, device=self.device)
        return self.expert_counts.tolist()

    def launch(self, plan: StepPlan, sampling: Sampling) -> Launched:
        """Start a step; its result can be waited for."""
        if self._worker:
            return self._worker.submit(lambda: self._run(plan, sampling).result())
        try:
            return self._run(plan, sampling)
        except Exception as error:  # handed to whoever reads the result, as a worker thread would
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        """Stop the worker thread, if there is one."""
        if self._worker:
            self._worker.shutdown()

    def _submit(self, work: Callable[[], object]) -> None:
        """Do something between two steps."""
        if self._worker:
            self._worker.submit(work)
        else:
            work()

    @torch.inference_mode()
    def _run(self, plan: StepPlan, sampling: Sampling) -> "_Unread":
        if self.graphs is not None and self.graphs.suits(plan):
            if plan.prepares:  # most decode steps do not, and one request's step is as long as the host's work for it
                self.state.begin(plan.to_batch(self.device))
            logits, drawn = self.graphs.run(plan, sampling.rows, self.last_tokens, self.expert_counts)
        else:
            batch, drawn = plan.to_batch(self.device), None
            self.state.begin(batch)
            batch.ids = chosen_ids(batch, self.last_tokens)
            batch.expert_counts = self.expert_counts
            logits = self.forward(batch, self.state).float()
            self.state.commit(batch)
        count = len(sampling.rows)
        tokens = self._sample(logits[:count], sampling) if drawn is None else drawn
        top = sampling.top_logprobs
        sampled = None if top is None else _logprobs(logits[:count], tokens, top)
        scored = None
        if sampling.scored_tokens:
            wanted = send(np.array(sampling.scored_tokens, np.int64), self.device)
            scored = _logprobs(logits[count:], wanted, sampling.scored_top)
        return _Unread(tokens, sampled, scored)

    def _sample(self, logits: Tensor, sampling: Sampling) -> Tensor:
        if not sampling.rows:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        tokens = sample(logits, sampling_tensors(sampling.rows, self.counts, self.device))
        self.last_tokens[send(np.array(sampling.slots, np.int64), self.device)] = tokens
        penalised = [i for i, row in enumerate(sampling.rows) if row.params.penalised]
        if penalised:
            assert self.counts is not None
            rows = send(np.array([(sampling.rows[i].slot, i) for i in penalised], np.int64).T.copy(), self.device)
            self.counts.add(rows[0], tokens[rows[1]], torch.ones_like(rows[0], dtype=torch.bool))
        return tokens


def _logprobs(logits: Tensor, tokens: Tensor, top: int) -> LogprobTensors:
    """`logprobs` of a few rows at a time: on its way it takes many times what it gives."""
    tiles = zip(logits.split(LOGPROB_ROWS), tokens.split(LOGPROB_ROWS), strict=True)
    parts = [logprobs(*tile, top) for tile in tiles]
    chosen, best, ids = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, best, ids


class _Unread:
    """A step's results before they are read."""

    def __init__(self, tokens: Tensor, sampled: LogprobTensors | None, scored: LogprobTensors | None) -> None:
        self._has = (sampled is not None, scored is not None)
        self._receipt = Receipt([tokens, *(sampled or ()), *(scored or ())])

    def result(self) -> StepResult:
        """Wait for them."""
        arrays = iter(self._receipt.read())
        tokens = next(arrays).tolist()
        sampled, scored = (Logprobs(next(arrays), next(arrays), next(arrays)) if has else None for has in self._has)
        return StepResult(tokens, sampled, scored)
