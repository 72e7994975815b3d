"""The property that everything hangs on: any schedule gives each request what it would have got alone.

Hundreds of random schedules, thousands with `-m slow`: prompts that share prefixes, lengths around every boundary,
random chunk sizes, token budgets, arrivals, cancellations, priorities, forks, pools so small that requests are
preempted and prefixes evicted, prefix cache on and off, the next step planned while one runs or not. Memory that
nothing wrote holds NaN. The integrity check runs after every step.
"""

import random

import numpy as np
import pytest
from schedules import MODELS, Job, absorb, check, engine, model, play, random_case

from leadline.engine.sampling import SamplingParams
from leadline.engine.scheduler import QueueFull

CASES = 15
QUICK_GROUPS = {"window only": 5, "csa": 6, "hca": 6, "all kinds": 9}
GROUPS = [
    pytest.param(kind, group, marks=[pytest.mark.slow] if group >= QUICK_GROUPS[kind] else [])
    for kind in MODELS
    for group in range(27)
]


@pytest.mark.parametrize(("kind", "group"), GROUPS)
def test_any_schedule_gives_what_each_request_gives_alone(kind: str, group: int) -> None:
    for seed in range(group * CASES, (group + 1) * CASES):
        random_case(kind, seed)


def test_schedules_reuse_and_preempt() -> None:
    """The random schedules above do reach prefix reuse and preemption, else they would prove nothing about them."""
    stats = [random_case("csa", seed).stats() for seed in range(16)]
    assert sum(entry.tokens_reused > 0 for entry in stats) > 2
    assert sum(entry.preemptions for entry in stats) > 0


def prompt(kind: str, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, model(kind).config.vocab_size, length, dtype=np.int32)


GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)


