"""DeepSeek-V4 as plain differentiable PyTorch over whole sequences: the definition.

Read this file to learn the model. It knows no cache, no batching trick and no kernel: every sequence starts
at position 0, and each formula stands where the paper has it. Parameters carry the names of the official
checkpoint, except that a layer's routed experts are stacked (`ffn.experts.w1` is [E, I, d]).

Sizes: B sequences, S tokens, d hidden size, n residual streams, H heads of D channels of which the last R are
rotated, W window, r the compress ratio of a layer, E experts of width I. Weights are [out, in]; no biases.

With `native=True` activations are rounded where the official code rounds them (fp8 into quantised products, fp8
window rows and entries, Hadamard + fp4 index keys and queries), with straight-through gradients.
"""

import math
from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.config import ModelConfig, Ratio, Yarn
from leadline.formats import fp4_round_trip, fp8_round_trip, hadamard

KV_BLOCK = 64
"""Channels that share one fp8 scale in a window row or an entry."""

Observer = Callable[[str, Tensor], None]
"""Called with a tensor's name and value, for looking inside: see `Reference.forward`."""


def high(x: Tensor) -> Tensor:
    """`x` in fp32, or unchanged in fp64: the precision of norms, gates, softmaxes and streams' mixing."""
    return x if x.dtype == torch.float64 else x.float()


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded` with the gradient of `x`."""
    return x + (rounded - x).detach()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in fp32 and cast once. `x` [..., c]."""
    wide = high(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * high(weight)).to(x.dtype)


# ------------------------------------------------------------------------------------------------ rotation


def rope_frequencies(dim: int, theta: float, yarn: Yarn | None) -> Tensor:
    """Angle per position of each channel pair, fp32 [dim / 2].

    YaRN divides the slow pairs by `factor` and blends between; it applies at every length and never scales
    the result (no mscale).
    """
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return frequencies

    def pair_of(turns: float) -> float:
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high_pair = min(math.ceil(pair_of(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high_pair - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / yarn.factor * ramp


def layer_frequencies(config: ModelConfig, ratio: Ratio) -> Tensor:
    """SWA layers turn with `rope_theta` and no YaRN; everything in CSA and HCA layers with the other table."""
    if ratio == Ratio.SWA:
        return rope_frequencies(config.qk_rope_head_dim, config.rope_theta, None)
    return rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor, direction: int = 1) -> Tensor:
    """RoPE on interleaved pairs of the last `2 * len(frequencies)` channels. `x` [B, S, ..., c], `positions` [S].

    `direction=-1` turns back: attention outputs carry the rotation of their values, since K and V are one tensor.
    """
    wide = high(x).dtype
    angles = positions[:, None].to(wide) * frequencies.to(x.device, wide) * direction
    angles = angles.view(1, len(positions), *[1] * (x.dim() - 3), len(frequencies))
    plain, tail = x.split([x.shape[-1] - 2 * len(frequencies), 2 * len(frequencies)], -1)
    a, b = high(tail).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
    return torch.cat([plain, turned.flatten(-2).to(x.dtype)], -1)


# ------------------------------------------------------------------------------------- hyper-connections


def hyper_mix(config: ModelConfig, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    """How a sublayer reads and writes the streams (mHC). `streams` [B, S, n, d], `fn` [(2 + n) n, n d].

    Returns `pre` [B, S, n] (weights of the collapse), `post` [B, S, n] (of the sublayer's output in each stream)
    and `comb` [B, S, n, n] (source stream, destination stream), made doubly stochastic by Sinkhorn rounds.
    """
    n, eps = config.hc_mult, config.hc_eps
    pre, post, comb = _projected(config, streams, fn).split([n, n, n * n], -1)
    scale, base = high(scale), high(base)
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
    comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def _projected(config: ModelConfig, streams: Tensor, fn: Tensor) -> Tensor:
    """The mixing logits: a projection of all streams together, normed over their n d channels."""
    flat = high(streams.flatten(-2))
    return F.linear(flat, high(fn)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)


def collapse(pre: Tensor, streams: Tensor) -> Tensor:
    """The streams' weighted sum: [B, S, n], [B, S, n, d] -> [B, S, d]."""
    return (pre[..., None] * high(streams)).sum(-2).to(streams.dtype)


def expand(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a sublayer: each receives the output and a mix of the old streams (`comb` transposed)."""
    mixed = torch.einsum("bsjk,bsjd->bskd", comb, high(streams))
    return (post[..., None] * high(output)[..., None, :] + mixed).to(streams.dtype)


# ------------------------------------------------------------------------------------------------- modules


class Linear(nn.Module):
    """`y = x W^T`. Where the official weight is fp8 or fp4, `quantized` rounds the input to fp8 first."""

    def __init__(self, inputs: int, outputs: int, quantized: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5)
        self.quantized = quantized

    def forward(self, x: Tensor) -> Tensor:
        if self.quantized:
            x = straight_through(x, fp8_round_trip(x.detach()))
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Compressor(nn.Module):
    """Turns every `ratio` tokens into one entry by a gated sum, channel by channel, in fp32.

    CSA entries overlap: a token's second half of channels goes into its own window's entry, its first half into
    the next window's. The first window has no predecessor.
    """

    def __init__(self, config: ModelConfig, ratio: Ratio, dim: int, frequencies: Tensor) -> None:
        super().__init__()
        width = 2 * dim if ratio == Ratio.CSA else dim
        self.wkv = Linear(config.hidden_size, width)
        self.wgate = Linear(config.hidden_size, width)
        self.ape = nn.Parameter(torch.zeros(ratio, width))
        self.norm = Norm(dim, config.rms_norm_eps)
        self.ratio, self.dim, self.frequencies = ratio, dim, frequencies

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, S, d] -> entries [B, S // ratio, dim]; the partly filled last window makes none."""
        count = x.shape[1] // self.ratio
        closed = high(x[:, : count * self.ratio])
        values = self.wkv(closed).unflatten(1, (count, self.ratio))
        scores = self.wgate(closed).unflatten(1, (count, self.ratio)) + high(self.ape)
        if self.ratio == Ratio.CSA:
            values = self._with_previous(values, 0.0)
            scores = self._with_previous(scores, -math.inf)
        entries = (scores.softmax(2) * values).sum(2).to(x.dtype)
        starts = torch.arange(count, device=x.device) * self.ratio
        return rotate(self.norm(entries), starts, self.frequencies)

    def _with_previous(self, rows: Tensor, fill: float) -> Tensor:
        """[B, C, 4, 2 dim] -> [B, C, 8, dim]: the previous window's first halves, then the own second halves."""
        first, second = rows.split(self.dim, -1)
        previous = F.pad(first, (0, 0, 0, 0, 1, 0), value=fill)[:, :-1]
        return torch.cat([previous, second], 2)


class Indexer(nn.Module):
    """Scores a CSA layer's entries for each query, so that attention reads only the best `index_topk`."""

    def __init__(self, config: ModelConfig, frequencies: Tensor, native: bool) -> None:
        super().__init__()
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim, native)
        self.weights_proj = Linear(config.hidden_size, self.heads)
        self.compressor = Compressor(config, Ratio.CSA, self.dim, frequencies)
        self.frequencies, self.native = frequencies, native

    def forward(self, x: Tensor, query_latent: Tensor, positions: Tensor) -> Tensor:
        """Scores [B, S, C] in fp32 of every entry, visible or not: sum over heads of weight * ReLU(q . k)."""
        queries = self.wq_b(query_latent).unflatten(-1, (self.heads, self.dim))
        queries = rotate(queries, positions, self.frequencies)
        keys = self.compressor(x)
        if self.native:
            queries, keys = (straight_through(t, fp4_round_trip(hadamard(t.detach()))) for t in (queries, keys))
        dots = torch.einsum("bshd,bcd->bshc", high(queries), high(keys)).relu()
        weights = high(self.weights_proj(x)) * (self.heads**-0.5 * self.dim**-0.5)
        return torch.einsum("bsh,bshc->bsc", weights, dots)

    def choose(self, scores: Tensor, visible: Tensor) -> Tensor:
        """The best `index_topk` visible entries of each query as a mask [B, S, C]."""
        scores = scores.masked_fill(~visible, -math.inf)
        best = scores.topk(min(self.topk, scores.shape[-1]), -1).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & visible


class Attention(nn.Module):
    """One shared key-value vector per token for all heads; a window of raw rows, then compressed entries."""

    def __init__(self, config: ModelConfig, ratio: Ratio, native: bool) -> None:
        super().__init__()
        c, d = config, config.hidden_size
        self.config, self.ratio, self.native = config, ratio, native
        self.frequencies = layer_frequencies(config, ratio)
        width = c.num_attention_heads * c.head_dim
        self.wq_a = Linear(d, c.q_lora_rank, native)
        self.q_norm = Norm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(c.q_lora_rank, width, native)
        self.wkv = Linear(d, c.head_dim, native)
        self.kv_norm = Norm(c.head_dim, c.rms_norm_eps)
        self.wo_a = Linear(width // c.o_groups, c.o_groups * c.o_lora_rank)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, d, native)
        self.attn_sink = nn.Parameter(torch.zeros(c.num_attention_heads))
        if ratio != Ratio.SWA:
            self.compressor = Compressor(c, ratio, c.head_dim, self.frequencies)
        if ratio == Ratio.CSA:
            self.indexer = Indexer(c, self.frequencies, native)

    def forward(self, x: Tensor, window_only: bool, observe: Observer) -> Tensor:
        """`x` [B, S, d], normed -> [B, S, d]."""
        c, positions = self.config, torch.arange(x.shape[1], device=x.device)
        latent = self.q_norm(self.wq_a(x))
        queries = self.wq_b(latent).unflatten(-1, (c.num_attention_heads, c.head_dim))
        queries = rotate(rms_norm(queries, None, c.rms_norm_eps), positions, self.frequencies)
        keys = self._rounded(rotate(self.kv_norm(self.wkv(x)), positions, self.frequencies))
        age = positions[:, None] - positions
        readable = ((age >= 0) & (age < c.sliding_window)).expand(len(x), -1, -1)
        if self.ratio != Ratio.SWA:
            entries = self._rounded(self.compressor(x))
            seen = self._readable_entries(x, latent, positions, entries.shape[1], observe) & (not window_only)
            keys, readable = torch.cat([keys, entries], 1), torch.cat([readable, seen], -1)
        outputs = self._attend(queries, keys, readable, observe)
        outputs = rotate(outputs, positions, self.frequencies, direction=-1)
        return self._project(outputs)

    def _readable_entries(self, x: Tensor, latent: Tensor, positions: Tensor, count: int, observe: Observer) -> Tensor:
        """Mask [B, S, C]: entry w exists for query t once its last token is at or before t; CSA picks among them."""
        visible = torch.arange(count, device=x.device) < ((positions + 1) // self.ratio)[:, None]
        visible = visible.expand(len(x), -1, -1)
        if self.ratio != Ratio.CSA:
            return visible
        scores = self.indexer(x, latent, positions)
        observe("index_scores", scores)
        return self.indexer.choose(scores, visible)

    def _attend(self, queries: Tensor, keys: Tensor, readable: Tensor, observe: Observer) -> Tensor:
        """Softmax over readable rows and a sink: a logit per head that takes weight and gives no value."""
        logits = torch.einsum("bshd,btd->bsht", high(queries), high(keys)) * self.config.head_dim**-0.5
        logits = logits.masked_fill(~readable[:, :, None], -math.inf)
        sink = high(self.attn_sink)[:, None].expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        observe("weights", weights)
        return torch.einsum("bsht,btd->bshd", weights, high(keys)).to(queries.dtype)

    def _project(self, outputs: Tensor) -> Tensor:
        """Low-rank output projection, one first factor per group of heads: [B, S, H, D] -> [B, S, d]."""
        groups = self.config.o_groups
        grouped = outputs.flatten(2).unflatten(-1, (groups, -1))
        first = self.wo_a.weight.to(outputs.dtype).unflatten(0, (groups, -1))
        return self.wo_b(torch.einsum("bsgi,gri->bsgr", grouped, first).flatten(2))

    def _rounded(self, rows: Tensor) -> Tensor:
        """Window rows and entries as the native cache keeps them: fp8, but for the rotated channels."""
        if not self.native:
            return rows
        plain, rotated = rows.split([rows.shape[-1] - self.config.qk_rope_head_dim, self.config.qk_rope_head_dim], -1)
        return torch.cat([straight_through(plain, fp8_round_trip(plain.detach(), KV_BLOCK)), rotated], -1)


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in fp32; a limit of 0 means none."""
    gate, up = high(gate), high(up)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


class Gate(nn.Module):
    """Chooses each token's experts: by its id in hash layers, else by score with a balancing bias."""

    tid2eid: Tensor
    bias: Tensor

    def __init__(self, config: ModelConfig, hashed: bool) -> None:
        super().__init__()
        experts, active = config.n_routed_experts, config.num_experts_per_tok
        self.weight = nn.Parameter(torch.randn(experts, config.hidden_size) * config.hidden_size**-0.5)
        self.active, self.scale, self.hashed = active, config.routed_scaling_factor, hashed
        if hashed:
            spread = torch.arange(config.vocab_size)[:, None] * active + torch.arange(active)
            self.register_buffer("tid2eid", spread % experts)
        else:
            self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """`x` [B, S, d], `ids` [B, S] -> fp32 weights [B, S, E], 0 for experts not chosen."""
        scores = F.softplus(F.linear(high(x), high(self.weight))).sqrt()
        if self.hashed:
            chosen = self.tid2eid[ids].long()
        else:
            chosen = (scores + self.bias).topk(self.active, -1).indices
        weights = scores.gather(-1, chosen)  # without the bias, which only balances load
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        return torch.zeros_like(scores).scatter(-1, chosen, weights)


class Experts(nn.Module):
    """The routed experts, stacked. Here every expert sees every token and the weights pick; an engine would not."""

    def __init__(self, config: ModelConfig, native: bool) -> None:
        super().__init__()
        count, width, d = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.w1 = nn.Parameter(torch.randn(count, width, d) * d**-0.5)
        self.w3 = nn.Parameter(torch.randn(count, width, d) * d**-0.5)
        self.w2 = nn.Parameter(torch.randn(count, d, width) * width**-0.5)
        self.limit, self.native = config.swiglu_limit, native

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """`x` [B, S, d], `weights` [B, S, E] -> fp32 [B, S, d]."""
        inputs = straight_through(x, fp8_round_trip(x.detach())) if self.native else x
        gate = torch.einsum("bsd,eid->bsei", inputs, self.w1.to(x.dtype))
        up = torch.einsum("bsd,eid->bsei", inputs, self.w3.to(x.dtype))
        hidden = (clamped_swiglu(gate, up, self.limit) * weights[..., None]).to(x.dtype)
        if self.native:
            hidden = straight_through(hidden, fp8_round_trip(hidden.detach()))
        return high(torch.einsum("bsei,edi->bsd", hidden, self.w2.to(x.dtype)))


class SharedExpert(nn.Module):
    """The expert that every token passes, unweighted."""

    def __init__(self, config: ModelConfig, native: bool) -> None:
        super().__init__()
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, native)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, native)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, native)
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(clamped_swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """Routed experts plus the shared one, summed in fp32."""

    def __init__(self, config: ModelConfig, hashed: bool, native: bool) -> None:
        super().__init__()
        self.gate = Gate(config, hashed)
        self.experts = Experts(config, native)
        self.shared_experts = SharedExpert(config, native)

    def forward(self, x: Tensor, ids: Tensor, observe: Observer) -> Tensor:
        weights = self.gate(x, ids)
        observe("expert_weights", weights)
        return (self.experts(x, weights) + high(self.shared_experts(x))).to(x.dtype)


class Collapser(Protocol):
    """Whatever has the parameters of a final collapse: the model has one set, the MTP block its own."""

    norm: Norm
    hc_head_fn: nn.Parameter
    hc_head_base: nn.Parameter
    hc_head_scale: nn.Parameter


def add_head(module: Collapser, config: ModelConfig) -> None:
    """Give `module` the parameters of a final collapse."""
    n = config.hc_mult
    module.norm = Norm(config.hidden_size, config.rms_norm_eps)
    module.hc_head_fn = nn.Parameter(torch.randn(n, n * config.hidden_size) * 0.01)
    module.hc_head_base = nn.Parameter(torch.zeros(n))
    module.hc_head_scale = nn.Parameter(torch.ones(1))


def final_hidden(config: ModelConfig, module: Collapser, streams: Tensor) -> Tensor:
    """What the vocabulary projection reads: the streams collapsed once more (no Sinkhorn, no factor 2) and normed.

    `streams` [B, S, n, d] -> [B, S, d].
    """
    mix = _projected(config, streams, module.hc_head_fn) * high(module.hc_head_scale) + high(module.hc_head_base)
    return module.norm(collapse(torch.sigmoid(mix) + config.hc_eps, streams))


class Layer(nn.Module):
    """Attention, then experts; each reads one mix of the streams and writes back into all of them."""

    hc_attn_fn: nn.Parameter
    hc_attn_base: nn.Parameter
    hc_attn_scale: nn.Parameter
    hc_ffn_fn: nn.Parameter
    hc_ffn_base: nn.Parameter
    hc_ffn_scale: nn.Parameter

    def __init__(self, config: ModelConfig, ratio: Ratio, hashed: bool, native: bool) -> None:
        super().__init__()
        self.config = config
        self.attn = Attention(config, ratio, native)
        self.ffn = MoE(config, hashed, native)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        for part in ("attn", "ffn"):
            fn = torch.randn(config.num_mixes, config.hc_mult * config.hidden_size) * 0.01
            self.register_parameter(f"hc_{part}_fn", nn.Parameter(fn))
            self.register_parameter(f"hc_{part}_base", nn.Parameter(torch.zeros(config.num_mixes)))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.ones(3)))

    def forward(self, streams: Tensor, ids: Tensor, window_only: bool, observe: Observer) -> Tensor:
        """`streams` [B, S, n, d], `ids` [B, S] -> streams."""
        pre, post, comb = hyper_mix(self.config, streams, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        x = self.attn_norm(collapse(pre, streams))
        streams = expand(self.attn(x, window_only, _named(observe, "attn")), streams, post, comb)
        pre, post, comb = hyper_mix(self.config, streams, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        x = self.ffn_norm(collapse(pre, streams))
        return expand(self.ffn(x, ids, _named(observe, "ffn")), streams, post, comb)


class DraftBlock(Layer):
    """The MTP block: one more layer, which reads the last streams and the next token and predicts one further."""

    norm: Norm
    hc_head_fn: nn.Parameter
    hc_head_base: nn.Parameter
    hc_head_scale: nn.Parameter

    def __init__(self, config: ModelConfig, native: bool) -> None:
        super().__init__(config, Ratio.SWA, hashed=False, native=native)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj, self.h_proj = Linear(d, d, native), Linear(d, d, native)
        self.enorm, self.hnorm = Norm(d, eps), Norm(d, eps)
        add_head(self, config)

    def entry_streams(self, streams: Tensor, next_embedding: Tensor) -> Tensor:
        """`streams` [B, S, n, d] of the last main layer and the next tokens' embeddings [B, S, d] -> streams."""
        return self.e_proj(self.enorm(next_embedding))[:, :, None] + self.h_proj(self.hnorm(streams))


class Reference(nn.Module):
    """The whole model.

    `native` switches the official code's rounding on; `dtype` is that of the activations (the parameters' own by
    default). `config.draft_ratios` with one value builds the MTP block; DSpark blocks are not part of this file.
    """

    norm: Norm
    hc_head_fn: nn.Parameter
    hc_head_base: nn.Parameter
    hc_head_scale: nn.Parameter

    def __init__(self, config: ModelConfig, native: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, ratio, config.is_hash_layer(i), native) for i, ratio in enumerate(config.compress_ratios)
        )
        self.head = Linear(config.hidden_size, config.vocab_size)
        add_head(self, config)
        drafts = 0 if config.dspark else config.num_draft_layers
        self.mtp = nn.ModuleList(DraftBlock(config, native) for _ in range(drafts))

    def forward(self, ids: Tensor, window_only: bool = False, observe: Observer | None = None) -> Tensor:
        """Token ids [B, S] -> logits [B, S, V] in fp32 for the token after each.

        `window_only` hides every entry, which leaves plain sliding-window attention. `observe(name, tensor)` is
        called with each layer's `attn.index_scores` [B, S, C], `attn.weights` [B, S, H, S + C] and
        `ffn.expert_weights` [B, S, E], named as "layers.3.attn.weights".
        """
        return self.logits(self, self.streams(ids, window_only, observe))

    def streams(self, ids: Tensor, window_only: bool = False, observe: Observer | None = None) -> Tensor:
        """Token ids [B, S] -> the streams [B, S, n, d] after the last layer, which also feed the MTP block."""
        observe = observe or _ignore
        streams = self._embedded(ids)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        for i, layer in enumerate(self.layers):
            streams = layer(streams, ids, window_only, _named(observe, f"layers.{i}"))
        return streams

    def draft_logits(self, streams: Tensor, next_ids: Tensor) -> Tensor:
        """MTP: streams [B, S, n, d] at positions t and the tokens [B, S] at t + 1 -> logits for t + 2."""
        block = cast(DraftBlock, self.mtp[0])
        streams = block.entry_streams(streams, self._embedded(next_ids))
        return self.logits(block, block(streams, next_ids, False, _ignore))

    def forward_with_draft(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids [B, S] -> (logits [B, S, V], MTP logits [B, S - 1, V]: row t predicts token t + 2)."""
        streams = self.streams(ids)
        return self.logits(self, streams), self.draft_logits(streams[:, :-1], ids[:, 1:])

    def logits(self, collapser: Collapser, streams: Tensor) -> Tensor:
        """Vocabulary logits in fp32 through the final collapse of `collapser` (the model or its MTP block)."""
        return self.head(high(final_hidden(self.config, collapser, streams)))

    def _embedded(self, ids: Tensor) -> Tensor:
        rows = self.embed(ids)
        return rows if self.dtype is None else rows.to(self.dtype)


def _ignore(name: str, value: Tensor) -> None:
    pass


def _named(observe: Observer, prefix: str) -> Observer:
    """`observe` with `prefix` before every name."""
    return observe if observe is _ignore else lambda name, value: observe(f"{prefix}.{name}", value)
