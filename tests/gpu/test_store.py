"""store and query_and_store: rows into plain and packed pools, against the definitions."""

import pytest
import torch

from leadline.kernels import query as query_definition
from leadline.kernels import store as definition
from leadline.kernels.gpu import store as gpu
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.rope import Angles
from tests.gpu.compiling import failures
from tests.gpu.rows import (
    FORMS,
    assert_near,
    assert_rounded_alike,
    content,
    draw,
    kv_pool,
    poison_new_tensors,
    turns,
)

SIZES = [(1, 64, 16, 63), (5, 32, 8, 62), (3, 48, 6, 0), (3, 512, 64, 126)]


def on_cpu(by: Angles) -> Angles:
    return Angles(by.cos.cpu(), by.sin.cpu())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "width", "rotated", "first"), SIZES)
def test_rows_are_stored_and_their_neighbours_stay(
    tokens: int, width: int, rotated: int, first: int, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(width)
    kv, norm, by = draw(tokens, width + 8, dtype=dtype)[:, :width], draw(width), turns(tokens, rotated)
    q = draw(tokens, 3, width, dtype=dtype)
    pool, want = (kv_pool(form, 192, width, rotated, dtype) for _ in range(2))
    native = form != "plain"
    definition.put_rows(kv[:0], rotated, native, want, torch.arange(0, device=kv.device))
    turned = query_definition.rotate(query_definition.rms_norm(kv.double(), norm, 1e-6), by)
    definition.put_rows(turned.to(dtype), rotated, native, want, torch.arange(first, first + tokens, device=kv.device))
    poison_new_tensors(monkeypatch)
    got = gpu.query_and_store(q, kv, norm, by, 1e-6, native, pool, first)
    expected = query_definition.query(q.double().cpu(), on_cpu(by), 1e-6)
    assert_near("query", got.cpu(), expected, 2.5, dtype)
    mine, theirs = content(pool, 192), content(want, 192)
    written = torch.arange(first, first + tokens)
    others = torch.ones(192, dtype=torch.bool).index_fill(0, written, False)
    assert torch.equal(mine[others], theirs[others])
    if form == "plain":
        assert_near("plain", mine[written], theirs[written], 3, dtype)
    else:
        # a step of e4m3 is an eighth of the value at most, and bf16 is a finer one
        close = dtype == torch.float32 and form == "rounded"
        assert_rounded_alike(form, mine[written, :-rotated], theirs[written, :-rotated], 0.13, 0.02 if close else 0.15)
        assert_near(form, mine[written, -rotated:], theirs[written, -rotated:], 3, torch.bfloat16)


@pytest.mark.parametrize("form", ["rounded", "packed"])
def test_turned_channels_do_not_coarsen_the_scale_of_the_others(form: str) -> None:
    """48 channels share a scale, and 16 turned ones, much larger, lie behind them in the same 64."""
    torch.manual_seed(2)
    kv, by, norm = draw(4, 64), turns(4, 16), torch.ones(64, device=draw(1).device)
    norm[48:] = 1e5
    pool, want = (kv_pool(form, 64, 64, 16, torch.float32) for _ in range(2))
    gpu.store(kv, norm, by, 1e-6, True, pool, 5)
    row = query_definition.rotate(query_definition.rms_norm(kv, norm, 1e-6), by)
    definition.put_rows(row, 16, True, want, torch.arange(5, 9, device=kv.device))
    assert_rounded_alike(form, content(pool, 9)[5:, :48], content(want, 9)[5:, :48], 0.13, 0.05)


def test_store_alone_writes_what_both_write() -> None:
    torch.manual_seed(0)
    kv, norm, by = draw(9, 64), draw(64), turns(9, 16)
    alone, both = (kv_pool("packed", 64, 64, 16, torch.bfloat16) for _ in range(2))
    gpu.store(kv, norm, by, 1e-6, True, alone, 40)
    gpu.query_and_store(draw(9, 2, 64), kv, norm, by, 1e-6, True, both, 40)
    assert torch.equal(alone.blocks, both.blocks)
    part = Angles(by.cos[3:5].contiguous(), by.sin[3:5].contiguous())
    few = kv_pool("packed", 64, 64, 16, torch.bfloat16)
    gpu.store(kv[3:5], norm, part, 1e-6, True, few, 43)
    assert torch.equal(content(few, 64)[43:45], content(alone, 64)[43:45])
    gpu.store(kv[:0], norm, Angles(by.cos[:0], by.sin[:0]), 1e-6, True, few, 0)


def test_a_row_of_zeros_and_one_of_large_values() -> None:
    kv, by = torch.stack([torch.zeros(64), torch.full((64,), 3e4)]).to(draw(1).device), turns(2, 16)
    pool = kv_pool("packed", 64, 64, 16, torch.bfloat16)
    gpu.store(kv, torch.full((64,), 1e4, device=kv.device), by, 1e-6, True, pool, 0)
    read = content(pool, 2)
    assert (read[0] == 0).all()
    assert_near("large", read[1:, :48], torch.full((1, 48), 1e4), 8, torch.bfloat16)


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile_for_every_chip(chip: str) -> None:
    assert failures("cases_state", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 130, 4096])
def test_official_sizes(tokens: int) -> None:
    kv, q, by = draw(tokens, 512, dtype=torch.bfloat16), draw(tokens, 64, 512, dtype=torch.bfloat16), turns(tokens, 64)
    norm = draw(512)
    pool = kv_pool("packed", 8192, 512, 64, torch.bfloat16)
    want = type(pool)(pool.blocks.cpu(), 512, 64)
    got = definition.query_and_store(q, kv, norm, by, 1e-6, True, pool, 1000)
    expected = definition.query_and_store(q.cpu(), kv.cpu(), norm.cpu(), on_cpu(by), 1e-6, True, want, 1000)
    assert_rounded_alike("query", got.cpu(), expected, 0.01, 0.01)
    rows = torch.arange(8192)
    assert_rounded_alike("rows", content(pool, 8192).cpu(), want.read(rows).float(), 0.13, 0.01)
