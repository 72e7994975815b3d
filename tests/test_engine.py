"""What a request may ask of sampling and stopping, through the engine: on a model without text, ids only."""

import re
from time import sleep
from typing import Any

import numpy as np
import pytest
from schedules import engine, model
from test_schedules import prompt
from torch import Tensor

from leadline.engine.engine import Engine, Update
from leadline.engine.sampling import SamplingParams
from leadline.engine.start import Start
from leadline.engine.warmup import warm_up
from leadline.model.batch import Batch
from leadline.model.state import State

KIND = "all kinds"


def run(built: Engine, ids: np.ndarray, **params: Any) -> list[Update]:
    """All updates of one request."""
    built.add(ids, SamplingParams(**params))
    updates = []
    while built.busy:
        updates += built.step()
    assert not built.problems()
    return updates


def tokens(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.tokens]


@pytest.fixture(params=[False, True], ids=["synchronous", "overlapped"])
def built(request: pytest.FixtureRequest) -> Engine:
    return engine(KIND, 30, 8, max_running=4, overlap=request.param)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(built: Engine) -> None:
    params: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 20, "ignore_eos": True}
    alone = tokens(run(built, prompt(KIND, 40), **params))
    others = [built.add(prompt(KIND, 30 + i, seed=i), SamplingParams(seed=i, max_tokens=25)) for i in range(3)]
    (request,) = built.add(prompt(KIND, 40), SamplingParams(**params))
    beside = []
    while built.busy:
        beside += [token for update in built.step() if update.request is request for token in update.tokens]
    assert beside == alone and len(others) == 3


def test_requests_without_a_seed_differ_and_the_engine_seed_reproduces_them() -> None:
    def draw(seed: int) -> list[list[int]]:
        built = engine(KIND, 30, 8, max_running=4, seed=seed)
        return [tokens(run(built, prompt(KIND, 10), temperature=1.0, max_tokens=15)) for _ in range(2)]

    first = draw(1)
    assert first[0] != first[1] and draw(1) == first and draw(2) != first


def test_stop_token_ids_end_the_output_and_are_kept_in_the_ids(built: Engine) -> None:
    free = tokens(run(built, prompt(KIND, 20), temperature=0, max_tokens=12, ignore_eos=True))
    stop = free[5]
    updates = run(built, prompt(KIND, 20), temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    assert tokens(updates) == free[: free.index(stop) + 1]
    assert updates[-1].finish_reason == "stop" and updates[-1].request.stop_reason == stop


def test_min_tokens_holds_back_eos(built: Engine) -> None:
    eos = model(KIND).config.eos_token_ids[0]
    free = run(built, prompt(KIND, 20), temperature=0, max_tokens=30, logit_bias={eos: 100})
    assert tokens(free) == [eos] and free[-1].finish_reason == "stop"
    held = run(built, prompt(KIND, 20), temperature=0, max_tokens=30, min_tokens=4, logit_bias={eos: 100})
    assert len(tokens(held)) == 5 and tokens(held).index(eos) == 4


def test_max_tokens_one_gives_one(built: Engine) -> None:
    updates = run(built, prompt(KIND, 129), temperature=0, max_tokens=1, ignore_eos=True)
    assert len(tokens(updates)) == 1 and updates[-1].finish_reason == "length"


def test_v49_the_edge_of_the_context() -> None:
    built = engine(KIND, 4, 2, max_running=1)
    assert len(tokens(run(built, prompt(KIND, 511), max_tokens=1))) == 1
    updates = run(built, prompt(KIND, 500), temperature=0, ignore_eos=True)
    assert len(tokens(updates)) == 12 and updates[-1].finish_reason == "length"
    with pytest.raises(ValueError, match="512 tokens and 1 more are asked for, 513 together; the context is 512"):
        built.add(prompt(KIND, 512), SamplingParams(max_tokens=1))


def test_penalties_forbid_repeats_even_after_a_preemption(built: Engine) -> None:
    """With a strong frequency penalty and a large repetition penalty no token comes twice."""
    params = SamplingParams(temperature=0, max_tokens=30, frequency_penalty=2.0, presence_penalty=2.0, ignore_eos=True)
    (calm,) = built.add(prompt(KIND, 20), params)
    while built.busy:
        built.step()
    expected = calm.output.tolist()
    (request,) = built.add(prompt(KIND, 20), params)
    while built.busy:
        built.step()
        if request.preemptions == 0 and len(request.output) == 7 and request.slot >= 0:
            built.scheduler._preempt(request)
    assert request.preemptions == 1 and request.output.tolist() == expected
    free = tokens(run(built, prompt(KIND, 20), temperature=0, max_tokens=30, ignore_eos=True))
    assert expected != free and len(set(expected)) > len(set(free))


def test_v48_prompt_logprobs_cover_every_token_also_beside_a_cached_prefix(built: Engine) -> None:
    ids = prompt(KIND, 300)
    run(built, ids, temperature=0, max_tokens=2)
    updates = run(built, ids, temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=2, ignore_eos=True)
    scored = {position: entry for update in updates for position, entry in update.prompt_logprobs or []}
    assert sorted(scored) == list(range(1, 300))
    assert all(scored[i].token == ids[i] and scored[i].logprob <= scored[i].top[0][1] + 1e-6 for i in scored)
    generated = [entry for update in updates for entry in update.logprobs or []]
    assert [entry.token for entry in generated] == tokens(updates)
    assert all(entry.top[0] == (entry.token, pytest.approx(entry.logprob)) for entry in generated)


def test_v48_max_tokens_zero_only_scores_the_prompt(built: Engine) -> None:
    updates = run(built, prompt(KIND, 200), max_tokens=0, prompt_logprobs=0)
    assert tokens(updates) == [] and updates[-1].finish_reason == "length"
    assert sum(len(update.prompt_logprobs or []) for update in updates) == 199


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([5, -1], r"token ids \[-1\]; allowed are 0 to 96"),
        ([97, 3, 120], r"token ids \[97, 120\]; allowed are 0 to 96"),
    ],
)
def test_v41_bad_prompts_are_refused_and_harm_nobody(built: Engine, ids: list[int], message: str) -> None:
    (good,) = built.add(prompt(KIND, 20), SamplingParams(max_tokens=5, ignore_eos=True))
    with pytest.raises(ValueError, match=message):
        built.add(np.array(ids, np.int32), SamplingParams())
    while built.busy:
        built.step()
    assert good.finish_reason == "length"


