"""The `sample` operation against its definition in plain Python, the quality of its noise, and log-probabilities."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline.engine.sampling import SamplingParams, SamplingRow, sampling_tensors
from leadline.kernels.sample import TokenCounts, child_seed, cutoff, gumbel, logprobs, mix, sample

NEVER = float("-inf")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def draw(logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Sample row i of `logits` by `params[i]`, `seeds[i]`, `positions[i]`."""
    rows = [SamplingRow(p, s, i) for p, s, i in zip(params, seeds, positions, strict=True)]
    return sample(logits, sampling_tensors(rows, None, logits.device))


def probabilities(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> list[float]:
    """The distribution that the request asks for, in the words of the documentation (float64, no tensors)."""
    scores = []
    for token, logit in enumerate(logits):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        scores.append(logit + (params.logit_bias or {}).get(token, 0.0))
    weights = [math.exp((score - max(scores)) / params.temperature) for score in scores]
    weights = [weight if weight >= params.min_p * max(weights) else 0.0 for weight in weights]
    if params.top_k > 0:
        lowest = sorted(weights, reverse=True)[: params.top_k][-1]
        weights = [weight if weight >= lowest else 0.0 for weight in weights]
    higher = [sum(other for other in weights if other > weight) for weight in weights]
    nucleus = params.top_p * sum(weights)
    weights = [weight if above < nucleus else 0.0 for weight, above in zip(weights, higher, strict=True)]
    return [weight / sum(weights) for weight in weights]


def assert_distributed(what: str, counts: Sequence[int], expected: Sequence[float]) -> None:
    """Pearson's chi-square test of `counts` against probabilities, at 4 sigma (Wilson and Hilferty's approximation)."""
    draws = sum(counts)
    impossible = [i for i, (count, p) in enumerate(zip(counts, expected, strict=True)) if p == 0 and count]
    assert not impossible, f"{what}: {impossible} have probability 0 but were drawn"
    cells = [(count, draws * p) for count, p in zip(counts, expected, strict=True) if p > 0]
    degrees = len(cells) - 1
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    bound = degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3 if degrees else 1e-9
    assert statistic < bound, f"{what}: chi-square {statistic:.1f} on {degrees} degrees of freedom, bound {bound:.1f}"


# ---- each parameter acts, and acts as documented ----

LOGITS = [1.5, -0.5, 0.7, 2.0, -1.0, 0.1, 1.9]
PROMPT, OUTPUT = [0, 1, 1], [3, 3, 4]
CASES = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.3),
    "hot": SamplingParams(temperature=2.0),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.2),
    "min_p after temperature": SamplingParams(min_p=0.2, temperature=2.0),
    "top_p after temperature": SamplingParams(top_p=0.6, temperature=2.0),
    "top_p of what top_k left": SamplingParams(top_k=3, top_p=0.7),
    "top_p of what min_p left": SamplingParams(min_p=0.3, top_p=0.8),
    "repetition_penalty": SamplingParams(repetition_penalty=1.8),
    "repetition_penalty below 1": SamplingParams(repetition_penalty=0.6),
    "presence_penalty": SamplingParams(presence_penalty=1.2),
    "frequency_penalty": SamplingParams(frequency_penalty=0.9),
    "negative penalties": SamplingParams(presence_penalty=-0.7, frequency_penalty=-0.4),
    "repetition before presence": SamplingParams(repetition_penalty=2.0, presence_penalty=1.5),
    "logit_bias": SamplingParams(logit_bias={1: 3.0, 6: -2.5}),
    "all": SamplingParams(0.8, 5, 0.9, 0.05, 1.3, 0.4, 0.3, {5: 1.5}),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_definition(device: str, name: str) -> None:
    params, draws = CASES[name], 20_000
    rows = [SamplingRow(params, 11, position) for position in range(draws)]
    counts = TokenCounts.empty(1, len(LOGITS), device)
    counts.start(0, torch.tensor(PROMPT, device=device), torch.tensor(OUTPUT, device=device))
    tokens = sample(torch.tensor([LOGITS] * draws, device=device), sampling_tensors(rows, counts, device))
    drawn = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    seen = (PROMPT, OUTPUT) if params.penalised else ((), ())
    expected = probabilities(LOGITS, params, *seen)
    assert_distributed(name, drawn, expected)
    if name != "plain":  # the parameter makes a difference that this many draws can show
        assert max(abs(a - b) for a, b in zip(expected, probabilities(LOGITS, SamplingParams()), strict=True)) > 0.02


