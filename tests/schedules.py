"""Random schedules for the engine: requests, arrivals, cancellations, and what each request must give."""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from models import CPU, poisoned_state, random_config, random_reference, serving_model
from numpy.typing import NDArray
from replays import with_replays

from leadline.checkpoint.loader import load
from leadline.checkpoint.reader import Checkpoint
from leadline.config import EngineConfig, ModelConfig
from leadline.engine.engine import Engine
from leadline.engine.loading import BUILT_IN
from leadline.engine.memory import plan_memory
from leadline.engine.plan import Chunk, Layout, Preparation, build_plan
from leadline.engine.request import Request
from leadline.engine.sampling import SamplingParams, SamplingRow, sampling_tensors
from leadline.kernels.sample import logprobs, sample
from leadline.model.transformer import Transformer
from leadline.model.weights import WeightStore

MODELS = {
    "window only": {"compress_ratios": [0, 0], "sliding_window": 24},
    "csa": {"compress_ratios": [4, 0], "sliding_window": 8, "index_topk": 16},
    "hca": {"compress_ratios": [128, 0], "sliding_window": 3},
    "all kinds": {"compress_ratios": [0, 4, 128, 0], "sliding_window": 128, "index_topk": 4, "num_hash_layers": 1},
}


TINY = {"tiny exact": False, "tiny native": True}
"""The built-in checkpoint, in either numerics."""


@cache
def model(kind: str) -> Transformer:
    """A small serving model in fp32: random, or the built-in one."""
    if kind in TINY:
        config = ModelConfig.from_folder(BUILT_IN)
        store = WeightStore(config, None, torch.float32, TINY[kind], CPU)
        transformer = Transformer(config, store)
        load(config, store.slots, Checkpoint(BUILT_IN))
        return transformer
    fixed = MODELS[kind]
    layers = len(fixed["compress_ratios"]) - 1
    shape = {"hc_mult": 2, "hc_sinkhorn_iters": 2, "num_hash_layers": 0, "num_hidden_layers": layers, "vocab_size": 97}
    shape |= {"n_routed_experts": 4, "num_experts_per_tok": 1}
    raw = random_config(random.Random(0), hidden_size=64, num_attention_heads=2, o_groups=1, **{**shape, **fixed})
    return serving_model(random_reference(raw, seed=len(kind)))


@dataclass
class Job:
    """A request of a schedule: when it comes, what it is, and when it is cancelled."""

    arrival: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    priority: int = 0
    salt: str = ""
    cancel: int | None = None
    requests: list[Request] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)


def engine(kind: str, pages: int, slots: int, **options: Any) -> Engine:
    """An engine with few pages and slots and poisoned memory."""
    transformer = model(kind)
    config = EngineConfig(**{"state_bytes": 1 << 26, **options})
    memory = plan_memory(transformer.config, config, torch.float32)
    memory = replace(memory, size=replace(memory.size, pages=pages, slots=slots), max_context=pages * 128)
    return Engine(transformer.forward, transformer.config, config, memory, poisoned_state(transformer.config, memory))


def play(engine: Engine, jobs: list[Job]) -> None:
    """Run a schedule to its end, with the integrity check after every step."""
    waiting = sorted(jobs, key=lambda job: job.arrival)
    time = 0
    while waiting or engine.busy:
        while waiting and waiting[0].arrival <= time:
            job = waiting.pop(0)
            job.requests = engine.add(job.prompt, job.params, job.priority, job.salt)
            job.tokens = {request.number: [] for request in job.requests}
            job.logprobs = {request.number: [] for request in job.requests}
        for job in jobs:
            if job.cancel is not None and job.cancel <= time:
                for request in job.requests:
                    engine.abort(request)
        if engine.busy:
            absorb(engine, jobs)
        problems = engine.problems()
        assert not problems, problems
        time += 1
        assert time < 20_000, "no request gets on"


def absorb(engine: Engine, jobs: list[Job]) -> None:
    """One step; its tokens go to their jobs."""
    owners = {request.number: job for job in jobs for request in job.requests}
    for update in engine.step():
        if update.error:
            raise update.error
        number = update.request.number
        job = owners[number]
        assert update.finish_reason != "abort" or not update.tokens
        job.tokens[number] += update.tokens
        job.logprobs[number] += [entry.logprob for entry in update.logprobs or []]


