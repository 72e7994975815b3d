"""How often each layer chose each expert: counted exactly, from when somebody asks, and at no cost before."""

import asyncio
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from schedules import engine, model
from test_schedules import prompt

import leadline.model.layer
from leadline.engine.async_engine import AsyncEngine
from leadline.engine.engine import Engine
from leadline.engine.sampling import SamplingParams

KIND = "all kinds"


@pytest.fixture(params=[False, True], ids=["synchronous", "overlapped"])
def built(request: pytest.FixtureRequest) -> Engine:
    return engine(KIND, 30, 8, max_running=4, overlap=request.param, chunk_tokens=50)


def run(built: Engine, lengths: list[int]) -> None:
    for seed, length in enumerate(lengths):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=9, ignore_eos=True)
        built.add(prompt(KIND, length, seed), params)
    while built.busy:
        built.step()


def test_every_choice_of_every_layer_is_counted_once(built: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, experts = built.model.num_hidden_layers, built.model.n_routed_experts
    chosen: list[torch.Tensor] = []
    real = leadline.model.layer.route

    def recorded(*arguments: Any) -> Any:
        result = real(*arguments)
        chosen.append(result[0].clone())
        return result

    monkeypatch.setattr("leadline.model.layer.route", recorded)
    assert built.expert_load() == np.zeros((layers, experts)).tolist()
    run(built, [130, 7, 61, 1])
    steps = len(chosen) // layers
    assert steps == built.stats().steps
    want = [
        torch.bincount(torch.cat([chosen[step * layers + layer].flatten() for step in range(steps)]), minlength=experts)
        for layer in range(layers)
    ]
    load = built.expert_load()
    assert load == [counts.tolist() for counts in want]
    assert {sum(counts) for counts in load} == {built.stats().tokens_run * built.model.num_experts_per_tok}


def test_a_hash_layer_loads_the_experts_of_its_table(built: Engine) -> None:
    built.expert_load()
    ids = prompt(KIND, 90)
    built.add(ids, SamplingParams(max_tokens=1))
    while built.busy:
        built.step()
    table = model(KIND).layers[0].experts.by_token
    assert table is not None
    want = np.bincount(table.numpy()[ids].flatten(), minlength=built.model.n_routed_experts)
    assert built.expert_load()[0] == want.tolist()


def test_nothing_is_counted_before_somebody_asks(built: Engine) -> None:
    run(built, [20])
    assert built.runner.expert_counts is None
    assert sum(map(sum, built.expert_load())) == 0
    run(built, [20])
    assert sum(map(sum, built.expert_load())) > 0


def test_counting_changes_no_token(built: Engine) -> None:
    def tokens() -> list[int]:
        (request,) = built.add(prompt(KIND, 40), SamplingParams(temperature=1.0, seed=3, max_tokens=12))
        while built.busy:
            built.step()
        return request.output.tolist()

    before = tokens()
    built.expert_load()
    assert tokens() == before


def test_the_engine_in_a_thread_tells_it_too(built: Engine) -> None:
    threaded = AsyncEngine(built)
    try:
        load = asyncio.run(threaded.expert_load())
    finally:
        threaded.close()
    assert len(load) == built.model.num_hidden_layers


def test_the_time_in_steps_is_counted(built: Engine) -> None:
    assert built.stats().busy_seconds == 0
    begun = perf_counter()
    run(built, [50])
    wall = perf_counter() - begun
    assert 0.5 * wall < built.stats().busy_seconds < wall
