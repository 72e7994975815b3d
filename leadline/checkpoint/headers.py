"""A folder of safetensors files, known from its headers alone: what it holds, and everything that is wrong with it.

A safetensors file is a length (little-endian u64), that many bytes of JSON, and the tensors' bytes without gaps:
https://huggingface.co/docs/safetensors. A sharded folder has `model.safetensors.index.json`, which names the shard
of every tensor. No tensor is read here, and nothing here knows what a model is.
"""

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The safetensors library's own limit: a longer header is damage or an attack."""
SHOWN_PROBLEMS = 1000

DTYPE_BITS = {
    "F4": 4,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
"""Bits of one element of each safetensors dtype that a checkpoint may hold."""


class CheckpointError(ValueError):
    """A checkpoint, or a tensor of one, that cannot be used. `problems` has one sentence per culprit."""

    def __init__(self, subject: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        shown = self.problems[:SHOWN_PROBLEMS]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - len(shown)} more")
        super().__init__(f"{subject}: {shown[0]}" if len(shown) == 1 else "\n  - ".join([f"{subject}:", *shown]))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: safetensors dtype, shape, and its bytes [start, end) counted from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.end - self.start


def read_headers(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of `folder` by its stored name, from one `model.safetensors` or from an index and its shards.

    Raises FileNotFoundError without any weights, and CheckpointError listing every structural problem: absent or
    truncated shards, bad paths, damaged headers, overlaps and holes, index and shards that disagree.
    """
    folder = Path(folder)
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        return _read_single(folder)
    problems: list[str] = []
    index = _load_json(index_path.read_bytes(), INDEX_NAME, problems)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        problems.append(f"{INDEX_NAME}: weight_map must map tensor names to file names")
        weight_map = {}
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        found = _read_shard_of_index(folder, shard, problems)
        if found is not None:
            _compare_with_index(shard, found, weight_map, problems)
            tensors |= {name: tensor for name, tensor in found.items() if weight_map.get(name) == shard}
    if not problems:
        _check_total_size(index, tensors.values(), problems)
    if problems:
        raise CheckpointError(f"{folder} is not a usable checkpoint", problems)
    return tensors


def _read_single(folder: Path) -> dict[str, StoredTensor]:
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE_NAME not in files and len(files) != 1:
        what = f"{len(files)} safetensors files but no {INDEX_NAME}" if files else "no safetensors files"
        raise FileNotFoundError(f"{folder} holds {what}: a checkpoint is {SINGLE_NAME}, or shards with an index")
    problems: list[str] = []
    tensors = _read_shard(folder, SINGLE_NAME if SINGLE_NAME in files else files[0], problems)
    if problems:
        raise CheckpointError(f"{folder} is not a usable checkpoint", problems)
    return tensors


def _read_shard_of_index(folder: Path, shard: str, problems: list[str]) -> dict[str, StoredTensor] | None:
    path = Path(shard)
    if path.is_absolute() or ".." in path.parts or "\\" in shard:
        problems.append(f"{INDEX_NAME}: shard path {shard!r} leads out of the folder")
        return None
    if not (folder / path).is_file():
        problems.append(f"{shard}: the index names this file, but it is not there")
        return None
    before = len(problems)
    tensors = _read_shard(folder, shard, problems)
    return tensors if len(problems) == before else None


def _compare_with_index(
    shard: str, found: dict[str, StoredTensor], weight_map: dict[str, str], problems: list[str]
) -> None:
    for name in sorted(found.keys() - weight_map.keys()):
        problems.append(f"{name}: in {shard}, but not in the index")
    for name, other in weight_map.items():
        if other == shard and name not in found:
            problems.append(f"{name}: the index places it in {shard}, which does not have it")
        if other != shard and name in found:
            problems.append(f"{name}: in {shard}, but the index places it in {other}")


def _check_total_size(index: dict[str, Any], tensors: Iterable[StoredTensor], problems: list[str]) -> None:
    metadata = index.get("metadata")
    declared = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(tensor.nbytes for tensor in tensors)
    if declared is not None and declared != total:
        problems.append(
            f"{INDEX_NAME}: metadata.total_size is {declared}, but the shards hold {total} bytes of tensors"
        )


# ------------------------------------------------------------------------------------------------ one file


def _read_shard(folder: Path, shard: str, problems: list[str]) -> dict[str, StoredTensor]:
    """The tensors of one file. Problems are appended, each with the name of the shard."""
    size = (folder / shard).stat().st_size
    with open(folder / shard, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            problems.append(f"{shard}: {size} bytes long, too short for a safetensors file")
            return {}
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, MAX_HEADER_BYTES):
            problems.append(
                f"{shard}: header of {length} bytes in a file of {size} bytes: truncated, or no safetensors"
            )
            return {}
        header = _load_json(file.read(length), shard, problems)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensor = _parse_entry(name, entry, shard, 8 + length, problems)
            if tensor is not None:
                tensors[name] = tensor
    if len(tensors) == len(header.keys() - {"__metadata__"}):
        _check_cover(shard, tensors, 8 + length, size, problems)
    return tensors


def _load_json(data: bytes, where: str, problems: list[str]) -> dict[str, Any]:
    """A JSON object in which no key is given twice, or {} and a problem."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                problems.append(f"{where}: {key!r} is given twice")
            seen[key] = value
        return seen

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        problems.append(f"{where}: not valid JSON ({error})")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{where}: holds JSON of type {type(value).__name__} instead of an object")
        return {}
    return value


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(name: str, entry: Any, shard: str, base: int, problems: list[str]) -> StoredTensor | None:
    """One header entry; `base` is where the file's tensors begin."""
    if not isinstance(entry, dict):
        problems.append(f"{name}: header entry in {shard} is no object")
        return None
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPE_BITS:
        problems.append(f"{name}: unknown dtype {dtype!r} in {shard}")
        return None
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        problems.append(f"{name}: shape {shape!r} in {shard} is no list of sizes")
        return None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        problems.append(f"{name}: data_offsets {offsets!r} in {shard} are no pair of positions")
        return None
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        problems.append(
            f"{name}: data_offsets {offsets} in {shard} do not fit {dtype} {shape}, which is {bits // 8} bytes"
        )
        return None
    return StoredTensor(dtype, tuple(shape), shard, base + offsets[0], base + offsets[1])


def _check_cover(shard: str, tensors: dict[str, StoredTensor], base: int, size: int, problems: list[str]) -> None:
    """The tensors must fill the file from `base` to its `size`, without gaps or overlaps."""
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "comes after a hole"
            problems.append(f"{name}: its bytes in {shard} start at {tensor.start - base} and {what} ({end - base})")
        end = max(end, tensor.end)
    if end > size:
        problems.append(f"{shard}: {size} bytes long, but its tensors need {end}: the file is truncated")
    elif end < size:
        problems.append(f"{shard}: {size - end} bytes after the last tensor belong to none")
