"""Reading a checkpoint: everything is checked from headers, then tensors are streamed in pairs of scale and weight."""

import logging
import mmap
import os
import re
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leadline.checkpoint.headers import CheckpointError, StoredTensor, read_headers
from leadline.checkpoint.names import (
    SCALE_DTYPES,
    STORED_DTYPES,
    Kind,
    Part,
    Shape,
    WeightFormat,
    WeightSpec,
    is_ignored,
    native_parts,
    packed_shape,
    scale_name,
    scale_shape,
    weight_of_scale,
    weight_specs,
)
from leadline.config import ModelConfig

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

TORCH_DTYPES = {
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The dtypes that a valid V4 checkpoint holds."""

PLAIN_DTYPES = {"plain_bf16": ("BF16", "F32"), "plain_fp32": ("F32", "BF16"), "int64": ("I64", "I32")}
"""Tensors without scales: the released dtype first, then what `transformers` may have saved instead."""

READ_THREADS = 4
READ_BYTES = 32 << 20
"""What one thread reads at once. At most twice `READ_THREADS` such pieces are read ahead of the consumer."""

_DENSE_NAME = re.compile(r".*\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|shared_experts\.w[123])\.weight")
_EXPERT_NAME = re.compile(r".*\.experts\.\d+\.w[123]\.weight")


class Header(NamedTuple):
    """A native tensor as its file's header describes it. fp4 matrices are "I8" [out, in / 2] whatever their container."""

    dtype: str
    shape: Shape
    shard: str


class Checkpoint:
    """A folder of safetensors with native or Hugging Face names, all of whose headers are sound.

    `headers` has every tensor by native name. Raises FileNotFoundError, or CheckpointError listing every problem.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, Header] = {}
        self._sources: dict[str, tuple[StoredTensor, Part]] = {}
        self.ignored: list[str] = []
        problems: list[str] = []
        for name, stored in read_headers(folder).items():
            for part in native_parts(name, stored.shape):
                self._add(name, stored, part, problems)
        if problems:
            raise CheckpointError(f"{folder} is not a usable checkpoint", problems)
        if self.ignored:
            log.warning("%s: ignoring %s", folder, ", ".join(self.ignored))

    def _add(self, name: str, stored: StoredTensor, part: Part, problems: list[str]) -> None:
        if is_ignored(part.name):
            self.ignored.append(part.name)
        elif part.name in self.headers:
            problems.append(f"{part.name}: given twice, the second time as {name} in {stored.shard}")
        else:
            self.headers[part.name] = _native_header(stored, part)
            self._sources[part.name] = (stored, part)

    @property
    def has_draft(self) -> bool:
        """Whether there are draft blocks `mtp.*`. What `transformers` saves has none, whatever its config says."""
        return any(name.startswith("mtp.") for name in self.headers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_part_bytes(*source) for source in self._sources.values())

    @property
    def format(self) -> WeightFormat:
        """How the weights are stored, by what most of the headers say. Raises CheckpointError where none tells."""
        dense = self._most_common(_DENSE_NAME, {"F8_E4M3": "fp8", "BF16": "bf16", "F32": "fp32"})
        experts = self._most_common(_EXPERT_NAME, {"I8": "fp4", "F8_E4M3": "fp8", "BF16": "bf16", "F32": "fp32"})
        scales = Counter(header.dtype for name, header in self.headers.items() if weight_of_scale(name))
        return WeightFormat(dense, experts, "f32" if scales["F32"] > scales["F8_E8M0"] else "e8m0")  # type: ignore[arg-type]

    def _most_common(self, names: re.Pattern[str], formats: dict[str, str]) -> str:
        counts = Counter(header.dtype for name, header in self.headers.items() if names.fullmatch(name))
        for dtype, _ in counts.most_common():
            if dtype in formats:
                return formats[dtype]
        raise CheckpointError(
            f"{self.folder} is not a usable checkpoint",
            [f"no tensor like {names.pattern} has one of the dtypes {', '.join(formats)} (found: {dict(counts)})"],
        )

    def validate(self, config: ModelConfig) -> None:
        """Compare every header with what `config` needs; raises CheckpointError listing every difference.

        All draft blocks may be absent (see `has_draft`); one that is there must be whole.
        """
        form = self.format
        problems = list(_contradictions(config, form, self.headers))
        specs = weight_specs(config)
        if not self.has_draft:
            specs = {name: spec for name, spec in specs.items() if not name.startswith("mtp.")}
        known = set()
        for name, spec in specs.items():
            known |= {name, scale_name(name)}
            problems += _check_weight(name, spec, form, self.headers)
        problems += [
            f"{name}: unknown tensor in {header.shard}" for name, header in self.headers.items() if name not in known
        ]
        if problems:
            raise CheckpointError(f"{self.folder} does not fit its config", problems)

    # -------------------------------------------------------------------------------------------- streaming

    def tensors(
        self, progress: Progress | None = None, only: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every (native name, tensor), a weight's scales directly before the weight; `only` names wanted weights.

        Tensors are read-only views of mapped files, which stay valid. Their pages are given back as the stream moves
        on, so that resident memory does not grow with the checkpoint; a few threads read ahead.
        """
        order = self._reading_order(only)
        total = sum(_part_bytes(*self._sources[name]) for name in order)
        done = 0
        files = {shard: _MappedFile(self.folder / shard) for shard in {self._sources[name][0].shard for name in order}}
        with ThreadPoolExecutor(READ_THREADS, "read") as pool:
            for pieces in _read_ahead(pool, files, [self._sources[name] for name in order]):
                for index in pieces.indices:
                    stored, part = self._sources[order[index]]
                    yield order[index], part.of(files[stored.shard].tensor(stored))
                    done += _part_bytes(stored, part)
                    if progress is not None:
                        progress(done, total)
                pieces.release(files)

    def _reading_order(self, only: Collection[str] | None) -> list[str]:
        """Weights as they lie in the files, each after its scales."""
        weights = [name for name in self._sources if weight_of_scale(name) not in self._sources]
        if only is not None:
            weights = [name for name in weights if name in only]
        weights.sort(key=lambda name: (self._sources[name][0].shard, self._sources[name][0].start))
        order = []
        for name in weights:
            if scale_name(name) in self._sources and name.endswith(".weight"):
                order.append(scale_name(name))
            order.append(name)
        return order
