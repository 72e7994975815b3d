"""Writing checkpoints and converting them: native or Hugging Face names, any weight format, without holding a model.

The files are laid out in advance and mapped; their tensors then are the slots of a `WeightLoader`, so everything
that loading can do (pair halves, quantise, expand, split stacks, check) is how a conversion is done.
"""

import json
import mmap
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.checkpoint.headers import DTYPE_BITS, INDEX_NAME, SINGLE_NAME
from leadline.checkpoint.loader import Slot, WeightLoader, put_all
from leadline.checkpoint.names import (
    Layout,
    Part,
    Shape,
    WeightFormat,
    lay_out,
    scale_name,
    stored_tensors,
    weight_specs,
)
from leadline.checkpoint.reader import Checkpoint, Progress
from leadline.checkpoint.stream import TORCH_DTYPES
from leadline.config import ModelConfig

MAX_SHARD_BYTES = 5_000_000_000
FORGET_BYTES = 256 << 20
"""Pages written are given back to the system (which keeps them until they are on disk) every so many bytes."""

Laid = dict[str, tuple[str, Shape, list[Part]]]


def write_native(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    format: WeightFormat,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a checkpoint as DeepSeek publishes them: `config` and (native name, tensor) pairs, stored in `format`.

    Tensors may come in any order and any format that `WeightLoader.put` takes; the config's keys on quantisation are
    set to say what is stored. Raises FileExistsError if `folder` has weights, CheckpointError for missing or bad ones.
    """
    _write(Path(folder), config, tensors, format, "native", max_shard_bytes)


def write_transformers(
    folder: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    format: WeightFormat,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Like `write_native`, under the parameter names of `transformers` with the routed experts stacked.

    Draft blocks keep their native names, which `transformers` ignores.
    """
    _write(Path(folder), config, tensors, format, "transformers", max_shard_bytes)


def convert(
    source: str | Path,
    destination: str | Path,
    layout: Layout = "native",
    weights: WeightFormat | None = None,
    progress: Progress | None = None,
) -> None:
    """Rewrite a checkpoint folder in another layout, and in another weight format unless `weights` is None.

    What need not change is copied bit for bit, and so are the folder's other files (tokenizer, generation config).
    Raises what opening, checking, and writing raise.
    """
    source, destination = Path(source), Path(destination)
    config = ModelConfig.from_folder(source)
    checkpoint = Checkpoint(source)
    checkpoint.validate(config)
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if not checkpoint.has_draft:
        raw = _without_draft(raw)
    _write(destination, raw, checkpoint.tensors(progress), weights or checkpoint.format, layout, MAX_SHARD_BYTES)
    for path in source.iterdir():
        if path.is_file() and path.name not in ("config.json", INDEX_NAME) and path.suffix != ".safetensors":
            shutil.copyfile(path, destination / path.name)


def _write(
    folder: Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    format: WeightFormat,
    layout: Layout,
    max_shard_bytes: int,
) -> None:
    model = ModelConfig.from_dict(config)
    shards = _name_shards(list(_split(lay_out(stored_tensors(model, format), layout), max_shard_bytes)))
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(path.name for path in folder.glob("*.safetensors*"))
    if present:
        raise FileExistsError(f"{folder} already holds weights: {', '.join(present)}")
    with _new_files(folder, shards) as files:
        loader = WeightLoader(model, _slots(model, files))
        put_all(loader, _forgetting(tensors, files))
        loader.finish()
    if len(shards) > 1:
        _write_json(folder / INDEX_NAME, _index(shards))
    _write_json(folder / "config.json", _describe(config, format))


# ------------------------------------------------------------------------------------------------ config.json


def _describe(config: dict[str, Any], format: WeightFormat) -> dict[str, Any]:
    """`config` with the keys that speak of stored formats set to `format`."""
    config = {key: value for key, value in config.items() if key not in ("expert_dtype", "quantization_config")} | {
        "torch_dtype" if "dtype" not in config else "dtype": "float32" if format.dense == "fp32" else "bfloat16"
    }
    if format.experts in ("fp4", "fp8"):
        config["expert_dtype"] = format.experts
    if format.dense == "fp8" or format.experts in ("fp4", "fp8"):
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        } | ({"scale_fmt": "ue8m0"} if format.scales == "e8m0" else {})
    return config


def _without_draft(config: dict[str, Any]) -> dict[str, Any]:
    config = {key: value for key, value in config.items() if not key.startswith("dspark_")}
    return config | {"num_nextn_predict_layers": 0}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ files


def _nbytes(dtype: str, shape: Shape) -> int:
    return torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8


def _split(laid: Laid, max_shard_bytes: int) -> Iterator[Laid]:
    """Cut the tensors, in their order, into shards of at most `max_shard_bytes` (or of one larger tensor)."""
    shard: Laid = {}
    size = 0
    for name, (dtype, shape, parts) in laid.items():
        if shard and size + _nbytes(dtype, shape) > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = (dtype, shape, parts)
        size += _nbytes(dtype, shape)
    yield shard


def _name_shards(shards: list[Laid]) -> dict[str, Laid]:
    if len(shards) == 1:
        return {SINGLE_NAME: shards[0]}
    names = (f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in count(1))
    return dict(zip(names, shards, strict=False))


def _index(shards: Mapping[str, Laid]) -> dict[str, Any]:
    sizes = (_nbytes(dtype, shape) for shard in shards.values() for dtype, shape, _ in shard.values())
    return {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }


class _NewFile:
    """A safetensors file of its final size, with its header written and the tensors' bytes mapped for writing."""

    def __init__(self, path: Path, tensors: Laid) -> None:
        # wide dtypes first, so that every tensor is aligned without holes, as the safetensors library does it
        ordered = sorted(tensors.items(), key=lambda item: -DTYPE_BITS[item[1][0]])
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (dtype, shape, _) in ordered:
            start, end = end, end + _nbytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "xb+") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, file.tell() + end)  # a full disk is an error now, not a crash later
            self.map = mmap.mmap(file.fileno(), 0)
        buffer = torch.frombuffer(self.map, dtype=torch.uint8, offset=8 + len(text)) if end else torch.empty(0)
        self.views: dict[str, Tensor] = {}
        for name, (dtype, shape, parts) in ordered:
            start, stop = header[name]["data_offsets"]
            whole = buffer[start:stop].view(TORCH_DTYPES[dtype]).view(shape)
            self.views |= {part.name: part.of(whole) for part in parts}

    def forget(self) -> None:
        """Give all pages back; the system writes them out in its own time."""
        self.map.madvise(mmap.MADV_DONTNEED)


@contextmanager
def _new_files(folder: Path, shards: Mapping[str, Laid]) -> Iterator[list[_NewFile]]:
    """The shards as new files, which are removed again if anything fails."""
    files: list[_NewFile] = []
    try:
        for name, tensors in shards.items():
            files.append(_NewFile(folder / name, tensors))
        yield files
        for file in files:
            file.map.flush()
    except BaseException:
        for name in shards:
            (folder / name).unlink(missing_ok=True)
        raise


def _slots(model: ModelConfig, files: list[_NewFile]) -> dict[str, Slot]:
    views = {name: view for file in files for name, view in file.views.items()}
    return {name: Slot(views[name], views.get(scale_name(name))) for name in weight_specs(model)}


def _forgetting(tensors: Iterable[tuple[str, Tensor]], files: list[_NewFile]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, while what was written of them does not pile up in resident memory."""
    size = 0
    for name, tensor in tensors:
        yield name, tensor
        size += tensor.nbytes
        if size > FORGET_BYTES:
            size = 0
            for file in files:
                file.forget()
