"""The memory plan on a GPU, from the bytes that weights leave; and what a step may hold on either device."""

import importlib
import inspect
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from schedules import Job, check, engine, play

from leadline.config import EngineConfig
from leadline.engine import loading, runner, scheduler
from leadline.engine.engine import Engine
from leadline.engine.memory import SCORED_ON_GPU, MemoryPlan, plan_memory
from leadline.engine.random_weights import geometry, random_engine
from leadline.engine.sampling import SamplingParams
from leadline.presets import preset

FLASH, GIB = preset("flash"), 1 << 30


def plan(free: int | None, **settings: object) -> MemoryPlan:
    """Of V4-Flash with packed rows."""
    return plan_memory(FLASH, EngineConfig(**settings), torch.bfloat16, True, free)


def limits(plan: MemoryPlan) -> tuple[int, int, int]:
    return plan.running, plan.size.step_tokens, plan.chunk_tokens


def test_a_cpu_keeps_small_steps_and_a_gibibyte() -> None:
    made = plan_memory(geometry("tiny"), EngineConfig(), torch.float32)
    assert limits(made) == (64, 2048, 512) and made.other_bytes == 0
    assert made == plan_memory(geometry("tiny"), EngineConfig(state_bytes=GIB), torch.float32)


def test_a_gpu_gets_large_steps_and_all_that_is_left() -> None:
    made = plan(60 * GIB)
    assert limits(made) == (256, 8192, 8192)
    spent = made.total_bytes + made.step_bytes + made.other_bytes
    assert 58 * GIB < spent <= 60 * GIB


def test_every_plan_of_a_gpu_fits_and_takes_the_largest_modest_step() -> None:
    """Random settings and sizes: what is made fits, what is given stays, and more memory never means smaller steps."""
    rng = random.Random(0)
    steps = {}
    for _ in range(60):
        free = int(rng.uniform(4, 130) * GIB)
        settings: dict[str, int | None] = {
            "max_running": rng.choice([None, 1, 16, 600]),
            "step_tokens": rng.choice([None, None, 600, 1000]),
            "chunk_tokens": rng.choice([None, 64, 5000]),
            "max_context": rng.choice([None, 10_000]),
        }
        if (settings["step_tokens"] or 600) < (settings["max_running"] or 1):
            settings["max_running"] = None
        made = plan(free, **settings)
        assert made.total_bytes + made.step_bytes + made.other_bytes <= free
        assert made.running <= made.size.step_tokens
        assert made.size.step_tokens == (settings["step_tokens"] or made.size.step_tokens)
        assert made.chunk_tokens == (settings["chunk_tokens"] or made.size.step_tokens)
        assert made.running <= (settings["max_running"] or 256)
        steps.setdefault(tuple(settings.values()), []).append((free, made.size.step_tokens))
    for found in steps.values():
        taken = [tokens for _, tokens in sorted(found)]
        assert taken == sorted(taken)


@pytest.mark.parametrize(("free", "tokens"), [(3, 256), (12, 2048), (30, 8192)])
def test_a_small_gpu_starts_with_smaller_steps(free: int, tokens: int) -> None:
    made = plan(free * GIB, max_context=32768)
    assert made.size.step_tokens == made.chunk_tokens == tokens
    assert made.size.pages > 100


def test_what_does_not_fit_is_refused_with_numbers_and_what_to_lower() -> None:
    with pytest.raises(
        ValueError, match=r"state_bytes is 10,737,418,240: .* leave 8,589,934,592 free; lower"
    ) as refusal:
        plan(8 * GIB, state_bytes=10 * GIB)
    advised = int(str(refusal.value).split("lower state_bytes to ")[1].split(", or")[0].replace(",", ""))
    made = plan(8 * GIB, state_bytes=advised)
    assert made.total_bytes <= advised
    with pytest.raises(ValueError, match=r"the weights leave 524,288,000 bytes .*lower step_tokens, max_running"):
        plan(500 << 20)
    with pytest.raises(ValueError, match=r"8,192 tokens"):
        plan(3 * GIB, step_tokens=8192)


def test_settings_that_are_given_shape_those_that_are_not() -> None:
    assert limits(plan_memory(geometry("tiny"), EngineConfig(step_tokens=40), torch.float32)) == (40, 40, 40)
    made = plan_memory(geometry("tiny"), EngineConfig(max_running=3000, state_bytes=40 * GIB), torch.float32)
    assert limits(made) == (3000, 3000, 512)


