"""The one table of checkpoint tensors: names, shapes and stored dtypes, and their names in Hugging Face's dialects.

"Native" names are those of DeepSeek's own files. Two more dialects are read: the parameter names of `transformers`
(`model.layers.3.self_attn.q_a_proj.weight`, routed experts stacked), and what its `save_pretrained` writes (native
names under `model.`). Matrices are [out, in]. A quantised matrix `X.weight` has its scales in `X.scale`, which
`transformers` calls `X.weight_scale_inv` (the stored number multiplies the weight all the same).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from leadline.config import ModelConfig, Ratio
from leadline.formats import FP4_BLOCK, fp8_scale_shape

Shape = tuple[int, ...]
Kind = Literal["plain_bf16", "plain_fp32", "int64", "fp8", "expert"]
Layout = Literal["native", "transformers"]


@dataclass(frozen=True)
class WeightSpec:
    """A parameter: its logical shape (matrices [out, in]) and how the released checkpoints store it.

    "fp8" matrices are quantised in every release, "expert" ones are fp4 or fp8; the other kinds have no scales.
    """

    shape: Shape
    kind: Kind


@dataclass(frozen=True)
class WeightFormat:
    """How a checkpoint stores its "fp8" matrices (`dense`), its "expert" matrices, and the scales of both."""

    dense: Literal["fp8", "bf16", "fp32"]
    experts: Literal["fp4", "fp8", "bf16", "fp32"]
    scales: Literal["e8m0", "f32"] = "e8m0"

    def of(self, kind: Kind) -> str:
        """The format of one kind of tensor: "fp4", "fp8", "bf16", "fp32" or "int64"."""
        if kind == "int64":
            return "int64"
        if kind == "plain_bf16":
            return "fp32" if self.dense == "fp32" else "bf16"
        if kind == "plain_fp32":
            return "fp32"
        return self.experts if kind == "expert" else self.dense


STORED_DTYPES = {"fp4": "I8", "fp8": "F8_E4M3", "bf16": "BF16", "fp32": "F32", "int64": "I64"}
SCALE_DTYPES = {"e8m0": "F8_E8M0", "f32": "F32"}

# ------------------------------------------------------------------------------------------------ what a model has


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every parameter of the model by native name (without scales), in the order of the released files.

    The draft blocks `mtp.*` (MTP, or DSpark's stages) come last.
    """
    c = config
    specs = {"embed.weight": WeightSpec((c.vocab_size, c.hidden_size), "plain_bf16")}
    for layer, ratio in enumerate(c.compress_ratios):
        block = _block(c, ratio, hashed=c.is_hash_layer(layer))
        specs |= {f"layers.{layer}.{name}": spec for name, spec in block.items()}
    specs["head.weight"] = WeightSpec((c.vocab_size, c.hidden_size), "plain_bf16")
    specs |= _final(c)
    for stage, ratio in enumerate(c.draft_ratios):
        block = _block(c, ratio, hashed=False) | (_dspark(c, stage) if c.dspark else _mtp(c))
        specs |= {f"mtp.{stage}.{name}": spec for name, spec in block.items()}
    return specs


def _final(c: ModelConfig) -> dict[str, WeightSpec]:
    """The closing norm and hyper-connection of the main model and of a draft block."""
    streams = c.hc_mult
    return {
        "norm.weight": WeightSpec((c.hidden_size,), "plain_bf16"),
        "hc_head_fn": WeightSpec((streams, streams * c.hidden_size), "plain_fp32"),
        "hc_head_base": WeightSpec((streams,), "plain_fp32"),
        "hc_head_scale": WeightSpec((1,), "plain_fp32"),
    }


