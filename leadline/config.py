"""What a checkpoint says of itself: `config.json` read into one immutable `ModelConfig`.

`ModelConfig` is the only description of a model that the rest of the package knows. It is read from
DeepSeek's own key names and from both spellings that Hugging Face `transformers` writes; everything that
can be derived is derived here, once.
"""

import json
import math
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

CSA_RATIO = 4
HCA_RATIO = 128
PAGE_TOKENS = 128
"""Tokens of history in one page: the least common multiple of the layer ratios."""

LAYER_TYPES = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}


class ConfigError(ValueError):
    """A config that cannot be served. The message names each offending key with its value."""


class Ratio(IntEnum):
    """How many tokens one entry of a layer stands for; 0 where a layer has no compressor."""

    SWA = 0
    CSA = CSA_RATIO
    HCA = HCA_RATIO


@dataclass(frozen=True)
class Yarn:
    """YaRN parameters of the compressed layers' RoPE. No mscale: V4 never multiplies by one."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class DSpark:
    """The block draft module of the `-DSpark`, `-0731` and `-0813` checkpoints (arXiv 2607.05147)."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V4 model's shape. Sizes are counts of elements; token positions start at 0.

    `compress_ratios` has one value per main layer and `draft_ratios` one per draft block (`mtp.*`).
    `expert_dtype` is "fp4", "fp8", or None when only the tensors' own dtypes tell.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[Ratio, ...]
    draft_ratios: tuple[Ratio, ...]
    num_hash_layers: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    expert_dtype: str | None = None
    quantized: bool = False
    dspark: DSpark | None = None
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ConfigError("unsupported model config: " + "; ".join(problems))

    @cached_property
    def num_draft_layers(self) -> int:
        """Blocks under `mtp.*`: one for MTP, `dspark` stages for DSpark, 0 without a draft module."""
        return len(self.draft_ratios)

    @cached_property
    def csa_layers(self) -> tuple[int, ...]:
        """Indices of the CSA layers."""
        return tuple(i for i, ratio in enumerate(self.compress_ratios) if ratio == Ratio.CSA)

    @cached_property
    def hca_layers(self) -> tuple[int, ...]:
        """Indices of the HCA layers."""
        return tuple(i for i, ratio in enumerate(self.compress_ratios) if ratio == Ratio.HCA)

    @cached_property
    def num_mixes(self) -> int:
        """Outputs of one hyper-connection projection: pre, post and the n x n combination."""
        return (2 + self.hc_mult) * self.hc_mult

    def is_hash_layer(self, layer: int) -> bool:
        """Whether main layer `layer` routes by token id. Draft blocks never do."""
        return layer < self.num_hash_layers

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read `folder/config.json`. Raises FileNotFoundError, or ConfigError for bad contents."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: a model folder needs a config.json")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} must hold a JSON object, not {type(raw).__name__}")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ModelConfig":
        """Read official keys or either Hugging Face spelling. Raises ConfigError naming every bad key."""
        _refuse_other_architectures(raw)
        keys = _Reader(raw)
        layers = keys.integer("num_hidden_layers")
        ratios, tail = _read_ratios(raw, layers)
        dspark = _read_dspark(raw)
        drafts = len(dspark.target_layer_ids) if dspark else keys.integer("num_nextn_predict_layers", 0)
        draft_ratios = (tail + [0] * drafts)[:drafts]
        theta, compress_theta, yarn = _read_rope(raw, keys)
        head_dim = keys.integer("head_dim")
        values: dict[str, Any] = {
            "num_hidden_layers": layers,
            "compress_ratios": _as_ratios(ratios),
            "draft_ratios": _as_ratios(draft_ratios),
            "num_hash_layers": _read_hash_layers(raw, layers),
            "rope_theta": theta,
            "compress_rope_theta": compress_theta,
            "yarn": yarn,
            "qk_rope_head_dim": _read_rope_dim(raw, keys, head_dim),
            "sliding_window": keys.integer("sliding_window", raw.get("window_size")),
            "expert_dtype": _read_expert_dtype(raw),
            "quantized": _read_quantization(raw),
            "dspark": dspark,
            "eos_token_ids": _read_eos(raw),
        }
        for field in fields(cls):
            if field.name not in values:
                read = keys.number if field.type in ("float", float) else keys.integer
                values[field.name] = read(field.name, _DEFAULTS.get(field.name))
        keys.raise_problems()
        return cls(**values)


