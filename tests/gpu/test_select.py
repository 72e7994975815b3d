"""select's kernels against the definition: in Triton's interpreter where there is no GPU.

Queries, keys and weights are small whole numbers where results are compared exactly: then no sum is rounded, and many
scores are equal.
"""

import inspect
import random
import re

import pytest
import torch

from leadline.formats import E2M1_VALUES, fp4_round_trip
from leadline.kernels import select as definition
from leadline.kernels.gpu import select as gpu
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.packed import index_rows
from tests.gpu.compiling import failures

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, CHANNELS, TOPK = 16, 64, 16


class Draw:
    """Random inputs of `select`: `requests` requests with `each` queries, of up to `longest` entries."""

    def __init__(self, seed, requests, each, longest, pool="packed", dtype=torch.bfloat16, spread=3, topk=TOPK):
        generator = torch.Generator().manual_seed(seed)
        pages = -(-longest // 32) + 1
        self.topk, self.longest = topk, longest
        self.q = torch.randint(-2, 3, (requests * each, HEADS, CHANNELS), generator=generator).to(dtype)
        self.weights = torch.randint(-2, 3, (requests * each, HEADS), generator=generator).float()
        keys = torch.randint(-1, spread - 1, (requests * pages * 32, CHANNELS), generator=generator).to(dtype)
        self.pool = keys.to(DEVICE)
        if pool == "packed":
            self.pool = index_rows(len(keys), CHANNELS, DEVICE)
            self.pool.blocks.fill_(77)
            self.pool.write(torch.arange(len(keys), device=DEVICE), keys.to(DEVICE))
        order = torch.randperm(requests * pages, generator=generator).view(requests, pages)
        self.pages = order.repeat_interleave(each, 0)
        self.visible = torch.randint(0, longest + 1, (requests * each,), generator=generator)
        self.visible[0] = longest

    def run(self, function):
        q, weights, pages, visible = (x.to(DEVICE) for x in (self.q, self.weights, self.pages.int(), self.visible))
        return function(q, weights, self.pool, pages, visible, self.longest, self.topk)

    def wanted(self):
        """The definition's answer, in fp64 so that a GPU uses no kernel for it."""
        rows = torch.arange(self.pages.numel() * 32, device=DEVICE)
        keys = self.pool if isinstance(self.pool, torch.Tensor) else self.pool.read(rows[: len(self.pool.blocks) * 64])
        inputs = (self.q.double(), self.weights.double(), keys.double().cpu(), self.pages, self.visible)
        return definition.select(*inputs, self.longest, self.topk).to(DEVICE)

    def assert_right(self):
        got, want = self.run(gpu.select), self.wanted()
        assert got.dtype == torch.int64 and torch.equal(got, want)


@pytest.fixture
def short_registers(monkeypatch):
    """Rows of 64 scores already are long ones."""
    monkeypatch.setattr(gpu, "held_at_once", lambda topk: 64)
    monkeypatch.setattr(gpu, "SIFTED", 128)


@pytest.mark.parametrize("longest", [1, 16, 17, 100, 300])
@pytest.mark.parametrize("pool", ["packed", "plain"])
def test_entries_are_those_of_the_definition(longest, pool):
    Draw(longest, 3, 1, longest, pool).assert_right()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_pools_of_every_dtype(dtype):
    Draw(5, 2, 2, 200, "plain", dtype).assert_right()


@pytest.mark.parametrize("seed", range(4))
def test_long_rows_are_sifted(seed, short_registers):
    Draw(seed, 2, 1, (500, 777, 1024, 65)[seed], spread=9).assert_right()


def test_more_equal_scores_than_registers_hold(short_registers):
    draw = Draw(3, 2, 1, 200)
    draw.weights.zero_()
    draw.assert_right()
    few = Draw(4, 1, 1, 300)
    few.q[:, :, 1:] = 0
    few.assert_right()


def test_scores_that_are_all_negative_or_zero(short_registers):
    draw = Draw(6, 1, 1, 150)
    draw.weights = -draw.weights.abs() - 1
    draw.assert_right()
    draw.weights[:] = -0.0
    draw.assert_right()


@pytest.mark.parametrize(("requests", "each"), [(1, 9), (3, 3), (2, 5), (7, 1)])
def test_queries_of_one_request_share_keys_and_others_do_not(requests, each, monkeypatch):
    config = gpu.ScoreConfig(4, 32, 4, 2, 1)
    monkeypatch.setattr(gpu, "score_config", lambda chip, dtype, queries: config)
    Draw(requests, requests, each, 150).assert_right()


def test_requests_that_share_only_their_first_pages(monkeypatch):
    config = gpu.ScoreConfig(4, 32, 4, 2, 1)
    monkeypatch.setattr(gpu, "score_config", lambda chip, dtype, queries: config)
    draw = Draw(8, 2, 2, 200)
    draw.visible[:] = 200
    draw.pages[2:, :3] = draw.pages[0, :3]
    draw.assert_right()


def test_tiles_of_queries(monkeypatch):
    monkeypatch.setattr(gpu, "SCRATCH", 2 * 128)
    Draw(9, 5, 1, 100).assert_right()


def test_tiles_of_long_rows_and_a_last_one_that_is_not_full(monkeypatch, short_registers):
    monkeypatch.setattr(gpu, "SCRATCH", 3 * 512)
    Draw(12, 5, 1, 500).assert_right()


def test_unseen_entries_and_pages_do_not_matter(short_registers):
    draw = Draw(10, 3, 1, 400)
    draw.visible = torch.tensor([400, 0, 130])
    want = draw.wanted()
    draw.pages[1:, 5:] = 10**6  # no such page
    draw.longest = 1000  # the capacity of a captured graph
    draw.pages = torch.nn.functional.pad(draw.pages, (0, 32))
    got = draw.run(gpu.select)
    assert torch.equal(got, want)


def test_no_queries():
    draw = Draw(11, 1, 1, 100)
    draw.q, draw.weights, draw.pages, draw.visible = (x[:0] for x in (draw.q, draw.weights, draw.pages, draw.visible))
    assert draw.run(gpu.select).shape == (0, TOPK)


@pytest.mark.parametrize("heads, channels", [(16, 32), (24, 64)])
def test_scores_are_as_near_as_fp32_allows(heads, channels):
    """Each of the sums of c and of heads terms is in error by at most its length times 2^-24 of the sum of sizes."""
    torch.manual_seed(heads)
    q = fp4_round_trip(torch.randn(2, heads, channels).bfloat16())
    weights, pool = torch.randn(2, heads), index_rows(256, channels, DEVICE)
    pool.write(torch.arange(256, device=DEVICE), (torch.randn(256, channels) * 3).bfloat16().to(DEVICE))
    pages, visible = torch.randperm(8).view(2, 4).to(DEVICE), torch.tensor([128, 100]).to(DEVICE)
    scores, maxima = torch.full((2, 128), float("nan"), device=DEVICE), torch.full((2, 16), 77.0, device=DEVICE)
    gpu._score(q.to(DEVICE), weights.to(DEVICE), pool, pages, visible, 16, scores, maxima)
    for i, seen in enumerate(visible.tolist()):
        rows = (pages[i, :, None] * 32 + torch.arange(32, device=DEVICE)).flatten()[:seen]
        dots = (q[i].double() @ pool.read(rows).cpu().double().T).relu()
        scale = (heads * channels) ** -0.5
        want, size = scale * weights[i].double() @ dots, scale * weights[i].double().abs() @ dots
        got = scores[i].cpu()
        assert torch.all((got[:seen] - want).abs() <= size * (heads + channels + 2) * 2**-24 + 1e-30)
        assert got[seen:].isnan().all()
        padded = torch.nn.functional.pad(got[:seen], (0, 128 - seen), value=float("-inf"))
        assert torch.equal(maxima[i].cpu(), padded.view(16, 8).amax(1))


def ptx(text, registers):
    """Run the few PTX instructions that `_quick_keys` uses, another is a KeyError. `registers` has inputs by name."""
    at = lambda name: registers[name] if name in registers else int(name, 0)  # noqa: E731
    halves = lambda x: torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).short().view(torch.bfloat16).double()  # noqa: E731
    for line in re.findall(r"^ +([a-z]\S* .*);$", text, re.M):
        name, target, *rest = line.replace(",", "").split()
        x = [at(operand) for operand in rest]
        if name == "prmt.b32":
            both = (x[0] | x[1] << 32).to_bytes(8, "little")
            made = int.from_bytes(bytes(both[x[2] >> 4 * i & 7] for i in range(4)), "little")
        elif name == "fma.rn.bf16x2":
            low, high = (halves(x[0]) * halves(x[1]) + halves(x[2])).bfloat16().view(torch.int16).tolist()
            made = (low & 0xFFFF) | (high & 0xFFFF) << 16
        else:
            made = {"mov.b32": x[0], "and.b32": x[0] & x[-1], "mul.lo.u32": x[0] * x[-1] % 2**32}[name]
        registers[target] = made
    return torch.cat([halves(registers[f"${i}"]) for i in range(4)])


