"""What has gone wrong for others who built this model, one test per report; V.. are numbers of public bug reports.

    V01  one RoPE table in every layer            V05  garbage from the first closed window on
    V02  entries visible too early or never       V11  neighbours in a batch leak into entries
    V03  the indexer compares two bases           V12  decoding disagrees with reading at once
    V04  a path without the SwiGLU clamp

Models here have all layer kinds and a window of 128, and run in fp64 where state matters, so that no tie can flip.
"""

import math
import random
from functools import cache
from typing import Any

import pytest
import torch
from models import (
    Cut,
    Served,
    at_once,
    engine_for,
    one_by_one,
    random_config,
    random_cut,
    random_reference,
    serve,
    serving_model,
)
from torch import Tensor

from leadline.config import ModelConfig, Ratio
from leadline.engine.sampling import SamplingParams
from leadline.formats import fp4_quantize_weight, fp8_quantize_weight, hadamard
from leadline.kernels import compress, store
from leadline.kernels.experts import experts, routed_experts, shared_expert
from leadline.kernels.project import Weight
from leadline.kernels.rope import Angles, angles
from leadline.kernels.select import select
from leadline.model import attention
from leadline.model.transformer import Transformer
from leadline.reference import Reference, layer_frequencies

YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1}


def config(**fixed: Any) -> dict[str, Any]:
    kinds = {"num_hidden_layers": 5, "compress_ratios": [0, 4, 128, 4, 128, 0], "num_hash_layers": 1, "index_topk": 16}
    shape = {"sliding_window": 128, "rope_scaling": YARN, "num_attention_heads": 4, "o_groups": 2, "hidden_size": 64}
    return random_config(random.Random(0), **{**kinds, **shape, **fixed})


