"""Loading and refitting: any order, any batches, any dialect and format, in place, with nothing lost silently."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    BASE,
    FORMATS,
    RELEASE,
    decode,
    empty_slots,
    random_tensors,
    same_bytes,
    save,
    tiny_config,
    tiny_dspark_config,
)
from torch import Tensor

from leadline.checkpoint.headers import CheckpointError
from leadline.checkpoint.loader import Slot, WeightLoader, load, progress_bar
from leadline.checkpoint.names import WeightFormat, scale_name, weight_specs
from leadline.checkpoint.reader import Checkpoint
from leadline.config import ModelConfig
from leadline.formats import fp4_dequantize, fp4_quantize_weight, fp8_dequantize, fp8_quantize_weight

RAW = tiny_config()
CONFIG = ModelConfig.from_dict(RAW)
FP8_NAME, EXPERT_NAME = "layers.1.attn.wq_a.weight", "layers.1.ffn.experts.2.w1.weight"


def loader_for(slots: dict[str, Slot]) -> WeightLoader:
    return WeightLoader(CONFIG, slots)


def value(slot: Slot) -> Tensor:
    """What a slot holds, expanded to fp32."""
    if slot.scale is None:
        return slot.weight
    expand = fp4_dequantize if slot.weight.dtype == torch.int8 else fp8_dequantize
    return expand(slot.weight, slot.scale, torch.float32)


def assert_holds(slots: dict[str, Slot], tensors: dict[str, Tensor]) -> None:
    """Kept slots hold the stored bytes, expanded ones the values that an independent decoder finds."""
    for name, slot in slots.items():
        if slot.scale is not None:
            assert same_bytes(slot.weight, tensors[name]), name
            assert same_bytes(slot.scale, tensors[scale_name(name)]), name
        else:
            wanted = decode(tensors, name).to(torch.float32).to(slot.weight.dtype)
            assert torch.equal(slot.weight, wanted), name


# ------------------------------------------------------------------------------------------------ first load


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float64], ids=lambda d: str(d or "kept"))
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_load(tmp_path: Path, form: WeightFormat, dtype: torch.dtype | None) -> None:
    tensors = random_tensors(RAW, form)
    slots = empty_slots(RAW, form) if dtype is None else empty_slots(RAW, None, dtype)
    load(CONFIG, slots, Checkpoint(save(tmp_path, RAW, tensors, shards=2)))
    assert_holds(slots, tensors)


def test_load_dspark_with_progress_bar(tmp_path: Path) -> None:
    raw = tiny_dspark_config()
    tensors = random_tensors(raw, RELEASE)
    slots = empty_slots(raw, None)
    with progress_bar("loading") as progress:
        load(ModelConfig.from_dict(raw), slots, Checkpoint(save(tmp_path, raw, tensors)), progress)
    assert_holds(slots, tensors)


def test_weights_without_a_slot_are_not_read(tmp_path: Path) -> None:
    tensors = random_tensors(RAW, RELEASE)
    slots = {name: slot for name, slot in empty_slots(RAW, RELEASE).items() if not name.startswith("mtp.")}
    load(CONFIG, slots, Checkpoint(save(tmp_path, RAW, tensors)))
    assert_holds(slots, tensors)


def test_slots_that_the_checkpoint_cannot_fill_are_named_before_reading(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in random_tensors(RAW, RELEASE).items() if not name.startswith("mtp.")}
    slots = empty_slots(RAW, RELEASE)
    with pytest.raises(CheckpointError) as caught:
        load(CONFIG, slots, Checkpoint(save(tmp_path, RAW, tensors)))
    assert {problem.split(":")[0] for problem in caught.value.problems} == {n for n in slots if n.startswith("mtp.")}
    assert (slots["embed.weight"].weight.view(torch.uint8) == 77).all()


def test_slots_of_another_model_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.9\.attn"):
        loader_for({"layers.9.attn.wq_a.weight": Slot(torch.empty(1))})


@pytest.mark.parametrize("form", [RELEASE, FORMATS["fp8"], BASE], ids=["fp4 + e8m0", "fp8 + e8m0", "fp8 + f32"])
@pytest.mark.parametrize("expanded", [True, False], ids=["expanded", "kept"])
def test_scale_bytes_mean_powers_of_two(tmp_path: Path, form: WeightFormat, expanded: bool) -> None:
    """Two experts; byte b means 2^(b - 127), never the number b (see https://github.com/vllm-project/vllm/issues/43416)."""
    raw = tiny_config(n_routed_experts=2)
    tensors = random_tensors(raw, form)
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            byte = torch.tensor([119, 120, 127, 130])[torch.arange(tensor.numel()) % 4].view(tensor.shape)
            exact = torch.exp2((byte - 127).float())
            tensors[name] = exact if form == BASE else byte.to(torch.uint8).view(torch.float8_e8m0fnu)
    slots = empty_slots(raw, None if expanded else WeightFormat(form.dense, form.experts, "f32"))
    load(ModelConfig.from_dict(raw), slots, Checkpoint(save(tmp_path, raw, tensors)))
    for name, slot in slots.items():
        assert torch.equal(value(slot).double(), decode(tensors, name).double()), name
        if slot.scale is not None:
            assert set(slot.scale.flatten().tolist()) <= {2.0**-8, 2.0**-7, 1.0, 8.0}, name


def test_bad_values_are_all_named(tmp_path: Path) -> None:
    tensors = random_tensors(RAW, RELEASE)
    tensors["layers.0.ffn.gate.tid2eid"][5, 0] = 3
    tensors["layers.1.ffn.gate.tid2eid"][6] = 1
    tensors["layers.2.attn.wkv.scale"].view(torch.uint8)[0, 1] = 255
    with pytest.raises(CheckpointError) as caught:
        load(CONFIG, empty_slots(RAW, RELEASE), Checkpoint(save(tmp_path, RAW, tensors)))
    assert sorted(caught.value.problems) == [
        "layers.0.ffn.gate.tid2eid: 1 rows name an expert outside 0..2",
        "layers.1.ffn.gate.tid2eid: 1 rows name an expert twice",
        "layers.2.attn.wkv.scale: some scales are not finite and positive",
    ]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_fp32_scales(bad: float) -> None:
    with pytest.raises(CheckpointError, match="some scales are not finite and positive"):
        loader_for(empty_slots(RAW, BASE)).put(scale_name(FP8_NAME), torch.tensor([[1.0, bad]]))


# ------------------------------------------------------------------------------------------------ any order


def shuffled_batches(tensors: dict[str, Tensor], rng: random.Random) -> list[list[str]]:
    names = list(tensors)
    rng.shuffle(names)
    cuts = sorted(rng.sample(range(len(names)), 5))
    return [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)], strict=True)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("keep", [RELEASE, None, WeightFormat("bf16", "fp4"), WeightFormat("fp8", "bf16")], ids=str)
