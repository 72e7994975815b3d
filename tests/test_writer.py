"""Writing and converting checkpoints, read back by the safetensors library and by transformers."""

import json
import os
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
from safetensors.torch import load_file
from torch import Tensor

from leadline.checkpoint.headers import CheckpointError
from leadline.checkpoint.loader import load
from leadline.checkpoint.names import Layout, WeightFormat, weight_specs
from leadline.checkpoint.reader import Checkpoint
from leadline.checkpoint.writer import convert, write_native, write_transformers
from leadline.config import ModelConfig

RAW = tiny_config()


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the safetensors library."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same(folder: Path, tensors: dict[str, Tensor]) -> None:
    found = read_folder(folder)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bytes(found[name], tensor), name


@pytest.mark.parametrize("raw", [RAW, tiny_dspark_config()], ids=["mtp", "dspark"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_write_native(tmp_path: Path, form: WeightFormat, raw: dict[str, Any]) -> None:
    """Bytes come back from the safetensors library, in any number of shards, and the folder is a valid checkpoint."""
    tensors = random_tensors(raw, form)
    for limit in (10**9, 250_000):
        folder = tmp_path / str(limit)
        write_native(folder, raw, reversed(tensors.items()), form, limit)
        assert_same(folder, tensors)
        checkpoint = Checkpoint(folder)
        checkpoint.validate(ModelConfig.from_folder(folder))
        assert checkpoint.format == form
        sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
        assert (len(sizes) > 3) == (limit == 250_000)
        assert max(sizes) < limit + 30_000


def test_write_quantises(tmp_path: Path) -> None:
    """Unquantised tensors written in the released format are near what they were, each within its format's error."""
    tensors = random_tensors(RAW, FORMATS["bf16"])
    write_native(tmp_path, RAW, tensors.items(), RELEASE)
    stored = read_folder(tmp_path)
    for name, spec in weight_specs(ModelConfig.from_dict(RAW)).items():
        got, wanted = decode(stored, name).double(), tensors[name].double()
        limit = {"fp8": 0.03, "expert": 0.13}.get(spec.kind, 0.0)
        assert (got - wanted).norm() <= limit * wanted.norm(), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["expert_dtype"] == "fp4" and config["quantization_config"]["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("raw", [RAW, tiny_dspark_config()], ids=["mtp", "dspark"])
def test_to_hugging_face_and_back_is_exact(tmp_path: Path, form: WeightFormat, raw: dict[str, Any]) -> None:
    tensors = random_tensors(raw, form)
    source = save(tmp_path / "native", raw, tensors, shards=2)
    convert(source, tmp_path / "theirs", "transformers")
    assert "model.layers.0.self_attn.q_a_proj.weight" in read_folder(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "back", "native")
    assert_same(tmp_path / "back", tensors)


@pytest.mark.parametrize("layout", ["native", "transformers"])
@pytest.mark.parametrize("form", [RELEASE, FORMATS["fp8"]], ids=["fp8+fp4", "fp8"])
def test_expanding_to_bf16_and_quantising_again_loses_nothing(
    tmp_path: Path, form: WeightFormat, layout: Layout
) -> None:
    """A bf16 file holds fp8 and fp4 values exactly, so quantising it gives them back: fp8 in its bytes, fp4 in value.

    The tensors are ones that the quantiser made: others may come back with other scales.
    """
    write_native(tmp_path / "a", RAW, random_tensors(RAW, FORMATS["bf16"]).items(), form)
    tensors = read_folder(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "wide", layout, FORMATS["bf16"])
    assert "quantization_config" not in json.loads((tmp_path / "wide/config.json").read_text())
    convert(tmp_path / "wide", tmp_path / "b", "native", form)
    back = read_folder(tmp_path / "b")
    assert back.keys() == tensors.keys()
    for name in weight_specs(ModelConfig.from_dict(RAW)):
        assert torch.equal(decode(back, name), decode(tensors, name)), name
        if tensors[name].dtype != torch.int8:
            assert same_bytes(back[name], tensors[name]), name


def test_base_scales_become_powers_of_two(tmp_path: Path) -> None:
    """fp32 scales that are no powers of two cannot be kept as e8m0: values are quantised anew, within half a step."""
    tensors = random_tensors(RAW, BASE)
    convert(save(tmp_path / "base", RAW, tensors), tmp_path / "e8m0", weights=FORMATS["fp8"])
    stored = read_folder(tmp_path / "e8m0")
    for name, spec in weight_specs(ModelConfig.from_dict(RAW)).items():
        got, wanted = decode(stored, name).double(), decode(tensors, name).double()
        assert (got - wanted).norm() <= (1 / 16 if spec.kind in ("fp8", "expert") else 0) * wanted.norm(), name


def test_convert_copies_the_other_files_and_reports_progress(tmp_path: Path) -> None:
    source = save(tmp_path / "a", RAW, random_tensors(RAW, RELEASE), shards=2)
    (source / "tokenizer.json").write_text("{}")
    calls: list[tuple[int, int]] = []
    convert(source, tmp_path / "b", progress=lambda done, total: calls.append((done, total)))
    assert sorted(os.listdir(tmp_path / "b")) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert calls[-1][0] == calls[-1][1] == Checkpoint(source).total_bytes


def test_convert_without_draft_says_so(tmp_path: Path) -> None:
    for raw in (RAW, tiny_dspark_config()):
        tensors = {k: v for k, v in random_tensors(raw, RELEASE).items() if not k.startswith("mtp.")}
        folder = tmp_path / f"{len(raw)}"
        convert(save(folder / "a", raw, tensors), folder / "b")
        assert_same(folder / "b", tensors)
        assert ModelConfig.from_folder(folder / "b").num_draft_layers == 0


def test_nothing_is_left_of_a_failed_write(tmp_path: Path) -> None:
    tensors = random_tensors(RAW, RELEASE)
    del tensors["norm.weight"], tensors["layers.0.attn.wkv.scale"]
    with pytest.raises(CheckpointError) as caught:
        write_native(tmp_path / "x", RAW, tensors.items(), RELEASE)
    assert len(caught.value.problems) == 2
    assert os.listdir(tmp_path / "x") == []


def test_weights_are_never_overwritten(tmp_path: Path) -> None:
    tensors = random_tensors(RAW, RELEASE)
    write_native(tmp_path, RAW, tensors.items(), RELEASE)
    with pytest.raises(FileExistsError, match=r"already holds weights: model\.safetensors"):
        write_native(tmp_path, RAW, tensors.items(), RELEASE)
    assert_same(tmp_path, tensors)


def test_too_small_a_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        write_native(tmp_path, RAW, random_tensors(RAW, RELEASE).items(), RELEASE)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("layout", ["native", "transformers"])
def test_transformers_reads_what_we_write(tmp_path: Path, layout: Layout) -> None:
    """A folder in the released format, expanded by us to fp32 in either layout, is what `from_pretrained` gives."""
    from transformers import DeepseekV4ForCausalLM

    tensors = random_tensors(RAW, RELEASE)
    writer = write_native if layout == "native" else write_transformers
    writer(tmp_path, RAW, tensors.items(), FORMATS["fp32"])
    model, report = DeepseekV4ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    model.save_pretrained(tmp_path / "again")
    slots = {name: slot for name, slot in empty_slots(RAW, None).items() if not name.startswith("mtp.")}
    load(ModelConfig.from_folder(tmp_path / "again"), slots, Checkpoint(tmp_path / "again"))
    for name, slot in slots.items():
        assert torch.equal(slot.weight.double(), decode(tensors, name).double()), name
