"""`config.json` in every spelling gives one ModelConfig, and what cannot be served is refused by key and value."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from models import random_config
from transformers import DeepseekV4Config

from leadline.config import ConfigError, EngineConfig, ModelConfig, Ratio, Yarn
from leadline.presets import PRESETS

FLASH: dict[str, Any] = PRESETS["flash"]


def changed(**values: Any) -> dict[str, Any]:
    return {**FLASH, **values}


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in FLASH.items() if key not in keys}


def test_flash_is_read_as_published() -> None:
    config = ModelConfig.from_dict(FLASH)
    assert (config.num_hidden_layers, config.compress_ratios[:4], config.compress_ratios[42]) == (43, (0, 0, 4, 128), 4)
    assert (len(config.csa_layers), len(config.hca_layers), config.num_draft_layers) == (21, 20, 1)
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)
    assert config.yarn == Yarn(16.0, 65536, 32.0, 1.0)
    assert [config.is_hash_layer(layer) for layer in (0, 2, 3, 42)] == [True, True, False, False]
    assert (config.expert_dtype, config.quantized, config.eos_token_ids) == ("fp4", True, (1,))


@pytest.mark.parametrize("name", PRESETS)
def test_what_transformers_writes_of_it_means_the_same(name: str) -> None:
    """`transformers` spells layer kinds, hash layers and RoPE in its own way."""
    raw = PRESETS[name]
    theirs = DeepseekV4Config(**raw).to_dict()
    assert {"layer_types", "mlp_layer_types", "rope_parameters"} <= theirs.keys()
    assert "compress_ratios" not in theirs and "num_hash_layers" not in theirs
    assert ModelConfig.from_dict(theirs) == ModelConfig.from_dict(raw)


@pytest.mark.parametrize("seed", range(20))
def test_random_configs_survive_the_other_spelling(seed: int) -> None:
    raw = random_config(random.Random(seed))
    assert ModelConfig.from_dict(DeepseekV4Config(**raw).to_dict()) == ModelConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("raw", "same"),
    [
        (changed(compress_ratios=[1, 1, *FLASH["compress_ratios"][2:]]), "a ratio of 1 means no compressor"),
        (changed(rope_scaling={**FLASH["rope_scaling"], "rope_type": "yarn"}), "rope_type beside type"),
        ({**without("qk_rope_head_dim"), "partial_rotary_factor": 64 / 512}, "the rotated share of a head"),
        ({**without("sliding_window"), "window_size": 128}, "an early name of the window"),
        ({**without("eos_token_id"), "eos_token_id": [1]}, "a list of one EOS"),
        (
            {**without("expert_dtype"), "quantization_config": {**FLASH["quantization_config"], "expert_dtype": "fp4"}},
            "in",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_spellings_of_the_same(raw: dict[str, Any], same: str) -> None:
    assert ModelConfig.from_dict(raw) == ModelConfig.from_dict(FLASH)


def test_dspark_is_told_from_mtp_by_its_keys_and_counted_by_its_layers() -> None:
    config = ModelConfig.from_dict(PRESETS["flash-0731"])
    assert config.dspark is not None and config.dspark.target_layer_ids == (40, 41, 42)
    assert config.draft_ratios == (Ratio.SWA,) * 3 and config.num_hidden_layers == 43
    assert ModelConfig.from_dict(FLASH).dspark is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            changed(model_type="deepseek_v41"),
            r"model_type is 'deepseek_v41': DeepSeek-V4.1 is a different architecture",
        ),
        (changed(model_type="llama"), r"model_type is 'llama', only 'deepseek_v4' is supported"),
        (changed(architectures=["LlamaForCausalLM"]), r"architectures is \['LlamaForCausalLM'\]"),
        (
            changed(compress_ratios=[0, 2, *FLASH["compress_ratios"][2:]]),
            r"compress_ratios holds \[2\]; allowed are 0, 4",
        ),
        (changed(compress_ratios=[0, 0, 4]), r"compress_ratios has 3 values for num_hidden_layers = 43"),
        (
            changed(compress_ratios=[*FLASH["compress_ratios"][:43], 4]),
            r"compress_ratios of the draft blocks must be 0",
        ),
        (
            {**without("num_hash_layers"), "mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 41},
            r"the hash_moe layers must come first",
        ),
        (without("compress_ratios"), r"compress_ratios \(or layer_types\) is missing"),
        (changed(hidden_act="gelu"), r"hidden_act is 'gelu', only 'silu' is supported"),
        (changed(tie_word_embeddings=True), r"tie_word_embeddings is True, only False is supported"),
        (changed(num_key_value_heads=8), r"num_key_value_heads is 8, only 1 is supported"),
        (changed(hidden_size="4096"), r"hidden_size is '4096', not an integer"),
        (without("q_lora_rank"), r"q_lora_rank is missing"),
        (changed(o_groups=7), r"num_attention_heads is 64, not a multiple of o_groups = 7"),
        (changed(num_experts_per_tok=300), r"num_experts_per_tok is 300, more than n_routed_experts = 256"),
        (changed(expert_dtype="int4"), r"expert_dtype is 'int4', allowed are 'fp4' and 'fp8'"),
        (changed(rope_scaling={"type": "linear", "factor": 2}), r"rope scaling type is 'linear'"),
        (changed(num_hash_layers=99), r"num_hash_layers is 99, out of range"),
        (changed(eos_token_id=999999), r"eos_token_id is \(999999,\), outside the vocabulary"),
        (
            changed(quantization_config={**FLASH["quantization_config"], "weight_block_size": [64, 64]}),
            r"quantization_config.weight_block_size is \[64, 64\], only \[128, 128\] is supported",
        ),
        (
            {**PRESETS["flash-0731"], "dspark_target_layer_ids": [40, 41, 43]},
            r"dspark_target_layer_ids is \[40, 41, 43\], not all in \[0, 43\)",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_key_and_value(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(raw)


def test_every_culprit_is_named_not_only_the_first() -> None:
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_dict(changed(hidden_act="relu", vocab_size=None, head_dim=1.5))
    for key in ("hidden_act", "vocab_size", "head_dim"):
        assert key in str(refusal.value)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist: a model folder needs a config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_dict(FLASH)


def test_engine_settings_are_checked_together() -> None:
    with pytest.raises(ValueError) as refusal:
        EngineConfig(dtype="int8", numerics="fast", max_running=9, step_tokens=8, snapshot_stride=100, chunk_tokens=0)
    for text in (
        "dtype is 'int8'",
        "numerics is 'fast'",
        "step_tokens is 8",
        "snapshot_stride is 100",
        "chunk_tokens is 0",
    ):
        assert text in str(refusal.value)