def test_the_scores_that_are_counted_are_those_that_the_kernel_makes() -> None:
    select = pytest.importorskip("leadline.kernels.gpu.select")
    assert select.SCRATCH == SCORED_ON_GPU


def test_an_engine_is_built_from_what_is_free_after_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan follows from the free bytes, which are asked for when the weights have their memory and no sooner."""
    made, empty = [], loading.WeightStore._empty
    monkeypatch.setattr(loading.WeightStore, "_empty", lambda self, *of: made.append(1) or empty(self, *of))
    counts = []
    monkeypatch.setattr(loading, "free_bytes", lambda device: counts.append(len(made)) or 3 * GIB)
    built, _ = random_engine(EngineConfig(device="cpu", max_context=2000), geometry("tiny", 3), 3, progress=False)
    assert counts == [len(made)] and counts[0] > 0
    size = built.memory.size
    assert built.memory.other_bytes and size.step_tokens > 2048
    assert built.scheduler.limits.step_tokens == built.scheduler.limits.chunk_tokens == size.step_tokens
    built.close()


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "eval"])
def test_commands_leave_sizes_to_the_device(command: str) -> None:
    run = getattr(importlib.import_module(f"leadline.cli.{command}"), command)
    sizes = {"state_memory", "max_context", "max_running", "step_tokens", "chunk_tokens"}
    found = {name: each.default for name, each in inspect.signature(run).parameters.items() if name in sizes}
    assert {"state_memory", "max_context"} <= set(found) and set(found.values()) == {None}


def scored_rows(built: Engine) -> list[int]:
    """The number of rows to be scored of each step that the engine will launch."""
    rows: list[int] = []
    launch = built.runner.launch
    built.runner.launch = lambda plan, how: rows.append(len(how.scored_tokens)) or launch(plan, how)
    return rows


@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_to_be_scored_share_a_bounded_part_of_each_step(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Scores and tokens are what they are without the bound, and no step makes more rows of logits."""
    monkeypatch.setattr(runner, "LOGPROB_ROWS", 7)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 90, length, dtype=np.int32) for length in (150, 40, 3, 90, 200)]
    seen = []
    for bound in (10_000, 32):
        monkeypatch.setattr(scheduler, "SCORED_TOKENS", bound)
        built = engine("all kinds", 40, 16, max_running=4, step_tokens=600, chunk_tokens=500, overlap=overlap)
        rows = scored_rows(built)
        scores: dict[int, list[tuple[int, float]]] = {}
        first = None
        for prompt in prompts:
            for request in built.add(prompt, params):
                first = request.number if first is None else first
        tokens: dict[int, list[int]] = {}
        while built.busy:
            for update in built.step():
                number = update.request.number - first
                scores.setdefault(number, []).extend((at, e.logprob) for at, e in update.prompt_logprobs or [])
                tokens.setdefault(number, []).extend(update.tokens)
            assert not built.problems()
        built.close()
        assert [len(scores[i]) for i in range(len(prompts))] == [len(prompt) - 1 for prompt in prompts]
        seen.append((tokens, scores, max(rows)))
    (tokens, scores, most), (bounded_tokens, bounded, bounded_most) = seen
    assert tokens == bounded_tokens and scores == bounded
    assert most > 100 and bounded_most <= 32 + 4


def test_plain_prompts_run_beside_scored_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SCORED_TOKENS", 16)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    jobs = [Job(0, np.arange(2, 80, dtype=np.int32), params), Job(0, np.arange(3, 70, dtype=np.int32), params)]
    scored = [Job(0, np.arange(4, 90, dtype=np.int32), replace(params, prompt_logprobs=0)) for _ in range(3)]
    built = engine("csa", 40, 16, max_running=6)
    play(built, [*scored, *jobs])
    check("csa", [*scored, *jobs], built.max_context)


def test_a_prompt_that_waits_to_be_scored_lets_others_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SCORED_TOKENS", 16)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    scored = replace(params, prompt_logprobs=0)
    built = engine("csa", 40, 16, max_running=6)
    prompt = np.arange(2, 90, dtype=np.int32)
    first, second, plain = (built.add(prompt, each)[0] for each in (scored, scored, params))
    ended = []
    while built.busy:
        ended += [update.request for update in built.step() if update.finish_reason]
    assert ended == [plain, first, second]
