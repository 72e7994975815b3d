"""Opening a checkpoint: everything is checked from headers before any tensor is read, then tensors are streamed."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from leadline.checkpoint.headers import CheckpointError, StoredTensor, read_headers
from leadline.checkpoint.names import (
    SCALE_DTYPES,
    STORED_DTYPES,
    Kind,
    Part,
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
from leadline.checkpoint.stream import staged, stream
from leadline.config import ModelConfig

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

PLAIN_DTYPES: dict[Kind, tuple[str, ...]] = {
    "plain_bf16": ("BF16", "F32"),
    "plain_fp32": ("F32", "BF16"),
    "int64": ("I64", "I32"),
}
"""Allowed for tensors without scales: the released dtype, then what other software writes without harm."""

_DENSE = re.compile(r".*\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|shared_experts\.w[123])\.weight")
_EXPERT = re.compile(r".*\.experts\.\d+\.w[123]\.weight")
_FORMATS: dict[str, Any] = {"I8": "fp4", "F8_E4M3": "fp8", "BF16": "bf16", "F32": "fp32"}


class Checkpoint:
    """A folder of safetensors with native or Hugging Face names, all of whose headers are sound.

    `headers` has every tensor by native name; a matrix of a stack of experts appears as a tensor of its own, packed
    fp4 always as I8 [out, in / 2]. Raises FileNotFoundError, or CheckpointError listing every problem.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.headers: dict[str, StoredTensor] = {}
        self.ignored: list[str] = []
        problems: list[str] = []
        for name, stored in read_headers(folder).items():
            for part in native_parts(name, stored.shape):
                if is_ignored(part.name):
                    self.ignored.append(part.name)
                elif part.name in self.headers:
                    problems.append(f"{part.name}: given twice, the second time as {name} in {stored.shard}")
                else:
                    self.headers[part.name] = _as_native(stored, part)
        if problems:
            raise CheckpointError(f"{folder} is not a usable checkpoint", problems)
        if self.ignored:
            log.warning("%s: ignoring %s", folder, ", ".join(self.ignored))

    @property
    def has_draft(self) -> bool:
        """Whether there are draft blocks `mtp.*`. What `transformers` saves has none, whatever its config says."""
        return any(name.startswith("mtp.") for name in self.headers)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.nbytes for stored in self.headers.values())

    @property
    def format(self) -> WeightFormat:
        """How the weights are stored, by what most of the headers say. Raises CheckpointError where none tells."""
        dense = self._most_common(_DENSE, ("F8_E4M3", "BF16", "F32"))
        experts = self._most_common(_EXPERT, ("I8", "F8_E4M3", "BF16", "F32"))
        scales = Counter(stored.dtype for name, stored in self.headers.items() if weight_of_scale(name))
        return WeightFormat(dense, experts, "f32" if scales["F32"] > scales["F8_E8M0"] else "e8m0")

    def _most_common(self, names: re.Pattern[str], dtypes: tuple[str, ...]) -> Any:
        counts = Counter(stored.dtype for name, stored in self.headers.items() if names.fullmatch(name))
        for dtype, _ in counts.most_common():
            if dtype in dtypes:
                return _FORMATS[dtype]
        what = "routed experts" if names is _EXPERT else "attention weights"
        problem = f"no {what} with dtype {' or '.join(dtypes)} (found: {', '.join(counts) or 'none'})"
        raise CheckpointError(f"{self.folder} is not a DeepSeek-V4 checkpoint", [problem])

    def validate(self, config: ModelConfig) -> None:
        """Compare every header with what `config` needs; raises CheckpointError listing every difference.

        The draft blocks may be absent all together (see `has_draft`), but not in part.
        """
        form = self.format
        problems = list(_contradictions(config, form, self.headers))
        specs = weight_specs(config)
        if not self.has_draft:
            specs = {name: spec for name, spec in specs.items() if not name.startswith("mtp.")}
        for name, spec in specs.items():
            problems += _check_weight(name, spec, form, self.headers)
        for name, stored in self.headers.items():
            if (weight_of_scale(name) or name) not in specs:
                problems.append(f"{name}: unknown tensor in {stored.shard}")
        if problems:
            raise CheckpointError(f"{self.folder} does not fit its config", problems)

    def tensors(
        self, progress: Progress | None = None, only: Collection[str] | None = None, for_gpu: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Every (native name, tensor) as a read-only view, the scales of a weight directly before it.

        `only` names the wanted weights, whose scales come with them. `for_gpu`: in page-locked memory, and each tensor
        valid only until the next one is asked for. Memory: see `leadline.checkpoint.stream`.
        """
        order = self._reading_order(only)
        stored = [self.headers[name] for name in order]
        done, total = 0, sum(tensor.nbytes for tensor in stored)
        tensors = staged(self.folder, stored) if for_gpu else stream(self.folder, stored)
        for name, header, tensor in zip(order, stored, tensors, strict=True):
            yield name, tensor
            done += header.nbytes
            if progress is not None:
                progress(done, total)

    def _reading_order(self, only: Collection[str] | None) -> list[str]:
        """Names as they lie in the files, except that a weight's scales are moved before it."""
        order: list[str] = []
        for name in sorted(self.headers, key=lambda name: (self.headers[name].shard, self.headers[name].start)):
            if weight_of_scale(name) in self.headers or (only is not None and name not in only):
                continue
            if scale_name(name) in self.headers:
                order.append(scale_name(name))
            order.append(name)
        return order


def _as_native(stored: StoredTensor, part: Part) -> StoredTensor:
    """The bytes of one native tensor within a stored one, with containers of fp4 and e8m0 called by one name."""
    shape, start, end = stored.shape, stored.start, stored.end
    if part.expert is not None:
        size = stored.nbytes // shape[0]
        shape, start = shape[1:], start + part.expert * size
        if part.rows is not None:
            row = size // shape[0] if shape[0] else 0
            shape = (part.rows.stop - part.rows.start, *shape[1:])
            start, size = start + part.rows.start * row, shape[0] * row
        end = start + size
    dtype = stored.dtype
    if weight_of_scale(part.name) and dtype == "U8":
        dtype = "F8_E8M0"
    elif _EXPERT.fullmatch(part.name) and dtype == "U8":
        dtype = "I8"
    elif _EXPERT.fullmatch(part.name) and dtype == "F4":
        dtype, shape = "I8", (*shape[:-1], shape[-1] // 2)
    return replace(stored, dtype=dtype, shape=shape, start=start, end=end)


# ------------------------------------------------------------------------------------------------ validation


def _contradictions(config: ModelConfig, form: WeightFormat, headers: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Where the config as a whole speaks of another checkpoint."""
    if config.expert_dtype not in (None, form.experts):
        yield f"config.json says expert_dtype is {config.expert_dtype!r}, but the expert tensors are {form.experts}"
    if config.dspark is not None and "mtp.0.e_proj.weight" in headers:
        yield "config.json describes a DSpark draft module (dspark_*), but the tensors are those of MTP"
    if config.dspark is None and "mtp.0.main_proj.weight" in headers:
        yield "the tensors hold a DSpark draft module, but config.json has no dspark_* keys"


def _check_weight(
    name: str, spec: WeightSpec, form: WeightFormat, headers: Mapping[str, StoredTensor]
) -> Iterator[str]:
    """Every problem of one weight and its scales."""
    if spec.kind in PLAIN_DTYPES:
        yield from _check_tensor(name, PLAIN_DTYPES[spec.kind], spec.shape, headers)
        if name.endswith(".weight"):
            yield from _check_absent(scale_name(name), f"its weight is {spec.kind} and has none", headers)
        return
    how = form.of(spec.kind)
    yield from _check_tensor(name, (STORED_DTYPES[how],), packed_shape(spec.shape, how), headers)
    scales = scale_shape(spec.shape, how)
    if scales is None:
        yield from _check_absent(scale_name(name), f"its weight is {how} and has none", headers)
    else:
        yield from _check_tensor(scale_name(name), (SCALE_DTYPES[form.scales],), scales, headers)


def _check_tensor(
    name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], headers: Mapping[str, StoredTensor]
) -> Iterator[str]:
    stored = headers.get(name)
    if stored is None:
        yield f"{name}: missing (expected {dtypes[0]} {list(shape)})"
        return
    if stored.dtype not in dtypes:
        yield f"{name}: expected dtype {' or '.join(dtypes)}, found {stored.dtype} in {stored.shard}"
    if stored.shape != shape:
        turned = ", which is transposed" if stored.shape == shape[::-1] else ""
        yield f"{name}: expected shape {list(shape)}, found {list(stored.shape)}{turned}, in {stored.shard}"


def _check_absent(name: str, why: str, headers: Mapping[str, StoredTensor]) -> Iterator[str]:
    if name in headers:
        yield f"{name}: unexpected scales in {headers[name].shard}, {why}"