_DEFAULTS: dict[str, Any] = {
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "swiglu_limit": 10.0,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "bos_token_id": 0,
    "routed_scaling_factor": 1.5,
}
"""Values that are the same in every released checkpoint (or unused where a layer kind is absent)."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "tie_word_embeddings": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "mlp_bias": (False,),
    "num_key_value_heads": (1,),
    "n_shared_experts": (1,),
    "markov_head_type": ("vanilla",),
    "enable_confidence_head": (True,),
    "sample_from_anchor": (True,),
}
"""Keys that select a variant of which the model family has only one."""


class _Reader:
    """Typed access to a config's keys that collects every problem instead of stopping at the first."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []
        for key, allowed in _FIXED.items():
            if key in raw and raw[key] is not None and raw[key] not in allowed:
                self.problems.append(f"{key} is {raw[key]!r}, only {allowed[0]!r} is supported")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.problems.append(f"{key} is missing" if value is None else f"{key} is {value!r}, not an integer")
            return 1
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.problems.append(f"{key} is missing" if value is None else f"{key} is {value!r}, not a number")
            return 1.0
        return float(value)

    def raise_problems(self) -> None:
        if self.problems:
            raise ConfigError("unsupported model config: " + "; ".join(dict.fromkeys(self.problems)))


def _refuse_other_architectures(raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if kind == "deepseek_v41" or "text_config" in raw:
        raise ConfigError(
            f"model_type is {kind!r}: DeepSeek-V4.1 is a different architecture, which Leadline does not serve"
        )
    if kind not in (None, "deepseek_v4"):
        raise ConfigError(f"model_type is {kind!r}, only 'deepseek_v4' is supported")
    names = raw.get("architectures") or ["DeepseekV4ForCausalLM"]
    if "DeepseekV4ForCausalLM" not in names:
        raise ConfigError(f"architectures is {names!r}, only ['DeepseekV4ForCausalLM'] is supported")


def _read_ratios(raw: dict[str, Any], layers: int) -> tuple[list[int], list[int]]:
    """(one ratio per main layer, the rest): from `compress_ratios`, or `layer_types` with `compress_rates`."""
    if raw.get("compress_ratios") is not None:
        ratios = raw["compress_ratios"]
        if not isinstance(ratios, list) or any(isinstance(r, bool) or not isinstance(r, int) for r in ratios):
            raise ConfigError(f"compress_ratios is {ratios!r}, not a list of integers")
        ratios = [0 if r == 1 else r for r in ratios]  # some engines write 1 for "no compressor"
    elif raw.get("layer_types") is not None:
        unknown = sorted({str(t) for t in raw["layer_types"]} - LAYER_TYPES.keys())
        if unknown:
            raise ConfigError(f"layer_types holds {', '.join(unknown)}; allowed are {', '.join(LAYER_TYPES)}")
        ratios = [LAYER_TYPES[t] for t in raw["layer_types"]]
        for name, rate in (raw.get("compress_rates") or {}).items():
            if LAYER_TYPES.get(name) != rate:
                raise ConfigError(
                    f"compress_rates gives {rate!r} for {name}, only {LAYER_TYPES.get(name)} is supported"
                )
    else:
        raise ConfigError("compress_ratios (or layer_types) is missing: the layer schedule cannot be guessed")
    bad = sorted(set(ratios) - set(LAYER_TYPES.values()))
    if bad:
        raise ConfigError(f"compress_ratios holds {bad}; allowed are 0, {CSA_RATIO} and {HCA_RATIO}")
    if len(ratios) < layers:
        raise ConfigError(f"compress_ratios has {len(ratios)} values for num_hidden_layers = {layers}")
    return ratios[:layers], ratios[layers:]


def _as_ratios(values: list[int]) -> tuple[Ratio, ...]:
    return tuple(Ratio(value) for value in values)


def _read_hash_layers(raw: dict[str, Any], layers: int) -> int:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        value = raw.get("num_hash_layers", 3)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"num_hash_layers is {value!r}, not an integer")
        return value
    unknown = sorted({str(kind) for kind in kinds} - {"hash_moe", "moe"})
    if unknown or len(kinds) < layers:
        raise ConfigError(f"mlp_layer_types is {kinds!r}: it needs 'hash_moe' or 'moe' for each of {layers} layers")
    count = sum(kind == "hash_moe" for kind in kinds[:layers])
    if list(kinds[:count]) != ["hash_moe"] * count:
        raise ConfigError(f"mlp_layer_types is {kinds!r}: the hash_moe layers must come first")
    return count


