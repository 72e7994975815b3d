"""A step's token ids and what it leaves for the next, next to their definition."""

import random
from types import SimpleNamespace

import pytest
import torch

from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.step_tokens import leave_tokens, take_tokens
from leadline.model.tokens import chosen_ids, keep_tokens
from tests.gpu.compiling import failures
from tests.gpu.rows import DEVICE, poison_new_tensors


def drawn(seed: int, single: bool) -> tuple[SimpleNamespace, torch.Tensor]:
    """A batch with unknown ids (-1) and padding (position -1, slot 0) on the CPU, and every slot's last token."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts = [1 if single else rng.randint(1, 90) for _ in range(rng.choice([1, 2, 9, 150, 300]))]
    padding = min(rng.choice([0, 0, 3]), len(counts) - 1)
    chunks = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.randint(0, 1000, (len(chunks),))
    ids[torch.rand(len(chunks)) < 0.5] = -1
    slots, positions = torch.randperm(310)[: len(counts)] + 1, torch.randint(0, 3000, (len(chunks),))
    if padding:
        slots[chunks[-padding:]], positions[-padding:], ids[-padding:] = 0, -1, -1
    return SimpleNamespace(ids=ids, positions=positions, chunks=chunks, slots=slots), torch.randint(0, 1000, (311,))


@pytest.mark.parametrize("seed", range(12))
def test_ids_are_as_defined(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, last = drawn(seed, single=False)
    want = chosen_ids(batch, last)
    poison_new_tensors(monkeypatch)
    given = (each.to(DEVICE) for each in (batch.ids, batch.positions, batch.chunks, batch.slots, last))
    assert torch.equal(take_tokens(*given).cpu(), want)


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_left_as_defined(seed: int) -> None:
    batch, last = drawn(seed, single=True)
    tokens, mine = torch.randint(0, 1000, (len(batch.ids),)), last.clone().to(DEVICE)
    leave_tokens(tokens.to(DEVICE), batch.positions.to(DEVICE), batch.slots.to(DEVICE), mine)
    before = last.clone()
    keep_tokens(batch, tokens, last)
    assert torch.equal(mine.cpu(), last) and not torch.equal(before, last)
    assert last[0] == before[0], "slot 0 is that of padding alone"


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile(chip: str) -> None:
    assert failures("cases_step_tokens", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12, 20))
def test_on_a_gpu(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    test_tokens_are_left_as_defined(seed)
    test_ids_are_as_defined(seed, monkeypatch)