def _block(c: ModelConfig, ratio: Ratio, hashed: bool) -> dict[str, WeightSpec]:
    """One layer, or the body of one draft block."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    specs = {
        "attn.attn_sink": WeightSpec((heads,), "plain_fp32"),
        "attn.wq_a.weight": WeightSpec((c.q_lora_rank, hidden), "fp8"),
        "attn.q_norm.weight": WeightSpec((c.q_lora_rank,), "plain_bf16"),
        "attn.wq_b.weight": WeightSpec((heads * c.head_dim, c.q_lora_rank), "fp8"),
        "attn.wkv.weight": WeightSpec((c.head_dim, hidden), "fp8"),
        "attn.kv_norm.weight": WeightSpec((c.head_dim,), "plain_bf16"),
        "attn.wo_a.weight": WeightSpec((c.o_groups * c.o_lora_rank, heads * c.head_dim // c.o_groups), "fp8"),
        "attn.wo_b.weight": WeightSpec((hidden, c.o_groups * c.o_lora_rank), "fp8"),
    }
    if ratio != Ratio.SWA:
        specs |= _compressor("attn.compressor", c, ratio, c.head_dim)
    if ratio == Ratio.CSA:
        specs["attn.indexer.wq_b.weight"] = WeightSpec((c.index_n_heads * c.index_head_dim, c.q_lora_rank), "fp8")
        specs["attn.indexer.weights_proj.weight"] = WeightSpec((c.index_n_heads, hidden), "plain_bf16")
        specs |= _compressor("attn.indexer.compressor", c, ratio, c.index_head_dim)
    specs["attn_norm.weight"] = WeightSpec((hidden,), "plain_bf16")
    specs["ffn_norm.weight"] = WeightSpec((hidden,), "plain_bf16")
    specs |= _feed_forward(c, hashed)
    for sublayer in ("attn", "ffn"):
        specs[f"hc_{sublayer}_fn"] = WeightSpec((c.num_mixes, c.hc_mult * hidden), "plain_fp32")
        specs[f"hc_{sublayer}_base"] = WeightSpec((c.num_mixes,), "plain_fp32")
        specs[f"hc_{sublayer}_scale"] = WeightSpec((3,), "plain_fp32")
    return specs


def _compressor(prefix: str, c: ModelConfig, ratio: Ratio, dim: int) -> dict[str, WeightSpec]:
    width = 2 * dim if ratio == Ratio.CSA else dim  # CSA windows overlap: half feeds the previous one
    return {
        f"{prefix}.ape": WeightSpec((int(ratio), width), "plain_fp32"),
        f"{prefix}.wkv.weight": WeightSpec((width, c.hidden_size), "plain_bf16"),
        f"{prefix}.wgate.weight": WeightSpec((width, c.hidden_size), "plain_bf16"),
        f"{prefix}.norm.weight": WeightSpec((dim,), "plain_bf16"),
    }


def _feed_forward(c: ModelConfig, hashed: bool) -> dict[str, WeightSpec]:
    specs = {"ffn.gate.weight": WeightSpec((c.n_routed_experts, c.hidden_size), "plain_bf16")}
    if hashed:
        specs["ffn.gate.tid2eid"] = WeightSpec((c.vocab_size, c.num_experts_per_tok), "int64")
    else:
        specs["ffn.gate.bias"] = WeightSpec((c.n_routed_experts,), "plain_fp32")
    wide, narrow = (c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size)
    for expert in range(c.n_routed_experts):
        for matrix, shape in (("w1", wide), ("w2", narrow), ("w3", wide)):
            specs[f"ffn.experts.{expert}.{matrix}.weight"] = WeightSpec(shape, "expert")
    for matrix, shape in (("w1", wide), ("w2", narrow), ("w3", wide)):
        specs[f"ffn.shared_experts.{matrix}.weight"] = WeightSpec(shape, "fp8")
    return specs


def _mtp(c: ModelConfig) -> dict[str, WeightSpec]:
    """What an MTP block has beside its body. Embedding and head are the main model's."""
    square = WeightSpec((c.hidden_size, c.hidden_size), "fp8")
    norm = WeightSpec((c.hidden_size,), "plain_bf16")
    return {"e_proj.weight": square, "h_proj.weight": square, "enorm.weight": norm, "hnorm.weight": norm} | _final(c)


def _dspark(c: ModelConfig, stage: int) -> dict[str, WeightSpec]:
    """What a DSpark stage has beside its body: the first reads the main model, the last makes the draft."""
    assert c.dspark is not None
    specs: dict[str, WeightSpec] = {}
    if stage == 0:
        captured = len(c.dspark.target_layer_ids) * c.hidden_size
        specs["main_proj.weight"] = WeightSpec((c.hidden_size, captured), "fp8")
        specs["main_norm.weight"] = WeightSpec((c.hidden_size,), "plain_bf16")
    if stage == c.num_draft_layers - 1:
        rank = c.dspark.markov_rank
        specs |= _final(c)
        specs["markov_head.markov_w1.weight"] = WeightSpec((c.vocab_size, rank), "plain_bf16")
        specs["markov_head.markov_w2.weight"] = WeightSpec((c.vocab_size, rank), "plain_bf16")
        specs["confidence_head.proj.weight"] = WeightSpec((1, c.hidden_size + rank), "plain_bf16")
    return specs