def test_text_options_are_refused_without_a_tokenizer(built: Engine) -> None:
    with pytest.raises(ValueError, match="has no tokenizer"):
        built.add(prompt(KIND, 5), SamplingParams(stop=["x"]))


def test_v32_identical_prompts_at_once_give_identical_answers(built: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [built.add(prompt(KIND, 130), params)[0] for _ in range(6)]
    while built.busy:
        built.step()
    assert len({tuple(request.output.tolist()) for request in requests}) == 1


def test_stats_count_what_happened(built: Engine) -> None:
    run(built, prompt(KIND, 300), temperature=0, max_tokens=5, ignore_eos=True)
    run(built, prompt(KIND, 300), temperature=0, max_tokens=5, ignore_eos=True)
    stats = built.stats()
    assert stats.tokens_generated == 10
    assert stats.tokens_run == 300 + 4 + 44 + 4
    assert stats.tokens_reused == 256
    assert stats.pages_used == stats.pages_reusable == 2 and stats.running == 0


def watched(built: Engine) -> tuple[list[int], list[int]]:
    """Of each step that will run: its tokens, and the longest context."""
    sizes: list[int] = []
    ends: list[int] = []
    forward = built.runner.forward

    def counted(batch: Batch, state: State) -> Tensor:
        sizes.append(len(batch.ids))
        ends.append(int(batch.positions.max()) + 1)
        return forward(batch, state)

    built.runner.forward = counted
    return sizes, ends


def test_a_warm_up_without_reused_prefixes_runs_no_long_prompt() -> None:
    built = engine(KIND, 30, 12, max_running=5, chunk_tokens=40, prefix_cache=False)
    _, ends = watched(built)
    warm_up(built, Start(progress=False))
    assert max(ends) == 41


def test_a_warm_up_runs_every_size_and_leaves_nothing() -> None:
    built = engine(KIND, 30, 12, max_running=5, chunk_tokens=40)
    sizes, ends = watched(built)
    warm_up(built, Start(progress=False))
    assert {1, 2, 4, 8, 16, 32, 40} <= set(sizes)
    most = min(built.max_context - 2, 30 * 128 - 2)
    assert {80, 160, 320, 640, most} <= set(ends) and max(ends) == most + 1
    assert sum(sizes) < 9 * (40 + 128) + 200, "early tokens of long prompts are not run"
    stats = built.stats()
    assert not built.busy and not built.problems()
    assert (stats.pages_used, stats.pages_reusable, stats.slots_used) == (0, 0, 0)


def test_a_start_says_where_its_time_went() -> None:
    start = Start(progress=False)
    sleep(0.06)
    start.done("weights")
    start.done("kernels")
    seconds = [float(number) for number in re.findall(r"[\d.]+(?= s:)|(?<=weights )[\d.]+", start.report())]
    assert seconds[0] >= seconds[1] >= 0.1 and list(start.parts) == ["weights", "kernels"]
    assert start.report().endswith(", kernels 0.0")