def test_random_order_with_halves_apart(keep: WeightFormat | None, seed: int) -> None:
    """Weights and scales in any order and batches; the caller may overwrite a tensor as soon as `put` returns."""
    tensors = random_tensors(RAW, RELEASE, seed)
    slots = empty_slots(RAW, keep)
    loader = loader_for(slots)
    for batch in shuffled_batches(tensors, random.Random(seed)):
        for name in batch:
            lent = tensors[name].clone()
            loader.put(name, lent)
            lent.view(torch.uint8).fill_(1)
    loader.finish()
    for name, slot in slots.items():
        assert torch.equal(value(slot).double(), decode(tensors, name).double()), name
        if keep == RELEASE:
            assert same_bytes(slot.weight, tensors[name]), name


@pytest.mark.parametrize("weight_first", [True, False], ids=["weight first", "scale first"])
@pytest.mark.parametrize("arrives", ["fp4", "fp8", "fp8, f32 scales"])
@pytest.mark.parametrize("kept", ["fp4", "fp8", "fp8, f32 scales"])
def test_expert_in_another_format_than_the_slot(arrives: str, kept: str, weight_first: bool) -> None:
    """A pair is expanded and quantised anew where it must be; what can be exact is."""
    forms = {"fp4": RELEASE, "fp8": FORMATS["fp8"], "fp8, f32 scales": BASE}
    tensors = random_tensors(RAW, forms[arrives])
    slots = empty_slots(RAW, forms[kept])
    loader = loader_for(slots)
    for name in (EXPERT_NAME, scale_name(EXPERT_NAME)) if weight_first else (scale_name(EXPERT_NAME), EXPERT_NAME):
        loader.put(name, tensors[name])
    loader.finish(partial=True)
    got, wanted = value(slots[EXPERT_NAME]).double(), decode(tensors, EXPERT_NAME)
    if kept == arrives or (arrives == "fp4" and kept == "fp8"):
        assert torch.equal(got, wanted.float().double())
    error = (got - wanted).norm() / wanted.norm()
    assert error < (0.15 if kept == "fp4" else 0.03)


