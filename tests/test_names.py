"""The table of names against the published inventories, and the dialects against each other."""

import hashlib
import json
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from checkpoints import FORMATS, RELEASE, random_tensors, tiny_config, tiny_dspark_config

from leadline.checkpoint.headers import DTYPE_BITS
from leadline.checkpoint.names import (
    WeightFormat,
    is_ignored,
    lay_out,
    native_parts,
    stored_tensors,
    to_native,
    weight_specs,
)
from leadline.config import ModelConfig
from leadline.presets import PRESETS, preset, preset_dict

BASE = WeightFormat("fp8", "fp8", "f32")

PUBLISHED: dict[str, tuple[WeightFormat, int, int, dict[str, int]]] = {
    "flash": (
        RELEASE,
        69_187,
        159_609_485_896,
        {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I8": 33_792, "I64": 3},
    ),
    "flash-0731": (
        RELEASE,
        72_317,
        166_878_536_440,
        {"BF16": 445, "F32": 433, "F8_E4M3": 390, "F8_E8M0": 35_718, "I8": 35_328, "I64": 3},
    ),
    "flash-base": (BASE, 69_187, 292_555_345_480, {"BF16": 433, "F32": 34_584, "F8_E4M3": 34_167, "I64": 3}),
    "pro": (
        RELEASE,
        145_116,
        864_704_792_696,
        {"BF16": 619, "F32": 590, "F8_E4M3": 528, "F8_E8M0": 71_952, "I8": 71_424, "I64": 3},
    ),
    "pro-base": (BASE, 145_116, 1_602_325_824_632, {"BF16": 619, "F32": 72_542, "F8_E4M3": 71_952, "I64": 3}),
    "pro-0813": (
        RELEASE,
        149_782,
        892_727_580_904,
        {"BF16": 631, "F32": 606, "F8_E4M3": 543, "F8_E8M0": 74_271, "I8": 73_728, "I64": 3},
    ),
}
"""Format, number of tensors, bytes, tensors per dtype."""


def nbytes(stored: dict[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) * DTYPE_BITS[dtype] // 8 for dtype, shape in stored.values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_inventory(name: str) -> None:
    form, count, size, dtypes = PUBLISHED[name]
    stored = stored_tensors(preset(name), form)
    assert len(stored) == count
    assert nbytes(stored) == size
    assert Counter(dtype for dtype, _ in stored.values()) == dtypes


@pytest.mark.parametrize(
    ("name", "count", "size", "digest"),
    [("flash", 1_575, 3_593_787_756, "331296a9"), ("flash-0731", 4_705, 10_862_838_300, "e404f70f")],
)
def test_published_draft_inventory(name: str, count: int, size: int, digest: str) -> None:
    """Names, dtypes and shapes of `mtp.*` have the published hash."""
    stored = {k: v for k, v in stored_tensors(preset(name), RELEASE).items() if k.startswith("mtp.")}
    assert (len(stored), nbytes(stored)) == (count, size)
    inventory = {k: {"dtype": dtype, "shape": list(shape)} for k, (dtype, shape) in stored.items()}
    text = json.dumps(inventory, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest().startswith(digest)


def test_published_catalogue_of_shards() -> None:
    """Every name of Flash-0731, with the shard it lies in (one per layer), has the published hash."""

    def shard(name: str) -> int:
        layer = re.match(r"(layers|mtp)\.(\d+)\.", name)
        if layer is None:
            return 1 if name == "embed.weight" else 45
        return int(layer[2]) + (2 if layer[1] == "layers" else 46)

    names = sorted(stored_tensors(preset("flash-0731"), RELEASE))
    rows = [json.dumps([n, f"model-{shard(n):05d}-of-00048.safetensors"], separators=(",", ":")) for n in names]
    assert hashlib.sha256(("\n".join(rows) + "\n").encode()).hexdigest().startswith("189e5e29")


def test_presets_are_all_there_and_are_copies() -> None:
    assert list(PRESETS) == ["flash", "flash-base", "flash-0731", "pro", "pro-base", "pro-0813"]
    preset_dict("flash")["compress_ratios"].clear()
    assert len(preset_dict("flash")["compress_ratios"]) == 44
    with pytest.raises(ValueError, match=r"'flush'.*flash-0731"):
        preset("flush")


@pytest.mark.parametrize("raw", [tiny_config(), tiny_dspark_config()], ids=["mtp", "dspark"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_transformers_names_lead_back(raw: dict[str, Any], form: WeightFormat) -> None:
    """Every tensor laid out for transformers, read under its name there, gives exactly the native tensors."""
    stored = stored_tensors(ModelConfig.from_dict(raw), form)
    laid = lay_out(stored, "transformers")
    assert nbytes({name: (dtype, shape) for name, (dtype, shape, _) in laid.items()}) == nbytes(stored)
    back = {}
    for name, (dtype, shape, _) in laid.items():
        for native, part in to_native(name, torch.empty(shape, device="meta")):
            back[native] = (dtype, tuple(part.shape))
    assert back == stored


@pytest.mark.parametrize(
    ("theirs", "native"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("head.weight", "head.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.hc_head.hc_scale", "hc_head_scale"),
        ("model.layers.3.self_attn.q_a_proj.weight", "layers.3.attn.wq_a.weight"),
        ("model.layers.3.self_attn.q_a_proj.weight_scale_inv", "layers.3.attn.wq_a.scale"),
        ("layers.3.attn.wq_a.weight_scale_inv", "layers.3.attn.wq_a.scale"),
        ("model.layers.12.attn.norm.weight", "layers.12.attn.kv_norm.weight"),
        ("model.layers.12.self_attn.kv_norm.weight", "layers.12.attn.kv_norm.weight"),
        ("model.layers.2.self_attn.compressor.kv_norm.weight", "layers.2.attn.compressor.norm.weight"),
        ("model.layers.2.self_attn.compressor.indexer.q_b_proj.weight", "layers.2.attn.indexer.wq_b.weight"),
        ("model.layers.2.self_attn.compressor.indexer.position_bias", "layers.2.attn.indexer.compressor.ape"),
        ("model.layers.2.attn.compressor.indexer.norm.weight", "layers.2.attn.indexer.compressor.norm.weight"),
        ("model.layers.2.attn.compressor.gate_proj.weight", "layers.2.attn.compressor.wgate.weight"),
        ("model.layers.0.attn_hc.scale", "layers.0.hc_attn_scale"),
        ("model.layers.0.hc_attn_scale", "layers.0.hc_attn_scale"),
        ("model.layers.5.mlp.gate.e_score_correction_bias", "layers.5.ffn.gate.bias"),
        ("model.layers.5.mlp.experts.7.up_proj.weight", "layers.5.ffn.experts.7.w3.weight"),
        ("model.layers.5.mlp.experts.7.w2.weight_scale_inv", "layers.5.ffn.experts.7.w2.scale"),
        ("model.layers.5.ffn.experts.7.w1.weight", "layers.5.ffn.experts.7.w1.weight"),
        ("model.layers.5.mlp.shared_experts.down_proj.weight", "layers.5.ffn.shared_experts.w2.weight"),
        ("model.mtp.0.e_proj.weight_scale_inv", "mtp.0.e_proj.scale"),
        ("mtp.0.attn.kv_norm.weight", "mtp.0.attn.kv_norm.weight"),
        ("model.something.else", "model.something.else"),
    ],
)
def test_dialects(theirs: str, native: str) -> None:
    assert [part.name for part in native_parts(theirs, (8, 8))] == [native]


def test_stacked_experts_are_split_into_gate_up_and_down() -> None:
    stack = torch.arange(3 * 8 * 5).view(3, 8, 5)
    parts = dict(to_native("model.layers.1.mlp.experts.gate_up_proj", stack))
    assert sorted(parts) == sorted(f"layers.1.ffn.experts.{e}.w{m}.weight" for e in range(3) for m in (1, 3))
    assert torch.equal(parts["layers.1.ffn.experts.2.w1.weight"], stack[2, :4])
    assert torch.equal(parts["layers.1.ffn.experts.2.w3.weight"], stack[2, 4:])
    scales = dict(to_native("model.layers.1.mlp.experts.down_proj_scale_inv", stack))
    assert torch.equal(scales["layers.1.ffn.experts.1.w2.scale"], stack[1])


def test_native_names_are_left_alone() -> None:
    for raw in (tiny_config(), tiny_dspark_config()):
        for name, tensor in random_tensors(raw, RELEASE).items():
            assert [native for native, _ in to_native(name, tensor)] == [name]


def test_copies_of_embedding_and_head_in_a_draft_block_are_ignored() -> None:
    assert is_ignored("mtp.0.emb.tok_emb.weight") and is_ignored("mtp.0.head.weight")
    for raw in (tiny_config(), tiny_dspark_config()):
        assert not any(map(is_ignored, weight_specs(ModelConfig.from_dict(raw))))


def test_fp4_needs_whole_blocks() -> None:
    config = ModelConfig.from_dict(tiny_config(moe_intermediate_size=100))
    with pytest.raises(ValueError, match="160 and 100"):
        stored_tensors(config, RELEASE)
    stored_tensors(config, BASE)