def _read_rope(raw: dict[str, Any], keys: _Reader) -> tuple[float, float, Yarn | None]:
    """(theta of SWA layers, theta of compressed layers, YaRN of compressed layers), either spelling."""
    nested = raw.get("rope_parameters") or {}
    if "main" in nested or "compress" in nested:
        main, compress = nested.get("main") or {}, nested.get("compress") or {}
        theta = _Reader(main).number("rope_theta", keys.number("rope_theta", 10000.0))
        compress_theta = compress.get("rope_theta", raw.get("compress_rope_theta"))
        if (main.get("rope_type") or "default") != "default":
            raise ConfigError(f"rope_parameters.main.rope_type is {main['rope_type']!r}, only 'default' is supported")
        scaling = compress
    else:
        theta, compress_theta = keys.number("rope_theta"), raw.get("compress_rope_theta")
        scaling = raw.get("rope_scaling") or nested
    if isinstance(compress_theta, bool) or not isinstance(compress_theta, int | float):
        raise ConfigError(f"compress_rope_theta is {compress_theta!r}, not a number")
    return theta, float(compress_theta), _read_yarn(scaling)


def _read_yarn(scaling: dict[str, Any]) -> Yarn | None:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"rope scaling type is {kind!r}, only 'yarn' and 'default' are supported")
    reader = _Reader(scaling)
    yarn = Yarn(
        reader.number("factor"),
        reader.integer("original_max_position_embeddings"),
        reader.number("beta_fast", 32.0),
        reader.number("beta_slow", 1.0),
    )
    reader.raise_problems()
    return yarn


def _read_rope_dim(raw: dict[str, Any], keys: _Reader, head_dim: int) -> int:
    if raw.get("qk_rope_head_dim") is not None:
        return keys.integer("qk_rope_head_dim")
    for source in (raw, (raw.get("rope_parameters") or {}).get("main") or {}):
        if source.get("partial_rotary_factor") is not None:
            return round(head_dim * source["partial_rotary_factor"])
    return keys.integer("qk_rope_head_dim")


def _read_expert_dtype(raw: dict[str, Any]) -> str | None:
    quantization = raw.get("quantization_config") or {}
    value = raw.get("expert_dtype", quantization.get("expert_dtype"))
    if value not in (None, "fp4", "fp8"):
        raise ConfigError(f"expert_dtype is {value!r}, allowed are 'fp4' and 'fp8'")
    return value


def _read_quantization(raw: dict[str, Any]) -> bool:
    quantization = raw.get("quantization_config")
    if quantization is None:
        return False
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for key, value in wanted.items():
        if quantization.get(key, value) != value:
            raise ConfigError(f"quantization_config.{key} is {quantization[key]!r}, only {value!r} is supported")
    return True


def _read_dspark(raw: dict[str, Any]) -> DSpark | None:
    if not any(key.startswith("dspark_") for key in raw):
        return None
    reader = _Reader(raw)
    targets = raw.get("dspark_target_layer_ids")
    if not isinstance(targets, list) or not targets or any(not isinstance(i, int) for i in targets):
        raise ConfigError(f"dspark_target_layer_ids is {targets!r}, not a list of layer indices")
    dspark = DSpark(
        reader.integer("dspark_block_size"),
        reader.integer("dspark_noise_token_id"),
        tuple(targets),
        reader.integer("dspark_markov_rank"),
    )
    reader.raise_problems()
    return dspark


