"""`reference.py` against what `transformers` lacks: the draft block, native rounding, and looking inside."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from models import at_once, fill, random_config, random_cut, random_reference, serve, serving_model
from numpy.typing import NDArray
from torch import Tensor

from leadline import reference as definition
from leadline.config import ModelConfig, Ratio
from leadline.formats import hadamard
from leadline.reference import Reference, hyper_mix, layer_frequencies

ALL_KINDS = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "index_topk": 8}


def tokens(raw: dict[str, Any], length: int, seed: int = 0) -> Tensor:
    """Random token ids [1, length]."""
    return torch.randint(0, raw["vocab_size"], (1, length), generator=torch.Generator().manual_seed(seed))


def all_kinds(seed: int = 0, **fixed: Any) -> dict[str, Any]:
    return random_config(random.Random(seed), **{**ALL_KINDS, **fixed})


# ------------------------------------------------------------------------------- the draft block, by hand

Array = NDArray[np.float64]


def norm(x: Array, weight: Array | float, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def turned(x: Array, position: int, rope: int, theta: float, sign: int) -> Array:
    """One head's row: channel pairs among the last `rope`, pair i by `sign * position * theta^(-2i/rope)`."""
    out = x.copy()
    for i in range(rope // 2):
        # Frequencies are a table in fp32, in checkpoints' own code too.
        angle = sign * position * float(np.float32(theta) ** np.float32(-2 * i / rope))
        j = len(x) - rope + 2 * i
        out[j] = x[j] * math.cos(angle) - x[j + 1] * math.sin(angle)
        out[j + 1] = x[j] * math.sin(angle) + x[j + 1] * math.cos(angle)
    return out


class ByHand:
    """The draft block in fp64 loops over tokens, heads, experts and streams: window attention and learned routing."""

    def __init__(self, config: ModelConfig, weights: dict[str, Array]) -> None:
        self.c, self.w = config, weights

    def __getitem__(self, name: str) -> Array:
        return self.w[f"mtp.0.{name}"]

    def logits(self, streams: Array, next_ids: list[int]) -> Array:
        """Streams [S, n, d] of the last main layer, and the token after each -> [S, V]."""
        rows = []
        for x, token in zip(streams, next_ids, strict=True):
            embedding = norm(self.w["embed.weight"][token], self["enorm.weight"], self.c.rms_norm_eps)
            e = self["e_proj.weight"] @ embedding
            rows.append([e + self["h_proj.weight"] @ norm(s, self["hnorm.weight"], self.c.rms_norm_eps) for s in x])
        state = np.array(rows)
        state = self.sublayer(state, "attn", self.attention)
        state = self.sublayer(state, "ffn", lambda xs: np.array([self.experts(x) for x in xs]))
        return np.array([self.head(x) for x in state])

    def mixes(self, x: Array, name: str) -> Array:
        flat = x.reshape(-1)
        return self[f"hc_{name}_fn"] @ flat / math.sqrt((flat**2).mean() + self.c.rms_norm_eps)

    def sublayer(self, state: Array, name: str, inner: Any) -> Array:
        n, eps = self.c.hc_mult, self.c.hc_eps
        inputs, posts, combs = [], [], []
        for x in state:
            m, scale, base = self.mixes(x, name), self[f"hc_{name}_scale"], self[f"hc_{name}_base"]
            pre = sigmoid(scale[0] * m[:n] + base[:n]) + eps
            posts.append(2 * sigmoid(scale[1] * m[n : 2 * n] + base[n : 2 * n]))
            raw = [[scale[2] * m[2 * n + n * j + k] + base[2 * n + n * j + k] for k in range(n)] for j in range(n)]
            combs.append(sinkhorn_by_hand(raw, self.c.hc_sinkhorn_iters, eps))
            inputs.append(norm(sum(pre[j] * x[j] for j in range(n)), self[f"{name}_norm.weight"], self.c.rms_norm_eps))
        outputs = inner(np.array(inputs))
        return np.array(
            [
                [post[k] * y + sum(comb[j][k] * x[j] for j in range(n)) for k in range(n)]
                for x, y, post, comb in zip(state, outputs, posts, combs, strict=True)
            ]
        )

    def attention(self, xs: Array) -> Array:
        c, eps, rope, theta = self.c, self.c.rms_norm_eps, self.c.qk_rope_head_dim, self.c.rope_theta
        keys = [
            turned(norm(self["attn.wkv.weight"] @ x, self["attn.kv_norm.weight"], eps), t, rope, theta, 1)
            for t, x in enumerate(xs)
        ]
        outputs = []
        for t, x in enumerate(xs):
            latent = norm(self["attn.wq_a.weight"] @ x, self["attn.q_norm.weight"], eps)
            heads = []
            for h, q in enumerate((self["attn.wq_b.weight"] @ latent).reshape(c.num_attention_heads, c.head_dim)):
                q = turned(norm(q, 1.0, eps), t, rope, theta, 1)
                seen = range(max(0, t - c.sliding_window + 1), t + 1)
                weights = [math.exp(q @ keys[i] / math.sqrt(c.head_dim)) for i in seen]
                total = sum(weights) + math.exp(self["attn.attn_sink"][h])
                value = sum(weight * keys[i] for weight, i in zip(weights, seen, strict=True)) / total
                heads.append(turned(value, t, rope, theta, -1))
            rank, size = c.o_lora_rank, c.num_attention_heads // c.o_groups
            parts = [
                self["attn.wo_a.weight"][g * rank : (g + 1) * rank] @ np.concatenate(heads[g * size : (g + 1) * size])
                for g in range(c.o_groups)
            ]
            outputs.append(self["attn.wo_b.weight"] @ np.concatenate(parts))
        return np.array(outputs)

    def experts(self, x: Array) -> Array:
        scores = np.sqrt(np.log1p(np.exp(self["ffn.gate.weight"] @ x)))
        chosen = np.argsort(-(scores + self["ffn.gate.bias"]))[: self.c.num_experts_per_tok]
        y = self.expert(x, *(self[f"ffn.shared_experts.w{i}.weight"] for i in (1, 2, 3)))
        for e in chosen:
            weight = scores[e] / scores[chosen].sum() * self.c.routed_scaling_factor
            y = y + weight * self.expert(x, *(self[f"ffn.experts.w{i}"][e] for i in (1, 2, 3)))
        return y

    def expert(self, x: Array, w1: Array, w2: Array, w3: Array) -> Array:
        limit = self.c.swiglu_limit
        gate, up = np.minimum(w1 @ x, limit), np.clip(w3 @ x, -limit, limit)
        return w2 @ (gate * sigmoid(gate) * up)

    def head(self, x: Array) -> Array:
        mix = sigmoid(self.mixes(x, "head") * self["hc_head_scale"][0] + self["hc_head_base"]) + self.c.hc_eps
        hidden = norm(sum(mix[j] * x[j] for j in range(len(x))), self["norm.weight"], self.c.rms_norm_eps)
        return self.w["head.weight"] @ hidden


def sinkhorn_by_hand(logits: Any, rounds: int, eps: float) -> list[list[float]]:
    """Rows are sources, columns destinations: softmax of rows, then columns, then rows and columns by turns."""
    n = len(logits)
    c = [
        [math.exp(logits[j][k]) / sum(math.exp(value) for value in logits[j]) + eps for k in range(n)] for j in range(n)
    ]

    def normalise(rows: bool) -> None:
        totals = [sum(c[i]) if rows else sum(c[j][i] for j in range(n)) for i in range(n)]
        for j in range(n):
            for k in range(n):
                c[j][k] /= (totals[j] if rows else totals[k]) + eps

    normalise(rows=False)
    for _ in range(rounds - 1):
        normalise(rows=True)
        normalise(rows=False)
    return c


@pytest.mark.parametrize("seed", range(6))
def test_draft_block_equals_the_formulas_written_out(seed: int) -> None:
    raw = random_config(
        random.Random(seed),
        num_hidden_layers=1 + seed % 2,
        compress_ratios=[4, 0, 0][1 - seed % 2 :],
        num_nextn_predict_layers=1,
        num_hash_layers=0,
        sliding_window=3,
        swiglu_limit=1.0,
    )
    model = random_reference(raw, seed).double()
    ids = tokens(raw, 6, seed)
    _, drafted = model.forward_with_draft(ids)
    streams = model.streams(ids)[0, :5].numpy()
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = ByHand(model.config, weights).logits(streams, ids[0, 1:].tolist())
    assert drafted.shape == (1, 5, raw["vocab_size"])
    np.testing.assert_allclose(drafted[0].numpy(), expected, rtol=0, atol=1e-6)


def test_draft_of_a_main_model_without_one_is_not_built() -> None:
    assert len(random_reference(all_kinds(num_nextn_predict_layers=0)).mtp) == 0


# ------------------------------------------------------------------------------------- hyper-connections


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_sinkhorn_equals_an_explicit_loop(streams: int, rounds: int) -> None:
    config = ModelConfig.from_dict(all_kinds(hc_mult=streams, hc_sinkhorn_iters=rounds))
    generator = torch.Generator().manual_seed(streams)
    x = torch.randn(1, 3, streams, config.hidden_size, generator=generator, dtype=torch.float64)
    fn, base, scale = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((config.num_mixes, streams * config.hidden_size), (config.num_mixes,), (3,))
    )
    pre, post, comb = hyper_mix(config, x, fn, scale, base)
    for t in range(3):
        flat = x[0, t].flatten()
        m = fn @ flat / math.sqrt(float((flat**2).mean()) + config.rms_norm_eps)
        m = torch.cat([m[:streams] * scale[0], m[streams : 2 * streams] * scale[1], m[2 * streams :] * scale[2]]) + base
        logits = m[2 * streams :].view(streams, streams).tolist()
        expected = torch.tensor(sinkhorn_by_hand(logits, rounds, config.hc_eps), dtype=torch.float64)
        torch.testing.assert_close(comb[0, t], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(pre[0, t], torch.sigmoid(m[:streams]) + config.hc_eps, rtol=0, atol=1e-12)
        torch.testing.assert_close(post[0, t], 2 * torch.sigmoid(m[streams : 2 * streams]), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------ native rounding


def on_grid(values: Tensor, block: int, largest: float, mantissa: int, smallest: float) -> bool:
    """Whether each block of `values` [..., c] is a power of two times numbers of a float format: at most `largest`,
    `mantissa` bits after the leading one, and whole multiples of `smallest`."""
    blocks = values.double().unflatten(-1, (-1, block))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / largest)))
    codes = blocks / scale
    fraction = torch.frexp(codes).mantissa * 2 ** (mantissa + 1)
    whole = (fraction == fraction.round()) & (codes / smallest == (codes / smallest).round())
    return bool((whole & (codes.abs() <= largest)).all())