@cache
def pair(native: bool = False) -> tuple[Reference, Transformer]:
    """The reference and the serving model, in fp64."""
    reference = random_reference(config(), seed=1, native=native).double()
    return reference, serving_model(reference, torch.float64, native)


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, config()["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))


def run(sequences: list[Tensor], cut: Cut = at_once, native: bool = False) -> Served:
    return serve(pair(native)[1], sequences, cut, torch.float64)


def assert_same(mine: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-10, msg=lambda text: f"{what}: {text}")


# ---------------------------------------------------------------------------------------------------------- V01


def test_v01_frequencies_of_the_released_models() -> None:
    """Base 10000 and no YaRN in SWA layers; base 160000 in the others, slow pairs divided by 16, some in between."""
    yarn = {**YARN, "original_max_position_embeddings": 65536}
    raw = config(head_dim=512, qk_rope_head_dim=64, index_head_dim=128, rope_scaling=yarn)
    swa = layer_frequencies(ModelConfig.from_dict(raw), Ratio.SWA).tolist()
    assert swa == pytest.approx([10000 ** (-i / 32) for i in range(32)], rel=1e-6)
    plain = [160000 ** (-i / 32) for i in range(32)]
    for ratio in (Ratio.CSA, Ratio.HCA):
        parts = [
            f / p for f, p in zip(layer_frequencies(ModelConfig.from_dict(raw), ratio).tolist(), plain, strict=True)
        ]
        assert parts[:16] == pytest.approx([1.0] * 16, rel=1e-6)
        assert parts[16:25] == pytest.approx([1 - 15 / 16 * (i - 15) / 10 for i in range(16, 25)], rel=1e-5)
        assert parts[25:] == pytest.approx([1 / 16] * 7, rel=1e-6)


def test_v01_every_layer_turns_by_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of SWA layers by one table, of all others by the other; nothing is scaled."""
    _, model = pair()
    frequencies = {
        Ratio.SWA: 10000.0 ** (-torch.arange(0, config()["qk_rope_head_dim"], 2) / config()["qk_rope_head_dim"]),
        Ratio.CSA: layer_frequencies(model.config, Ratio.CSA),
    }
    assert not torch.allclose(frequencies[Ratio.SWA], frequencies[Ratio.CSA], rtol=0.1)
    seen = []
    original = store.query

    def spy(q: Tensor, by: Any, eps: float) -> Tensor:
        seen.append(by)
        return original(q, by, eps)

    monkeypatch.setattr(store, "query", spy)
    run([tokens(140)])
    assert len(seen) == 5
    for by, ratio in zip(seen, model.config.compress_ratios, strict=True):
        expected = angles(torch.arange(140), frequencies[Ratio.SWA if ratio == Ratio.SWA else Ratio.CSA].double())
        torch.testing.assert_close(by.cos, expected.cos, rtol=0, atol=1e-4)
        torch.testing.assert_close(by.sin, expected.sin, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [96, 127, 128, 129, 210, 1500])
def test_v01_logits_around_and_far_beyond_the_window(length: int) -> None:
    ids = tokens(length, length)
    assert_same(run([ids], random_cut(length)).logits[0], pair()[0](ids[None])[0], f"{length} tokens")


def test_v01_entries_are_turned_by_their_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, list[tuple[Tensor, Tensor]]] = {"csa_entries": [], "hca_entries": []}

    def watch(name: str) -> None:
        original = getattr(compress, name)

        def spy(*arguments: Any) -> Tensor:
            """Also makes the rows that would come out without any rotation."""
            plain = [Angles(torch.ones_like(a.cos), 0 * a.sin) if isinstance(a, Angles) else a for a in arguments]
            made[name].append((original(*plain), original(*arguments)))
            return made[name][-1][1]

        monkeypatch.setattr(compress, name, spy)

    for name in made:
        watch(name)
    served = run([tokens(700)])
    frequencies = layer_frequencies(pair()[1].config, Ratio.CSA).double()
    for name, ratio, calls in (("csa_entries", 4, 4), ("hca_entries", 128, 2)):
        assert len(made[name]) == calls, "two layers of each kind; index keys are made as entries are"
        for unturned, turned in made[name]:
            pairs = torch.view_as_complex(unturned[:, -2 * len(frequencies) :].unflatten(-1, (-1, 2)).contiguous())
            phase = torch.arange(700 // ratio)[:, None] * ratio * frequencies
            expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(phase), phase)).flatten(1)
            assert_same(turned[:, -2 * len(frequencies) :], expected, name)
            assert torch.equal(turned[:, : -2 * len(frequencies)], unturned[:, : -2 * len(frequencies)])
    assert torch.equal(served.csa_entries(1, 0)[:175], made["csa_entries"][2][1])
    assert torch.equal(served.index_keys(1, 0)[:175], made["csa_entries"][3][1])
    assert torch.equal(served.hca_entries(1, 0)[:5], made["hca_entries"][1][1])


# ---------------------------------------------------------------------------------------------------------- V02

QUERIES = [2, 3, 4, 126, 127, 128, 255, 511]


def test_v02_the_last_token_changes_no_earlier_logits() -> None:
    ids, other = tokens(600), tokens(600)
    other[599] = (other[599] + 1) % config()["vocab_size"]
    reference, _ = pair()
    for name, logits in {
        "reference": [reference(x[None])[0] for x in (ids, other)],
        "engine": [run([x]).logits[0] for x in (ids, other)],
    }.items():
        assert torch.equal(logits[0][:599], logits[1][:599]), name
        assert not torch.equal(logits[0][599], logits[1][599]), name


def test_v02_entries_are_readable_from_their_last_token_on() -> None:
    seen: dict[str, Tensor] = {}
    pair()[0](tokens(600)[None], observe=seen.__setitem__)
    for query in QUERIES:
        csa = {int(i) for i in seen["layers.1.attn.weights"][0, query, 0, 600:].nonzero()}
        hca = {int(i) for i in seen["layers.2.attn.weights"][0, query, 0, 600:].nonzero()}
        assert csa <= {j for j in range(150) if (j + 1) * 4 <= query + 1}
        assert len(csa) == min((query + 1) // 4, 16)
        assert hca == {j for j in range(4) if (j + 1) * 128 <= query + 1}


def attend_calls(monkeypatch: pytest.MonkeyPatch, sequences: list[Tensor], cut: Cut) -> list[dict[str, Tensor]]:
    """What each call of `attend` was told to read, layer after layer, step after step."""
    calls: list[dict[str, Tensor]] = []
    original = attention.attend

    def spy(
        q: Tensor, sink: Tensor, window: Tensor, window_rows: Tensor, entries: Any, chosen: Any, *rest: Any
    ) -> Tensor:
        calls.append({"window": window_rows, "chosen": torch.empty(len(q), 0) if chosen is None else chosen})
        return original(q, sink, window, window_rows, entries, chosen, *rest)

    monkeypatch.setattr(attention, "attend", spy)
    run(sequences, cut)
    monkeypatch.undo()
    return calls


@pytest.mark.parametrize("cut", [at_once, random_cut(5), one_by_one], ids=["one step", "random chunks", "one by one"])
def test_v02_the_engine_reads_as_many_rows_as_it_may(monkeypatch: pytest.MonkeyPatch, cut: Cut) -> None:
    calls = attend_calls(monkeypatch, [tokens(600)], cut)
    for layer, ratio in enumerate(pair()[0].config.compress_ratios):
        window = torch.cat([(call["window"] >= 0).sum(1) for call in calls[layer::5]])
        chosen = torch.cat([(call["chosen"] >= 0).sum(1) for call in calls[layer::5]])
        position = torch.arange(600)
        assert torch.equal(window, (position + 1).clamp(max=128))
        closed = (position + 1) // max(1, int(ratio))
        limit = {Ratio.SWA: 0, Ratio.CSA: 16, Ratio.HCA: 600}[ratio]
        assert torch.equal(chosen, closed.clamp(max=limit)), f"layer {layer}"


def test_v02_scores_are_weighted_relus_and_masked_before_the_choice() -> None:
    """Entries not yet closed have the best scores here, and must not push visible ones out."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 8, generator=generator)
    weights = torch.tensor([[1.0, -0.5]]).expand(3, 2).contiguous()
    keys = torch.randn(64, 8, generator=generator)
    keys[40:] = 100 * q[0, 0]
    visible = torch.tensor([30, 40, 7])
    chosen = select(q, weights, keys, torch.tensor([[1, 0]]).expand(3, 2), visible, 64, 10)
    pool = torch.cat([keys[32:], keys[:32]])
    for t in range(3):
        scores = [
            sum(float(weights[t, h]) * max(0.0, float(q[t, h] @ pool[i])) for h in range(2)) for i in range(visible[t])
        ]
        best = sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:10])
        assert chosen[t].tolist() == best + [-1] * (10 - len(best))