def greedy(max_tokens: int) -> SamplingParams:
    """Parameters of a greedy request with exactly `max_tokens` tokens of output."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("kind", ["window only", "all kinds"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_known_prefix_without_snapshot_gives_its_pages_to_the_only_request(kind: str, overlap: bool) -> None:
    """A known prefix is kept for those on whose path it lies. Here its only user needs the pages to get on itself."""
    built = engine(kind, 4, 3, max_running=1, chunk_tokens=64, overlap=overlap)
    first = Job(0, prompt(kind, 260), greedy(2))
    play(built, [first])
    while built.scheduler.index.evict_snapshot():
        pass
    assert built.scheduler.index.idle_pages == 2, "the prefix is known, but there is nothing to start it from"
    grows = Job(0, first.prompt[:256], greedy(200))  # 2 pages when it is admitted, all 4 in the end
    play(built, [grows])
    check(kind, [first, grows], built.max_context)


@pytest.mark.parametrize("kind", ["window only", "all kinds"])
def test_a_known_prefix_without_snapshot_does_not_count_as_room(kind: str) -> None:
    """What a request matches is no page that eviction could free for it: alone, it does without the prefix."""
    built = engine(kind, 4, 3, max_running=1, chunk_tokens=500)
    first = Job(0, prompt(kind, 260), greedy(2))
    play(built, [first])
    while built.scheduler.index.evict_snapshot():
        pass
    again = Job(0, prompt(kind, 400), greedy(2))
    again.prompt[:260] = first.prompt  # needs 4 pages at once; 2 are free, 2 hold what it matches
    play(built, [again])
    check(kind, [first, again], built.max_context)


@pytest.mark.parametrize("kind", ["hca", "csa", "all kinds"])
def test_the_last_page_of_a_prompt_of_whole_pages_is_not_its_own(kind: str) -> None:
    """Its last token runs in any case, so its last page is taken anew, though the index knows one with these tokens.

    With 2 pages known, 2 used by another request and none free, that page must come from the index.
    """
    built = engine(kind, 4, 6, max_running=2)
    first = Job(0, prompt(kind, 256), greedy(1))
    play(built, [first])
    other = Job(0, prompt(kind, 200, seed=1), greedy(40))
    second = Job(3, first.prompt, greedy(1))
    play(built, [other, second])
    check(kind, [first, other, second], built.max_context)
    assert second.requests[0].reused == 128


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 384, 385])
@pytest.mark.parametrize("together", [False, True], ids=["in a row", "at once"])
def test_v19_a_hit_that_covers_the_whole_prompt_still_runs_a_token(length: int, together: bool) -> None:
    built = engine("all kinds", 30, 8, max_running=4)
    jobs = [Job(0 if together else 10 * i, prompt("all kinds", length), GREEDY) for i in range(3)]
    play(built, jobs)
    check("all kinds", jobs, built.max_context)
    reusable = (length - 1) // 128 * 128
    assert [job.requests[0].reused for job in jobs] == [0, reusable, reusable]


def test_other_salts_share_nothing() -> None:
    built = engine("all kinds", 30, 8, max_running=4)
    jobs = [Job(10 * i, prompt("all kinds", 300), GREEDY, salt=salt) for i, salt in enumerate(["a", "b", "a"])]
    play(built, jobs)
    check("all kinds", jobs, built.max_context)
    assert [job.requests[0].reused for job in jobs] == [0, 0, 256]


def test_v17_short_prefixes_hit() -> None:
    built = engine("all kinds", 40, 8, max_running=4)
    shared = prompt("all kinds", 200)
    jobs = [Job(10 * i, np.concatenate([shared, prompt("all kinds", 30, seed=i + 1)]), GREEDY) for i in range(3)]
    play(built, jobs)
    check("all kinds", jobs, built.max_context)
    assert [job.requests[0].reused for job in jobs][1:] == [128, 128]


def test_a_snapshot_without_its_pages_and_pages_without_snapshot() -> None:
    """Evicting snapshots leaves pages that cannot be reused alone; evicting pages takes their snapshots along."""
    built = engine("all kinds", 30, 8, max_running=4)
    play(built, [Job(0, prompt("all kinds", 300), GREEDY)])
    index = built.scheduler.index
    while index.evict_snapshot():
        pass
    assert not built.problems() and index.match(prompt("all kinds", 300), "").reusable == 0
    again = Job(0, prompt("all kinds", 300), GREEDY)
    play(built, [again])
    check("all kinds", [again], built.max_context)
    assert again.requests[0].reused == 0
    while index.evict_page():
        pass
    assert not built.problems() and not list(index.nodes())
    assert built.stats().slots_used == 0


@pytest.mark.parametrize("overlap", [False, True], ids=["synchronous", "overlapped"])
def test_a_waiting_request_does_not_lose_the_page_it_waits_for(overlap: bool) -> None:
    """The second request waits for the first one's prefix, which is cancelled; the second computes it itself."""
    built = engine("all kinds", 12, 4, max_running=2, chunk_tokens=64, overlap=overlap)
    first = Job(0, prompt("all kinds", 300), GREEDY, cancel=3)
    second = Job(1, prompt("all kinds", 310), GREEDY)
    play(built, [first, second])
    check("all kinds", [first, second], built.max_context)
    assert first.requests[0].finish_reason == "abort"


@pytest.mark.parametrize("generated", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("length", [127, 128, 129, 130, 255, 256, 257, 383, 384, 385])
def test_v20_preempted_and_resumed_equals_undisturbed(length: int, generated: int) -> None:
    kind = "all kinds"
    built = engine(kind, 12, 4, max_running=2)
    job = Job(0, prompt(kind, length), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=0))
    job.requests = built.add(job.prompt, job.params)
    (request,) = job.requests
    job.tokens, job.logprobs = {request.number: []}, {request.number: []}
    disturbed = False
    while built.busy:
        absorb(built, [job])
        if not disturbed and len(job.tokens[request.number]) > generated:
            built.scheduler._preempt(request)
            disturbed = True
        assert not built.problems()
    check(kind, [job], built.max_context)
    assert request.preemptions == 1
    assert len(job.tokens[request.number]) == 32


def test_v34_no_token_after_an_abort_at_any_moment() -> None:
    """Cancelled while queued, between chunks, after the last chunk was launched, after some tokens, twice."""
    for overlap in (False, True):
        for moment in (0, 1, 2, 3, 5, 8, 11):
            built = engine("all kinds", 30, 8, max_running=2, chunk_tokens=128, overlap=overlap)
            jobs = [Job(0, prompt("all kinds", 500, seed=i), GREEDY, cancel=moment) for i in range(2)]
            last = Job(0, prompt("all kinds", 200, seed=9), GREEDY)
            play(built, [*jobs, last])
            check("all kinds", [*jobs, last], built.max_context)
            built.reset_cache()
            assert built.stats().pages_used == built.stats().slots_used == 0
            built.abort(jobs[0].requests[0])
            assert jobs[0].requests[0].finish_reason in ("abort", "length")