def test_draws_over_seeds_follow_the_definition(device: str) -> None:
    draws = 20_000
    logits = torch.tensor([LOGITS] * draws, device=device)
    tokens = draw(logits, [SamplingParams()] * draws, range(-draws // 2, draws // 2), [5] * draws)
    assert_distributed("seeds", torch.bincount(tokens).tolist(), probabilities(LOGITS, SamplingParams()))


def test_improbable_tokens_are_drawn_as_often_as_they_should(device: str) -> None:
    """Half of the probability lies in 129,279 tokens of 4e-6 each: coarse noise would misjudge them."""
    vocab, draws = 129_280, 240
    logits = torch.zeros(1, vocab, device=device)
    logits[0, 77] = math.log(vocab - 1)
    chunks = [range(start, start + 20) for start in range(0, draws, 20)]
    tokens = torch.cat([draw(logits.expand(20, -1), [SamplingParams()] * 20, [3] * 20, c) for c in chunks])
    assert_distributed("head and tail", [int((tokens == 77).sum()), int((tokens != 77).sum())], [0.5, 0.5])
    halves = torch.bincount(tokens[tokens != 77] * 2 // vocab).tolist()
    assert_distributed("low and high ids of the tail", halves, [0.5, 0.5])


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id(device: str) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0], [-1.0, -9.0, -3.0, 0.0, -0.0]])
    for temperature in (0.0, 9e-6):
        params = [*[SamplingParams(temperature=temperature)] * 3, SamplingParams()]
        for rows in (3, 4):  # alone, and beside a random row
            seeds = positions = range(rows)
            tokens = draw(logits[[0, 1, 2, 0]][:rows].to(device), params[:rows], seeds, positions)
            assert tokens[:3].tolist() == [1, 0, 3]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str)
def test_narrowest_setting_equals_greedy(device: str, narrow: dict[str, Any]) -> None:
    logits = torch.randn(50, 333, generator=torch.Generator().manual_seed(1)).to(device)
    tokens = draw(logits, [SamplingParams(**narrow)] * 50, range(50), range(50))
    assert tokens.equal(logits.argmax(-1))


def test_top_k_off_spellings_and_beyond_the_vocabulary_change_nothing(device: str) -> None:
    logits = torch.randn(40, 77, generator=torch.Generator().manual_seed(2)).to(device)
    plain = draw(logits, [SamplingParams()] * 40, range(40), range(40))
    for top_k in (0, -1, 77, 78, 9_999_999, 2**63 - 1):
        params = [SamplingParams(top_k=top_k)] * 39 + [SamplingParams(top_k=2)]  # the last row forces the sorting path
        assert draw(logits, params, range(40), range(40))[:-1].equal(plain[:-1]), top_k


def test_equal_scores_at_the_cut_stay_together(device: str) -> None:
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0]] * 300, device=device)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.4)):
        assert set(draw(logits, [params] * 300, [4] * 300, range(300)).tolist()) == {0, 2, 3}


def test_top_p_of_one_keeps_what_has_hardly_any_probability(device: str) -> None:
    """Else a row's result would depend on whether another row makes the batch sort."""
    scores = torch.tensor([[0.0, -30.0, -60.0, -100.0]] * 3, device=device)
    top_p = torch.tensor([1.0, 0.5, 1.0], device=device)
    lowest = cutoff(scores, torch.tensor([0, 0, 3], device=device), top_p)
    assert lowest[:, 0].tolist() == [-100.0, 0.0, -60.0]


