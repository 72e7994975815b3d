"""sample's kernels against the definition: in Triton's interpreter where there is no GPU.

Parts and registers are made small, so that short rows already take every path.
"""

import random
from dataclasses import replace

import pytest
import torch

from leadline.engine.sampling import SamplingParams, SamplingRow, sampling_tensors
from leadline.kernels import sample as definition
from leadline.kernels.gpu import sample as gpu
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.sample_race import earliest, times
from leadline.kernels.sample import Allowed, Bias, Penalties, TokenCounts
from tests.gpu.compiling import failures

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEVER = float("-inf")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    sizes = {
        "PART": 64,
        "GROUP": 8,
        "FEW": 16,
        "CHUNK": 8,
        "BLOCK": 32,
        "LISTED": 16,
        "SAMPLED": 32,
        "WAYS": 4,
        "WIDE": 8,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(gpu, name, size)


def moved(tensors, device):
    """A dataclass of tensors, tables included, on `device`."""
    fields = {}
    for name, value in vars(tensors).items():
        if isinstance(value, torch.Tensor):
            value = value.to(device)
        elif hasattr(value, "__dataclass_fields__"):
            value = moved(value, device)
        fields[name] = value
    return replace(tensors, **fields)


def assert_same(logits, how):
    kept = logits.clone()
    got = gpu.sample(logits.to(DEVICE), moved(how, DEVICE)).cpu()
    assert torch.equal(logits, kept)
    assert got.dtype == torch.int64 and got.tolist() == definition.sample(logits, how).tolist()


def random_params(rng, vocab):
    if rng.random() < 0.2:
        return SamplingParams(temperature=0.0, logit_bias=rng.choice([None, {0: 2.0}]))
    return SamplingParams(
        temperature=rng.choice([0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, vocab - 1, vocab + 5]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.3, 1e-6]),
        min_p=rng.choice([0.0, 0.0, 0.1, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0, 0.5]),
        frequency_penalty=rng.choice([0, 0.5]),
        logit_bias=rng.choice([None, {1: 3.0, vocab - 1: -2.0}]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_the_definition(seed):
    rng = random.Random(seed)
    vocab, batch = rng.choice([5, 100, 300]), rng.choice([1, 3, 6])
    torch.manual_seed(seed)
    logits = torch.randn(batch, vocab) * rng.choice([0.1, 1, 5])
    if seed % 3 == 0:
        logits = logits.round()
    counts = TokenCounts.empty(batch, vocab, "cpu")
    rows = []
    for i in range(batch):
        counts.start(i, torch.randint(0, vocab, (5,)), torch.randint(0, vocab, (7,)))
        banned = [rng.randrange(vocab)] if rng.random() < 0.3 else []
        drawn = (rng.randrange(-(2**63), 2**63), rng.randrange(1000))
        rows.append(SamplingRow(random_params(rng, vocab), *drawn, banned, slot=i))
    assert_same(logits, sampling_tensors(rows, counts, "cpu"))


def tensors(rows, params=None, seed=0):
    params = SamplingParams() if params is None else params
    return sampling_tensors([SamplingRow(params, seed - i, i) for i in range(rows)], None, "cpu")


@pytest.mark.parametrize("few", [16, 128])
@pytest.mark.parametrize("shape", ["normal", "rounded", "equal", "two", "peaked", "spiky"])
def test_what_is_kept_is_what_the_definition_keeps(shape, few, monkeypatch):
    """Each filter with many seeds: at a high temperature every token that is kept is drawn now and then."""
    monkeypatch.setattr(gpu, "FEW", few)
    monkeypatch.setattr(gpu, "BLOCK", 128)
    torch.manual_seed(0)
    x = torch.randn(120)
    x = {
        "normal": x,
        "rounded": x.round(),
        "equal": x * 0 + 3,
        "two": (x > 0.5).float(),
        "peaked": x * 4 + 30 * (x > 2.0),
        "spiky": x + 9 * (torch.arange(120) % 8 == 3),  # groups' highest tokens hold most of the probability
    }[shape]
    filters = [(7, 1, 0), (0, 0.7, 0), (60, 0.9, 0), (0, 0.5, 0.6), (0, 1, 0.7), (5, 0.4, 0.05), (0, 0.999999, 0)]
    rows = 3 * len(filters)
    how = tensors(rows, SamplingParams(top_k=1, temperature=2.0))
    top_k, top_p, min_p = (torch.tensor(column * 3) for column in zip(*filters, strict=True))
    assert_same(x.expand(rows, -1), replace(how, top_k=top_k, top_p=top_p, min_p=min_p))


def test_greedy_takes_the_lowest_of_equals():
    x = torch.zeros(3, 200)
    x[1, 70:] = 1
    x[2, 199] = 5
    assert gpu.sample(x.to(DEVICE), moved(tensors(3, SamplingParams(temperature=0.0)), DEVICE)).tolist() == [0, 70, 199]


def test_top_k_where_fewer_are_possible():
    x = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    bits = torch.zeros(2, 10, dtype=torch.int32)
    bits[0, 2], bits[1, 0], bits[1, 9] = 0b1011, -(1 << 31), 1
    allowed = Allowed(torch.tensor([1, 0]), bits.flip(0))
    for top_k in (1, 2, 3, 4, 50):
        assert_same(x, replace(tensors(2, SamplingParams(top_k=top_k, top_p=0.9)), allowed=allowed))


def test_a_mask_belongs_to_its_row():
    x = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    bits = torch.randint(-(2**31), 2**31, (2, 4), generator=torch.Generator().manual_seed(2)).int()
    for params in (SamplingParams(), SamplingParams(temperature=0.0)):
        assert_same(x, replace(tensors(5, params), allowed=Allowed(torch.tensor([3, 1]), bits)))


def test_bias_entries_of_one_token_add_up_and_drafts_count():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 150, generator=generator)
    entries = 60  # more than are looked at together
    row, token = (
        torch.randint(0, 4, (entries,), generator=generator),
        torch.randint(0, 150, (entries,), generator=generator),
    )
    token[::5] = 70
    bias = Bias(row, token, torch.randint(-3, 4, (entries,), generator=generator).float())
    counts = TokenCounts.empty(6, 150, "cpu")
    counts.start(5, torch.arange(20), torch.arange(10, 50))
    drafted = torch.randint(0, 4, (40,), generator=generator), torch.randint(0, 150, (40,), generator=generator)
    penalties = Penalties(
        counts, torch.tensor([5, 0, 5, 3]), torch.tensor([1.5, 1.0, 1.2, 0.5]), torch.tensor([0.0, 1.0, 0.0, -0.5]),
        torch.tensor([0.7, 0.0, 0.0, 2.0]), *drafted
    )  # fmt: skip
    for params in (SamplingParams(), SamplingParams(temperature=0.0)):
        how = replace(tensors(4, params), penalties=penalties, bias=bias)
        assert_same(x, how)
        floats, ids = torch.empty(2, 4, 3, device=DEVICE), torch.empty(4, 3, dtype=torch.int, device=DEVICE)
        groups = torch.empty(4, 3 * gpu.PART // gpu.GROUP, device=DEVICE)
        changed = gpu._find_tops(x.to(DEVICE), moved(how, DEVICE), floats[0], ids, floats[1], groups)
        want = definition.penalise(x, penalties).index_put((row, token), bias.value, accumulate=True)
        torch.testing.assert_close(changed.cpu(), want, rtol=3e-7, atol=3e-7)


def test_noise_is_that_of_the_definition():
    """Of a score of 0. The definition's rounding of the noise, up to 22, is in the difference."""
    import triton
    import triton.language as tl

    @triton.jit
    def noise(p_out, p_seed, p_position, n: tl.constexpr):
        tl.store(
            p_out + tl.arange(0, n),
            times(tl.zeros([n], tl.float32), tl.load(p_seed), tl.load(p_position), tl.arange(0, n)),
        )

    for seed, position in ((0, 0), (-1, 5), (2**62 + 12345, 2**40 + 7), (-(2**63), 1)):
        out = torch.full((4096,), 77.0, device=DEVICE)
        noise[(1,)](out, torch.tensor(seed).to(DEVICE), torch.tensor(position).to(DEVICE), 4096)
        want = (-definition.gumbel(torch.tensor([seed]), torch.tensor([position]), 4096)[0].double()).exp().float()
        torch.testing.assert_close(out.cpu(), want, rtol=4e-6, atol=0)


@pytest.mark.parametrize("kept", [2, 18])
def test_exactly_as_many_as_asked_for(kept, monkeypatch):
    """Tokens nearly alike, so that one too many or too few would be drawn soon; 18 are more than compared in pairs."""
    monkeypatch.setattr(gpu, "BLOCK", 128)
    x = torch.randperm(100, generator=torch.Generator().manual_seed(8)) * 1e-4
    for params in (SamplingParams(top_k=kept), SamplingParams(top_p=(kept - 0.5) / 100)):
        assert_same(x.expand(16, -1), tensors(16, params))


def test_top_p_counts_what_min_p_leaves():
    """40 tokens, too many to compare in pairs; what min_p drops has nearly half as much probability."""
    x = torch.randperm(100, generator=torch.Generator().manual_seed(9)).float()
    x = x * 1e-2 - (x < 60).float()
    assert_same(x.expand(16, -1), tensors(16, SamplingParams(top_p=0.3, min_p=0.6)))


@pytest.mark.parametrize("lead", [0.0, 2.0, 20.0])
def test_the_earliest_is_found_by_its_bound(lead):
    """With a token far ahead its u is anything up to 1, and another is often before it by the bound alone."""
    import triton
    import triton.language as tl

    @triton.jit
    def race(p_score, p_times, p_token, n: tl.constexpr):
        o_token, seed = tl.arange(0, n), tl.program_id(0).to(tl.int64)
        score = tl.load(p_score + o_token)
        tl.store(p_times + seed * n + o_token, times(score, seed, seed, o_token))
        tl.store(p_token + seed, earliest(score, o_token, seed, seed))

    score = torch.randn(64, generator=torch.Generator().manual_seed(6)) - lead
    score[40], score[7] = 0, NEVER
    found, tokens = torch.empty(50, 64, device=DEVICE), torch.empty(50, dtype=torch.int32, device=DEVICE)
    race[(50,)](score.to(DEVICE), found, tokens, 64)
    assert tokens.tolist() == found.argmin(-1).tolist()


def test_a_guess_from_an_unlike_sample_costs_time_alone():
    """The sample has 8 of every 37 tokens; what is high lies elsewhere, so that the cutoff is far from the guess."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(300, generator=generator) * 0.3 + 3 * (torch.arange(300) % 75 > 20)
    for top_p in (0.3, 0.9):
        assert_same(x.expand(5, -1), tensors(5, SamplingParams(top_p=top_p, temperature=2.0)))


@pytest.mark.gpu  # the interpreter's maximum refuses a row of NaN
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_nan_in_one_row_leaves_the_others_alone(how):
    """And the row itself gets some token of the vocabulary."""
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(4))
    how = tensors(3, SamplingParams(**how))
    want = definition.sample(x, how).tolist()
    x[1] = float("nan")
    got = gpu.sample(x.to(DEVICE), moved(how, DEVICE)).tolist()
    assert got[::2] == want[::2] and 0 <= got[1] < 100


def test_no_rows():
    assert gpu.sample(torch.empty(0, 100, device=DEVICE), moved(tensors(0), DEVICE)).shape == (0,)


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile(chip, monkeypatch):
    monkeypatch.undo()
    assert failures("cases_sample", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_official_vocabulary(spread, monkeypatch):
    monkeypatch.undo()
    x = torch.randn(8, 129_280, generator=torch.Generator().manual_seed(5)) * spread
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=100, top_p=0.95)):
        assert_same(x, tensors(8, params))
