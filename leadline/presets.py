"""The `config.json` of the released DeepSeek-V4 checkpoints, so that a model's shape is known without a download."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from leadline.config import ModelConfig, Ratio

_COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}

_FLASH: dict[str, Any] = _COMMON | {
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    "expert_dtype": "fp4",
    "hidden_size": 4096,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "q_lora_rank": 1024,
    "routed_scaling_factor": 1.5,
}

_PRO: dict[str, Any] = _COMMON | {
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    "expert_dtype": "fp4",
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}


def _with_dspark(config: dict[str, Any], markov_rank: int) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return config | {
        "compress_ratios": [*config["compress_ratios"][:layers], 0, 0, 0],
        "dspark_block_size": 5,
        "dspark_markov_rank": markov_rank,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
    }


PRESETS: dict[str, dict[str, Any]] = {
    "flash": _FLASH,
    "flash-base": _FLASH | {"expert_dtype": "fp8"},
    "flash-0731": _with_dspark(_FLASH, markov_rank=256),
    "pro": _PRO,
    "pro-base": _PRO | {"expert_dtype": "fp8"},
    "pro-0813": _with_dspark(_PRO, markov_rank=512),
}
"""Name -> contents of `config.json`. The `-base` checkpoints hold fp8 experts with fp32 scales."""


def preset_dict(name: str) -> dict[str, Any]:
    """A copy of a released model's `config.json`. Raises ValueError for a name that is not in `PRESETS`."""
    if name not in PRESETS:
        raise ValueError(f"{name!r} is no preset; the presets are {', '.join(PRESETS)}")
    return copy.deepcopy(PRESETS[name])


def preset(name: str) -> ModelConfig:
    """The shape of a released model. Raises ValueError for a name that is not in `PRESETS`."""
    return ModelConfig.from_dict(preset_dict(name))


def with_layers(model: ModelConfig, ratios: Sequence[Ratio]) -> ModelConfig:
    """The same model with main layers of these ratios and no draft blocks. Raises ConfigError if there are none."""
    return replace(
        model,
        num_hidden_layers=len(ratios),
        compress_ratios=tuple(ratios),
        num_hash_layers=min(model.num_hash_layers, len(ratios)),
        draft_ratios=(),
        dspark=None,
    )