def test_banned_tokens_never_come(device: str) -> None:
    logits = torch.tensor([[9.0, 0.0, 9.0, 0.5]] * 400, device=device)
    params = SamplingParams(temperature=2.0, logit_bias={0: 100.0})
    for temperature in (0.0, 2.0):
        rows = [SamplingRow(replace(params, temperature=temperature), 4, i, banned=[0, 2, 0]) for i in range(400)]
        tokens = sample(logits, sampling_tensors(rows, None, device))
        assert set(tokens.tolist()) == ({3} if temperature == 0 else {1, 3})


# ---- rows are independent ----


@st.composite
def params_and_seed(draw_value: st.DrawFn) -> tuple[SamplingParams, int, int]:
    params = SamplingParams(
        temperature=draw_value(st.sampled_from([0.0, 0.2, 1.0, 2.0])),
        top_k=draw_value(st.sampled_from([0, 1, 5, 10**6])),
        top_p=draw_value(st.sampled_from([1.0, 0.9, 0.3])),
        min_p=draw_value(st.sampled_from([0.0, 0.1])),
        repetition_penalty=draw_value(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw_value(st.sampled_from([0.0, 0.5])),
        logit_bias=draw_value(st.sampled_from([None, {0: 2.0}])),
    )
    return params, draw_value(st.integers(-(2**63), 2**63 - 1)), draw_value(st.integers(0, 10**6))


@settings(max_examples=60, deadline=None)
@given(st.lists(params_and_seed(), min_size=2, max_size=9), st.sampled_from([1, 2, 7, 129, 1003]), st.integers(0, 99))
def test_a_row_alone_equals_the_row_in_a_batch(
    device: str, chosen: list[tuple[SamplingParams, int, int]], vocab: int, noise: int
) -> None:
    generator = torch.Generator().manual_seed(noise)
    logits = (torch.randn(len(chosen), vocab, generator=generator) * 3).to(device)
    counts = TokenCounts.empty(len(chosen), vocab, device)
    for slot in range(len(chosen)):
        ids = torch.randint(vocab, (2, 5), generator=generator).to(device)
        counts.start(slot, ids[0], ids[1])
    rows = [SamplingRow(p, seed, position, slot=i) for i, (p, seed, position) in enumerate(chosen)]
    together = sample(logits, sampling_tensors(rows, counts, device))
    alone = [sample(logits[i : i + 1].clone(), sampling_tensors([row], counts, device)) for i, row in enumerate(rows)]
    assert together.tolist() == torch.cat(alone).tolist()


def test_a_row_alone_equals_the_row_in_a_batch_at_the_full_vocabulary(device: str) -> None:
    logits = (torch.randn(7, 129_280, generator=torch.Generator().manual_seed(5)) * 2).to(device)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.95},
        {"top_k": 50},
        {"temperature": 0.0},
        {"min_p": 0.01},
        {"top_p": 0.5},
        {"top_k": 900},
    ]
    rows = [SamplingRow(SamplingParams(**kind), 9, i) for i, kind in enumerate(kinds)]
    together = sample(logits, sampling_tensors(rows, None, device)).tolist()
    assert together == [
        sample(logits[i : i + 1].clone(), sampling_tensors([row], None, device)).item() for i, row in enumerate(rows)
    ]
    reported = logprobs(logits, torch.tensor(together, device=device), 5)
    for i, token in enumerate(together):
        single = logprobs(logits[i : i + 1].clone(), torch.tensor([token], device=device), 5)
        assert all(one.equal(many[i : i + 1]) for one, many in zip(single, reported, strict=True))


