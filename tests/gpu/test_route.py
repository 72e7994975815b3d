"""route: scores, choice and weights, against the definition in fp64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.kernels import route as definition
from leadline.kernels.gpu import route as gpu
from leadline.kernels.gpu.chips import CHIPS
from tests.gpu.compiling import failures
from tests.gpu.rows import DEVICE, assert_near, draw, poison_new_tensors

TYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 with a wide gate": (torch.bfloat16, torch.float32),
}
"""Of rows and gate."""
SCALE = 1.5


def wanted(
    x: Tensor, gate: Tensor, bias: Tensor | None, by_token: Tensor | None, ids: Tensor, active: int
) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else bias.double()
    return definition.route(x.double(), gate.double(), bias, by_token, ids, active, SCALE)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(
    ("rows", "experts", "d", "active"),
    [(1, 8, 64, 2), (5, 8, 200, 2), (17, 48, 650, 6), (3, 384, 136, 6), (33, 256, 130, 6), (2, 3, 16, 3)],
)
def test_experts_are_chosen_and_weighed(
    rows: int, experts: int, d: int, active: int, types: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rows)
    dtype, gate_dtype = TYPES[types]
    x = draw(rows, d + 8, dtype=dtype)[:, :d]
    gate, bias = (draw(experts, d) / d**0.5).to(gate_dtype), draw(experts)
    ids = torch.randint(0, 9, (rows,), device=DEVICE)
    by_token = torch.stack([torch.randperm(experts)[:active] for _ in range(9)]).to(DEVICE)
    poison_new_tensors(monkeypatch)
    for learned, table in ((bias, None), (None, by_token)):
        chosen, weights = gpu.route(x, gate, learned, table, ids, active, SCALE)
        want, want_weights = wanted(x, gate, learned, table, ids, active)
        assert chosen.dtype == torch.int64 and weights.dtype == torch.float32
        assert torch.equal(chosen, want)
        assert_near("weights", weights, want_weights, 4, torch.float32)


def test_ties_go_to_the_lower_index() -> None:
    torch.manual_seed(0)
    # whole numbers, whose sums are exact in any order
    x, some = (torch.randint(-2, 3, (count, 40), device=DEVICE) / 8 for count in (6, 3))
    gate, bias = some[torch.tensor([2, 0, 1, 0, 2, 1, 1, 0, 2, 2])], torch.zeros(10, device=DEVICE)
    chosen, _ = gpu.route(x, gate, bias, None, torch.zeros(6, dtype=torch.int64, device=DEVICE), 7, SCALE)
    assert torch.equal(chosen, wanted(x, gate, bias, None, torch.zeros(6, dtype=torch.int64, device=DEVICE), 7)[0])


def test_small_scores_keep_their_precision() -> None:
    """Softplus of -30 is 1e-13: its weights are as exact as others', and its square root underflows nowhere."""
    x, gate = torch.eye(4, 16, device=DEVICE), torch.zeros(8, 16, device=DEVICE)
    gate[:, :4] = torch.tensor([[-30.0, -3, 30, -80]]) + torch.arange(8)[:, None] / 7
    for bias in (torch.zeros(8, device=DEVICE), -torch.arange(8.0, device=DEVICE)):
        chosen, weights = gpu.route(x, gate, bias, None, torch.zeros(4, dtype=torch.int64, device=DEVICE), 3, SCALE)
        want, want_weights = wanted(x, gate, bias, None, torch.zeros(4, dtype=torch.int64, device=DEVICE), 3)
        assert torch.equal(chosen, want)
        assert (weights / want_weights - 1).abs().max() < 5e-6


def test_not_a_number_still_chooses_distinct_experts() -> None:
    x, gate = torch.full((2, 32), float("nan"), device=DEVICE), draw(12, 32)
    chosen, _ = gpu.route(x, gate, draw(12), None, torch.zeros(2, dtype=torch.int64, device=DEVICE), 6, SCALE)
    assert all(len(set(row)) == 6 and min(row) >= 0 and max(row) < 12 for row in chosen.tolist())