def test_the_quick_unpacking_of_keys_is_exact_element_by_element():
    """Triton's interpreter does not run it. Four elements in one register may come from different keys."""
    text = inspect.getsource(gpu._quick_keys.fn)
    rng = random.Random(0)
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)
    for _ in range(100):
        codes, exponents = [rng.randrange(256) for _ in range(4)], [rng.randrange(128, 251) for _ in range(4)]
        factors = [exponent << 7 for exponent in exponents]
        inputs = {"$4": int.from_bytes(bytes(codes), "little")}
        inputs |= {"$5": factors[0] | factors[1] << 16, "$6": factors[2] | factors[3] << 16}
        scale = torch.tensor([2.0 ** (exponent - 127 - 126) for exponent in exponents], dtype=torch.float64)
        want = torch.cat([values[[code & 15 for code in codes]] * scale, values[[code >> 4 for code in codes]] * scale])
        assert torch.equal(ptx(text, inputs), want)


def test_entry_rows():
    torch.manual_seed(0)
    pages = torch.randperm(60).view(6, 10).to(DEVICE)
    ids = torch.randint(-1, 320, (6, 37)).to(DEVICE)
    known = ids.clamp(min=0)
    want = torch.where(ids < 0, -1, pages.gather(1, known // 32) * 32 + known % 32)
    assert torch.equal(gpu.entry_rows(pages.int(), ids, 32), want)
    assert gpu.entry_rows(pages[:0].int(), ids[:0], 32).shape == (0, 37)


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile(chip):
    assert failures("cases_select", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "each", "longest"), [(1, 1, 262144), (16, 1, 16384), (3, 200, 5000)])
def test_official_sizes(requests, each, longest):
    Draw(longest, requests, each, longest, spread=9, topk=512).assert_right()