def test_nan_logits_of_one_row_leave_the_others_alone(device: str) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(6)).to(device)
    params = [SamplingParams(top_p=0.9)] * 3
    before = draw(logits, params, [1, 2, 3], [0, 0, 0]).tolist()
    logits[1] = float("nan")
    after = draw(logits, params, [1, 2, 3], [0, 0, 0]).tolist()
    assert (after[0], after[2]) == (before[0], before[2]) and 0 <= after[1] < 50


def test_logits_are_not_changed(device: str) -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(7)).to(device)
    kept = logits.clone()
    counts = TokenCounts.empty(2, 30, device)
    rows = [SamplingRow(CASES["all"], 1, 2, banned=[3], slot=i) for i in range(2)]
    sample(logits, sampling_tensors(rows, counts, device))
    draw(logits, [SamplingParams(logit_bias={3: 5.0}, top_p=0.5)] * 2, [1, 2], [0, 0])
    assert logits.equal(kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="host synchronisation exists on GPUs only")
def test_sampling_never_waits_for_the_device(device: str) -> None:
    logits = torch.randn(3, 999).to(device)
    counts = TokenCounts.empty(3, 999, device)
    how = sampling_tensors([SamplingRow(CASES["all"], 1, 2, banned=[3], slot=i) for i in range(3)], counts, device)
    taken = torch.ones(3, dtype=torch.bool, device=device)
    assert how.penalties is not None
    sample(logits, how)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(logits, how)
        counts.add(how.penalties.slot, tokens, taken)
        logprobs(logits, tokens, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- counts ----


def test_counts_grow_as_if_started_with_the_output(device: str) -> None:
    grown, started = TokenCounts.empty(3, 9, device), TokenCounts.empty(3, 9, device)
    prompt, output = torch.tensor([8, 1, 8], device=device), torch.tensor([4, 4, 0, 4], device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    for counts in (grown, started):  # an earlier request leaves nothing behind
        counts.start(2, torch.tensor([5, 6], device=device), torch.tensor([7, 7], device=device))
    grown.start(2, prompt, none)
    for token in output:
        other = torch.tensor(3, device=device)
        slots, taken = torch.tensor([2, 0, 2], device=device), torch.tensor([True, False, False], device=device)
        grown.add(slots, torch.stack([token, other, other]), taken)
    started.start(2, prompt, output)
    assert grown.output.equal(started.output) and grown.prompt.equal(started.prompt)
    assert grown.output[2].tolist() == [1, 0, 0, 0, 3, 0, 0, 0, 0] and grown.output[:2].sum() == 0
    assert grown.prompt[2].nonzero().flatten().tolist() == [1, 8]


def test_counts_of_repeated_slots_in_one_call_add_up(device: str) -> None:
    counts = TokenCounts.empty(2, 5, device)
    slots, tokens = torch.tensor([1, 1, 1, 0], device=device), torch.tensor([2, 2, 4, 2], device=device)
    counts.add(slots, tokens, torch.tensor([True, True, True, True], device=device))
    assert counts.output.tolist() == [[0, 0, 1, 0, 0], [0, 0, 2, 0, 1]]


def test_drafted_tokens_count_as_if_they_had_been_taken(device: str) -> None:
    """Three rows verify the drafts 2, 2: row j must see j of them although the table sees none."""
    params = SamplingParams(frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.2)
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(8)).to(device)
    counts = TokenCounts.empty(1, 6, device)
    prompt = torch.tensor([0], device=device)
    counts.start(0, prompt, torch.tensor([3], device=device))
    for seed in range(40):
        rows = [SamplingRow(params, seed, 1 + j) for j in range(3)]
        how = sampling_tensors(rows, counts, device)
        assert how.penalties is not None
        row, token = torch.tensor([[1, 2, 2], [2, 2, 2]], device=device)
        penalties = replace(how.penalties, drafted_row=row, drafted_token=token)
        verified = sample(logits.expand(3, -1), replace(how, penalties=penalties)).tolist()
        for j in range(3):
            one_by_one = TokenCounts.empty(1, 6, device)
            one_by_one.start(0, prompt, torch.tensor([3] + [2] * j, device=device))
            assert verified[j] == sample(logits, sampling_tensors([rows[j]], one_by_one, device)).item()


# ---- noise and seeds ----


def mix_in_python(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def gumbel_in_python(seed: int, position: int, token: int) -> float:
    keys = []
    for state in (0x243F6A88, 0x05A308D3):
        for word in (seed % 2**32, (seed >> 32) % 2**32, position % 2**32):
            state = mix_in_python(state ^ word)
        keys.append(state)
    bits = mix_in_python(mix_in_python(token ^ keys[0]) ^ keys[1]) % 2**31
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**31, 1 - 2**-24)))


