"""attend's kernels against the definition in float64: in Triton's interpreter where there is no GPU."""

import math

import pytest
import torch
import triton
import triton.language as tl

from leadline.kernels import attend as definition
from leadline.kernels.gpu import attend as kernels
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.packed import KvRows, kv_rows
from leadline.kernels.rope import Angles, angles
from tests.gpu.cases_attend import hopper_failures
from tests.gpu.compiling import failures

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMATS = {
    "fp32": (torch.float32, False, False),
    "bf16": (torch.bfloat16, False, False),
    "bf16-packed": (torch.bfloat16, True, True),
    "fp32-packed": (torch.float32, True, True),
    "bf16-packed-window": (torch.bfloat16, True, False),
    "bf16-packed-entries": (torch.bfloat16, False, True),
}


class Problem:
    """Random arguments: tokens that see anything from one row up to everything; rows that nobody reads are NaN."""

    def __init__(self, seed, tokens, heads, width, rotated, window, widest, form="bf16", pool_rows=300):
        torch.manual_seed(seed)
        dtype, *packed = FORMATS[form]
        self.q = (torch.randn(tokens, heads, width) * 2).to(dtype).to(DEVICE)
        self.sink = (torch.randn(heads) * 2).to(DEVICE)
        self.window_rows = torch.randint(0, pool_rows, (tokens, window), device=DEVICE)
        seen = torch.randint(1, window + 1, (tokens, 1), device=DEVICE)
        self.window_rows[torch.arange(window, device=DEVICE) < window - seen] = -1
        self.entry_rows = torch.randint(0, pool_rows, (tokens, widest), device=DEVICE)
        read = torch.randint(0, widest + 1, (tokens, 1), device=DEVICE)
        read[::3] = widest
        self.entry_rows[torch.arange(widest, device=DEVICE) >= read] = -1
        self.window = _pool(self.window_rows, pool_rows, width, rotated, dtype, packed[0])
        self.entries = _pool(self.entry_rows, pool_rows, width, rotated, dtype, packed[1])
        self.by = angles(torch.randint(0, 100000, (tokens,)), 10000 ** -torch.linspace(0, 1, rotated // 2))
        self.by = Angles(self.by.cos.to(DEVICE), self.by.sin.to(DEVICE))

    def run(self, function=kernels.attend):
        return function(self.q, self.sink, self.window, self.window_rows, self.entries, self.entry_rows, self.by)

    def exact(self):
        """The definition in float64."""
        pools = [_plain(pool) for pool in (self.window, self.entries)]
        by = Angles(self.by.cos.double(), self.by.sin.double())
        rows = (pools[0], self.window_rows, pools[1], self.entry_rows)
        return definition.attend(self.q.double(), self.sink.double(), *rows, by)


def _pool(rows, pool_rows, width, rotated, dtype, packed):
    read = rows[rows >= 0].unique()
    values = torch.randn(len(read), width, device=DEVICE).to(torch.bfloat16 if packed else dtype)
    if packed:
        pool = kv_rows(pool_rows, width, rotated, DEVICE)
        pool.blocks.fill_(0x7F)
        pool.write(read, values)
    else:
        pool = torch.full((pool_rows, width), float("nan"), dtype=dtype, device=DEVICE)
        pool[read] = values
    return pool


def _plain(pool):
    if not isinstance(pool, KvRows):
        return pool.double()
    return pool.read(torch.arange(len(pool.blocks) * 64, device=DEVICE)).double()


def assert_close(got, want):
    """fp32: some hundred roundings of 2^-24. bf16: outputs and weights are rounded to 8 bits, 2^-9 each at most."""
    assert got.shape == want.shape
    error = ((got.double() - want).norm() / want.norm()).item() if want.numel() else 0.0
    bound = 3e-6 if got.dtype == torch.float32 else 5e-3
    assert error <= bound, f"attend: relative error {error:.1e}, bound {bound:.1e}"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rotated", "window", "widest"),
    [(3, 8, 128, 32, 16, 90), (1, 3, 128, 32, 5, 0), (2, 20, 32, 8, 33, 17), (4, 1, 192, 64, 1, 1)],
    ids=["tiny", "window only", "odd", "one row each"],
)
def test_the_kernel_computes_the_definition(form, tokens, heads, width, rotated, window, widest):
    problem = Problem(tokens, tokens, heads, width, rotated, window, widest, form)
    assert_close(problem.run(), problem.exact())


def test_no_token_and_no_entry_list():
    problem = Problem(0, 2, 4, 64, 16, 20, 0)
    without = kernels.attend(problem.q, problem.sink, problem.window, problem.window_rows, None, None, problem.by)
    assert torch.equal(without, problem.run())
    assert Problem(0, 0, 4, 64, 16, 20, 30).run().shape == (0, 4, 64)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_any_number_of_parts_gives_the_same(monkeypatch, parts):
    """7 parts of 4 tiles at most: some programs have nothing to do, and say so."""
    problem = Problem(1, 3, 5, 64, 16, 20, 40, "fp32")
    monkeypatch.setattr(kernels, "splits", lambda *_: parts)
    poison = torch.full((1 << 16,), float("nan"), device=DEVICE)
    del poison
    assert_close(problem.run(), problem.exact())


def test_where_nothing_is_split_a_token_does_not_depend_on_the_others(monkeypatch):
    """To the bit: each token alone, with lists as wide as it needs, as in the batch with wider ones."""
    problem = Problem(5, 4, 5, 64, 16, 20, 90, "fp32")
    monkeypatch.setattr(kernels, "splits", lambda *_: 1)
    together = problem.run()
    q, window, entries, by = problem.q, problem.window_rows, problem.entry_rows, problem.by
    for token in range(4):
        one = slice(token, token + 1)
        problem.q, problem.window_rows, problem.by = q[one], window[one], Angles(by.cos[one], by.sin[one])
        problem.entry_rows = entries[one, : int((entries[token] >= 0).sum())]
        assert torch.equal(problem.run(), together[one])


def test_parts_are_joined_a_few_at_a_time(monkeypatch):
    problem = Problem(1, 3, 5, 64, 16, 20, 90, "fp32")
    monkeypatch.setattr(kernels, "splits", lambda *_: 7)
    monkeypatch.setattr(kernels, "joining", lambda *_: {"CHANNELS": 16, "PARTS": 2})
    assert_close(problem.run(), problem.exact())


@pytest.mark.parametrize("sink", [-1e30, -math.inf, 300.0])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_sink_of_any_size(monkeypatch, sink, parts):
    problem = Problem(2, 2, 3, 64, 16, 20, 40, "fp32")
    problem.sink.fill_(sink)
    monkeypatch.setattr(kernels, "splits", lambda *_: parts)
    got, want = problem.run(), problem.exact()
    assert torch.isfinite(got).all()
    assert_close(got, want) if sink < 300 else torch.testing.assert_close(got.double(), want, atol=1e-30, rtol=0)


def test_strided_lists_and_queries():
    problem = Problem(3, 3, 4, 64, 16, 20, 40, "fp32")
    want = problem.run()
    problem.q = torch.stack([problem.q, problem.q], 1)[:, 0]
    problem.entry_rows = torch.nn.functional.pad(problem.entry_rows, (0, 70))[:, :-70]
    problem.window_rows = torch.nn.functional.pad(problem.window_rows, (2, 3))[:, 2:-3]
    assert torch.equal(problem.run(), want)
    problem.entry_rows = torch.stack([problem.entry_rows, problem.entry_rows], -1)[..., 0]
    assert torch.equal(problem.run(), want)


def test_a_short_list_costs_little_in_a_wide_one():
    rows = torch.full((1, 200 * 64), -1, device=DEVICE)
    for read, tiles in ((0, 0), (1, 1), (64, 1), (65, 2), (128 * 64, 128), (130 * 64 + 1, 131), (200 * 64, 200)):
        rows[0, :read] = 5
        found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        _count[(1,)](rows, found, rows.shape[1], KEYS=64)
        assert found.item() == tiles
        rows.fill_(-1)


@triton.jit
def _count(p_rows, p_found, width, KEYS: tl.constexpr):
    tl.store(p_found, kernels._entry_tiles(p_rows, width, KEYS))


def test_splits_fill_the_chip_and_never_exceed_the_tiles():
    for programs in (1, 3, 16, 64, 128, 132, 140, 4096):
        for tiles in (1, 2, 10, 130):
            assert 1 <= kernels.splits(programs, tiles, 132) <= tiles
    assert kernels.splits(1, 10, 132) >= 5
    assert kernels.splits(64, 10, 132) == 2
    assert kernels.splits(128, 10, 132) == kernels.splits(4096, 10, 132) == 1


def test_the_definition_reads_packed_rows_as_the_plain_ones_that_they_hold():
    problem = Problem(4, 3, 4, 64, 16, 20, 40, "bf16-packed")
    packed = problem.run(definition.attend)
    problem.window, problem.entries = (_plain(pool).bfloat16() for pool in (problem.window, problem.entries))
    assert torch.equal(problem.run(definition.attend), packed)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_case_compiles(chip):
    assert failures("cases_attend", chip) == []


def test_hoppers_own_kernel_compiles():
    assert hopper_failures() == []


OFFICIAL = {
    "decode": (5, 64, 128, 512),
    "decode, long": (1, 64, 128, 8192),
    "Pro": (3, 128, 128, 1024),
    "a slice of the heads": (4, 8, 128, 70),
    "window only": (9, 64, 128, 0),
    "prompt": (300, 64, 128, 512),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", OFFICIAL)
def test_official_sizes(name, form):
    tokens, heads, window, widest = OFFICIAL[name]
    problem = Problem(7, tokens, heads, 512, 64, window, widest, form, pool_rows=5000)
    poison = torch.full((1 << 28,), float("nan"), device=DEVICE)
    del poison
    assert_close(problem.run(definition.attend), problem.exact())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "bf16-packed"])
def test_the_kernel_for_other_chips_at_official_sizes(monkeypatch, form):
    monkeypatch.setattr(kernels, "_suits_hopper", lambda *_: False)
    problem = Problem(8, 5, 64, 512, 64, 128, 512, form, pool_rows=5000)
    assert_close(problem.run(), problem.exact())


@pytest.mark.gpu
def test_a_graph_replays_with_other_rows():
    problem, other = (Problem(seed, 4, 64, 512, 64, 128, 512, "bf16-packed", pool_rows=5000) for seed in (9, 10))
    problem.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = problem.run()
    for name in ("q", "window_rows", "entry_rows", "sink"):
        getattr(problem, name).copy_(getattr(other, name))
    problem.window.blocks.copy_(other.window.blocks)
    problem.entries.blocks.copy_(other.entries.blocks)
    graph.replay()
    assert_close(got, problem.exact())
