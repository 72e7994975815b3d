"""Reuse is real: how many tokens run through the model, counted."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from schedules import Job, check, engine, model, play
from test_schedules import GREEDY, prompt

from leadline.cache.pages import Pool
from leadline.engine.sampling import SamplingParams
from leadline.engine.scheduler import Scheduler

KIND = "all kinds"


def stand_in(kind: str = KIND, **options: Any) -> Any:
    """An engine whose model answers at once, with the logits of no model, and whose memory is bookkeeping only."""
    built = engine(kind, options.pop("pages"), options.pop("slots"), **options)
    built.runner.forward = lambda batch, state: torch.zeros(len(batch.logit_rows), model(kind).config.vocab_size)
    return built


@pytest.mark.parametrize("arrive", ["at once", "in a row"])
def test_a_shared_system_prompt_runs_once(arrive: str) -> None:
    built = stand_in(pages=600, slots=64, max_running=16, step_tokens=512, chunk_tokens=256)
    system = prompt(KIND, 2000)
    tails = [prompt(KIND, 20 + 7 * (i % 5), seed=100 + i) for i in range(100)]
    jobs = [
        Job(0 if arrive == "at once" else 12 * i, np.concatenate([system, tail]), SamplingParams(max_tokens=1))
        for i, tail in enumerate(tails)
    ]
    play(built, jobs)
    most = len(system) + sum(len(tail) + 128 for tail in tails)
    assert built.stats().tokens_run <= most


def test_a_shared_system_prompt_gives_the_right_tokens() -> None:
    """The same with the model, smaller: all arrive at once, so that the parting snapshot is made on the way."""
    built = engine(KIND, 60, 16, max_running=6, chunk_tokens=100)
    system = prompt(KIND, 300)
    jobs = [Job(0, np.concatenate([system, prompt(KIND, 30, seed=i + 1)]), GREEDY) for i in range(6)]
    play(built, jobs)
    check(KIND, jobs, built.max_context)
    assert built.stats().tokens_run <= 300 + 6 * (30 + 128 + 2)


def test_where_prompts_part_a_snapshot_is_left_for_the_third() -> None:
    """The first two prompts share 1,000 tokens and end far apart; the second shows where, the third profits."""
    built = engine(KIND, 80, 16, max_running=2, chunk_tokens=512, step_tokens=512)
    jobs = [Job(30 * i, np.concatenate([prompt(KIND, 700), prompt(KIND, 300, seed=i + 1)]), GREEDY) for i in range(3)]
    play(built, jobs)
    check(KIND, jobs, built.max_context)
    assert [job.requests[0].reused for job in jobs] == [0, 0, 640]


def test_a_chat_of_ten_turns_recomputes_at_most_a_page_a_turn() -> None:
    built = engine(KIND, 60, 8, max_running=2)
    history = prompt(KIND, 150)
    jobs = []
    for turn in range(10):
        params = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True, logprobs=0)
        job = Job(0, history, params)
        before = built.stats().tokens_run
        play(built, [job])
        jobs.append(job)
        (answer,) = job.tokens.values()
        new = 150 if turn == 0 else 40
        assert built.stats().tokens_run - before <= new + len(answer) + 128
        history = np.concatenate([history, np.array(answer, np.int32), prompt(KIND, 40, seed=turn + 1)])
    check(KIND, jobs, built.max_context)


def test_v22_a_long_session_keeps_its_prefix_between_others() -> None:
    """Session S of 1,200 tokens; between its turns ten others of 200 pass through a pool that holds it."""
    built = engine(KIND, 60, 24, max_running=4, step_tokens=600, chunk_tokens=512)
    session = prompt(KIND, 1200)
    reused = []
    for turn in range(4):
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
        job = Job(0, session, params)
        others = [Job(5, prompt(KIND, 200, seed=50 + 10 * turn + i), GREEDY) for i in range(10)]
        play(built, [job, *others])
        check(KIND, [job, *others[:2]], built.max_context)
        reused.append(job.requests[0].reused)
        session = np.concatenate([session, prompt(KIND, 30, seed=turn + 1)])
    assert reused[0] == 0 and all(tokens >= 1200 - 256 for tokens in reused[1:])


def test_a_million_tokens_are_planned_matched_and_reused_in_seconds() -> None:
    """The bookkeeping of a 1,000,000-token context, with the model stubbed: pages, plans, snapshots, reuse."""
    built = stand_in(pages=2, slots=8, max_running=2, step_tokens=8192, chunk_tokens=8192)
    built.max_context = 1_048_576
    built.scheduler = Scheduler(built.scheduler.limits, Pool(16000), Pool(8), 8192)
    built.runner.state.page_table = torch.zeros(8, 8192, dtype=torch.int64)
    text = np.random.default_rng(0).integers(2, 90, 1_000_000, dtype=np.int32)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        (request,) = built.add(text, SamplingParams(max_tokens=4, ignore_eos=True))
        while built.busy:
            built.step()
        seconds.append(time.perf_counter() - start)
    assert request.reused == 999_936
    assert not built.problems()
    assert seconds[0] < 20 and seconds[1] < 3