# ---------------------------------------------------------------------------------------------------------- V03


@pytest.mark.parametrize("native", [False, True], ids=["exact", "native"])
def test_v03_the_engine_chooses_the_entries_that_the_reference_chooses(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    """400 tokens, 100 entries of which 16 are read: from token 67 on the indexer decides."""
    ids = tokens(400, 7)
    reference, model = pair(native)
    seen: dict[str, Tensor] = {}
    reference(ids[None], observe=seen.__setitem__)
    chosen: list[Tensor] = []
    original = attention.select

    def spy(*arguments: Any) -> Tensor:
        chosen.append(original(*arguments))
        return chosen[-1]

    monkeypatch.setattr(attention, "select", spy)
    serve(model, [ids], at_once, torch.float64)
    assert len(chosen) == 2
    for layer, picked in zip((1, 3), chosen, strict=True):
        read = seen[f"layers.{layer}.attn.weights"][0, :, 0, 400:] > 0
        mine = torch.zeros(400, 101, dtype=torch.bool).scatter(1, torch.where(picked < 0, 100, picked), True)[:, :100]
        assert mine[399].sum() == 16
        assert torch.equal(mine, read), f"layer {layer}: {int((mine != read).any(1).sum())} of 400 queries differ"


def test_v03_both_sides_are_turned_by_the_same_matrix() -> None:
    """Products of turned vectors are those of the vectors, and the turn is not the identity."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(5, 128, generator=generator).double(), torch.randn(9, 128, generator=generator).double()
    torch.testing.assert_close(hadamard(q) @ hadamard(k).T, q @ k.T)
    assert not torch.allclose(hadamard(q) @ k.T, q @ k.T, atol=1.0)
    matrix = [[(-1) ** bin(i & j).count("1") / math.sqrt(128) for j in range(128)] for i in range(128)]
    torch.testing.assert_close(hadamard(q), q @ torch.tensor(matrix, dtype=torch.float64))


# ---------------------------------------------------------------------------------------------------------- V04

GATE = [-50.0, 3.0, 9.9, 50.0]
UP = [-50.0, -3.0, 9.9, 50.0]
CLAMPED = [(-50.0, -10.0), (3.0, -3.0), (9.9, 9.9), (10.0, 10.0)]


def swiglu_weights(form: str) -> tuple[Weight, Weight]:
    """One expert of width 32 for rows of 64 channels: hidden units 0..3 have the pre-activations that GATE and UP say
    for the row [1, 0.1, 0, ...], and channels 0..3 put out what they become."""
    w13, w2 = torch.zeros(64, 64), torch.zeros(64, 32)
    for i in range(4):
        for row, value in ((i, GATE[i]), (32 + i, UP[i])):
            whole = round(value) if form != "plain" else value
            w13[row, 0], w13[row, 1] = whole, round(10 * (value - whole), 6)
        w2[i, i] = 1.0
    if form == "plain":
        return Weight(w13[None]), Weight(w2[None])
    quantize = fp8_quantize_weight if form == "fp8" else fp4_quantize_weight
    parts = [quantize(w) for w in (w13, w2)]
    return Weight(parts[0][0][None], parts[0][1][None]), Weight(parts[1][0][None], parts[1][1][None])


def pre_activations(w13: Weight, x: Tensor) -> tuple[Tensor, Tensor]:
    gate_up = x.double() @ w13.expert(0).dense(torch.float32).double().T
    return gate_up[:, :4], gate_up[:, 32:36]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", ["plain", "fp8", "fp4"])
def test_v04_every_path_clamps(form: str, dtype: torch.dtype) -> None:
    w13, w2 = swiglu_weights(form)
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 0], x[0, 1] = 1.0, 0.1
    gate, up = pre_activations(w13, x)
    if form == "plain":
        torch.testing.assert_close(gate[0], torch.tensor(GATE).double(), rtol=0.01, atol=0)
        torch.testing.assert_close(up[0], torch.tensor(UP).double(), rtol=0.01, atol=0)
    assert gate.max() > 40 and gate.min() < -40 and up.max() > 40 and up.min() < -40
    gate, up = gate.clamp(max=10), up.clamp(-10, 10)
    expected = (gate / (1 + torch.exp(-gate)) * up)[0]
    first, one = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.float32)
    shared = w13.expert(0), w2.expert(0)
    results = {
        "routed": routed_experts(x, first, one, w13, w2, 10.0),
        "shared": shared_expert(x, *shared, 10.0),
        "the mean of both": experts(x, first, one, w13, w2, *shared, 10.0) / 2,
    }
    for name, result in results.items():
        torch.testing.assert_close(
            result[0, :4].double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6, msg=name
        )
        assert not result[0, 4:].any()


@pytest.mark.parametrize("path", ["experts", "shared_experts"])
def test_v04_the_reference_clamps_on_every_path(path: str) -> None:
    raw = config(n_routed_experts=4, num_experts_per_tok=4, num_nextn_predict_layers=1, swiglu_limit=10.0)
    model = random_reference(raw)
    x = torch.full((1, 1, 64), 0.0)
    x[..., 0] = 1
    for ffn in (model.layers[0].ffn, model.layers[2].ffn, model.mtp[0].ffn):
        other = ffn.shared_experts if path == "experts" else ffn.experts
        for parameter in other.parameters():
            parameter.zero_()
        part = getattr(ffn, path)
        w1, w2, w3 = (getattr(part, w) if path == "experts" else getattr(part, w).weight for w in ("w1", "w2", "w3"))
        for w in (w1, w2, w3):
            w.zero_()
        for i in range(4):
            w1[..., i, 0], w3[..., i, 0], w2[..., i, i] = GATE[i], UP[i], 1.0
        y = ffn(x, torch.zeros(1, 1, dtype=torch.int64), lambda name, value: None)[0, 0, :4]
        scale = raw["routed_scaling_factor"] if path == "experts" else 1.0
        expected = [scale * gate / (1 + math.exp(-gate)) * up for gate, up in CLAMPED]
        assert y.tolist() == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- V05

LENGTHS = [*range(1, 13), *range(120, 137), *range(250, 263)]


@pytest.fixture(scope="module")
def expected_at_any_length() -> Tensor:
    """The reference's logits of one text; by causality also those of each of its beginnings."""
    return pair()[0](tokens(LENGTHS[-1])[None])[0]


def test_v05_the_reference_itself_is_right_at_every_length(expected_at_any_length: Tensor) -> None:
    for length in (1, 2, 3, 4, 5, 127, 128, 129):
        alone = pair()[0](tokens(LENGTHS[-1])[None, :length])[0]
        assert_same(alone, expected_at_any_length[:length], f"{length} tokens")


@pytest.mark.parametrize("cut", [at_once, random_cut(3)], ids=["one step", "random chunks"])
def test_v05_every_length_in_one_batch(expected_at_any_length: Tensor, cut: Cut) -> None:
    text = tokens(LENGTHS[-1])
    for length, mine in zip(LENGTHS, run([text[:length] for length in LENGTHS], cut).logits, strict=True):
        assert_same(mine, expected_at_any_length[:length], f"{length} tokens")


@pytest.mark.parametrize("length", LENGTHS)
def test_v05_every_length_alone(expected_at_any_length: Tensor, length: int) -> None:
    assert_same(run([tokens(LENGTHS[-1])[:length]]).logits[0], expected_at_any_length[:length], f"{length} tokens")


# ---------------------------------------------------------------------------------------------------------- V11


def test_v11_requests_of_a_batch_do_not_leak_into_each_other() -> None:
    """Prompts of six lengths in one step, then 20 decode steps together; alone each is the same, to the bit."""
    lengths = [3, 4, 5, 127, 128, 300]
    sequences = [tokens(length + 20, length) for length in lengths]

    def prompt_then_decode(sequence: int, start: int) -> int:
        return lengths[sequence] if start == 0 else 1

    together = run(sequences, prompt_then_decode)
    for number, (length, ids) in enumerate(zip(lengths, sequences, strict=True)):
        alone = serve(pair()[1], [ids], lambda _, start, n=length: n if start == 0 else 1, torch.float64)
        assert torch.equal(together.logits[number], alone.logits[0]), f"prompt of {length}"
        for layer in range(2):
            assert_entries(together.csa_entries(layer, number), alone.csa_entries(layer, 0), len(ids) // 4)
            assert_entries(together.index_keys(layer, number), alone.index_keys(layer, 0), len(ids) // 4)
            assert_entries(together.hca_entries(layer, number), alone.hca_entries(layer, 0), len(ids) // 128)


def assert_entries(mine: Tensor, expected: Tensor, count: int) -> None:
    """The first `count` rows are written and equal, all others were never touched."""
    assert torch.equal(mine[:count], expected[:count])
    assert mine[:count].isfinite().all()
    assert mine[count:].isnan().all() and expected[count:].isnan().all()


@pytest.mark.parametrize("length", [3, 127])
def test_v11_no_entry_before_a_window_is_full(length: int) -> None:
    served = run([tokens(length), tokens(300)])
    assert len(served.hca_entries(0, 0)) == 1 and served.hca_entries(0, 0).isnan().all()
    written = (~served.csa_entries(0, 0).isnan()).any(-1).sum()
    assert written == length // 4


def test_v11_greedy_tokens_are_those_of_a_request_alone() -> None:
    reference, model = random_reference(config(), seed=1), serving_model(random_reference(config(), seed=1))
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [tokens(length, length).numpy().astype("int32") for length in (3, 4, 5, 127, 128, 300)]

    def generated(batch: list[Any]) -> list[list[int]]:
        engine = engine_for(reference, model, step_tokens=600, chunk_tokens=600, state_bytes=1 << 28)
        requests = [engine.add(prompt, greedy)[0] for prompt in batch]
        while engine.busy:
            engine.step()
        return [request.output.tolist() for request in requests]

    assert generated(prompts) == [generated([prompt])[0] for prompt in prompts]


# ---------------------------------------------------------------------------------------------------------- V12


@pytest.mark.parametrize("native", [False, True], ids=["exact", "native"])
def test_v12_decoding_equals_reading_at_once_at_every_step(native: bool) -> None:
    """Prompts of 5 to 300 tokens and 150 more one by one, against the reference over the whole text."""
    rng = random.Random(12)
    lengths = [5, 127, rng.randint(6, 120), rng.randint(130, 300)]
    sequences = [tokens(length + 150, length) for length in lengths]
    decoded = run(sequences, lambda sequence, start: lengths[sequence] if start == 0 else 1, native)
    at_once_too = run(sequences, at_once, native)
    for number, ids in enumerate(sequences):
        expected = pair(native)[0](ids[None])[0]
        assert_same(decoded.logits[number], expected, f"prompt of {lengths[number]}")
        for layer in range(2):
            for kind in ("csa_entries", "index_keys", "hca_entries"):
                rows = [getattr(served, kind)(layer, number) for served in (decoded, at_once_too)]
                count = len(ids) // (128 if kind == "hca_entries" else 4)
                assert_entries(rows[0], rows[1], count)