def attention_rows(monkeypatch: pytest.MonkeyPatch, raw: dict[str, Any], native: bool, ids: Tensor) -> list[Tensor]:
    """What each layer's attention reads: window rows, then entries, [S + C, D]."""
    rows: list[Tensor] = []
    attend = definition.Attention._attend

    def spy(self: Any, queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        rows.append(keys[0])
        return attend(self, queries, keys, *rest)

    monkeypatch.setattr(definition.Attention, "_attend", spy)
    random_reference(raw, native=native)(ids)
    monkeypatch.undo()
    return rows


def test_native_window_rows_and_entries_are_fp8_but_for_rotated_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = all_kinds(head_dim=144, qk_rope_head_dim=16, index_head_dim=32)
    ids = tokens(raw, 261)
    native = attention_rows(monkeypatch, raw, True, ids)
    exact = attention_rows(monkeypatch, raw, False, ids)
    assert [len(rows) for rows in native] == [261, 261 + 65, 261 + 2]
    for rows, unrounded in zip(native, exact, strict=True):
        assert on_grid(rows[:, :-16], 64, 448.0, 3, 2.0**-9)
        assert not on_grid(unrounded[:, :-16], 64, 448.0, 3, 2.0**-9)
        assert not on_grid(rows[:, -64:], 64, 448.0, 3, 2.0**-9)


def test_native_rounding_leaves_rotated_channels_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a first layer without rounded products, rows differ from exact ones by the rounding of one block only."""
    raw = all_kinds(num_hidden_layers=1, compress_ratios=[128, 0], head_dim=80, qk_rope_head_dim=16)
    monkeypatch.setattr(definition.Linear, "forward", lambda self, x: torch.nn.functional.linear(x, self.weight))
    ids = tokens(raw, 130)
    native, exact = random_reference(raw, native=True).layers[0].attn, random_reference(raw).layers[0].attn
    x = torch.randn(1, 130, raw["hidden_size"], generator=torch.Generator().manual_seed(1))
    kept: list[Tensor] = []
    attend = definition.Attention._attend

    def spy(self: Any, queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        kept.append(keys)
        return attend(self, queries, keys, *rest)

    monkeypatch.setattr(definition.Attention, "_attend", spy)
    for attention in (native, exact):
        attention(x, False, lambda name, value: None)
    rounded, unrounded = kept
    assert rounded.shape == (1, len(ids[0]) + 1, 80)
    assert torch.equal(rounded[..., -16:], unrounded[..., -16:])
    error = (rounded[..., :64] - unrounded[..., :64]).abs()
    assert 0 < error.max() <= unrounded[..., :64].abs().max() / 16


def test_native_index_keys_and_queries_are_turned_and_rounded_to_fp4(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = all_kinds(index_head_dim=64, index_n_heads=16)
    seen: list[tuple[Tensor, Tensor]] = []
    rounded = definition.fp4_round_trip

    def spy(x: Tensor) -> Tensor:
        seen.append((x, rounded(x)))
        return seen[-1][1]

    monkeypatch.setattr(definition, "fp4_round_trip", spy)
    model = random_reference(raw, native=True)
    scores: dict[str, Tensor] = {}
    model(tokens(raw, 42), observe=scores.__setitem__)
    assert [tuple(value.shape) for _, value in seen] == [(1, 42, 16, 64), (1, 10, 64)]
    for before, after in seen:
        assert on_grid(after, 32, 6.0, 1, 0.5)
        assert not on_grid(before, 32, 6.0, 1, 0.5)
    keys = model.layers[1].attn.indexer.compressor
    monkeypatch.setattr(definition, "hadamard", lambda x: x)
    with_no_turn: dict[str, Tensor] = {}
    model(tokens(raw, 42), observe=with_no_turn.__setitem__)
    turned_back = hadamard(seen[1][0])
    torch.testing.assert_close(turned_back, seen[3][0], rtol=0, atol=1e-5)
    assert keys.dim == 64
    name = "layers.1.attn.index_scores"
    assert not torch.equal(scores[name], with_no_turn[name])


def test_native_differs_from_exact_and_every_parameter_gets_a_gradient() -> None:
    raw = all_kinds(num_experts_per_tok=2, n_routed_experts=4, num_nextn_predict_layers=1)
    native, exact = random_reference(raw, native=True), random_reference(raw)
    ids = tokens(raw, 133)
    assert not torch.equal(native(ids), exact(ids))
    native.requires_grad_(True)
    logits, drafted = native.forward_with_draft(ids)
    (logits.square().mean() + drafted.square().mean()).backward()
    for name, parameter in native.named_parameters():
        if ".indexer." in name:
            assert parameter.grad is None, f"{name}: a choice of entries has no gradient"
        else:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), f"{name}: no gradient"


def test_rounding_passes_gradients_straight_through() -> None:
    x = torch.tensor([0.3, -2.2, 1.7], requires_grad=True)
    y = definition.straight_through(x, x.detach().round())
    assert y.tolist() == [0.0, -2.0, 2.0]
    y.square().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, -4.0, 4.0]


@pytest.mark.parametrize("native", [False, True], ids=["exact", "native"])
@pytest.mark.parametrize("seed", range(8))
def test_serving_model_equals_the_reference_in_fp64(seed: int, native: bool) -> None:
    """In fp64 the two differ by about 1e-14, so that no rounding to fp8 or fp4 and no top-k falls differently."""
    rng = random.Random(seed)
    ratios = rng.sample([0, 4, 4, 128], 4)
    raw = random_config(rng, num_hidden_layers=4, compress_ratios=[*ratios, 0], index_topk=rng.choice([4, 16]))
    model = random_reference(raw, seed, native).double()
    serving = serving_model(model, torch.float64, native)
    sequences = [tokens(raw, length, seed)[0] for length in (rng.randint(1, 12), rng.randint(126, 400))]
    served = {cut: serve(serving, sequences, cut, torch.float64).logits for cut in (at_once, random_cut(seed))}
    for logits in served.values():
        for ids, mine in zip(sequences, logits, strict=True):
            torch.testing.assert_close(mine, model(ids[None])[0], rtol=0, atol=1e-11)


# ------------------------------------------------------------------------------------------ looking inside


def test_observed_names_and_shapes() -> None:
    raw = all_kinds()
    seen: dict[str, Tensor] = {}
    random_reference(raw)(tokens(raw, 133), observe=seen.__setitem__)
    heads, experts = raw["num_attention_heads"], raw["n_routed_experts"]
    shapes = {name: tuple(value.shape) for name, value in seen.items()}
    assert shapes == {
        "layers.0.attn.weights": (1, 133, heads, 133),
        "layers.0.ffn.expert_weights": (1, 133, experts),
        "layers.1.attn.index_scores": (1, 133, 33),
        "layers.1.attn.weights": (1, 133, heads, 133 + 33),
        "layers.1.ffn.expert_weights": (1, 133, experts),
        "layers.2.attn.weights": (1, 133, heads, 133 + 1),
        "layers.2.ffn.expert_weights": (1, 133, experts),
    }
    for name, value in seen.items():
        if name.endswith("expert_weights"):
            assert ((value > 0).sum(-1) == raw["num_experts_per_tok"]).all()
            torch.testing.assert_close(value.sum(-1), torch.full((1, 133), raw["routed_scaling_factor"]))
        elif name.endswith("attn.weights"):
            assert (value.sum(-1) < 1).all(), "the sink takes a share"


def test_window_only_hides_every_entry() -> None:
    raw = all_kinds()
    ids = tokens(raw, 300)
    model, other = random_reference(raw), random_reference(raw)
    for name, parameter in other.named_parameters():
        if ".compressor." in name or ".indexer." in name:
            parameter.copy_(fill(name, parameter, torch.Generator().manual_seed(99), 1))
    assert torch.equal(model(ids, window_only=True), other(ids, window_only=True))
    assert not torch.equal(model(ids), other(ids))
    seen: dict[str, Tensor] = {}
    model(ids, window_only=True, observe=seen.__setitem__)
    for layer in (1, 2):
        weights = seen[f"layers.{layer}.attn.weights"]
        assert not weights[..., 300:].any()
        age = torch.arange(300)[:, None] - torch.arange(300)
        inside = ((age >= 0) & (age < raw["sliding_window"]))[None, :, None].expand_as(weights[..., :300])
        assert torch.equal(weights[..., :300] > 0, inside)


@pytest.mark.parametrize("native", [False, True], ids=["exact", "native"])
@pytest.mark.parametrize("changed", [3, 4, 127, 128, 200, 259])
def test_a_token_changes_no_earlier_logits(changed: int, native: bool) -> None:
    raw = all_kinds()
    model = random_reference(raw, native=native)
    ids = tokens(raw, 260)
    other = ids.clone()
    other[0, changed] = (ids[0, changed] + 1) % raw["vocab_size"]
    before, after = model(ids)[0], model(other)[0]
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.equal(before[changed], after[changed])


def test_sequences_of_a_batch_do_not_meet() -> None:
    raw = all_kinds()
    model = random_reference(raw).double()
    ids = torch.cat([tokens(raw, 150, seed) for seed in range(3)])
    together = model(ids)
    for row in range(3):
        torch.testing.assert_close(together[row], model(ids[row : row + 1])[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_sequences_shorter_than_any_entry(length: int) -> None:
    raw = all_kinds()
    logits = random_reference(raw)(tokens(raw, length))
    assert logits.shape == (1, length, raw["vocab_size"]) and logits.isfinite().all()


def test_streams_carry_the_dtype_asked_for_and_logits_are_fp32() -> None:
    raw = all_kinds()
    model = Reference(ModelConfig.from_dict(raw), dtype=torch.bfloat16)
    assert model.streams(tokens(raw, 5)).dtype == torch.bfloat16
    assert model(tokens(raw, 5)).dtype == torch.float32
    assert layer_frequencies(model.config, Ratio.CSA).dtype == torch.float32