def test_token_ids_beyond_the_table_read_its_end() -> None:
    x, gate, by_token = draw(4, 32), draw(8, 32), torch.tensor([[1, 2], [3, 4], [5, 6]], device=DEVICE)
    ids = torch.tensor([0, 3, 129280, 1], device=DEVICE)
    chosen, _ = gpu.route(x, gate, None, by_token, ids, 2, SCALE)
    assert chosen.tolist() == [[1, 2], [5, 6], [5, 6], [3, 4]]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("hashed", [False, True], ids=["scored", "hashed"])
@pytest.mark.parametrize("route", [definition.route, gpu.route], ids=["definition", "kernel"])
def test_rows_that_are_no_tokens_get_no_experts(route: Callable[..., Any], hashed: bool, seed: int) -> None:
    torch.manual_seed(seed)
    rows, experts, active = 1 + 6 * seed, 9, 3
    x, gate, bias = draw(rows, 40), draw(experts, 40) / 6, draw(experts)
    by_token = torch.stack([torch.randperm(experts)[:active] for _ in range(7)]).to(DEVICE)
    how = (None, by_token) if hashed else (bias, None)
    ids = torch.randint(0, 7, (rows,), device=DEVICE)
    want, want_weights = route(x, gate, *how, ids, active, SCALE)
    absent = torch.rand(rows, device=DEVICE) < 0.4
    absent[0] = True
    ids[absent], x[absent] = -1, float("nan")
    chosen, weights = route(x, gate, *how, ids, active, SCALE)
    assert chosen.dtype == torch.int64 and weights.dtype == torch.float32
    assert (chosen[absent] == -1).all() and (weights[absent] == 0).all()
    assert torch.equal(chosen[~absent], want[~absent]) and torch.equal(weights[~absent], want_weights[~absent])


def test_no_rows() -> None:
    chosen, weights = gpu.route(draw(0, 32), draw(8, 32), draw(8), None, torch.zeros(0, dtype=torch.int64), 2, SCALE)
    assert chosen.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("gate_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_the_cut(gate_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    d = gpu.UNIT * (4 * gpu.GROUP + 1) + 8
    x, gate = draw(5, d, dtype=torch.bfloat16), (draw(16, d) / d**0.5).to(gate_dtype)
    ids = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    found = []
    for cut in (gpu.Config(16, 0), gpu.Config(16, 1), gpu.Config(16, 5)):
        parts = gpu._scores(x, gate, cut)
        assert len(parts) == {0: 18, 1: 5, 5: 1}[cut.groups]
        monkeypatch.setattr(gpu, "config", lambda chip, rows, d, cut=cut: cut)
        for rows in (slice(0, 5), slice(2, 3)):
            chosen, weights = gpu.route(x[rows], gate, None, ids[:, None] + 7, ids[rows], 1, SCALE)
            assert chosen.eq(7).all() and weights.eq(SCALE).all()
            found.append(gpu.route(x[rows], gate, gate[:, 0].float(), None, ids[rows], 6, SCALE))
    whole = found[0]
    for index, (chosen, weights) in enumerate(found):
        rows = slice(0, 5) if index % 2 == 0 else slice(2, 3)
        assert torch.equal(chosen, whole[0][rows]) and torch.equal(weights, whole[1][rows]), index


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile_for_every_chip(chip: str) -> None:
    assert failures("cases_route", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "d"), [(256, 4096), (384, 7168)])
@pytest.mark.parametrize("rows", [1, 16, 130, 2100])
def test_official_sizes(rows: int, experts: int, d: int) -> None:
    torch.manual_seed(rows)
    x, gate, bias = draw(rows, d, dtype=torch.bfloat16), draw(experts, d) / d**0.5, draw(experts)
    ids = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    chosen, weights = definition.route(x, gate, bias, None, ids, 6, SCALE)
    want, want_weights = wanted(x, gate, bias, None, ids, 6)
    same = (chosen == want).all(1)
    assert (~same).sum() <= rows / 1000
    assert_near("weights", weights[same], want_weights[same], 8, torch.float32)
