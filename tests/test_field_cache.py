"""Field reports on cache and scheduler as tests, named by their numbers; more stand beside what they concern."""

import numpy as np
import pytest
import torch
from schedules import Job, check, engine, model, play
from test_schedules import GREEDY, prompt
from typer.testing import CliRunner

from leadline.cli.main import app
from leadline.config import EngineConfig, ModelConfig
from leadline.engine.memory import plan_memory
from leadline.engine.sampling import SamplingParams
from leadline.presets import preset

KIND = "all kinds"


@pytest.mark.parametrize("length", [100, 127, 128, 129, 255, 256, 257, 1023, 1025])
def test_v16_repeats_equal_the_first_answer_with_other_traffic_between(length: int) -> None:
    """The same prompt four times, then with other endings; between them five unrelated prompts."""
    text = prompt(KIND, length)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    built = engine(KIND, 60, 12, max_running=3, step_tokens=600)
    jobs = [Job(30 * i, text, params) for i in range(4)]
    jobs += [Job(120 + 30 * i, np.concatenate([text, prompt(KIND, 5, seed=90 + i)]), params) for i in range(3)]
    others = [Job(30 * (i % 7) + 3, prompt(KIND, 30 + 40 * (i % 5), seed=i + 1), GREEDY) for i in range(35)]
    play(built, [*jobs, *others])
    check(KIND, jobs, built.max_context)
    answers = [tuple(next(iter(job.tokens.values()))) for job in jobs[:4]]
    assert len(set(answers)) == 1
    hits = [job.requests[0].reused for job in jobs[1:4]]
    assert hits == [(length - 1) // 128 * 128] * 3


@pytest.mark.parametrize("length", [1, 3, 5, 129])
def test_v24_nothing_depends_on_memory_that_no_token_wrote(length: int) -> None:
    """Pools start as NaN here and as zeros there; answers and log-probabilities are equal to the bit."""
    seen = []
    for clean in (False, True):
        built = engine(KIND, 20, 4, max_running=2)
        if clean:
            state = built.runner.state
            for pool in (state.window, state.pending, state.folds):
                pool.zero_()
            for pool in (state.csa_entries, state.index_keys, state.hca_entries):
                pool.zero_()
        job = Job(0, prompt(KIND, length), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0))
        play(built, [job])
        seen.append((job.tokens, job.logprobs))
        assert torch.isfinite(torch.tensor(list(next(iter(job.logprobs.values()))))).all()
    (tokens, scores), (clean_tokens, clean_scores) = [[next(iter(x.values())) for x in pair] for pair in seen]
    assert tokens == clean_tokens and scores == clean_scores


@pytest.mark.parametrize("context", [131072, 524288, 1048576])
@pytest.mark.parametrize("step_tokens", [2048, 8192])
def test_v30_the_plan_counts_the_index_scores_of_a_long_prompt(context: int, step_tokens: int) -> None:
    """Scores are made for a bounded number of tokens at a time, and the plan says what that takes at this context."""
    config = EngineConfig(max_context=context, step_tokens=step_tokens, state_bytes=60 << 30)
    plan = plan_memory(preset("flash"), config, torch.bfloat16)
    assert plan.max_context == context
    scores = 64 * (context // 4) * 4
    assert scores <= plan.step_bytes < scores * 8 + step_tokens * 3_000_000


def test_v30_a_budget_that_cannot_hold_a_request_is_refused_with_what_would() -> None:
    flash: ModelConfig = preset("flash")
    with pytest.raises(ValueError, match=r"state_bytes is 1,000,000: scratch .* at least [\d,]+ are needed"):
        plan_memory(flash, EngineConfig(state_bytes=1_000_000), torch.bfloat16)


def test_bench_prints_the_plan_in_a_table_that_adds_up() -> None:
    words = ["bench", "--requests", "2", "--input-len", "8", "--output-len", "2", "--state-memory", "64M"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.endswith(" B")]
    sizes = {line.split("  ")[0]: int(line.split()[-2].replace(",", "")) for line in lines}
    parts = ("history pages", "frontier slots", "step scratch")
    assert sizes["together"] == sum(sizes[part] for part in parts) <= 64 << 20


def test_the_plan_stays_within_its_budget_and_its_pools_are_as_large_as_it_says() -> None:
    from leadline.model.state import State

    config = model(KIND).config
    for budget in (5_200_000, 1 << 24, 3_000_001 * 7):
        plan = plan_memory(config, EngineConfig(state_bytes=budget, max_running=16), torch.float32)
        state = State(config, plan.size, torch.float32, torch.device("cpu"))
        pools = (state.window, state.pending, state.folds, state.csa_entries, state.index_keys, state.hca_entries)
        assert sum(pool.nbytes for pool in pools) == plan.total_bytes <= budget
        assert plan.running >= 1 and plan.size.pages >= 1
