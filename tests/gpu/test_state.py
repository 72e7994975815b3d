"""Packed pools in the engine's state: the same answers, to the bit, as plain pools that hold the rounded values."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import CPU, random_config, random_reference, serving_model
from schedules import Job, play, random_jobs

from leadline.config import EngineConfig
from leadline.engine.engine import Engine, Stats
from leadline.engine.memory import plan_memory
from leadline.model.pools import Packed, copy_rows, packed_keys, packed_kv
from leadline.model.state import State, StateSize, keeps_packed, page_bytes, scratch_bytes, slot_bytes
from leadline.model.transformer import Transformer
from leadline.presets import preset

SHAPE = {"compress_ratios": [0, 4, 128, 0], "num_hidden_layers": 3, "sliding_window": 24, "index_topk": 16}


@cache
def native_model() -> Transformer:
    """A small model in bf16 with every layer kind and native numerics."""
    sizes = {"hidden_size": 64, "head_dim": 64, "qk_rope_head_dim": 16, "num_attention_heads": 2, "o_groups": 1}
    raw = random_config(random.Random(0), **SHAPE, **sizes, hc_mult=2, num_hash_layers=0, vocab_size=97)
    return serving_model(random_reference(raw, 1), torch.bfloat16, native=True)


def played(seed: int, packed: bool) -> tuple[list[Job], Stats, int]:
    """A random schedule on an engine with few pages, all of whose memory is NaN at first."""
    rng = random.Random(seed)
    config = native_model().config
    pages, running = rng.choice([4, 4, 5, 30]), rng.choice([4, 8])
    options = {"step_tokens": rng.choice([64, 300]), "chunk_tokens": rng.choice([5, 64, 130])}
    engine_config = EngineConfig(state_bytes=1 << 26, max_running=running, **options)
    memory = plan_memory(config, engine_config, torch.bfloat16)
    size = replace(memory.size, pages=pages, slots=running + rng.choice([0, 1, running]))
    state = State(config, size, torch.bfloat16, CPU, packed)
    for pool in (state.window, state.csa_entries, state.hca_entries, state.index_keys, state.pending, state.folds):
        if isinstance(pool, Packed):
            pool.whole.blocks.fill_(255)
        else:
            pool.fill_(float("nan"))
    state.page_table.fill_(2**40)
    memory = replace(memory, size=size, max_context=pages * 128)
    engine = Engine(native_model().forward, config, engine_config, memory, state)
    jobs = random_jobs(rng, config.vocab_size, config.sliding_window, min(400, pages * 128 - 40))
    copies = [0]
    begin = state.begin

    def counted(batch):  # type: ignore[no-untyped-def]
        copies[0] += batch.page_copies.shape[1]
        begin(batch)

    state.begin = counted  # type: ignore[method-assign]
    play(engine, jobs)
    return jobs, engine.stats(), copies[0]


def answers(job: Job) -> list[list[list]]:
    """The tokens and log-probabilities of each choice of a job, whose requests have other numbers in each engine."""
    return [list(job.tokens.values()), list(job.logprobs.values())]


def test_packed_pools_change_no_bit_of_any_answer() -> None:
    seen = [0, 0, 0]
    for seed in (2, 3, 6, 11):
        (plain, _, _), (packed, stats, copies) = played(seed, False), played(seed, True)
        for mine, expected in zip(packed, plain, strict=True):
            assert answers(mine) == answers(expected), seed
            assert all(torch.tensor(values).isfinite().all() for values in mine.logprobs.values()), seed
        seen = [a + b for a, b in zip(seen, (stats.tokens_reused > 0, stats.preemptions, copies), strict=True)]
    assert all(seen), "the schedules reach snapshots, preemption and copies of pages"


@pytest.mark.parametrize("layers", [1, 3])
def test_copies_reach_every_layer_and_no_other_row(layers: int) -> None:
    torch.manual_seed(layers)
    for made in (packed_kv(layers, 150, 64, 16, CPU), packed_kv(layers, 150, 512, 64, CPU)):
        check_copies(made, 64 if made.whole.width == 64 else 512)
    for width in (32, 128):
        check_copies(packed_keys(layers, 150, width, CPU), width)


def check_copies(pool: Packed, width: int) -> None:
    """Sources and targets in one order of a cycle, so that some are both; all other rows stay."""
    rows = torch.arange(150)
    for layer in range(pool.layers):
        pool[layer].write(rows, torch.randn(150, width).bfloat16())
    before = torch.stack([pool[layer].read(rows) for layer in range(pool.layers)])
    source = torch.randperm(150)[:40]
    target = source.roll(1)
    copy_rows(pool, source, target)
    expected = before.clone()
    expected[:, target] = before[:, source]
    assert torch.equal(torch.stack([pool[layer].read(rows) for layer in range(pool.layers)]), expected)


@pytest.mark.parametrize("name", ["flash", "pro", "small"])
def test_the_plan_of_packed_pools_is_as_large_as_they_are(name: str) -> None:
    config = native_model().config if name == "small" else preset(name)
    dtype, meta = torch.bfloat16, torch.device("meta")
    for budget in (1 << 28, (1 << 33) + 12345):
        engine_config = EngineConfig(state_bytes=budget if name == "small" else budget * 8, step_tokens=512)
        plan = plan_memory(config, engine_config, dtype, packed=True)
        state = State(config, plan.size, dtype, meta, packed=True)
        packed = (state.window, state.csa_entries, state.hca_entries, state.index_keys)
        held = sum(pool.nbytes for pool in (*packed, state.pending, state.folds))
        assert held <= plan.total_bytes <= engine_config.state_bytes
        spare = scratch_bytes(config, dtype, plan.size, True) - scratch_bytes(config, dtype, plan.size)
        assert plan.total_bytes - held < max(0.02 * held, 64 * 2000 * 4 * config.num_hidden_layers), spare


def test_bytes_of_flash() -> None:
    """584 bytes a row and one of its block's padding, 68 an index key."""
    flash, dtype = preset("flash"), torch.bfloat16
    assert page_bytes(flash, dtype, packed=True) == 21 * 32 * (585 + 68) + 20 * 585
    plain = slot_bytes(flash, dtype)
    assert slot_bytes(flash, dtype, packed=True) == plain - 43 * 128 * (1024 - 585)
    two = StateSize(1, 1, 2, 1), StateSize(1, 1, 3, 1)
    more = [scratch_bytes(flash, dtype, size, packed=True) for size in two]
    assert more[1] - more[0] == 43 * 585 + 21 * 4 * 640 * 4 + (two[1].step_pieces - two[0].step_pieces) * 20 * 6144


def test_what_is_kept_packed() -> None:
    gpu = torch.device("cuda")
    assert keeps_packed(True, torch.bfloat16, gpu)
    assert not keeps_packed(False, torch.bfloat16, gpu)
    assert not keeps_packed(True, torch.float32, gpu)
    assert not keeps_packed(True, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match=r"bfloat16 values in fp8; the activations here are torch\.float32"):
        State(native_model().config, StateSize(1, 1, 1, 1), torch.float32, CPU, packed=True)