def alone(kind: str, request: Request) -> tuple[list[int], list[float]]:
    """What a finished request's sampler gives at each place of its output when its whole text runs in one step."""
    transformer = model(kind)
    count = max(1, request.known - 1)
    tokens = request.tokens[:count].astype(np.int64)
    memory = plan_memory(transformer.config, EngineConfig(step_tokens=4096, max_running=1), torch.float32)
    state = poisoned_state(transformer.config, replace(memory, size=replace(memory.size, pages=16, slots=1)))
    table = np.arange(16, dtype=np.int32)[None, ::-1].copy()
    cells = [(0, column, int(page)) for column, page in enumerate(table[0])]
    rows = np.arange(request.prompt_length - 1, count)
    layout = Layout(1, transformer.config.sliding_window)
    plan = build_plan([Chunk(0, 0, count)], tokens, table, layout, rows, [], Preparation(cells, [], []))
    batch = plan.to_batch(CPU)
    state.begin(batch)
    logits = transformer.forward(batch, state)
    how = [SamplingRow(request.params, request.seed, place) for place in range(len(rows))]
    expected = sample(logits, sampling_tensors(how, None, CPU))
    return expected.tolist(), logprobs(logits, expected, 0)[0].tolist()


def check(kind: str, jobs: list[Job], context: int, eos: tuple[int, ...] = (1,)) -> None:
    """Every request gave what it would have given alone, uncached and unchunked, and stopped where it should."""
    for job in jobs:
        for request in job.requests:
            got, scores = job.tokens[request.number], job.logprobs[request.number]
            expected, expected_scores = alone(kind, request)
            assert got == expected[: len(got)]
            np.testing.assert_allclose(scores, expected_scores[: len(got)], atol=1e-5)
            stops = not job.params.ignore_eos and bool(got) and got[-1] in eos
            full = len(got) == min(job.params.max_tokens or context, context - len(job.prompt))
            assert not set(got[:-1]) & set(eos) or job.params.ignore_eos
            if request.finish_reason == "abort":
                assert job.cancel is not None
            else:
                assert request.finish_reason == ("stop" if stops else "length") and (stops or full)


LENGTHS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257)


def random_jobs(rng: random.Random, vocabulary: int, window: int, longest: int) -> list[Job]:
    """Requests of which many share prefixes, with lengths around every boundary there is."""
    stems = [np.array([rng.randrange(vocabulary) for _ in range(longest)], np.int32) for _ in range(rng.choice([1, 2]))]
    jobs = []
    for _ in range(rng.randint(2, 9)):
        around = [*LENGTHS, *LENGTHS[-3:], max(1, window - 1), window, window + 1]
        length = min(rng.choice([*around, rng.randint(1, longest), rng.randint(130, longest)]), longest)
        shared = rng.choice([0, 64, 127, 128, 129, 256, 300, length, length])
        fresh = np.array([rng.randrange(vocabulary) for _ in range(length)], np.int32)
        prompt = np.concatenate([rng.choice(stems)[:shared], fresh])[:length]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 0, 5]),
            seed=rng.randrange(1000),
            max_tokens=rng.choice([1, 2, 3, 5, 8, 12, 16]),
            ignore_eos=rng.random() < 0.7,
            logprobs=0,
            n=rng.choice([1, 1, 1, 1, 3]),
        )
        cancel = rng.choice([None, None, None, None, rng.randrange(30)])
        salt = rng.choice(["", "", "", "", "", "tenant"])
        jobs.append(Job(rng.randrange(rng.choice([1, 12, 40])), prompt, params, rng.choice([0, 0, 1]), salt, cancel))
    return jobs


def random_case(kind: str, seed: int) -> Engine:
    """Draw an engine and a schedule, play it, and check every request; returns the engine, idle."""
    rng = random.Random(f"{kind} {seed}")
    config = model(kind).config
    running = rng.choice([1, 2, 4, 4, 8, 8])
    pages = rng.choice([4, 5, 5, 6, 6, 7, 8, 12, 30])
    options = {
        "max_running": running,
        "step_tokens": rng.choice([running, running + 7, 64, 300, 700]),
        "chunk_tokens": rng.choice([1, 3, 5, 64, 128, 130, 500]) if rng.random() < 0.9 else 1000,
        "prefix_cache": rng.random() < 0.8,
        "overlap": rng.random() < 0.5,
        "snapshot_stride": 128 * rng.choice([1, 2, 32]),
    }
    if options["chunk_tokens"] < 64:
        options["chunk_tokens"] += rng.choice([0, 40])
    built = engine(kind, pages, running + rng.choice([0, 1, running]), **options)
    if random.Random(f"padded {kind} {seed}").random() < 0.5:
        with_replays(built)
    jobs = random_jobs(rng, config.vocab_size, config.sliding_window, min(400, pages * 128 - 40))
    play(built, jobs)
    check(kind, jobs, built.max_context)
    built.reset_cache()
    stats = built.stats()
    assert (stats.pages_used, stats.slots_used) == (0, 0)
    built.close()
    return built
