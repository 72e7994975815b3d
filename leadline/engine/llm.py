"""The offline interface: `LLM(model).generate(prompts)`."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from leadline.config import EngineConfig
from leadline.engine.engine import Engine, Stats, TokenLogprob, Update, as_token_ids
from leadline.engine.loading import load_engine
from leadline.engine.request import Request
from leadline.engine.sampling import SamplingParams

Prompt = str | Sequence[int] | NDArray[np.integer[Any]]

BAR_FROM = 8
"""Prompts in one call from which a progress bar is shown, on a terminal."""


@dataclass
class Choice:
    """One generated continuation. `token_ids` contains the token that stopped it, `text` does not."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, if one did."""
    logprobs: list[TokenLogprob] | None = None


@dataclass
class Result:
    """All choices of one prompt, and what they took."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Per prompt token, None for the first, which nothing predicts."""
    cached_tokens: int = 0
    """Prompt tokens whose computation was reused."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt_token_ids)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def token_ids(self) -> list[int]:
        """The first choice's tokens."""
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str | None:
        """Why the first choice ended: "stop" or "length"."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The first choice's log-probabilities, if asked for."""
        return self.choices[0].logprobs


class LLM:
    """A model loaded for offline use. `options` are the fields of `EngineConfig` besides `model`.

    Raises ValueError, FileNotFoundError or CheckpointError with a sentence for whatever cannot be served.
    """

    def __init__(self, model: str | None = None, progress: bool | None = None, **options: Any) -> None:
        """`progress`: show bars; None: on a terminal."""
        self.config = EngineConfig(model=model, **options)
        self.progress = sys.stderr.isatty() if progress is None else progress
        self.engine: Engine = load_engine(self.config, self.progress)
        self.tokenizer = self.engine.tokenizer

    def encode(self, prompt: Prompt) -> NDArray[np.int32]:
        """A prompt as token ids [P]. A text is preceded by BOS, unless it begins with it."""
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model} has no tokenizer.json: give prompts as lists of token ids")
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        bos = self.engine.model.bos_token_id
        return np.array(ids if ids[:1] == [bos] else [bos, *ids], np.int32)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Result]:
        """Generate for one prompt or many, together; results come in the order of the prompts.

        `params` is one for all or one per prompt. Every prompt is checked before any is run: ValueError names the
        first that is bad.
        """
        many = _as_list(prompts)
        chosen = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(chosen) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(chosen)} sampling parameters: give one for all or one each")
        jobs = [(self.encode(prompt), param) for prompt, param in zip(many, chosen, strict=True)]
        for number, (ids, param) in enumerate(jobs):
            try:
                self.engine.check(ids, param)
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}" if len(jobs) > 1 else str(error)) from error
        results = [Result(ids.tolist(), [Choice() for _ in range(param.n)]) for ids, param in jobs]
        with self._bar(len(jobs)) as bar:
            self._run(jobs, results, bar)
        return results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """Generate for one prompt, an update per step. Closing the iterator ends the request."""
        requests = self.engine.add(self.encode(prompt), params or SamplingParams())
        open_requests = len(requests)
        try:
            while open_requests:
                for update in self.engine.step():
                    if update.error:
                        raise update.error
                    open_requests -= update.finish_reason is not None
                    yield update
        finally:
            for request in requests:
                self.engine.abort(request)
            while self.engine.busy:
                self.engine.step()

    def stats(self) -> Stats:
        """Tokens run, reused and generated, pages and slots in use, preemptions."""
        return self.engine.stats()

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def _run(self, jobs: list[tuple[NDArray[np.int32], SamplingParams]], results: list[Result], bar: Progress) -> None:
        """Feed the queue as it empties and collect updates until everything has ended."""
        task = bar.add_task("generating", total=len(jobs))
        owners: dict[Request, tuple[Result, Choice]] = {}
        fed = done = 0
        try:
            while done < len(jobs) or fed < len(jobs):
                while fed < len(jobs) and self.engine.stats().waiting + jobs[fed][1].n <= self.config.max_waiting:
                    result = results[fed]
                    for request, choice in zip(self.engine.add(*jobs[fed]), result.choices, strict=True):
                        owners[request] = (result, choice)
                    fed += 1
                for update in self.engine.step():
                    if update.error:
                        raise update.error
                    result, choice = owners[update.request]
                    _collect(update, result, choice)
                    if update.finish_reason and all(choice.finish_reason for choice in result.choices):
                        done += 1
                        bar.advance(task)
        except BaseException:
            for request in owners:
                self.engine.abort(request)
            while self.engine.busy:
                self.engine.step()
            raise

    def _bar(self, prompts: int) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = self.progress and prompts >= BAR_FROM
        return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    values: list[Any] = list(prompts)
    if values and all(isinstance(value, int | np.integer) for value in values):
        return [values]
    return values


def _collect(update: Update, result: Result, choice: Choice) -> None:
    choice.token_ids += update.tokens
    choice.text += update.text
    choice.finish_reason = update.finish_reason
    choice.stop_reason = update.request.stop_reason
    if update.request.choice == 0:
        result.cached_tokens = max(0, update.request.reused)
    if update.logprobs is not None:
        choice.logprobs = (choice.logprobs or []) + update.logprobs
    if update.prompt_logprobs is not None and update.request.choice == 0:
        if result.prompt_logprobs is None:
            result.prompt_logprobs = [None] * result.prompt_tokens
        for position, entry in update.prompt_logprobs:
            result.prompt_logprobs[position] = entry