def test_power_of_two_fp32_scales_fill_e8m0_slots_exactly() -> None:
    codes = random_tensors(RAW, BASE)[FP8_NAME]
    slots = empty_slots(RAW, RELEASE)
    loader = loader_for(slots)
    loader.put(FP8_NAME, codes)
    loader.put(scale_name(FP8_NAME), torch.tensor([[0.25, 2.0]]))
    loader.finish(partial=True)
    scale = slots[FP8_NAME].scale
    assert scale is not None and same_bytes(slots[FP8_NAME].weight, codes)
    assert scale.view(torch.uint8).tolist() == [[125, 128]]


# ------------------------------------------------------------------------------------------------ refit


def test_refit_is_in_place() -> None:
    """Addresses stay, views into fused tensors stay inside their rows, the new values are there."""
    specs = weight_specs(CONFIG)
    rows = {name: specs[f"layers.1.attn.{name}.weight"].shape[0] for name in ("wq_a", "wkv")}
    fused = torch.full((sum(rows.values()) + 1, 160), 5.0)
    slots = {
        "layers.1.attn.wq_a.weight": Slot(fused[: rows["wq_a"]]),
        "layers.1.attn.wkv.weight": Slot(fused[rows["wq_a"] : -1]),
    }
    address = fused.data_ptr()
    loader = loader_for(slots)
    for seed in range(2):
        tensors = random_tensors(RAW, RELEASE, seed)
        for name in slots:  # the two halves of the fused matrix come in different batches
            loader.put(scale_name(name), tensors[scale_name(name)])
        for name in reversed(slots):
            loader.put(name, tensors[name])
        loader.finish()
        wanted = torch.cat([decode(tensors, name) for name in slots]).float()
        assert torch.equal(fused[:-1], wanted) and (fused[-1] == 5).all()
    assert fused.data_ptr() == address == slots["layers.1.attn.wq_a.weight"].weight.data_ptr()


