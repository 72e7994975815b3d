"""`leadline inspect` against published figures, and how the command speaks to people."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from leadline.checkpoint.names import stored_tensors, weight_specs
from leadline.cli import inspect as inspecting
from leadline.cli.inspect import (
    Report,
    StateBytes,
    Tensors,
    count_parameters,
    describe_schedule,
    examine,
    find_model,
    fit,
    released_format,
    state_bytes,
)
from leadline.cli.main import app
from leadline.config import ModelConfig
from leadline.model.state import page_bytes, slot_bytes
from leadline.presets import PRESETS, preset, preset_dict


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@cache
def released(name: str) -> tuple[ModelConfig, Tensors]:
    return find_model(name)


def report_of(name: str, contexts: list[int] | None = None, gpus: int | None = None) -> Report:
    return examine(name, *released(name), contexts, gpus)


def tiny_dict(**changes: Any) -> dict[str, Any]:
    """A config.json small enough to write its checkpoint in a test; odd sizes where the format allows them."""
    small = {
        "vocab_size": 131,
        "hidden_size": 96,
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 4, 0],
        "num_attention_heads": 6,
        "head_dim": 80,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 40,
        "o_groups": 3,
        "o_lora_rank": 24,
        "n_routed_experts": 9,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hash_layers": 1,
        "index_n_heads": 5,
        "index_head_dim": 16,
        "sliding_window": 33,
        "max_position_embeddings": 6144,
        "eos_token_id": 1,
    }
    return preset_dict("flash") | small | changes


def write_checkpoint(folder: Path, raw: dict[str, Any], drop: str | None = None) -> None:
    """A checkpoint of zeros in one file, without the tensors whose name starts with `drop`."""
    dtypes = {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "I8": torch.int8,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
    config = ModelConfig.from_dict(raw)
    stored = stored_tensors(config, released_format(config))
    tensors = {
        name: torch.zeros(shape, dtype=torch.uint8).to(dtypes[dtype])
        for name, (dtype, shape) in stored.items()
        if drop is None or not name.startswith(drop)
    }
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")


# ------------------------------------------------------------------------------------------------ published figures


@pytest.mark.parametrize(
    ("name", "tensors", "size"),
    [
        ("flash", 69_187, 159_609_485_896),
        ("flash-0731", 72_317, 166_878_536_440),
        ("flash-base", 69_187, 292_555_345_480),
        ("pro", 145_116, 864_704_792_696),
        ("pro-0813", 149_782, 892_727_580_904),
    ],
)
def test_files_are_the_published_ones(name: str, tensors: int, size: int) -> None:
    report = report_of(name)
    assert sum(part.tensors for part in report.files.values()) == tensors
    assert sum(part.bytes for part in report.files.values()) == size == report.memory["as stored"]


def test_dtype_counts_of_flash_are_the_published_ones() -> None:
    counts = {dtype: part.tensors for dtype, part in report_of("flash").files.items()}
    assert counts == {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I8": 33_792, "I64": 3}


@pytest.mark.parametrize(("name", "total", "active"), [("flash", "284B", "13B"), ("pro", "1573B", "49B")])
def test_parameters_are_the_published_ones(name: str, total: str, active: str) -> None:
    report = report_of(name)
    assert f"{report.total_parameters / 1e9:.0f}B" == total
    assert f"{report.active_parameters / 1e9:.0f}B" == active
    assert f"{report.total_parameters / 1e12:.1f}T" == {"flash": "0.3T", "pro": "1.6T"}[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_has_one_part(name: str) -> None:
    config, tensors = released(name)
    parameters = count_parameters(config, tensors)
    weights = [spec for spec in weight_specs(config).values() if spec.kind != "int64"]
    assert sum(parameters.values()) == sum(math.prod(spec.shape) for spec in weights)
    assert len(parameters) == len(inspecting.PARTS)


def test_bytes_of_a_part_against_the_formulas_of_the_paper() -> None:
    config, tensors = released("flash")
    parameters = count_parameters(config, tensors)
    assert parameters["routed experts"] == 43 * 256 * 3 * 4096 * 2048
    assert parameters["shared experts"] == 43 * 3 * 4096 * 2048
    assert parameters["embedding"] == parameters["head"] == 129280 * 4096
    assert parameters["hyper-connections"] == 43 * 2 * (24 * 4 * 4096 + 24 + 3) + 4 * 4 * 4096 + 4 + 1
    assert parameters["router"] == 43 * 256 * 4096 + 40 * 256
    assert parameters["norms"] == (2 * 43 + 1) * 4096


# ------------------------------------------------------------------------------------------------ state


def test_native_rows_of_flash_are_584_and_68_bytes() -> None:
    state = state_bytes(preset("flash"), "native", [])
    assert (state.row, state.index_key) == (584, 68)


def test_state_of_flash_against_a_count_by_hand() -> None:
    state = state_bytes(preset("flash"), "native", [4096, 131_072, 1_048_576])
    frontier = 43 * 128 * 584 + 21 * 8 * 4 * (2 * 512 + 2 * 512 + 2 * 128 + 2 * 128) + 20 * 3 * 512 * 4
    assert state.frontier == frontier
    for context, size in state.request.items():
        assert size == 21 * context // 4 * (584 + 68) + 20 * context // 128 * 584 + frontier
    assert state.history_per_token == 21 * (584 + 68) / 4 + 20 * 584 / 128
    assert [round(size / 1e6) for size in state.request.values()] == [19, 466, 3690]


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*PRESETS, "tiny"])
def test_plain_state_is_what_the_engine_allocates(name: str, kind: str) -> None:
    config = ModelConfig.from_dict(tiny_dict()) if name == "tiny" else preset(name)
    dtype = getattr(torch, kind)
    state = state_bytes(config, kind, [1, 128, 129, 5000])
    assert state.frontier == slot_bytes(config, dtype)
    for context, pages in ((1, 1), (128, 1), (129, 2), (5000, 40)):
        assert state.request[context] == pages * page_bytes(config, dtype) + slot_bytes(config, dtype)


# ------------------------------------------------------------------------------------------------ GPUs


@given(
    mib=st.integers(1000, 200_000),
    weights=st.integers(1, 10**12),
    request=st.integers(0, 10**10),
    split=st.sampled_from([1, 6, 8, 64]),
)
def test_needed_gpus_hold_the_model_and_fewer_do_not(mib: int, weights: int, request: int, split: int) -> None:
    state = StateBytes(0, 0, 0.0, 0, {})
    needed = fit(mib, weights, request, state, split, None).needed
    usable = mib * 2**20 * inspecting.USABLE
    divisors = [n for n in range(1, split + 1) if split % n == 0]
    for n in divisors:
        room = usable - weights / n - request
        if abs(room) > 2**21:  # away from rounding to whole MiB
            assert (room > 0) == (needed is not None and n >= needed)


def test_flash_on_real_gpus() -> None:
    report = report_of("flash", [131_072], gpus=4)
    needed = {kind: gpu.needed for kind, gpu in report.gpus.items()}
    assert needed["H200 141 GB"] == needed["RTX PRO 6000 96 GB"] == needed["DGX Spark 128 GB"] == 2
    assert needed["B200 180 GB"] == 1
    assert needed["H100 80 GB"] == needed["A100 80 GB"] == 4
    h200 = report.gpus["H200 141 GB"]
    assert h200.free == h200.usable - report.memory["as stored"] // 4
    assert h200.requests == {131_072: h200.free // report.state["native"].request[131_072]}


def test_pro_is_too_large_for_four_h200() -> None:
    h200 = report_of("pro", [131_072], gpus=4).gpus["H200 141 GB"]
    assert h200.free is not None and h200.free < 0
    assert h200.requests == {131_072: 0}
    assert h200.needed == 8


# ------------------------------------------------------------------------------------------------ schedule


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ("S S C H C H C", "2 S, 2 x (C, H), 1 C"),
        ("H H C H C H C", "2 H, 2 x (C, H), 1 C"),
        ("S", "1 S"),
        ("S S S S S", "5 S"),
        ("S C H", "1 S, 1 C, 1 H"),
        ("C C H H C C H H", "2 C, 2 H, 2 C, 2 H"),
        ("C H C H H H", "2 x (C, H), 2 H"),
    ],
)
def test_schedule_in_words(kinds: str, text: str) -> None:
    assert describe_schedule(kinds.split()) == text


@given(st.lists(st.sampled_from(["SWA", "CSA", "HCA"]), min_size=1, max_size=40))
def test_schedule_in_words_says_every_layer_in_order(kinds: list[str]) -> None:
    told: list[str] = []
    for piece in (
        describe_schedule(kinds)
        .replace(", HCA)", "+HCA)")
        .replace(", CSA)", "+CSA)")
        .replace(", SWA)", "+SWA)")
        .split(", ")
    ):
        count, _, unit = piece.partition(" ")
        told += unit.removeprefix("x ").strip("()").split("+") * int(count)
    assert told == kinds


# ------------------------------------------------------------------------------------------------ sources


def test_a_folder_with_only_a_config_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(preset_dict("flash")))
    report = examine("x", *find_model(str(tmp_path)), None, None)
    assert replace(report, model="flash") == report_of("flash")


def test_headers_say_what_the_config_cannot(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_dict(), drop="mtp.")
    report = examine("x", *find_model(str(tmp_path)), None, None)
    assert "draft block" not in report.parameters
    assert report.parameters["embedding"] == 131 * 96
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < file_bytes - report.memory["as stored"] < 200 * sum(part.tensors for part in report.files.values())
    draft = next(line for line in run("inspect", str(tmp_path)).stdout.splitlines() if line.startswith("draft"))
    assert draft.split() == ["draft", "none"]


def test_the_built_in_model_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_dict())
    monkeypatch.setattr(inspecting, "BUILT_IN", tmp_path)
    told = json.loads(run("inspect", "--json").stdout)
    assert told["model"] == "built-in model"
    assert list(told["state"]["native"]["request"]) == ["4096", "6144"]


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_dict(), drop="layers.2.attn.w")
    result = run("inspect", str(tmp_path))
    assert result.exit_code == 1
    for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"):
        assert f"layers.2.attn.{name}.weight" in result.stderr
    assert result.stdout == ""


def test_the_hub_gives_only_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(repo: str, file: str) -> str:
        asked.append((repo, file))
        (tmp_path / file).write_text(json.dumps(preset_dict("pro")))
        return str(tmp_path / file)

    monkeypatch.setattr(inspecting, "hf_hub_download", download)
    result = run("inspect", "owner/name", "--json")
    assert json.loads(result.stdout)["total_parameters"] == report_of("pro").total_parameters
    assert asked == [("owner/name", "config.json")]


def test_a_hub_that_cannot_be_reached_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, file: str) -> str:
        raise LocalEntryNotFoundError("no connection\nto the hub")

    monkeypatch.setattr(inspecting, "hf_hub_download", download)
    result = run("inspect", "owner/name")
    assert result.exit_code == 1
    assert result.stderr == (
        "leadline: 'owner/name' is not a folder, and its config.json cannot be had from the hub: "
        "no connection to the hub\n"
    )


# ------------------------------------------------------------------------------------------------ the command


def test_json_and_tables_show_the_same_report() -> None:
    told = json.loads(run("inspect", "flash", "--json", "--context", "5000", "--context", "128K", "--gpus", "2").stdout)
    report = report_of("flash", [5000, 131_072], gpus=2)
    assert told["active_parameters"] == report.active_parameters
    assert told["files"]["I8"] == {"tensors": 33_792, "bytes": report.files["I8"].bytes}
    assert told["config"]["compress_ratios"][:4] == [0, 0, 4, 128]
    sizes = report.state["native"].request
    assert told["state"]["native"]["request"] == {"5000": sizes[5000], "131072": sizes[131_072]}
    assert told["gpus"]["H200 141 GB"]["free"] == report.gpus["H200 141 GB"].free
    shown = run("inspect", "flash", "--context", "5000", "--gpus", "2").stdout
    for text in ("284.33 B", "13.27 B", "159.61 GB", "2 SWA, 20 x (CSA, HCA), 1 CSA", "5,000", "free on each of 2"):
        assert text in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flsh"], ["'flsh'", "neither a preset", "flash-0731", "hub id"]),
        (["flash", "--context", "0", "--context", "5", "--context", "2M"], ["is 0, 2097152;", "1 to 1048576 tokens"]),
        (["flash", "--gpus", "3"], ["3 GPUs", "divide 64"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_errors_are_sentences_that_name_every_culprit(arguments: list[str], words: list[str]) -> None:
    result = run("inspect", *arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("leadline: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_a_bad_config_names_every_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_dict(hidden_size="big", scoring_func="softmax")))
    result = run("inspect", str(tmp_path))
    assert result.exit_code == 1
    assert "hidden_size is 'big'" in result.stderr
    assert "scoring_func is 'softmax'" in result.stderr


def test_debug_shows_the_error_itself() -> None:
    result = run("--debug", "inspect", "flsh")
    assert isinstance(result.exception, FileNotFoundError)


@pytest.mark.parametrize("arguments", [["inspect", "flash", "--gpus", "0"], ["inspect", "--frob"], ["frobnicate"], []])
def test_wrong_usage_gives_status_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
