"""Small checkpoints for tests: random tensors in any stored format, files written by the safetensors library."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from leadline.checkpoint.loader import Slot
from leadline.checkpoint.names import WeightFormat, scale_name, stored_tensors, weight_specs
from leadline.checkpoint.stream import TORCH_DTYPES
from leadline.config import ModelConfig

RELEASE = WeightFormat("fp8", "fp4", "e8m0")
BASE = WeightFormat("fp8", "fp8", "f32")
FORMATS = {
    "fp8+fp4": RELEASE,
    "fp8": WeightFormat("fp8", "fp8", "e8m0"),
    "fp8, f32 scales": BASE,
    "bf16": WeightFormat("bf16", "bf16"),
    "fp32": WeightFormat("fp32", "fp32"),
    "bf16+fp4": WeightFormat("bf16", "fp4"),
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json with every layer type, hash and learned routing, MTP, and sizes that leave partial fp8 tiles."""
    config = {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "vocab_size": 71,
        "hidden_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 40,
        "o_groups": 2,
        "o_lora_rank": 72,
        "sliding_window": 8,
        "compress_ratios": [0, 4, 128, 4, 0],
        "num_hash_layers": 2,
        "n_routed_experts": 3,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 1.5,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 8,
        "hc_mult": 4,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 1,
    }
    return config | changes


def tiny_dspark_config() -> dict[str, Any]:
    """The same with a DSpark draft module of two stages."""
    return tiny_config(
        compress_ratios=[0, 4, 128, 4, 0, 0],
        dspark_block_size=3,
        dspark_noise_token_id=70,
        dspark_target_layer_ids=[1, 2],
        dspark_markov_rank=5,
    )


def random_tensors(raw: dict[str, Any], format: WeightFormat, seed: int = 0) -> dict[str, Tensor]:
    """Random stored tensors of a whole checkpoint by native name. fp8 codes are never NaN."""
    config = ModelConfig.from_dict(raw)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (dtype, shape) in stored_tensors(config, format).items():
        draw = torch.rand(shape, generator=generator)
        if dtype == "I64":
            experts = torch.rand(shape[0], config.n_routed_experts, generator=generator).argsort(-1)
            tensors[name] = experts[:, : shape[1]].contiguous()
        elif dtype == "F8_E4M3":
            codes = (draw * 127).floor() + 128 * (torch.rand(shape, generator=generator) < 0.5)
            tensors[name] = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        elif dtype == "I8":
            tensors[name] = (draw * 256).floor().to(torch.uint8).view(torch.int8)
        elif dtype == "F8_E8M0":
            tensors[name] = (115 + (draw * 12).floor()).to(torch.uint8).view(torch.float8_e8m0fnu)
        elif name.endswith(".scale"):
            tensors[name] = 2.0**-10 * (0.5 + draw)
        else:
            tensors[name] = (2 * draw - 1).to(TORCH_DTYPES[dtype])
    return tensors


def save(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """A checkpoint folder; with several shards, tensor i goes to shard i mod `shards` (halves of a pair part)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def empty_slots(raw: dict[str, Any], keep: WeightFormat | None, dtype: torch.dtype = torch.float32) -> dict[str, Slot]:
    """A slot for every weight: in the stored format `keep`, or expanded into `dtype`. Filled with a wrong value."""
    config = ModelConfig.from_dict(raw)
    if keep is None:
        specs = weight_specs(config)
        integers = {name for name, spec in specs.items() if spec.kind == "int64"}
        return {
            name: Slot(torch.full(spec.shape, 77, dtype=torch.int32 if name in integers else dtype))
            for name, spec in specs.items()
        }
    stored = stored_tensors(config, keep)
    places = {
        name: torch.full(shape, 77, dtype=torch.uint8)[..., None].expand(*shape, TORCH_DTYPES[dtype].itemsize).clone()
        for name, (dtype, shape) in stored.items()
    }
    views = {name: place.view(TORCH_DTYPES[stored[name][0]]).squeeze(-1) for name, place in places.items()}
    return {name: Slot(views[name], views.get(scale_name(name))) for name in weight_specs(config)}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


# ------------------------------------------------------------------------------------------------ decoding, again


def _e4m3_values() -> list[float]:
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(float("nan") if byte & 127 == 127 else -size if byte & 128 else size)
    return values


E4M3 = np.array(_e4m3_values())
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The values of a stored weight in fp64, by NumPy and loops over blocks; integers as they are."""
    weight, scale = tensors[name], tensors.get(scale_name(name))
    if scale is None:
        return weight if weight.dtype == torch.int64 else weight.double()
    if scale.dtype == torch.float32:
        scales = scale.numpy().astype(np.float64)
    else:
        scales = 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)
    codes = weight.view(torch.uint8).numpy()
    if weight.dtype == torch.int8:
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(codes.shape[0], -1)
        block = (1, 32)
    else:
        values, block = E4M3[codes], (128, 128)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            values[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] *= scales[i, j]
    return torch.from_numpy(values)