def _read_eos(raw: dict[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id", 1)
    values = value if isinstance(value, list) else [value]
    if not values or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise ConfigError(f"eos_token_id is {value!r}, not a token id or a list of them")
    return tuple(values)


def _problems(c: ModelConfig) -> "list[str]":
    """Every reason why a config that could be read still describes no model we can build."""
    found = []

    def need(holds: bool, text: str) -> None:
        if not holds:
            found.append(text)

    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank o_groups o_lora_rank "
        "sliding_window n_routed_experts num_experts_per_tok moe_intermediate_size index_n_heads index_head_dim "
        "index_topk hc_mult hc_sinkhorn_iters max_position_embeddings qk_rope_head_dim rope_theta "
        "compress_rope_theta rms_norm_eps hc_eps"
    ).split()
    for name in positive:
        need(getattr(c, name) > 0, f"{name} is {getattr(c, name)}, it must be positive")
    if found:
        return found
    rope = c.qk_rope_head_dim
    need(rope % 2 == 0 and rope <= c.head_dim, f"qk_rope_head_dim is {rope}, it must be even and at most head_dim")
    if c.csa_layers:
        need(rope <= c.index_head_dim, f"index_head_dim is {c.index_head_dim}, less than qk_rope_head_dim = {rope}")
    need(
        c.num_attention_heads % c.o_groups == 0,
        f"num_attention_heads is {c.num_attention_heads}, not a multiple of o_groups = {c.o_groups}",
    )
    need(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok is {c.num_experts_per_tok}, more than n_routed_experts = {c.n_routed_experts}",
    )
    need(0 <= c.num_hash_layers <= c.num_hidden_layers, f"num_hash_layers is {c.num_hash_layers}, out of range")
    need(c.swiglu_limit >= 0, f"swiglu_limit is {c.swiglu_limit}, it must not be negative (0 means no limit)")
    need(all(r == Ratio.SWA for r in c.draft_ratios), "compress_ratios of the draft blocks must be 0")
    need(0 <= c.bos_token_id < c.vocab_size, f"bos_token_id is {c.bos_token_id}, outside the vocabulary")
    need(
        all(0 <= i < c.vocab_size for i in c.eos_token_ids),
        f"eos_token_id is {c.eos_token_ids}, outside the vocabulary",
    )
    if c.dspark:
        d = c.dspark
        inside = all(0 <= i < c.num_hidden_layers for i in d.target_layer_ids)
        need(inside, f"dspark_target_layer_ids is {list(d.target_layer_ids)}, not all in [0, {c.num_hidden_layers})")
        need(d.block_size >= 1, f"dspark_block_size is {d.block_size}, it must be at least 1")
        need(
            0 <= d.noise_token_id < c.vocab_size, f"dspark_noise_token_id is {d.noise_token_id}, outside the vocabulary"
        )
    return found


DTYPES = ("auto", "checkpoint", "bfloat16", "float32", "float64")
NUMERICS = ("exact", "native")


@dataclass(frozen=True)
class EngineConfig:
    """How to serve a model. Everything has a default; sizes are tokens or bytes as their names say.

    Raises ValueError naming every field that is out of range.
    """

    model: str | None = None
    """A folder, a hub id, or None for the built-in tiny model."""
    dtype: str = "auto"
    """"checkpoint" keeps fp8 and fp4 weights as they are stored; a float type expands all weights into it. "auto" is
    float32 on a CPU and "checkpoint" on a GPU."""
    numerics: str | None = None
    """"exact" rounds nothing beyond the dtype, "native" rounds what official code rounds. None: native on a GPU."""
    device: str = "auto"
    max_context: int | None = None
    """The most tokens of prompt and output together; None: what the model and the memory allow."""
    max_running: int | None = None
    """The most requests that run at once. None: 64 on a CPU, 256 on a GPU; fewer where their slots have no room."""
    max_waiting: int = 4096
    step_tokens: int | None = None
    """The most tokens of one step: its token budget. None: 2,048 on a CPU; on a GPU 8,192, fewer on a small one."""
    chunk_tokens: int | None = None
    """The most tokens of one prompt in one step. None: 512 on a CPU, a whole step on a GPU."""
    state_bytes: int | None = None
    """Memory for history pages, frontier slots and step scratch together. None: 1 GiB on a CPU, on a GPU what weights
    and steps leave free. `leadline.engine.memory` turns these four into a plan."""
    prefix_cache: bool = True
    snapshot_stride: int = 4096
    """Tokens between the snapshots that a long prompt leaves on its way."""
    overlap: bool | None = None
    """Whether the next step is planned while one runs. None: on a GPU."""
    deterministic: bool = False
    """Whether on a GPU, as on a CPU always, a token's result has the same bits whatever else is in its step and however
    its prompt was cut. NVIDIA and bf16 only; costs speed, most of it in prompts: see docs/performance.md."""
    seed: int = 0
    """Where the seeds of requests without one come from."""

    def __post_init__(self) -> None:
        found = []
        if self.dtype not in DTYPES:
            found.append(f"dtype is {self.dtype!r}; allowed: {', '.join(DTYPES)}")
        if self.numerics not in (None, *NUMERICS):
            found.append(f"numerics is {self.numerics!r}; allowed: {', '.join(NUMERICS)}")
        for name in ("max_running", "max_waiting", "step_tokens", "chunk_tokens", "state_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value}; it must be at least 1")
        if self.max_context is not None and self.max_context < 2:
            found.append(f"max_context is {self.max_context}; it must be at least 2")
        if self.step_tokens is not None and self.max_running is not None and self.step_tokens < self.max_running:
            found.append(f"step_tokens is {self.step_tokens}, less than max_running = {self.max_running}")
        if self.snapshot_stride < PAGE_TOKENS or self.snapshot_stride % PAGE_TOKENS:
            found.append(f"snapshot_stride is {self.snapshot_stride}; it must be a multiple of {PAGE_TOKENS}")
        if found:
            raise ValueError("; ".join(found))
