"""A step's lists and rotations in one launch, next to their definition."""

import random
from types import SimpleNamespace

import pytest
import torch

from leadline.kernels.gpu.chips import CHIPS
from leadline.model.rows import StepRows
from tests.gpu.compiling import failures
from tests.gpu.rows import DEVICE, poison_new_tensors


def drawn(seed: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A batch of random chunks, some of them padding (position -1), and a state with a random page table."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    chunks = [
        (rng.choice([-1, 0, 1, 127, 128, rng.randrange(3000)]), rng.randint(1, 40)) for _ in range(rng.randint(1, 9))
    ]
    chunks = [(start, count if start >= 0 else 1) for start, count in chunks]
    ends = [start + count for start, count in chunks]
    firsts = torch.tensor([0, *(count for _, count in chunks)]).cumsum(0)[:-1]
    batch = SimpleNamespace(
        positions=torch.tensor([start + i for start, count in chunks for i in range(count)]),
        chunks=torch.tensor([number for number, (_, count) in enumerate(chunks) for _ in range(count)]),
        starts=torch.tensor([start for start, _ in chunks]),
        firsts=firsts,
        slots=torch.randperm(12)[: len(chunks)],
        closing_positions=torch.randint(0, 3000, (rng.choice([0, 1, 7]),)),
        full_positions=torch.randint(0, 3000, (rng.choice([0, 1, 3]),)),
    )
    for name, value in vars(batch).items():
        setattr(batch, name, value.to(DEVICE))
    batch.most_pages = -(-max(max(ends), 1) // 128) + rng.choice([0, 0, 3])
    batch.most_hca_entries = min(batch.most_pages, max(max(ends), 0) // 128 + rng.choice([0, 0, 1]))
    ring = rng.choice([3, 16, 24, 128])
    table = torch.randint(0, 10**6, (12, 40)).to(DEVICE)
    return batch, SimpleNamespace(page_table=table, ring=ring, window_scratch=12 * ring)


@pytest.mark.parametrize("seed", range(25))
def test_as_the_definition(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, state = drawn(seed)
    frequencies = [(torch.rand(half) + 0.001).to(DEVICE) for half in 2 * [random.Random(seed).choice([4, 16, 32])]]
    on_cpu = SimpleNamespace(**{k: v.cpu() if torch.is_tensor(v) else v for k, v in vars(batch).items()})
    state_on_cpu = SimpleNamespace(**{**vars(state), "page_table": state.page_table.cpu()})
    want = StepRows.of(on_cpu, state_on_cpu, *(each.cpu() for each in frequencies))
    poison_new_tensors(monkeypatch)
    got = StepRows._on_gpu(batch, state, *frequencies, expand=False)
    for name in ("window", "pages", "csa_visible", "hca"):
        assert torch.equal(getattr(got, name).cpu().long(), getattr(want, name)), name
    assert got.pages.dtype == torch.int32
    turns = [(got.swa_turns, want.swa_turns)]
    turns += [
        (getattr(got.compressed_turns, name), getattr(want.compressed_turns, name))
        for name in ("tokens", "closing", "full")
    ]
    for have, wanted in turns:
        torch.testing.assert_close(have.cos.cpu(), wanted.cos, atol=3e-7, rtol=0)
        torch.testing.assert_close(have.sin.cpu(), wanted.sin, atol=3e-7, rtol=0)


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile(chip: str) -> None:
    assert failures("cases_step_rows", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(25, 40))
def test_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_as_the_definition(seed, monkeypatch)


@pytest.mark.gpu
def test_far_positions_are_turned_as_exactly_as_near_ones() -> None:
    """Up to the last of a million tokens; in Triton's interpreter NumPy computes cosines, which proves nothing."""
    batch, state = drawn(0)
    batch.positions = batch.positions % 1000 + 1_040_000
    batch.starts = torch.full_like(batch.starts, 1_040_000)
    state.page_table = state.page_table.repeat(1, 300)
    batch.most_pages, batch.most_hca_entries = 8192, 8192
    frequencies = torch.rand(32, device=DEVICE)
    got = StepRows._on_gpu(batch, state, frequencies, frequencies, expand=False).swa_turns
    phase = batch.positions[:, None].float() * frequencies
    torch.testing.assert_close(got.cos.double(), phase.double().cos(), atol=3e-7, rtol=0)
    torch.testing.assert_close(got.sin.double(), phase.double().sin(), atol=3e-7, rtol=0)
