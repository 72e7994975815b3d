"""Rows that a decode step leaves in frontiers: all pools in one launch, next to copies one by one."""

import random

import pytest
import torch

from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.commit import commit_rows
from leadline.model.pools import Packed, copy_rows, packed_kv, row_words
from tests.gpu.compiling import failures
from tests.gpu.rows import DEVICE


def pools(seed: int) -> list[torch.Tensor | Packed]:
    """Window rows (packed or plain), pending rows and folds of 1 to 3 layers, or of none, with random bytes."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, dtype = rng.choice([(32, torch.float32), (64, torch.bfloat16), (512, torch.bfloat16)])
    made: list[torch.Tensor | Packed] = []
    if rng.random() < 0.6 and width >= 64:
        packed = packed_kv(rng.randint(1, 3), 200, width, 16, torch.device(DEVICE))
        packed.whole.blocks.random_(0, 256)
        made.append(packed)
    else:
        made.append(torch.randn(rng.randint(1, 3), 200, width).to(DEVICE, dtype))
    made.append(torch.randn(rng.randint(0, 2), 70, 4 * (width + 32)).to(DEVICE))
    made.append(torch.randn(rng.randint(0, 2), 40, 3, width).to(DEVICE))
    return made


def content(pool: torch.Tensor | Packed) -> torch.Tensor:
    return (pool.whole.blocks if isinstance(pool, Packed) else pool).clone()


@pytest.mark.parametrize("seed", range(12))
def test_as_copies_one_by_one(seed: int) -> None:
    """Sources are the last rows, as scratch is; some targets are -1, and their sources anything."""
    count = random.Random(seed).choice([1, 1, 2, 7, 13])
    lists = []
    for rows in (200, 70, 40):
        target = torch.randperm(rows - count)[:count]
        target[torch.rand(count) < 0.3] = -1
        source = torch.where(target < 0, 0, rows - count + torch.randperm(count))
        lists.append((source.to(DEVICE), target.to(DEVICE)))
    mine, expected = pools(seed), pools(seed)
    for pool, (source, target) in zip(expected, lists, strict=True):
        copy_rows(pool, source[target >= 0], target[target >= 0])
    commit_rows([(part, *rows) for pool, rows in zip(mine, lists, strict=True) for part in row_words(pool)])
    for got, want in zip(mine, expected, strict=True):
        assert torch.equal(content(got), content(want))


def test_nothing_to_copy() -> None:
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    commit_rows([(part, none, none) for pool in pools(0) for part in row_words(pool)])


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile(chip: str) -> None:
    assert failures("cases_commit", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12, 20))
def test_on_a_gpu(seed: int) -> None:
    test_as_copies_one_by_one(seed)
