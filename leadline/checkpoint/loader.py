"""Putting named tensors into a model's parameters: one path for the first load and for a refit while serving.

Parameters are written in place and never rebound, so views, fused matrices and captured graphs keep their addresses.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich import progress as rich_progress
from rich.console import Console
from torch import Tensor

from leadline.checkpoint.headers import CheckpointError
from leadline.checkpoint.names import (
    Kind,
    packed_shape,
    scale_name,
    scale_shape,
    to_native,
    weight_of_scale,
    weight_specs,
)
from leadline.checkpoint.reader import Checkpoint, Progress
from leadline.config import ModelConfig
from leadline.formats import (
    e8m0_decode,
    e8m0_encode,
    fp4_dequantize,
    fp4_quantize_weight,
    fp8_dequantize,
    fp8_quantize_weight,
    power_of_two_ceil,
)

WEIGHT_DTYPES: dict[Kind, tuple[torch.dtype, ...]] = {
    "plain_bf16": (torch.bfloat16, torch.float32),
    "plain_fp32": (torch.bfloat16, torch.float32),
    "int64": (torch.int64, torch.int32),
    "fp8": (torch.bfloat16, torch.float32, torch.float8_e4m3fn),
    "expert": (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8),
}
"""In which dtypes a weight may come."""
QUANTISED = {torch.float8_e4m3fn: "fp8", torch.int8: "fp4"}
SCALES = (torch.float8_e8m0fnu, torch.float32)
E8M0_NAN = 255


@dataclass
class Slot:
    """Where a weight goes: views into the model's parameters, which may be fused or stacked.

    With `scale` the model keeps the matrix quantised: `weight` is e4m3 [out, in] or packed fp4 (int8 [out, in / 2]),
    `scale` is e8m0 or fp32, in the checkpoint's shapes. Without, `weight` has the logical shape and any dtype.
    """

    weight: Tensor
    scale: Tensor | None = None


class WeightLoader:
    """Takes named tensors in any order and any batches, and writes them into slots.

    A weight and its scales may come far apart. Whatever can be written at once is; a half that needs its partner for
    a conversion is held, as a copy, until that comes. A tensor that comes twice replaces the first one; of a
    quantised matrix both halves must come again. After any error the parameters may be partly written.
    """

    def __init__(self, config: ModelConfig, slots: Mapping[str, Slot]) -> None:
        self.specs = weight_specs(config)
        self.slots = slots
        self.experts = config.n_routed_experts
        self._halves: dict[str, Tensor] = {}  # lone halves by name: a held copy, or the slot it was written to
        self._complete: set[str] = set()
        unknown = [f"{name}: the model has no such weight" for name in slots if name not in self.specs]
        if unknown:
            raise CheckpointError("slots do not fit the config", unknown)

    def put(self, name: str, tensor: Tensor) -> None:
        """Take one tensor under its native name, or under a Hugging Face one (stacked experts are split).

        Tensors of weights without a slot are ignored. Floating-point values are cast to the slot's dtype, and
        quantised where the slot is. `tensor` may be reused by the caller afterwards. Raises CheckpointError for an
        unknown name, a wrong shape or dtype, and scales or `tid2eid` that hold impossible values.
        """
        problems: list[str] = []
        for native, part in to_native(name, tensor):
            weight = weight_of_scale(native) or native
            found = self._problems(native, weight, part)
            problems += found
            if not found and weight in self.slots:
                self._write(native, weight, part)
        if problems:
            raise CheckpointError("refused a tensor", problems)

    def finish(self, partial: bool = False) -> None:
        """End the load: raises CheckpointError naming every half without its partner, and every missing weight.

        With `partial` weights that did not come at all keep their old values.
        """
        problems = []
        for name in self._halves:
            weight = weight_of_scale(name)
            problems.append(f"{weight or scale_name(name)}: missing, its other half {name} came alone")
        if not partial:
            lone = {weight_of_scale(name) or name for name in self._halves}
            missing = [name for name in self.slots if name not in self._complete and name not in lone]
            problems += [f"{name}: missing" for name in missing]
        self._halves.clear()
        self._complete.clear()
        if problems:
            raise CheckpointError("the weights are incomplete", problems)

    # -------------------------------------------------------------------------------------------- checks

    def _problems(self, name: str, weight: str, tensor: Tensor) -> list[str]:
        """What is wrong with one native tensor, so that writing it can no longer fail."""
        spec = self.specs.get(weight)
        if spec is None or (name != weight and spec.kind not in ("fp8", "expert")):
            return [f"{name}: the model has no such tensor"]
        dtypes = WEIGHT_DTYPES[spec.kind] if name == weight else SCALES
        if tensor.dtype not in dtypes:
            return [f"{name}: dtype {tensor.dtype} is not one of {', '.join(map(str, dtypes))}"]
        if name == weight:
            shapes = [packed_shape(spec.shape, QUANTISED.get(tensor.dtype, "plain"))]
        else:
            formats = ("fp8", "fp4") if spec.kind == "expert" else ("fp8",)
            shapes = [shape for how in formats if (shape := scale_shape(spec.shape, how)) is not None]
        if tuple(tensor.shape) not in shapes:
            return [f"{name}: shape {list(tensor.shape)} is not {' or '.join(str(list(shape)) for shape in shapes)}"]
        return list(_value_problems(name, tensor, self.experts))

    # -------------------------------------------------------------------------------------------- writing

    def _write(self, name: str, weight: str, tensor: Tensor) -> None:
        """Write one checked tensor, or keep it until its partner comes."""
        slot = self.slots[weight]
        if name == weight and tensor.dtype not in QUANTISED:
            self._halves.pop(weight, None)
            self._halves.pop(scale_name(weight), None)
            _write_values(slot, tensor.to(slot.weight.device))
            self._complete.add(weight)
            return
        self._halves.pop(name, None)
        partner = self._halves.pop(scale_name(weight) if name == weight else weight, None)
        if partner is not None:
            codes, scale = (tensor, partner) if name == weight else (partner, tensor)
            self._check_pair(weight, codes, scale)
            _write_pair(slot, codes.to(slot.weight.device), scale.to(slot.weight.device))
            self._complete.add(weight)
            return
        place = slot.weight if name == weight else slot.scale
        if slot.scale is not None and place is not None and _same_form(place, tensor):
            place.copy_(tensor)
            self._halves[name] = place
        else:
            self._halves[name] = tensor.to(slot.weight.device, copy=True)

    def _check_pair(self, weight: str, codes: Tensor, scale: Tensor) -> None:
        wanted = scale_shape(self.specs[weight].shape, QUANTISED[codes.dtype])
        if tuple(scale.shape) != wanted:
            problem = f"{scale_name(weight)}: shape {list(scale.shape)} is not {list(wanted or ())} for {codes.dtype}"
            raise CheckpointError("refused a tensor", [problem])


def load(
    config: ModelConfig,
    slots: Mapping[str, Slot],
    checkpoint: Checkpoint,
    progress: Progress | None = None,
) -> None:
    """Check `checkpoint` against `config`, then fill every slot from it.

    Raises CheckpointError: before any tensor is read for whatever the headers show, afterwards for bad values.
    """
    checkpoint.validate(config)
    absent = [f"{name}: the checkpoint has no such tensor" for name in slots if name not in checkpoint.headers]
    if absent:
        raise CheckpointError(f"{checkpoint.folder} lacks weights of the model", absent)
    loader = WeightLoader(config, slots)
    for_gpu = any(slot.weight.is_cuda for slot in slots.values())
    put_all(loader, checkpoint.tensors(progress, slots, for_gpu))
    loader.finish()


def put_all(loader: WeightLoader, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Put every (name, tensor) into `loader`. Raises CheckpointError naming every bad tensor, not only the first."""
    problems: list[str] = []
    for name, tensor in tensors:
        try:
            loader.put(name, tensor)
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError("refused tensors", problems)


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A progress bar on standard error, if that is a terminal, while the context lasts: a callback for `load`."""
    console = Console(stderr=True)
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ------------------------------------------------------------------------------------------------ one tensor


def _value_problems(name: str, tensor: Tensor, experts: int) -> Iterator[str]:
    """Cheap scans for values that no sound checkpoint holds: bad scales, expert ids out of range or repeated."""
    if weight_of_scale(name):
        low, high = (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor).aminmax()
        sound = high < E8M0_NAN if tensor.dtype == torch.float8_e8m0fnu else (low > 0) & (high < float("inf"))
        if not sound:  # a NaN fails every comparison
            yield f"{name}: some scales are not finite and positive"
    elif name.endswith("tid2eid"):
        outside = int(((tensor < 0) | (tensor >= experts)).any(-1).sum())
        if outside:
            yield f"{name}: {outside} rows name an expert outside 0..{experts - 1}"
        ordered = tensor.sort(-1).values
        repeated = int((ordered[:, 1:] == ordered[:, :-1]).any(-1).sum())
        if repeated:
            yield f"{name}: {repeated} rows name an expert twice"


def _same_form(place: Tensor, tensor: Tensor) -> bool:
    return place.dtype == tensor.dtype and place.shape == tensor.shape


def _write_values(slot: Slot, values: Tensor) -> None:
    """Unquantised values into a slot, quantised as the slot keeps them."""
    if slot.scale is None:
        slot.weight.copy_(values)
        return
    quantise = fp4_quantize_weight if slot.weight.dtype == torch.int8 else fp8_quantize_weight
    codes, scale = quantise(values, slot.scale.dtype)
    slot.weight.copy_(codes)
    slot.scale.copy_(scale)


def _write_pair(slot: Slot, weight: Tensor, scale: Tensor) -> None:
    """A quantised matrix into a slot: as it is where the formats agree, expanded (and quantised anew) elsewhere."""
    if slot.scale is not None and _same_form(slot.weight, weight):
        kept = _scales_as(scale, slot.scale.dtype)
        if kept is not None:
            slot.weight.copy_(weight)
            slot.scale.copy_(kept)
            return
    expand = fp4_dequantize if weight.dtype == torch.int8 else fp8_dequantize
    _write_values(slot, expand(weight, scale, torch.float32 if slot.scale is not None else slot.weight.dtype))


def _scales_as(scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Scales of equal value in another dtype; None where e8m0 is asked for and they are not powers of two."""
    if scale.dtype == dtype:
        return scale
    if dtype == torch.float32:
        return e8m0_decode(scale)
    return e8m0_encode(scale) if torch.equal(power_of_two_ceil(scale), scale) else None
