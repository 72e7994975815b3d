"""The runner: executes a step plan on the device, samples, and brings the results back when they are asked for."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.engine.plan import StepPlan
from leadline.engine.sampling import SamplingRow, sampling_tensors
from leadline.kernels.sample import TokenCounts, logprobs, sample
from leadline.model.batch import Batch
from leadline.model.state import State

Forward = Callable[[Batch, State], Tensor]


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


class Runner:
    """Owns the state tensors and the last sampled token of every slot; steps run in the order of their launch."""

    def __init__(
        self, forward: Forward, state: State, vocab_size: int, running: int, device: torch.device, overlap: bool
    ) -> None:
        self.forward, self.state, self.device = forward, state, device
        self.vocab_size, self.running = vocab_size, running
        self.last_tokens = torch.zeros(state.size.slots, dtype=torch.int64, device=device)
        self.counts: TokenCounts | None = None
        self.expert_counts: Tensor | None = None
        # A thread of its own waits for the device, or is the device, while the host plans the next step.
        self._worker = ThreadPoolExecutor(1, "leadline-step") if overlap else None

    def start_counts(self, row: int, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        """Before its next step: `row` of the penalties' counts belongs to a request with these tokens."""
        if self.counts is None:
            self.counts = TokenCounts.empty(self.running, self.vocab_size, self.device)
        counts = self.counts
        values = [torch.from_numpy(tokens.astype(np.int64)).to(self.device) for tokens in (prompt, output)]
        self._submit(lambda: counts.start(row, *values))

    def expert_load(self, layers: int, experts: int) -> list[list[int]]:
        """How often each of the layers chose each of its experts since the first call, which begins to count."""
        if self.expert_counts is None:
            self.expert_counts = torch.zeros(layers, experts, dtype=torch.int64, device=self.device)
        return self.expert_counts.tolist()

    def launch(self, plan: StepPlan, sampling: Sampling) -> "Future[StepResult]":
        """Start a step; its result can be waited for."""
        return self._submit(lambda: self._run(plan, sampling))

    def close(self) -> None:
        """Stop the worker thread, if there is one."""
        if self._worker:
            self._worker.shutdown()

    def _submit(self, work: Callable[[], object]) -> Future:
        if self._worker:
            return self._worker.submit(work)
        future: Future = Future()
        try:
            future.set_result(work())
        except Exception as error:  # handed to whoever reads the result, as a worker thread would
            future.set_exception(error)
        return future

    @torch.inference_mode()
    def _run(self, plan: StepPlan, sampling: Sampling) -> StepResult:
        batch = plan.to_batch(self.device)
        unread = self.last_tokens[batch.slots[batch.chunks]]
        batch.ids = torch.where(batch.ids < 0, unread, batch.ids)
        batch.expert_counts = self.expert_counts
        self.state.begin(batch)
        logits = self.forward(batch, self.state).float()
        self.state.commit(batch)
        count = len(sampling.rows)
        tokens, sampled = self._sample(logits[:count], sampling)
        scored = None
        if sampling.scored_tokens:
            wanted = torch.tensor(sampling.scored_tokens, device=self.device)
            scored = _logprobs(logits[count:], wanted, sampling.scored_top)
        return StepResult(tokens, sampled, scored)

    def _sample(self, logits: Tensor, sampling: Sampling) -> tuple[list[int], Logprobs | None]:
        if not sampling.rows:
            return [], None
        tokens = sample(logits, sampling_tensors(sampling.rows, self.counts, self.device))
        self.last_tokens[torch.tensor(sampling.slots, device=self.device)] = tokens
        penalised = [i for i, row in enumerate(sampling.rows) if row.params.penalised]
        if penalised:
            assert self.counts is not None
            rows = torch.tensor([sampling.rows[i].slot for i in penalised], device=self.device)
            self.counts.add(rows, tokens[penalised], torch.ones_like(rows, dtype=torch.bool))
        top = sampling.top_logprobs
        return tokens.tolist(), None if top is None else _logprobs(logits, tokens, top)


def _logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    return Logprobs(*(value.cpu().numpy() for value in logprobs(logits, tokens, top)))