@pytest.mark.parametrize("form", [RELEASE, FORMATS["fp8"], BASE], ids=["fp8+fp4", "fp8", "fp8, f32 scales"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_trainer_sends_unquantised_weights(form: WeightFormat, dtype: torch.dtype) -> None:
    """They are quantised on arrival as a checkpoint's weights are."""
    generator = torch.Generator().manual_seed(3)
    slots = empty_slots(RAW, form)
    loader = loader_for(slots)
    for name in (FP8_NAME, EXPERT_NAME):
        sent = torch.randn(weight_specs(CONFIG)[name].shape, generator=generator).to(dtype)
        loader.put(name, sent)
        slot = slots[name]
        assert slot.scale is not None
        quantise = fp4_quantize_weight if slot.weight.dtype == torch.int8 else fp8_quantize_weight
        codes, scale = quantise(sent, slot.scale.dtype)
        assert same_bytes(slot.weight, codes) and same_bytes(slot.scale, scale)
        assert (value(slot) - sent.float()).norm() / sent.float().norm() < 0.14
    loader.finish(partial=True)


def test_last_one_wins() -> None:
    old, new = random_tensors(RAW, RELEASE, 1), random_tensors(RAW, RELEASE, 2)
    for keep in (RELEASE, None):
        slots = empty_slots(RAW, keep)
        loader = loader_for(slots)
        for name in (FP8_NAME, EXPERT_NAME, "norm.weight"):
            for tensors in (old, new):
                loader.put(name, tensors[name])
                if scale_name(name) in tensors:
                    loader.put(scale_name(name), tensors[scale_name(name)])
        loader.finish(partial=True)
        assert_holds({name: slots[name] for name in (FP8_NAME, EXPERT_NAME, "norm.weight")}, new)


@pytest.mark.parametrize("keep", [RELEASE, None], ids=["kept", "expanded"])
@pytest.mark.parametrize("half", [FP8_NAME, scale_name(FP8_NAME)], ids=["weight", "scale"])
def test_unquantised_values_replace_a_lone_half(half: str, keep: WeightFormat | None) -> None:
    slots = empty_slots(RAW, keep)
    loader = loader_for(slots)
    loader.put(half, random_tensors(RAW, RELEASE)[half])
    loader.put(FP8_NAME, torch.full((40, 160), 3.0))
    loader.finish(partial=True)
    assert (value(slots[FP8_NAME]) == 3).all()


def test_a_lone_half_that_comes_twice_is_replaced() -> None:
    old, new = random_tensors(RAW, RELEASE, 1), random_tensors(RAW, RELEASE, 2)
    for keep in (RELEASE, None):
        slots = empty_slots(RAW, keep)
        loader = loader_for(slots)
        for tensors, name in ((old, FP8_NAME), (new, FP8_NAME), (new, scale_name(FP8_NAME))):
            loader.put(name, tensors[name])
        loader.finish(partial=True)
        assert_holds({FP8_NAME: slots[FP8_NAME]}, new)


@pytest.mark.parametrize("keep", [RELEASE, None], ids=["kept", "expanded"])
def test_finish_names_everything_that_is_missing(keep: WeightFormat | None) -> None:
    tensors = random_tensors(RAW, RELEASE)
    absent = {"norm.weight", scale_name(FP8_NAME), EXPERT_NAME}
    for partial in (False, True):
        loader = loader_for(empty_slots(RAW, keep))
        for name in tensors.keys() - absent:
            loader.put(name, tensors[name])
        with pytest.raises(CheckpointError) as caught:
            loader.finish(partial)
        lone = [
            f"{EXPERT_NAME}: missing, its other half {scale_name(EXPERT_NAME)} came alone",
            f"{scale_name(FP8_NAME)}: missing, its other half {FP8_NAME} came alone",
        ]
        assert sorted(caught.value.problems) == sorted(lone if partial else [*lone, "norm.weight: missing"])


def test_partial_refit_keeps_the_rest() -> None:
    tensors = random_tensors(RAW, RELEASE)
    slots = empty_slots(RAW, RELEASE)
    loader = loader_for(slots)
    loader.put("norm.weight", tensors["norm.weight"])
    loader.finish(partial=True)
    assert (slots["embed.weight"].weight.view(torch.uint8) == 77).all()
    assert same_bytes(slots["norm.weight"].weight, tensors["norm.weight"])


WRONG = {
    "unknown name": ("layers.1.attn.wq_a.input_scale", torch.ones(1), "has no such tensor"),
    "layer too many": ("layers.4.attn.wq_a.weight", torch.ones(40, 160), "has no such tensor"),
    "scale of a norm": ("norm.scale", torch.ones(1), "has no such tensor"),
    "shape": (FP8_NAME, torch.ones(41, 160), r"shape \[41, 160\] is not \[40, 160\]"),
    "transposed scale": (scale_name(FP8_NAME), torch.ones(2, 1), r"shape \[2, 1\] is not \[1, 2\]"),
    "fp4 scale of a dense weight": (scale_name(FP8_NAME), torch.ones(40, 5), r"shape \[40, 5\] is not \[1, 2\]"),
    "dtype": ("norm.weight", torch.ones(160).half(), "dtype torch.float16 is not one of torch.bfloat16, torch.float32"),
    "fp4 dense weight": (FP8_NAME, torch.ones(40, 80).to(torch.int8), "dtype torch.int8 is not one of"),
    "fp4 norm": ("norm.weight", torch.ones(80).to(torch.int8), "dtype torch.int8 is not one of"),
    "integers for values": ("norm.weight", torch.ones(160).long(), "dtype torch.int64 is not one of"),
    "values for integers": ("layers.0.ffn.gate.tid2eid", torch.ones(71, 2), "dtype torch.float32 is not one of"),
    "stack of experts": ("model.layers.1.mlp.experts.down_proj", torch.ones(4, 160, 96), r"experts\.3\.w2\.weight"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensor_is_refused(case: str) -> None:
    name, tensor, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message):
        loader_for(empty_slots(RAW, RELEASE)).put(name, tensor)


def test_halves_of_different_formats_are_refused() -> None:
    loader = loader_for(empty_slots(RAW, None))
    loader.put(EXPERT_NAME, random_tensors(RAW, RELEASE)[EXPERT_NAME])
    with pytest.raises(CheckpointError, match=r"shape \[1, 2\] is not \[96, 5\] for torch.int8"):
        loader.put(scale_name(EXPERT_NAME), torch.ones(1, 2))


# ------------------------------------------------------------------------------------------------ transformers


def hugging_face_model(seed: int) -> tuple[Any, dict[str, Any]]:
    """A random `transformers` model with CPU-made values everywhere, and the config keys that it came from."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    rng = random.Random(seed)
    layers = rng.randint(1, 4)
    raw = tiny_config(
        num_hidden_layers=layers,
        compress_ratios=[rng.choice([0, 4, 128]) for _ in range(layers)] + [0],
        num_hash_layers=rng.randint(0, layers),
        hidden_size=rng.choice([64, 160]),
    )
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{k: v for k, v in raw.items() if k != "model_type"}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(buffer.shape[0], raw["n_routed_experts"]).argsort(-1)[:, : buffer.shape[1]])
    return model, raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_transformers_saves_loads(tmp_path: Path, seed: int, dtype: torch.dtype) -> None:
    """`save_pretrained` folders, and its parameters sent one by one under its own names, give the same weights."""
    model, _ = hugging_face_model(seed)
    model = model.to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = ModelConfig.from_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    slots = [
        {name: slot for name, slot in empty_slots(raw, None).items() if not name.startswith("mtp.")} for _ in range(2)
    ]
    checkpoint = Checkpoint(tmp_path)
    assert not checkpoint.has_draft
    load(config, slots[0], checkpoint)
    loader = WeightLoader(config, slots[1])
    for name, tensor in model.state_dict().items():
        loader.put(name, tensor)
    loader.finish()
    layer = model.model.layers[-1]
    prefix = f"layers.{config.num_hidden_layers - 1}."
    for weights in slots:
        assert torch.equal(weights["embed.weight"].weight, model.model.embed_tokens.weight.float())
        assert torch.equal(weights[f"{prefix}attn.wkv.weight"].weight, layer.self_attn.kv_proj.weight.float())
        gate_up = layer.mlp.experts.gate_up_proj[2].float()
        assert torch.equal(weights[f"{prefix}ffn.experts.2.w1.weight"].weight, gate_up[:96])
        assert torch.equal(weights[f"{prefix}ffn.experts.2.w3.weight"].weight, gate_up[96:])
    assert all(torch.equal(slots[0][name].weight, slots[1][name].weight) for name in slots[0])
