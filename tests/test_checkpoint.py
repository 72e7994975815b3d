"""Opening checkpoints: what is sound opens and streams; what is not is refused, with every culprit named."""

import json
import logging
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import BASE, FORMATS, RELEASE, random_tensors, same_bytes, save, tiny_config, tiny_dspark_config
from safetensors.torch import save_file
from torch import Tensor

from leadline.checkpoint import stream
from leadline.checkpoint.headers import INDEX_NAME, CheckpointError, read_headers
from leadline.checkpoint.names import WeightFormat
from leadline.checkpoint.reader import Checkpoint
from leadline.config import ModelConfig

Change = Callable[[dict[str, Tensor]], None]


def problems_of(folder: Path, raw: dict[str, Any]) -> list[str]:
    """The problems that opening and validating a folder finds."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).validate(ModelConfig.from_dict(raw))
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def write_file(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """A safetensors file with any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


# ------------------------------------------------------------------------------------------------ sound


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("raw", [tiny_config(), tiny_dspark_config()], ids=["mtp", "dspark"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_sound_checkpoint(tmp_path: Path, form: WeightFormat, raw: dict[str, Any], shards: int) -> None:
    """Every format is recognised, valid, and streams bit for bit, scales just before their weight."""
    tensors = random_tensors(raw, form)
    checkpoint = Checkpoint(save(tmp_path, raw, tensors, shards))
    checkpoint.validate(ModelConfig.from_dict(raw))
    assert checkpoint.format == form
    assert checkpoint.has_draft
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    seen = list(checkpoint.tensors())
    assert sorted(name for name, _ in seen) == sorted(tensors)
    for (name, tensor), following in zip(seen, [*(name for name, _ in seen[1:]), ""], strict=True):
        assert same_bytes(tensor, tensors[name]), name
        if name.endswith(".scale"):
            assert following == name.removesuffix("scale") + "weight"


def test_format_comes_from_most_headers(tmp_path: Path) -> None:
    """fp32 and e8m0 scales are told apart, whatever the config's scale_fmt says."""
    raw = tiny_config(expert_dtype="fp8")
    assert Checkpoint(save(tmp_path / "f32", raw, random_tensors(raw, BASE))).format.scales == "f32"
    tensors = random_tensors(raw, WeightFormat("fp8", "fp8", "e8m0"))
    assert Checkpoint(save(tmp_path / "e8m0", raw, tensors)).format.scales == "e8m0"


def test_progress_counts_bytes_to_the_end(tmp_path: Path) -> None:
    raw = tiny_config()
    checkpoint = Checkpoint(save(tmp_path, raw, random_tensors(raw, RELEASE)))
    calls: list[tuple[int, int]] = []
    count = len(list(checkpoint.tensors(lambda done, total: calls.append((done, total)))))
    assert len(calls) == count and calls[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    assert calls == sorted(calls)


def test_only_some_weights(tmp_path: Path) -> None:
    raw = tiny_config()
    checkpoint = Checkpoint(save(tmp_path, raw, random_tensors(raw, RELEASE), shards=2))
    names = [name for name, _ in checkpoint.tensors(only={"layers.1.attn.wq_a.weight", "norm.weight"})]
    assert sorted(names) == ["layers.1.attn.wq_a.scale", "layers.1.attn.wq_a.weight", "norm.weight"]


def test_stream_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces, and tensors larger than the scratch buffer; views outlive the stream; stopping early is fine."""
    monkeypatch.setattr(stream, "PIECE_BYTES", 1000)
    monkeypatch.setattr(stream, "SCRATCH_BYTES", 64)
    raw = tiny_config()
    tensors = random_tensors(raw, RELEASE)
    checkpoint = Checkpoint(save(tmp_path, raw, tensors, shards=2))
    for name, tensor in list(checkpoint.tensors()):
        assert same_bytes(tensor, tensors[name]), name
    stopped = checkpoint.tensors()
    next(stopped)
    stopped.close()  # type: ignore[attr-defined]


def test_tensors_for_a_gpu_are_read_into_pieces_that_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more pieces than there is memory for, tensors larger than a piece, a consumer that stops early."""
    monkeypatch.setattr(stream, "PIECE_BYTES", 1024)
    raw = tiny_config()
    tensors = random_tensors(raw, RELEASE)
    checkpoint = Checkpoint(save(tmp_path, raw, tensors, shards=2))
    stored = [checkpoint.headers[name] for name in tensors]
    places, seen = set(), []
    for tensor in stream.staged(tmp_path, stored, pinned=False):
        seen.append(tensor.clone())
        if tensor.nbytes <= 1024:
            places.add(tensor.data_ptr() // 1024)
    assert len(seen) == len(tensors)
    assert all(same_bytes(tensor, want) for tensor, want in zip(seen, tensors.values(), strict=True))
    assert len(places) <= 3 * (stream.PIECES_AHEAD + 1) < len(tensors) // 2, "memory is used again"
    stopped = stream.staged(tmp_path, stored, pinned=False)
    next(stopped)
    stopped.close()
    path = next(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(OSError, match="changed while being read"):
        list(stream.staged(tmp_path, stored, pinned=False))


def mapped_memory(path: Path) -> int:
    """Resident bytes of this process's mappings of a file."""
    text = Path("/proc/self/smaps").read_text()
    return sum(1024 * int(size) for size in re.findall(rf"{path}\n(?:Size|.*PageSize):.*\n(?:.*\n)*?Rss: +(\d+)", text))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumed pages are given back, although a view of the first tensor keeps the file mapped."""
    monkeypatch.setattr(stream, "PIECE_BYTES", 1 << 20)
    path = tmp_path / "model.safetensors"
    save_file({f"t{i}": torch.full((1 << 19,), float(i)) for i in range(16)}, path)
    tensors = list(read_headers(tmp_path).values())
    peak, sums, kept = 0, [], []
    for tensor in stream.stream(tmp_path, tensors):
        sums.append(float(tensor.mean()))
        kept.append(tensor)
        peak = max(peak, mapped_memory(path))
    assert sorted(sums) == list(range(16))
    assert 2 << 20 <= peak < 5 << 20, "one tensor at a time"
    assert [float(tensor.mean()) for tensor in kept] == sums, "views stay valid"


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = torch.randn(3)
    header = {"a": entry("U8", [1], 0, 1), "norm.weight": entry("F32", [3], 1, 13)}
    write_file(tmp_path / "model.safetensors", header, b"x" + values.numpy().tobytes())
    stored = read_headers(tmp_path)["norm.weight"]
    assert torch.equal(next(iter(stream.stream(tmp_path, [stored]))), values)


def test_file_that_shrinks_while_read(tmp_path: Path) -> None:
    raw = tiny_config()
    checkpoint = Checkpoint(save(tmp_path, raw, random_tensors(raw, RELEASE)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(OSError, match="changed while being read"):
        list(checkpoint.tensors())


def test_uint8_containers_of_fp4_and_e8m0(tmp_path: Path) -> None:
    raw = tiny_config()
    tensors = random_tensors(raw, RELEASE)
    containers = {
        name: tensor.view(torch.uint8) if ".experts." in name or name.endswith(".scale") else tensor
        for name, tensor in tensors.items()
        if "shared" not in name or name.endswith(".scale")
    }
    containers |= {name: tensor for name, tensor in tensors.items() if name not in containers}
    checkpoint = Checkpoint(save(tmp_path, raw, containers))
    checkpoint.validate(ModelConfig.from_dict(raw))
    assert all(same_bytes(tensor, tensors[name]) for name, tensor in checkpoint.tensors())


def test_missing_draft_is_allowed_but_not_half_of_it(tmp_path: Path) -> None:
    """`transformers` saves no draft blocks and still writes num_nextn_predict_layers = 1."""
    raw = tiny_config()
    tensors = {name: tensor for name, tensor in random_tensors(raw, RELEASE).items() if not name.startswith("mtp.")}
    checkpoint = Checkpoint(save(tmp_path / "none", raw, tensors))
    checkpoint.validate(ModelConfig.from_dict(raw))
    assert not checkpoint.has_draft
    tensors["mtp.0.norm.weight"] = torch.ones(160, dtype=torch.bfloat16)
    found = problems_of(save(tmp_path / "half", raw, tensors), raw)
    assert len(found) > 30 and all("mtp.0." in problem and "missing" in problem for problem in found)


def test_ignored_copies_give_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = tiny_config()
    tensors = random_tensors(raw, RELEASE)
    tensors |= {"mtp.0.head.weight": torch.ones(2), "mtp.0.emb.tok_emb.weight": torch.ones(2)}
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint(save(tmp_path, raw, tensors))
    checkpoint.validate(ModelConfig.from_dict(raw))
    assert checkpoint.ignored == ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"]
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------------------------------ does not fit


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change


def put(name: str, edit: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = edit(tensors[name])

    return change


def add(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def drop(*names: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


WRONG: dict[str, tuple[WeightFormat, Change, list[str]]] = {
    "missing scale": (
        RELEASE,
        drop("layers.1.attn.wq_a.scale"),
        ["layers.1.attn.wq_a.scale: missing (expected F8_E8M0 [1, 2])"],
    ),
    "missing expert scale": (
        RELEASE,
        drop("layers.2.ffn.experts.1.w3.scale"),
        ["layers.2.ffn.experts.1.w3.scale: missing (expected F8_E8M0 [96, 5])"],
    ),
    "missing weight": (
        RELEASE,
        drop("layers.3.attn.indexer.weights_proj.weight"),
        ["layers.3.attn.indexer.weights_proj.weight: missing (expected BF16 [4, 160])"],
    ),
    "transposed fp8 scale": (
        RELEASE,
        put("layers.1.attn.wq_a.scale", lambda t: t.view(torch.uint8).T.contiguous().view(t.dtype)),
        [
            "layers.1.attn.wq_a.scale: expected shape [1, 2], found [2, 1], which is transposed, in model.safetensors",
        ],
    ),
    "scale of another block size": (
        RELEASE,
        put("layers.0.attn.wo_b.scale", lambda t: torch.ones(3, 2).to(t.dtype)),
        ["layers.0.attn.wo_b.scale: expected shape [2, 2], found [3, 2], in model.safetensors"],
    ),
    "one fp32 scale among e8m0": (
        RELEASE,
        put("layers.0.attn.wkv.scale", lambda t: t.float()),
        ["layers.0.attn.wkv.scale: expected dtype F8_E8M0, found F32 in model.safetensors"],
    ),
    "scale beside a bf16 weight": (
        WeightFormat("bf16", "bf16"),
        add("layers.0.attn.wq_a.scale", torch.ones(1, 2)),
        ["layers.0.attn.wq_a.scale: unexpected scales in model.safetensors, its weight is bf16 and has none"],
    ),
    "bf16 weight beside its scale": (
        RELEASE,
        put("layers.0.attn.wq_a.weight", lambda t: t.bfloat16()),
        ["layers.0.attn.wq_a.weight: expected dtype F8_E4M3, found BF16 in model.safetensors"],
    ),
    "scale of a norm": (
        RELEASE,
        add("layers.0.attn_norm.scale", torch.ones(160)),
        ["layers.0.attn_norm.scale: unexpected scales in model.safetensors, its weight is plain_bf16 and has none"],
    ),
    "fp8 expert among fp4": (
        RELEASE,
        put("layers.0.ffn.experts.0.w2.weight", lambda t: torch.ones(160, 96).to(torch.float8_e4m3fn)),
        [
            "layers.0.ffn.experts.0.w2.weight: expected dtype I8, found F8_E4M3 in model.safetensors",
            "layers.0.ffn.experts.0.w2.weight: expected shape [160, 48], found [160, 96], in model.safetensors",
        ],
    ),
    "half-precision norm": (
        RELEASE,
        put("norm.weight", lambda t: t.half()),
        ["norm.weight: expected dtype BF16 or F32, found F16 in model.safetensors"],
    ),
    "wrong shape": (
        RELEASE,
        put("layers.2.attn.compressor.ape", lambda t: t[:, :-1].contiguous()),
        ["layers.2.attn.compressor.ape: expected shape [128, 48], found [128, 47], in model.safetensors"],
    ),
    "unknown tensor": (
        RELEASE,
        add("layers.0.attn.wq_a.input_scale", torch.ones(1)),
        ["layers.0.attn.wq_a.input_scale: unknown tensor in model.safetensors"],
    ),
    "tensor of a layer too many": (
        RELEASE,
        add("layers.4.attn.wq_a.weight", torch.ones(1)),
        ["layers.4.attn.wq_a.weight: unknown tensor in model.safetensors"],
    ),
    "hash layer with a bias too": (
        RELEASE,
        add("layers.0.ffn.gate.bias", torch.ones(3)),
        ["layers.0.ffn.gate.bias: unknown tensor in model.safetensors"],
    ),
    "layer without tid2eid or bias": (
        RELEASE,
        drop("layers.1.ffn.gate.tid2eid", "layers.2.ffn.gate.bias"),
        [
            "layers.1.ffn.gate.tid2eid: missing (expected I64 [71, 2])",
            "layers.2.ffn.gate.bias: missing (expected F32 [3])",
        ],
    ),
    "renamed": (
        RELEASE,
        rename("layers.0.attn.q_norm.weight", "layers.0.attn.q_a_layernorm.weight"),
        [
            "layers.0.attn.q_norm.weight: missing (expected BF16 [40])",
            "layers.0.attn.q_a_layernorm.weight: unknown tensor in model.safetensors",
        ],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensor(tmp_path: Path, case: str) -> None:
    form, change, wanted = WRONG[case]
    tensors = random_tensors(tiny_config(), form)
    change(tensors)
    assert problems_of(save(tmp_path, tiny_config(), tensors), tiny_config()) == wanted


def test_several_at_once_are_all_named(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config(), RELEASE)
    cases = ["missing scale", "unknown tensor", "wrong shape", "half-precision norm", "one fp32 scale among e8m0"]
    for case in cases:
        WRONG[case][1](tensors)
    found = problems_of(save(tmp_path, tiny_config(), tensors, shards=2), tiny_config())
    names = {problem.split(":")[0] for case in cases for problem in WRONG[case][2]}
    assert {problem.split(":")[0] for problem in found} == names and len(found) == len(cases)


def test_wrong_vocabulary_size(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config(vocab_size=72), RELEASE)
    found = problems_of(save(tmp_path, tiny_config(), tensors), tiny_config())
    tables = ["embed.weight", "layers.0.ffn.gate.tid2eid", "layers.1.ffn.gate.tid2eid", "head.weight"]
    assert [problem.split(":")[0] for problem in found] == tables
    assert "expected shape [71, 160], found [72, 160]" in found[0]


def test_other_hidden_size_names_every_tensor(tmp_path: Path) -> None:
    raw = tiny_config(hidden_size=192)
    found = problems_of(save(tmp_path, raw, random_tensors(tiny_config(), RELEASE)), raw)
    assert len({problem.split(":")[0] for problem in found}) > 100


@pytest.mark.parametrize(("form", "said"), [(RELEASE, "fp8"), (BASE, "fp4"), (WeightFormat("bf16", "bf16"), "fp4")])
def test_expert_dtype_contradicts_headers(tmp_path: Path, form: WeightFormat, said: str) -> None:
    raw = tiny_config(expert_dtype=said)
    found = problems_of(save(tmp_path, raw, random_tensors(raw, form)), raw)
    assert found == [f"config.json says expert_dtype is {said!r}, but the expert tensors are {form.experts}"]


def test_mtp_tensors_for_a_dspark_config_and_the_reverse(tmp_path: Path) -> None:
    mtp, dspark = tiny_config(), tiny_dspark_config()
    found = problems_of(save(tmp_path / "a", dspark, random_tensors(mtp, RELEASE)), dspark)
    assert "but the tensors are those of MTP" in found[0]
    found = problems_of(save(tmp_path / "b", mtp, random_tensors(dspark, RELEASE)), mtp)
    assert "config.json has no dspark_* keys" in found[0]


def test_a_model_of_another_kind(tmp_path: Path) -> None:
    save(tmp_path, tiny_config(), {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)})
    assert problems_of(tmp_path, tiny_config()) == [
        "no attention weights with dtype F8_E4M3 or BF16 or F32 (found: none)"
    ]


def test_same_tensor_in_two_dialects(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config(), RELEASE)
    tensors["model.embed_tokens.weight"] = tensors["embed.weight"].clone()
    found = problems_of(save(tmp_path, tiny_config(), tensors), tiny_config())
    assert len(found) == 1 and "embed.weight: given twice" in found[0]


# ------------------------------------------------------------------------------------------------ damaged folders


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A sound folder of three shards."""
    return save(tmp_path / "model", tiny_config(), random_tensors(tiny_config(), RELEASE), shards=3)


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


def folder_problems(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    return caught.value.problems


def test_missing_shards_are_all_named(sharded: Path) -> None:
    (sharded / "model-00001.safetensors").unlink()
    (sharded / "model-00003.safetensors").unlink()
    assert folder_problems(sharded) == [
        f"model-0000{i}.safetensors: the index names this file, but it is not there" for i in (1, 3)
    ]


@pytest.mark.parametrize(
    "keep", [0, 5, 8, 600, -1], ids=["empty", "in the length", "no header", "in the header", "tail"]
)
def test_truncated_shard(sharded: Path, keep: int) -> None:
    path = sharded / "model-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    (found,) = folder_problems(sharded)
    assert "model-00002.safetensors" in found and ("truncated" in found or "too short" in found)


def test_bytes_after_the_last_tensor(sharded: Path) -> None:
    with open(sharded / "model-00002.safetensors", "ab") as file:
        file.write(b"12345")
    assert folder_problems(sharded) == ["model-00002.safetensors: 5 bytes after the last tensor belong to none"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../model-00001.safetensors", "a/../../b.safetensors"])
def test_shard_path_out_of_the_folder(sharded: Path, path: str) -> None:
    edit_index(sharded, lambda index: index["weight_map"].update({"norm.weight": path}))
    assert f"shard path {path!r} leads out of the folder" in folder_problems(sharded)[0]


def test_index_and_shards_disagree(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX_NAME).read_text())["weight_map"]
    moved, lost = "norm.weight", "embed.weight"
    home = weight_map[moved]
    other = next(shard for shard in set(weight_map.values()) if shard != home)

    def edit(index: dict[str, Any]) -> None:
        index["weight_map"][moved] = other
        del index["weight_map"][lost]
        index["weight_map"]["ghost.weight"] = home

    edit_index(sharded, edit)
    assert sorted(folder_problems(sharded)) == sorted(
        [
            f"embed.weight: in {weight_map[lost]}, but not in the index",
            f"ghost.weight: the index places it in {home}, which does not have it",
            f"norm.weight: in {home}, but the index places it in {other}",
            f"norm.weight: the index places it in {other}, which does not have it",
        ]
    )


def test_total_size_is_checked(sharded: Path) -> None:
    edit_index(sharded, lambda index: index["metadata"].update(total_size=17))
    assert "metadata.total_size is 17" in folder_problems(sharded)[0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "not valid JSON"),
        ("[]", "JSON of type list"),
        ("{}", "weight_map must map"),
        ('{"weight_map": {"a": 3}}', "weight_map must map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' is given twice"),
    ],
)
def test_damaged_index(sharded: Path, text: str, wanted: str) -> None:
    (sharded / INDEX_NAME).write_text(text)
    assert wanted in folder_problems(sharded)[0]


GOOD = entry("F32", [2], 0, 8)
HEADERS: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    "not JSON": (b"{]", "not valid JSON"),
    "not text": (b"\xff\xfe\x00", "not valid JSON"),
    "a list": (b"[1]", "JSON of type list"),
    "name twice": (
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        b' "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        "'a' is given twice",
    ),
    "no object": ({"a": 3}, "a: header entry in model.safetensors is no object"),
    "unknown dtype": ({"a": entry("F7", [2], 0, 8)}, "a: unknown dtype 'F7'"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "a: unknown dtype None"),
    "negative size": ({"a": entry("F32", [-2], 0, 8)}, "a: shape [-2]"),
    "fractional size": ({"a": entry("F32", [2.0], 0, 8)}, "a: shape [2.0]"),  # type: ignore[list-item]
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, "a: data_offsets None"),
    "negative offset": ({"a": entry("F32", [2], -8, 0)}, "a: data_offsets [-8, 0]"),
    "size and shape differ": ({"a": entry("F32", [3], 0, 8)}, "a: data_offsets [0, 8] in model.safetensors do not fit"),
    "overlap": ({"a": GOOD, "b": entry("I8", [4], 4, 8)}, "b: its bytes in model.safetensors start at 4 and overlaps"),
    "hole": (
        {"a": entry("I8", [4], 0, 4), "b": entry("I8", [3], 5, 8)},
        "b: its bytes in model.safetensors start at 5",
    ),
    "beyond the end": ({"a": GOOD, "b": entry("I8", [4], 8, 12)}, "truncated"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_header(tmp_path: Path, case: str) -> None:
    header, wanted = HEADERS[case]
    write_file(tmp_path / "model.safetensors", header, b"12345678")
    assert wanted in folder_problems(tmp_path)[0]


def test_absurd_header_length_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert f"header of {2**62} bytes in a file of 10 bytes" in folder_problems(tmp_path)[0]


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors files"):
        Checkpoint(tmp_path)
    for name in "ab":
        write_file(tmp_path / f"{name}.safetensors", {"a": GOOD}, b"12345678")
    with pytest.raises(FileNotFoundError, match="2 safetensors files but no model"):
        Checkpoint(tmp_path)


def test_a_long_list_of_problems_is_cut_only_in_the_message() -> None:
    error = CheckpointError("x", [f"problem {i}" for i in range(3000)])
    assert len(error.problems) == 3000 and "and 2000 more" in str(error) and len(str(error)) < 30_000