def test_v47_choices_share_the_prompt_and_copy_the_unfinished_page() -> None:
    kind = "all kinds"
    for length in (3, 5, 127, 128, 129, 200):
        for pages in (30, 6):
            built = engine(kind, pages, 8, max_running=4)
            params = SamplingParams(n=4, seed=7, temperature=1, max_tokens=20, ignore_eos=True, logprobs=0)
            job = Job(0, prompt(kind, length), params)
            play(built, [job])
            check(kind, [job], built.max_context)
            texts = [tuple(tokens) for tokens in job.tokens.values()]
            assert len(set(texts)) > 1
            if pages == 30:
                assert built.stats().tokens_run == length + 4 * 19, "the prompt ran once"
                assert {request.reused for request in job.requests} == {0}


def test_priorities_and_age_decide_who_goes_first() -> None:
    built = engine("window only", 30, 4, max_running=1, step_tokens=64, chunk_tokens=64)
    jobs = [Job(0, prompt("window only", 20, seed=i), GREEDY, priority=p) for i, p in enumerate([1, 0, 1, 0])]
    ended: list[int] = []
    for job in jobs:
        job.requests = built.add(job.prompt, job.params, job.priority)
    order = {job.requests[0].number: i for i, job in enumerate(jobs)}
    while built.busy:
        ended += [order[u.request.number] for u in built.step() if u.finish_reason]
    assert ended == [1, 3, 0, 2]


def test_requests_beyond_the_queue_or_the_pool_are_refused_with_the_numbers() -> None:
    built = engine("window only", 4, 2, max_running=1, max_waiting=2)
    with pytest.raises(ValueError, match=r"500 tokens and 100 more are asked for, 600 together; the context is 512"):
        built.add(prompt("window only", 500), SamplingParams(max_tokens=100))
    built.add(prompt("window only", 5), GREEDY)
    built.add(prompt("window only", 5), GREEDY)
    with pytest.raises(QueueFull, match="2 requests are waiting; at most 2 may"):
        built.add(prompt("window only", 5), GREEDY)
    while built.busy:
        built.step()
    assert not built.problems()


def test_a_step_that_raises_ends_its_requests_and_harms_no_other() -> None:
    kind = "all kinds"
    built = engine(kind, 30, 8, max_running=4)
    healthy = built.runner.forward

    def forward(batch, state):  # type: ignore[no-untyped-def]
        if (batch.ids == 13).any():
            raise RuntimeError("token 13 is poison")
        return healthy(batch, state)

    built.runner.forward = forward
    good = prompt(kind, 200)
    good[good == 13] = 14
    bad = good[:50].copy()
    bad[20] = 13
    jobs = [Job(0, good, GREEDY), Job(20, good, GREEDY)]
    built.add(bad, GREEDY)
    errors = []
    while built.busy:
        errors += [str(update.error) for update in built.step() if update.finish_reason == "error"]
        assert not built.problems()
    assert errors == ["token 13 is poison"]
    play(built, jobs)
    check(kind, jobs, built.max_context)


def test_soak_many_short_requests_leave_nothing_behind() -> None:
    """Random short requests with cancellations on a small pool; see benchmarks/soak.py for 20,000 of them."""
    rng = random.Random(5)
    built = engine("csa", 10, 10, max_running=8, step_tokens=64, chunk_tokens=48)
    live: list = []
    for _ in range(200):
        params = SamplingParams(max_tokens=rng.randint(1, 6), seed=rng.randrange(9), n=rng.choice([1, 1, 2]))
        live += built.add(prompt("csa", rng.randint(1, 200), seed=rng.randrange(6)), params)
        if rng.random() < 0.3:
            built.abort(rng.choice(live))
        for _ in range(rng.randint(0, 4)):
            built.step()
        assert not built.problems()
    while built.busy:
        built.step()
    assert all(request.finish_reason for request in live)
    built.reset_cache()
    stats = built.stats()
    assert (stats.pages_used, stats.slots_used, stats.running, stats.waiting) == (0, 0, 0, 0)
