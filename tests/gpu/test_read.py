"""Packed rows brought into bf16 by a launch, and what a long step reads of them in one copy."""

import pytest
import torch

from leadline.kernels.attend import attend
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.read import read_rows
from leadline.kernels.packed import KvRows, kv_rows
from leadline.kernels.rope import Angles
from leadline.kernels.select import entry_rows
from leadline.model import rows as step_rows
from leadline.model.pools import packed_kv
from leadline.model.rows import Expansion, StepRows
from tests.gpu.compiling import failures
from tests.gpu.rows import DEVICE, poison_new_tensors
from tests.gpu.test_step_rows import drawn


def filled(rows: int, width: int, rotated: int) -> KvRows:
    """A packed pool of random rows on the CPU."""
    pool = kv_rows(rows, width, rotated, torch.device("cpu"))
    pool.blocks.fill_(0x7F)
    pool.write(torch.arange(rows), torch.randn(rows, width) * 3)
    return pool


@pytest.mark.parametrize(("width", "rotated", "count"), [(512, 64, 37), (128, 32, 1), (64, 16, 200), (64, 16, 0)])
def test_rows_are_read_as_defined(width: int, rotated: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(count)
    pool, rows = filled(300, width, rotated), torch.randint(0, 300, (count,))
    rows[torch.rand(count) < 0.2] = -1
    want = pool.read(rows.clamp(min=0)) * (rows >= 0)[:, None]
    poison_new_tensors(monkeypatch)
    got = read_rows(pool.blocks.to(DEVICE), rows.to(DEVICE), width, rotated)
    assert got.dtype == torch.bfloat16 and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("seed", range(15))
def test_attention_over_the_copy_is_attention_over_the_pools(seed: int) -> None:
    """To the bit: chunks of many lengths, padding, pages in any order, and page tables that hold anything past a
    request's end.
    """
    batch, state = drawn(seed)
    batch = type(batch)(
        **{name: value.cpu() if torch.is_tensor(value) else value for name, value in vars(batch).items()}
    )
    pages, tokens = 60, len(batch.positions)
    batch.ids = batch.positions
    state.page_table = state.page_table.cpu() % pages
    rows = StepRows.of(batch, state, *(torch.rand(8) for _ in range(2)))
    reached = batch.positions // 128
    for chunk, slot in enumerate(batch.slots):
        state.page_table[slot, int(reached[batch.chunks == chunk].max()) + 1 :] = 10**12
    rows.pages = state.page_table[batch.slots, : batch.most_pages][batch.chunks]
    expansion = Expansion.of(batch, rows, state.page_table, state.window_scratch)
    torch.manual_seed(seed)
    ids = torch.randint(0, 10**6, (tokens, 24)) % rows.csa_visible.clamp(min=1)[:, None]
    ids[torch.arange(24) >= torch.minimum(torch.tensor(24), rows.csa_visible)[:, None]] = -1
    window, csa, hca = (filled(n, 64, 16) for n in (state.window_scratch + tokens, pages * 32, pages))
    q, sink, turns = (
        torch.randn(tokens, 2, 64).bfloat16(),
        torch.randn(2),
        Angles(torch.rand(tokens, 8), torch.rand(tokens, 8)),
    )
    copy, places = window.read(expansion.window), expansion.window_places
    assert len(copy) == tokens + len(batch.slots) * state.ring
    for pool, listed, read, read_places in (
        (csa, entry_rows(rows.pages, ids, 32), expansion.csa, expansion.csa_places(ids)),
        (hca, rows.hca, expansion.pages.flatten(), expansion.hca_places),
    ):
        assert int(read.max()) < pages * 32, "what lies past a request's end is not read"
        want = attend(q, sink, window, rows.window, pool, listed, turns)
        got = attend(q, sink, copy, places, pool.read(read.clamp(min=0)), read_places, turns)
        assert torch.equal(got, want)


def test_a_long_step_is_expanded_unless_bits_must_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, state = drawn(3)
    batch.ids, state.window = batch.positions, packed_kv(1, 64, 64, 16, torch.device(DEVICE))
    frequencies = [torch.rand(8).to(DEVICE) + 0.001 for _ in range(2)]
    monkeypatch.setattr(step_rows, "EXPANDED_TOKENS", 1)
    monkeypatch.setattr(step_rows, "EXPANDED_ROWS", 10**9)
    assert StepRows._on_gpu(batch, state, *frequencies, expand=True).expansion is not None
    assert StepRows._on_gpu(batch, state, *frequencies, expand=False).expansion is None
    state.window = torch.zeros(1)
    assert StepRows._on_gpu(batch, state, *frequencies, expand=True).expansion is None


def test_short_steps_and_large_copies_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, _ = drawn(0)
    batch.ids, batch.slots, batch.most_pages = torch.zeros(512), torch.zeros(1), 64
    assert Expansion.pays(batch, 128)
    batch.most_pages = 512
    assert not Expansion.pays(batch, 128)
    batch.most_pages, batch.slots = 64, torch.zeros(5)
    assert not Expansion.pays(batch, 128)
    batch.ids, batch.slots = torch.zeros(step_rows.EXPANDED_TOKENS - 1), torch.zeros(1)
    assert not Expansion.pays(batch, 128)


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile(chip: str) -> None:
    assert failures("cases_read", chip) == []


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    test_rows_are_read_as_defined(512, 64, 3700, monkeypatch)
    test_rows_are_read_as_defined(64, 16, 200, monkeypatch)
