"""The engine: requests in, tokens out, one step at a time. Plan, run, absorb."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from leadline.cache.pages import Pool
from leadline.config import EngineConfig, ModelConfig
from leadline.engine.detokenize import Detokenizer, TokenBytes
from leadline.engine.grammar import Grammars, Matcher, wait_for_one
from leadline.engine.memory import MemoryPlan
from leadline.engine.plan import Ints, Layout, build_plan
from leadline.engine.request import Request
from leadline.engine.runner import Launched, Logprobs, Runner, Sampling
from leadline.engine.sampling import SamplingParams, SamplingRow, banned_tokens, encode_bad_words
from leadline.engine.scheduler import Limits, Scheduler, Step
from leadline.kernels.sample import child_seed
from leadline.model.state import Forward, State, pages_for


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, and the most probable ones at its place as (id, log-probability)."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Update:
    """What a step brought for one request. `finish_reason` is set once, in its last update."""

    request: Request
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[tuple[int, TokenLogprob]] | None = None
    """(position, its token's log-probability) of prompt tokens."""
    finish_reason: str | None = None
    """"stop", "length", "abort", or "error"."""
    error: Exception | None = None
    """What ended it, if `finish_reason` is "error"."""


@dataclass(frozen=True)
class Stats:
    """Counts since the start, and what is in use now."""

    tokens_run: int
    tokens_reused: int
    tokens_generated: int
    steps: int
    preemptions: int
    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_reusable: int
    slots: int
    slots_used: int
    busy_seconds: float = 0.0
    """Spent in steps; over `steps` it is the time of a step."""


@dataclass
class _Flight:
    """A step on its way: who gets which of its sampled tokens and scored rows."""

    step: Step
    sampled: list[Request]
    scored: list[tuple[Request, int]]
    launched: Launched


class Engine:
    """Runs a model's `forward` for many requests at once. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        forward: Forward,
        model: ModelConfig,
        config: EngineConfig,
        memory: MemoryPlan,
        state: State,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.model, self.config, self.memory = model, config, memory
        self.tokenizer = tokenizer
        self.max_context = memory.max_context
        self._token_bytes = TokenBytes(tokenizer) if tokenizer else None
        self._grammars: Grammars | None = None
        device = state.window.device
        overlap = config.overlap if config.overlap is not None else device.type != "cpu"
        self.runner = Runner(forward, state, model.vocab_size, memory.running, device, overlap)
        size = memory.size
        limits = Limits(
            memory.running, config.max_waiting, size.step_tokens, memory.chunk_tokens, config.snapshot_stride
        )
        self.scheduler = Scheduler(limits, Pool(size.pages), Pool(size.slots), pages_for(self.max_context))
        self._layout = Layout(size.slots, model.sliding_window)
        self._depth = 1 if overlap else 0
        self._launched: deque[_Flight] = deque()
        self._ended: list[Update] = []
        self._count_rows: list[Request | None] = [None] * memory.running
        self._random = random.Random(config.seed)
        self._generated = 0
        self._steps = 0
        self._busy_seconds = 0.0

    # ------------------------------------------------------------------------------------------- requests

    def add(
        self, prompt: NDArray[np.int32], params: SamplingParams, priority: int = 0, salt: str = ""
    ) -> list[Request]:
        """Queue a prompt of token ids [P]; returns its `params.n` choices.

        Raises ValueError for a bad prompt or parameters, QueueFull if too many wait; nothing is queued then.
        """
        self.check(prompt, params)
        limit = params.max_tokens if params.max_tokens is not None else self.max_context
        last = min(len(prompt) + limit, self.max_context)
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        bad_words = encode_bad_words(self.tokenizer, params.bad_words) if self.tokenizer and params.bad_words else []
        room = len(prompt) + min(last - len(prompt), 256)
        choices = []
        for choice in range(params.n):
            tokens = np.empty(room, np.int32)
            tokens[: len(prompt)] = prompt
            request = Request(len(prompt), tokens, params, child_seed(seed, choice), last, choice, priority, salt)
            request.known, request.bad_words = len(prompt), bad_words
            request.reuse = self.config.prefix_cache and params.prompt_logprobs is None
            request.detokenizer = Detokenizer(self._token_bytes, params)
            choices.append(request)
        for request, matcher in zip(choices, self._matchers(params), strict=True):
            request.matcher = matcher
        for request in choices[1:]:
            request.leader = choices[0]
        choices[0].followers = choices[1:]
        self.scheduler.add(choices)
        return choices

    def _matchers(self, params: SamplingParams) -> Sequence[Matcher | None]:
        """One for each choice; their grammar is compiled while the prompt runs."""
        if params.constraint is None:
            return [None] * params.n
        if self._grammars is None:
            assert self._token_bytes is not None
            self._grammars = Grammars(self._token_bytes, self.model.vocab_size, self.model.eos_token_ids)
        return self._grammars.start(params.constraint, params.n)

    def check(self, prompt: NDArray[np.int32], params: SamplingParams) -> None:
        """Raise ValueError if `add` would refuse this prompt with these parameters for what they are."""
        if len(prompt) == 0:
            raise ValueError("the prompt is empty: it must have at least one token")
        outside = sorted({int(token) for token in prompt[(prompt < 0) | (prompt >= self.model.vocab_size)]})
        if outside:
            raise ValueError(f"the prompt holds token ids {outside}; allowed are 0 to {self.model.vocab_size - 1}")
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if len(prompt) + wanted > self.max_context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and {wanted} more are asked for, "
                f"{len(prompt) + wanted} together; the context is {self.max_context}"
            )
        params.validate(self.model.vocab_size)
        if self.tokenizer is None and (params.stops or params.bad_words):
            raise ValueError("stop and bad_words need text, and this model folder has no tokenizer")
        if params.constraint is not None:
            if self.tokenizer is None:
                raise ValueError("a constraint needs text, and this model folder has no tokenizer")
            params.constraint.check()

    def abort(self, request: Request) -> None:
        """End a request at whatever moment; no token of it is delivered afterwards. Idle if it has ended."""
        if request.finish_reason is None:
            self._finish(request, "abort")
            self._ended.append(Update(request, [], "", finish_reason="abort"))

    def _finish(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        if request.counts_row >= 0:
            self._count_rows[request.counts_row] = None

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._launched or self._ended or self.scheduler.running or self.scheduler.waiting)

    # ----------------------------------------------------------------------------------------------- step

    def step(self) -> list[Update]:
        """Plan and launch a step, and absorb the oldest one that nobody overlaps with any more."""
        begun = perf_counter()
        updates, self._ended = self._ended, []
        step = self.scheduler.schedule()
        if step is not None:
            self._launch(step)
        if self._launched and (step is None or len(self._launched) > self._depth):
            updates += self._absorb(self._launched.popleft())
        elif step is None and self.scheduler.waiting and not updates:
            self._await_grammar()
            begun = perf_counter()  # waiting is no work
        self._busy_seconds += perf_counter() - begun
        return updates

    def _await_grammar(self) -> None:
        """Sleep until a grammar is compiled that requests wait for, but not for long: others may come or leave.

        Raises RuntimeError if requests wait for something else, which nothing can bring.
        """
        if not self.scheduler.compiling:
            raise RuntimeError(f"{len(self.scheduler.waiting)} requests wait and none can start: {self.problems()}")
        wait_for_one(self.scheduler.compiling, seconds=0.01)

    def _launch(self, step: Step) -> None:
        """Build the plan and hand it to the runner."""
        sampled: list[Request] = []
        scored: list[tuple[Request, int]] = []
        sampled_rows: list[int] = []
        scored_rows: list[int] = []
        first = 0
        for item in step.items:
            request = item.request
            last = first + item.end - item.start - 1
            if item.samples:
                sampled += [request, *item.forks]
                sampled_rows += [last] * (1 + len(item.forks))
            if request.params.prompt_logprobs is not None:
                positions = range(item.start, min(item.end, request.prompt_length - 1))
                scored += [(request, position + 1) for position in positions]
                scored_rows += [first + position - item.start for position in positions]
            first = last + 1
        rows = np.array(sampled_rows + scored_rows, np.int64)
        plan = build_plan(
            step.items, _ids(step), self.scheduler.page_table, self._layout, rows, step.writes, step.preparation
        )
        result = self.runner.launch(plan, self._sampling(sampled, scored))
        self._launched.append(_Flight(step, sampled, scored, result))
        self._steps += 1

    def _sampling(self, sampled: list[Request], scored: list[tuple[Request, int]]) -> Sampling:
        tops = [request.params.logprobs for request in sampled if request.params.logprobs is not None]
        return Sampling(
            [self._sampling_row(request) for request in sampled],
            [request.slot for request in sampled],
            max(tops) if tops else None,
            [int(request.tokens[position]) for request, position in scored],
            max((request.params.prompt_logprobs or 0 for request, _ in scored), default=0),
        )

    def _sampling_row(self, request: Request) -> SamplingRow:
        params, position = request.params, request.output_length - 1
        banned: list[int] = []
        if request.bad_words or params.min_tokens:
            before = request.output.tolist()
            before += [-1] * (position - len(before))  # not read yet; only its place counts
            banned = banned_tokens(params, request.bad_words, self.model.eos_token_ids, before)
        row = self._counts_row(request) if params.penalised else 0
        allowed = request.matcher.allowed() if request.matcher is not None else None
        return SamplingRow(params, request.seed, position, banned, row, allowed)

    def _counts_row(self, request: Request) -> int:
        """The request's row in the penalties' counts, made anew when it starts or comes back."""
        if request.counts_row < 0 or self._count_rows[request.counts_row] is not request:
            rows = self._count_rows
            free = (i for i, owner in enumerate(rows) if owner is None or owner.slot < 0)
            request.counts_row = next(free)
            rows[request.counts_row] = request
            prompt = request.tokens[: request.prompt_length]
            self.runner.start_counts(request.counts_row, prompt, request.output)
        return request.counts_row

    def _absorb(self, flight: _Flight) -> list[Update]:
        """Read a step's result: extend requests, end those that are done, and let the cache know what is computed."""
        try:
            result = flight.launched.result()
        except Exception as error:  # whatever a model can raise: its requests end, the others go on
            return self._fail(flight, error)
        self.scheduler.absorb(flight.step)
        updates: dict[Request, Update] = {}
        for i, (request, position) in enumerate(flight.scored):
            if request.finish_reason is None and result.scored is not None:
                top = request.params.prompt_logprobs or 0
                entry = _token_logprob(result.scored, i, int(request.tokens[position]), top)
                update = updates.setdefault(request, Update(request, [], "", prompt_logprobs=[]))
                assert update.prompt_logprobs is not None
                update.prompt_logprobs.append((position, entry))
        for i, (request, token) in enumerate(zip(flight.sampled, result.tokens, strict=True)):
            request.in_flight -= 1
            if request.finish_reason is None:
                update = updates.setdefault(request, Update(request, [], ""))
                self._extend(request, token, update)
                if request.params.logprobs is not None and result.sampled is not None:
                    update.logprobs = [_token_logprob(result.sampled, i, token, request.params.logprobs)]
        for item in flight.step.items:
            request = item.request
            if request.finish_reason is None and request.last_position == request.prompt_length == item.end:
                self._finish(request, "length")  # only the prompt's log-probabilities were asked for
                updates.setdefault(request, Update(request, [], "")).finish_reason = "length"
        return list(updates.values())

    def _extend(self, request: Request, token: int, update: Update) -> None:
        """Add a sampled token to its request and see whether that ends it."""
        params = request.params
        if request.matcher is not None:
            if request.matcher.error is not None:
                self._finish(request, "error")
                update.finish_reason, update.error = "error", request.matcher.error
                return
            request.matcher.accept(token)
        request.append(token)
        self._generated += 1
        update.tokens.append(token)
        reason = None
        if (not params.ignore_eos and token in self.model.eos_token_ids) or token in params.stop_token_ids:
            reason, request.stop_reason = "stop", token if token in params.stop_token_ids else None
        else:
            update.text = request.detokenizer.push(token)
            if request.detokenizer.stopped is not None:
                reason, request.stop_reason = "stop", request.detokenizer.stopped
            elif request.known >= request.last_position:
                reason = "length"
        if reason:
            update.text += request.detokenizer.finish()
            self._finish(request, reason)
            update.finish_reason = reason

    def _fail(self, flight: _Flight, error: Exception) -> list[Update]:
        """A step raised: its requests end. No frontier has changed, so that all others are as they were."""
        updates = []
        for request in dict.fromkeys(r for item in flight.step.items for r in (item.request, *item.forks)):
            request.in_flight = 0
            if request.finish_reason is None:
                self._finish(request, "error")
                updates.append(Update(request, [], "", finish_reason="error", error=error))
        self.scheduler.absorb(flight.step)
        return updates

    # --------------------------------------------------------------------------------------------- looking in

    def stats(self) -> Stats:
        """Counts and use of pages and slots."""
        scheduler = self.scheduler
        return Stats(
            scheduler.tokens_run,
            scheduler.tokens_reused,
            self._generated,
            self._steps,
            scheduler.preemptions,
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.pages.size,
            scheduler.pages.size - scheduler.pages.free,
            scheduler.index.idle_pages,
            scheduler.slots.size,
            scheduler.slots.size - scheduler.slots.free,
            self._busy_seconds,
        )

    def expert_load(self) -> list[list[int]]:
        """How often each main layer chose each expert since this was first asked for: it costs nothing before."""
        return self.runner.expert_load(self.model.num_hidden_layers, self.model.n_routed_experts)

    def problems(self) -> list[str]:
        """Every contradiction between pages, slots, counts, requests and prefixes; empty when all is well."""
        return self.scheduler.problems([flight.step for flight in self._launched])

    def reset_cache(self) -> None:
        """Forget every prefix that no running request uses."""
        self.scheduler.index.clear()

    def close(self) -> None:
        """Stop the threads of the runner and of the grammars."""
        self.runner.close()
        if self._grammars is not None:
            self._grammars.close()


def _ids(step: Step) -> Ints:
    """The tokens of the step's chunks in order, -1 for one that is still on the device."""
    parts = []
    for item in step.items:
        request = item.request
        parts.append(request.tokens[item.start : min(item.end, request.known)])
        if item.end > request.known:
            parts.append(_UNREAD)
    return np.concatenate(parts).astype(np.int64)


_UNREAD = np.array([-1], np.int32)


def _token_logprob(values: Logprobs, row: int, token: int, top: int) -> TokenLogprob:
    pairs = zip(values.top_ids[row, :top].tolist(), values.top[row, :top].tolist(), strict=True)
    return TokenLogprob(token, float(values.chosen[row]), list(pairs))


def as_token_ids(values: object) -> NDArray[np.int32]:
    """A prompt given as a list of token ids, as an array [P]. Raises ValueError for anything else."""
    array = np.asarray(values)
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"a prompt must be a text or a flat list of token ids, not {type(values).__name__}")
    if array.min() < -1 or array.max() > np.iinfo(np.int32).max:
        raise ValueError(f"the prompt holds token ids from {array.min()} to {array.max()}: not token ids")
    return array.astype(np.int32)