# ------------------------------------------------------------------------------------------------ what a file holds


def scale_name(weight: str) -> str:
    """`X.weight` -> `X.scale`."""
    return weight.removesuffix(".weight") + ".scale"


def weight_of_scale(name: str) -> str | None:
    """`X.scale` -> `X.weight`; None for the name of anything but scales."""
    return name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else None


def packed_shape(shape: Shape, stored: str) -> Shape:
    """The shape in which a matrix of `shape` [out, in] lies in a file: fp4 packs two values in a byte."""
    return (shape[0], shape[1] // 2) if stored == "fp4" else shape


def scale_shape(shape: Shape, stored: str) -> Shape | None:
    """The shape of the scales of a matrix [out, in] stored as "fp8" or "fp4"; None for formats without scales."""
    if stored == "fp8":
        return fp8_scale_shape(shape)
    if stored == "fp4":
        return (shape[0], shape[1] // FP4_BLOCK)
    return None


def stored_tensors(config: ModelConfig, format: WeightFormat) -> dict[str, tuple[str, Shape]]:
    """Every tensor of a native checkpoint in `format`: name -> (safetensors dtype, shape), scales after weights.

    Raises ValueError where fp4 experts are asked for and their width is no multiple of 32.
    """
    widths = {config.hidden_size, config.moe_intermediate_size}
    if format.experts == "fp4" and any(width % FP4_BLOCK for width in widths):
        raise ValueError(
            f"fp4 experts need hidden_size and moe_intermediate_size to be multiples of {FP4_BLOCK}, "
            f"not {config.hidden_size} and {config.moe_intermediate_size}"
        )
    stored: dict[str, tuple[str, Shape]] = {}
    for name, spec in weight_specs(config).items():
        how = format.of(spec.kind)
        stored[name] = (STORED_DTYPES[how], packed_shape(spec.shape, how))
        scales = scale_shape(spec.shape, how)
        if scales is not None:
            stored[scale_name(name)] = (SCALE_DTYPES[format.scales], scales)
    return stored


_IGNORED = re.compile(r"mtp\.\d+\.(emb\w*\..*|head\.weight)")


def is_ignored(name: str) -> bool:
    """Whether a native name is on the list of tensors to skip: a draft block's copies of embedding and head."""
    return _IGNORED.fullmatch(name) is not None


# ------------------------------------------------------------------------------------------------ dialects

_TOP = {
    "embed.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
}
"""native -> transformers, which puts all but `lm_head` under `model.`."""

_IN_LAYER = {
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
}
"""native -> transformers within a layer; a trailing `.weight` or `.scale` is left off."""


def _mixed_spellings() -> dict[str, str]:
    """Any mix of the two -> native. `save_pretrained` undoes only those renamings that it did when it loaded."""
    native = {"attn.norm": "attn.kv_norm"}
    for ours, theirs in _IN_LAYER.items():
        blocks, leaf = theirs.split(".")[:-1], theirs.split(".")[-1]
        for path in (blocks, [{"self_attn": "attn", "mlp": "ffn"}.get(block, block) for block in blocks]):
            for last in (leaf, ours.split(".")[-1]):
                native[".".join([*path, last])] = ours
    return native


_FROM_TOP = {theirs: ours for ours, theirs in _TOP.items()}
_FROM_LAYER = _mixed_spellings()

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)")
_STACK = re.compile(r"(?:mlp|ffn)\.experts\.(gate_up_proj|down_proj)(_scale_inv)?")
_THEIR_EXPERT = re.compile(r"(?:mlp|ffn)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.(weight\w*|scale)")
_THEIR_MATRIX = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class Part:
    """One native tensor's place in a tensor of another dialect: rows of one expert of a stack, or all of it."""

    name: str
    expert: int | None = None
    rows: slice | None = None

    def of(self, tensor: Any) -> Any:
        """The part of `tensor`, as a view."""
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor if self.rows is None else tensor[self.rows]


def native_parts(name: str, shape: Shape) -> Iterator[Part]:
    """Which native tensors a tensor `name` of any dialect with `shape` holds; `Part.name` is the native name.

    Unknown names come back as they are. A stack of routed experts [E, out, in] gives one part per matrix.
    """
    bare = name.removeprefix("model.")
    layer = _LAYER.fullmatch(bare)
    if bare in _FROM_TOP or bare in _TOP:
        yield Part(_FROM_TOP.get(bare, bare))
        return
    if layer is None:
        yield Part(_with_our_suffix(bare) if bare.startswith("mtp.") else name)
        return
    prefix, leaf = f"layers.{layer[1]}.", layer[2]
    stack = _STACK.fullmatch(leaf)
    if stack is not None and len(shape) == 3:
        yield from _unstack(f"{prefix}ffn.experts", stack[1], "scale" if stack[2] else "weight", shape)
    else:
        yield Part(prefix + _leaf_to_native(leaf))


def _unstack(prefix: str, stack: str, suffix: str, shape: Shape) -> Iterator[Part]:
    half = shape[1] // 2
    for expert in range(shape[0]):
        if stack == "down_proj":
            yield Part(f"{prefix}.{expert}.w2.{suffix}", expert)
        else:
            yield Part(f"{prefix}.{expert}.w1.{suffix}", expert, slice(0, half))
            yield Part(f"{prefix}.{expert}.w3.{suffix}", expert, slice(half, shape[1]))


def _leaf_to_native(leaf: str) -> str:
    if leaf in _FROM_LAYER:
        return _FROM_LAYER[leaf]
    expert = _THEIR_EXPERT.fullmatch(leaf)
    if expert is not None:
        leaf = f"ffn.experts.{expert[1]}.{_THEIR_MATRIX.get(expert[2], expert[2])}.{expert[3]}"
    stem, dot, suffix = _with_our_suffix(leaf).rpartition(".")
    return _FROM_LAYER.get(stem, stem) + dot + suffix


def _with_our_suffix(name: str) -> str:
    stem = name.removesuffix(".weight_scale_inv")
    return name if stem == name else stem + ".scale"


def to_native(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """A named tensor of any dialect as (native name, view of the tensor) pairs; stacked experts are split."""
    for part in native_parts(name, tuple(tensor.shape)):
        yield part.name, part.of(tensor)


def transformers_part(name: str, shape: Shape, stacked: bool) -> Part:
    """Where a native tensor of `shape` belongs among the parameters of `transformers`.

    Its routed experts are stacked, but from files it expands quantised ones only if they come one by one: so they are
    written with `stacked` False. Draft blocks have no place there and keep their native names, which it ignores.
    """
    if name in _TOP:
        theirs = _TOP[name]
        return Part(theirs if theirs.startswith("lm_head") else f"model.{theirs}")
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return Part(name)
    prefix, leaf = f"model.layers.{layer[1]}.", layer[2]
    expert = _EXPERT.fullmatch(leaf)
    if expert is not None and stacked:
        if expert[2] == "w2":
            return Part(f"{prefix}mlp.experts.down_proj", int(expert[1]))
        start = 0 if expert[2] == "w1" else shape[0]
        return Part(f"{prefix}mlp.experts.gate_up_proj", int(expert[1]), slice(start, start + shape[0]))
    if leaf in _IN_LAYER:
        return Part(prefix + _IN_LAYER[leaf])
    stem, _, suffix = leaf.rpartition(".")
    stem = _IN_LAYER[stem] if expert is None else f"mlp.experts.{expert[1]}.{expert[2]}"
    return Part(f"{prefix}{stem}.{'weight_scale_inv' if suffix == 'scale' else suffix}")


def lay_out(stored: Mapping[str, tuple[str, Shape]], layout: Layout) -> dict[str, tuple[str, Shape, list[Part]]]:
    """What a checkpoint of native tensors `stored` holds in `layout`: name -> (dtype, shape, its native parts)."""
    if layout == "native":
        return {name: (dtype, shape, [Part(name)]) for name, (dtype, shape) in stored.items()}
    places: dict[str, list[tuple[str, Part]]] = {}
    for name, (_, shape) in stored.items():
        weight = weight_of_scale(name) or name
        part = transformers_part(name, shape, stacked=stored[weight][0] in ("BF16", "F32"))
        places.setdefault(part.name, []).append((name, part))
    return {theirs: _stacked(stored, parts) for theirs, parts in places.items()}


def _stacked(
    stored: Mapping[str, tuple[str, Shape]], parts: Iterable[tuple[str, Part]]
) -> tuple[str, Shape, list[Part]]:
    """(dtype, shape, parts) of one tensor made of `parts`, each given with its native name."""
    inverse = [Part(name, part.expert, part.rows) for name, part in parts]
    dtype, shape = stored[inverse[0].name]
    if inverse[0].expert is not None:
        experts = 1 + max(part.expert or 0 for part in inverse)
        rows = max(part.rows.stop if part.rows else shape[0] for part in inverse)
        shape = (experts, rows, *shape[1:])
    return dtype, shape, inverse
