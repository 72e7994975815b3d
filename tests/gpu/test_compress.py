"""close_csa and hca_fold: the kernels against the definitions, in any company and for any cut."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from leadline.kernels import compress as definition
from leadline.kernels.compress import Gating, Pieces
from leadline.kernels.gpu import compress as gpu
from leadline.kernels.rope import Angles
from tests.gpu.rows import DEVICE, FORMS, assert_near, assert_rounded_alike, content, draw, key_pool, kv_pool, turns

SIZES = [(1, 64, 32, 16), (4, 48, 32, 6), (3, 512, 128, 64)]
DTYPES = [torch.float32, torch.bfloat16]


def doubled(by: Angles) -> Angles:
    return Angles(by.cos.double(), by.sin.double())


def windows(count: int) -> Tensor:
    """Rows of windows among 60 pending ones; some have no window before them."""
    rows = torch.randint(0, 60, (count, 8))
    rows[::3, :4] = -1
    return rows.to(DEVICE)


def assert_row(name: str, got: Tensor, want: Tensor, rotated: int, native: bool, dtype: torch.dtype) -> None:
    """Window rows or entries, of which native numerics round all but the last `rotated` channels."""
    if not native:
        assert_near(name, got, want, 4, dtype)
        return
    assert_rounded_alike(name, got[:, :-rotated], want[:, :-rotated], 0.13, 0.15)
    assert_near(name, got[:, -rotated:], want[:, -rotated:], 4, torch.bfloat16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("count", "width", "index_width", "rotated"), SIZES)
def test_windows_close_and_other_rows_stay(
    count: int, width: int, index_width: int, rotated: int, dtype: torch.dtype, form: str
) -> None:
    torch.manual_seed(width + count)
    native, columns = form != "plain", 4 * (width + index_width)
    pending, gating = draw(61, columns), Gating(draw(1), draw(4, columns))
    pending[0] = float("nan")  # what row -1 would be
    pending = pending[1:]
    rows, targets = windows(count), torch.randperm(64)[:count].to(DEVICE)
    targets[1::3] = -1
    norms, by = (draw(width), draw(index_width)), turns(count, rotated)
    mine, theirs = (
        (kv_pool(form, 64, width, rotated, dtype), key_pool(form, 64, index_width, dtype)) for _ in range(2)
    )
    made = [
        definition.csa_entries(part.double(), rows, ape.double(), norm.double(), doubled(by), 1e-6, torch.float64)
        for part, ape, norm in zip(
            pending.split([4 * width, 4 * index_width], 1),
            gating.ape.split([4 * width, 4 * index_width], 1),
            norms,
            strict=True,
        )
    ]
    definition.put_rows(made[0].to(dtype), rotated, native, theirs[0], targets)
    definition.put_index_keys(made[1].to(dtype), native, theirs[1], targets)
    gpu.close_csa(pending, rows, gating, norms, by, 1e-6, native, mine, targets)
    written = torch.zeros(64, dtype=torch.bool).index_fill(0, targets[targets >= 0].cpu(), True)
    for pool, expected in zip(mine, theirs, strict=True):
        assert torch.equal(content(pool, 64)[~written], content(expected, 64)[~written])
    entries, keys = (content(pool, 64)[written] for pool in mine)
    want_entries, want_keys = (content(pool, 64)[written] for pool in theirs)
    assert_row("entries", entries, want_entries, rotated, native, dtype)
    if native:
        assert_rounded_alike("keys", keys, want_keys, 0.34, 0.08)
    else:
        assert_near("keys", keys, want_keys, 4, dtype)


def test_a_window_closes_to_the_same_bits_in_any_company() -> None:
    torch.manual_seed(1)
    pending, gating, norms = draw(60, 4 * 96), Gating(draw(1), draw(4, 4 * 96)), (draw(64), draw(32))
    rows, by, targets = windows(9), turns(9, 16), torch.randperm(64)[:9].to(DEVICE)
    whole, part = (
        (kv_pool("packed", 64, 64, 16, torch.bfloat16), key_pool("packed", 64, 32, torch.bfloat16)) for _ in range(2)
    )
    gpu.close_csa(pending, rows, gating, norms, by, 1e-6, True, whole, targets)
    for pick in (slice(5, 9), slice(0, 1), slice(1, 5)):
        turn = Angles(by.cos[pick].contiguous(), by.sin[pick].contiguous())
        gpu.close_csa(pending, rows[pick], gating, norms, turn, 1e-6, True, part, targets[pick])
    assert torch.equal(whole[0].blocks, part[0].blocks) and torch.equal(whole[1].blocks, part[1].blocks)
    gpu.close_csa(pending, rows[:0], gating, norms, turn, 1e-6, True, part, targets[:0])


RATIO = 16
"""Of the windows that are folded here: shorter than the model's, as the interpreter is slow."""


def pieces_of(cuts: list[int], slots: list[int]) -> Pieces:
    """Consecutive pieces of the given sizes that go on from `slots`; those that reach a multiple of RATIO are full."""
    counts = torch.tensor(cuts)
    ends = counts.cumsum(0)
    full = torch.nonzero((ends % RATIO == 0) & (counts > 0))[:, 0]
    parts = (ends - counts, counts, torch.tensor(slots), full, torch.arange(len(full)) * 2 + 1)
    return Pieces(*(part.to(DEVICE) for part in parts), longest=max(cuts))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("width", "rotated"), [(48, 6), (512, 64)])