def test_hash_is_murmur3s_finaliser(device: str) -> None:
    words = [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF] + [random.Random(1).getrandbits(32) for _ in range(200)]
    signed = torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32, device=device)
    assert (mix(signed).long() % 2**32).tolist() == [mix_in_python(word) for word in words]
    assert [mix_in_python(word) for word in (0, 1, 0xFFFFFFFF)] == [0, 0x514E28B7, 0x81F16F39]  # published values


@settings(max_examples=40, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1))
def test_noise_is_a_function_of_seed_position_and_token(device: str, seed: int, position: int) -> None:
    expected = [gumbel_in_python(seed, position, token) for token in range(11)]
    noise = gumbel(torch.tensor([seed], device=device), torch.tensor([position], device=device), 11)
    assert noise[0].tolist() == pytest.approx(expected, rel=2e-5, abs=2e-5)


def test_noise_keeps_its_precision_for_improbable_tokens(device: str) -> None:
    """The largest noise decides whether a rare token wins: it must not be rounded to a few values."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    noise = gumbel(zero, zero, 30_000)[0].tolist()
    for token, value in enumerate(noise):
        if value > 5:
            assert value == pytest.approx(gumbel_in_python(0, 0, token), abs=3e-6)


@pytest.mark.parametrize(("position", "token"), [(123, 5839), (468, 78_052)], ids=["nearly 1", "nearly 0"])
def test_noise_is_finite_where_the_hash_is_extreme(device: str, position: int, token: int) -> None:
    """With seed 0, the hash of (123, 5839) is 19 below its maximum and that of (468, 78052) is 1."""
    row = torch.tensor([position], device=device)
    noise = gumbel(torch.zeros_like(row), row, token + 1)
    assert noise[0, token].item() == pytest.approx(gumbel_in_python(0, position, token), abs=1e-4)
    only = torch.full((1, token + 1), NEVER, device=device)
    only[0, token] = 0.0
    assert draw(only, [SamplingParams()], [0], [position]).tolist() == [token]


def uniform(seeds: Tensor, positions: Tensor, vocab: int, device: str) -> Tensor:
    """The noise turned back into uniform numbers: [B, vocab]."""
    return (-(-gumbel(seeds.to(device), positions.to(device), vocab)).exp()).exp().clamp(0, 1 - 1e-7)


STEP = torch.arange(3000)
PAIRS = {  # two families of rows that must be unrelated, or each token against the next
    "positions": ((STEP * 0 + 7, STEP), (STEP * 0 + 7, STEP + 1)),
    "seeds": ((STEP, STEP * 0), (STEP + 1, STEP * 0)),
    "high halves of seeds": ((STEP, STEP * 0), (STEP + 2**32, STEP * 0)),
    "negated seeds": ((STEP, STEP * 0), (-STEP - 1, STEP * 0)),
    "seed and position swapped": ((STEP, STEP * 0 + 5), (STEP * 0 + 5, STEP)),
    "children": ((STEP, STEP * 0), (torch.tensor([child_seed(s, 1) for s in range(3000)]), STEP * 0)),
}


@pytest.mark.parametrize("name", [*PAIRS, "tokens"])
def test_noise_is_uniform_and_independent(device: str, name: str) -> None:
    vocab = 40
    if name == "tokens":
        both = uniform(STEP, STEP, vocab + 1, device)
        first, second = both[:, :-1], both[:, 1:]
    else:
        rows = PAIRS[name]
        first, second = (uniform(seeds, positions, vocab, device) for seeds, positions in rows)
    unequal = rows[0][0] != rows[1][0] if name == "seed and position swapped" else slice(None)
    cells = ((first * 16).long() * 16 + (second * 16).long())[unequal].flatten()
    assert_distributed(name, torch.bincount(cells, minlength=256).tolist(), [1 / 256] * 256)


def test_noise_has_the_right_mean_and_no_two_equal_rows(device: str) -> None:
    noise = uniform(STEP[:20], STEP[:20], 100_000, device)
    assert noise.double().mean().item() == pytest.approx(0.5, abs=4 * math.sqrt(1 / 12 / noise.numel()))
    assert len({tuple(row) for row in noise[:, :50].tolist()}) == 20


def test_same_seed_repeats_and_each_position_differs(device: str) -> None:
    logits = torch.zeros(1, 5000, device=device)
    runs = [[draw(logits, [SamplingParams()], [5], [i]).item() for i in range(20)] for _ in range(2)]
    assert runs[0] == runs[1] and len(set(runs[0])) > 15


def test_children_differ_from_each_other_and_the_first_is_the_parent(device: str) -> None:
    logits = torch.zeros(4, 1000, device=device)
    seeds = [child_seed(7, choice) for choice in range(4)]
    choices = [draw(logits, [SamplingParams()] * 4, seeds, [i] * 4).tolist() for i in range(10)]
    assert len(set(zip(*choices, strict=True))) == 4
    assert [row[0] for row in choices] == [draw(logits[:1], [SamplingParams()], [7], [i]).item() for i in range(10)]
    greedy = draw(logits + torch.arange(1000, device=device), [SamplingParams(temperature=0)] * 4, seeds, [0] * 4)
    assert greedy.tolist() == [999] * 4


def test_child_seeds_are_splitmix64_and_fit_int64(device: str) -> None:
    assert child_seed(0, 1) % 2**64 == 0xE220A8397B1DCDAF  # published first output for seed 0
    seeds = {child_seed(seed, i) for seed in (-(2**63), -1, 0, 2**63 - 1) for i in range(128)}
    assert len(seeds) == 512 and all(-(2**63) <= seed < 2**63 for seed in seeds)


# ---- log-probabilities ----


@pytest.mark.parametrize("vocab", [1, 6, 1003])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(device: str, vocab: int) -> None:
    generator = torch.Generator().manual_seed(9)
    logits = (torch.randn(5, vocab, generator=generator) * 4).to(device)
    tokens = torch.randint(vocab, (5,), generator=generator).to(device)
    for top_n in (0, min(vocab, 5), min(vocab, 20)):
        chosen, top, ids = logprobs(logits, tokens, top_n)
        exact = logits.double().log_softmax(-1)
        assert chosen.tolist() == pytest.approx(exact[range(5), tokens].tolist(), abs=1e-5)
        assert top.shape == ids.shape == (5, top_n) and top.dtype == torch.float32
        for row in range(5):
            expected = sorted(range(vocab), key=lambda token: (-logits[row, token].item(), token))[:top_n]
            assert ids[row].tolist() == expected
            assert top[row].tolist() == pytest.approx(exact[row, expected].tolist(), abs=1e-5)
            assert top[row].tolist() == sorted(top[row].tolist(), reverse=True)
        assert (top.double().exp().sum(-1) <= 1 + 1e-6).all()


def test_equal_logprobs_are_ordered_by_lower_id(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, -1.0, NEVER, -0.0, -1.0, 2.0]], device=device)
    _, _, ids = logprobs(logits, torch.tensor([0], device=device), 10)
    assert ids.tolist() == [[1, 3, 9, 0, 2, 4, 7, 5, 8, 6]]