def test_pieces_are_folded_and_full_ones_leave_an_entry(
    width: int, rotated: int, dtype: torch.dtype, form: str
) -> None:
    torch.manual_seed(width)
    native = form != "plain"
    raw, positions = draw(39, 2 * width), torch.arange(39, device=DEVICE) + RATIO * 5
    gating, norm = Gating(draw(1), draw(RATIO, 2 * width)), draw(width)
    pieces = pieces_of([3, 13, 16, 0, 1, 6], [-1, 3, -1, -1, 2, 0])
    by = turns(2, rotated)
    before = draw(20, 3, width)
    before[:, 1:] = before[:, 1:].abs() + 1
    folds, pool, want = before.clone(), *(kv_pool(form, 64, width, rotated, dtype) for _ in range(2))
    gpu.hca_fold(raw, positions, gating, pieces, folds, 10, norm, by, 1e-6, native, pool)
    states = definition._folded(raw.double(), positions, gating.ape.double(), pieces, before.double())
    done = pieces.count > 0
    assert_near("states", folds[10:16][done].flatten(1), states[done].flatten(1), 8, torch.float32)
    kept = [row for row in range(20) if row not in (10, 11, 12, 14, 15)]
    assert torch.equal(folds[kept], before[kept]), "other states, a piece of no token's among them"
    made = definition.hca_entries(states[pieces.full], norm.double(), doubled(by), 1e-6, torch.float64)
    definition.put_rows(made.to(dtype), rotated, native, want, pieces.targets)
    mine, theirs = content(pool, 64), content(want, 64)
    written = torch.zeros(64, dtype=torch.bool).index_fill(0, pieces.targets.cpu(), True)
    assert len(pieces.full) == 2 and torch.equal(mine[~written], theirs[~written])
    assert_row("entries", mine[written], theirs[written], rotated, native, dtype)
    empty = kv_pool(form, 64, width, rotated, dtype)
    nowhere = replace(pieces, targets=torch.full_like(pieces.targets, -1))
    gpu.hca_fold(raw, positions, gating, nowhere, folds, 10, norm, by, 1e-6, native, empty)
    assert torch.equal(content(empty, 64), content(kv_pool(form, 64, width, rotated, dtype), 64)), "-1 writes nothing"


def test_the_last_bit_of_a_state_does_not_depend_on_the_cut() -> None:
    torch.manual_seed(3)
    raw, positions = draw(RATIO, 128), torch.arange(RATIO, device=DEVICE)
    gating, norm, by = Gating(draw(1), draw(RATIO, 128)), draw(64), turns(1, 16)
    results = []
    for cuts in ([16], [1, 15], [7, 9], [3, 8, 5], [15, 1]):
        folds, pool = torch.full((9, 3, 64), float("nan"), device=DEVICE), kv_pool("plain", 4, 64, 16, torch.float32)
        start = 0
        for index, count in enumerate(cuts):
            part = slice(start, start + count)
            first, number, before = (torch.tensor([value], device=DEVICE) for value in (0, count, index - 1))
            full = torch.zeros(int(start + count == RATIO), dtype=torch.int64, device=DEVICE)
            one = Pieces(first, number, before, full, full, count)
            gpu.hca_fold(raw[part], positions[part], gating, one, folds, index, norm, by, 1e-6, False, pool)
            start += count
        results.append((folds[len(cuts) - 1], pool[0]))
    for state, entry in results[1:]:
        assert torch.equal(state, results[0][0]) and torch.equal(entry, results[0][1])
    assert results[0][0].isfinite().all()


def test_more_full_pieces_than_one_block_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """140 pieces are full; each must take its own angles and its own target."""
    torch.manual_seed(4)
    monkeypatch.setattr(gpu, "FOLD_ROWS", 1)
    count = 140
    raw, positions = draw(count, 64), torch.full((count,), 127, device=DEVICE)
    gating, norm, by = Gating(draw(1), draw(128, 64)), draw(32), turns(count, 8)
    row = torch.arange(count, device=DEVICE)
    pieces = Pieces(row, torch.ones_like(row), row % 7, row, torch.randperm(count).to(DEVICE), 1)
    before = draw(8 + count, 3, 32).abs() + 0.5
    pool, want = (kv_pool("plain", count, 32, 8, torch.float32) for _ in range(2))
    gpu.hca_fold(raw, positions, gating, pieces, before.clone(), 8, norm, by, 1e-6, False, pool)
    states = definition._folded(raw, positions, gating.ape, pieces, before)
    definition.put_rows(definition.hca_entries(states, norm, by, 1e-6, torch.float32), 8, False, want, pieces.targets)
    assert_near("entries", pool, want, 8, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 72, 300), (13, 130, 520)]
    + [pytest.param(tokens, 2560, 4096, marks=pytest.mark.gpu) for tokens in (1, 16, 17, 100)],
)
def test_gate_rows(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    x = draw(tokens, columns, dtype=dtype)
    gating = Gating((draw(rows, columns) / columns**0.5).to(dtype), draw(4, rows))
    out = torch.full((tokens + 2, rows), 77.0, device=DEVICE)
    gpu.gate_rows(x, gating, out[1:-1])
    # a tensor core cuts off, on average, half of 2^-23 of the running sum after each 16 columns, all in one direction
    ulps = max(20, columns / 64)
    assert_near("rows", out[1:-1], x.double() @ gating.matrix.double().T, ulps, torch.float32)
    assert (out[[0, -1]] == 77).all()
