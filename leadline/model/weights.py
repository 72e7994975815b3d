"""Where the model's weights live: one place decides their formats, fuses them, and tells the loader about them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from leadline.checkpoint.loader import Slot
from leadline.checkpoint.names import WeightFormat, weight_specs
from leadline.config import ModelConfig
from leadline.formats import FP4_BLOCK, FP8_BLOCK
from leadline.kernels.arrange import arrange_experts, restore_experts
from leadline.kernels.mix import Mixing
from leadline.kernels.project import Weight
from leadline.model.state import gate_dtype


class WeightStore:
    """Allocates weights, uninitialised, and collects a `Slot` for every checkpoint tensor that fills one.

    With `keep` the fp8 and fp4 matrices stay in that format, as the checkpoint has them; without, everything is
    expanded into `dtype`. Small tensors that are only used in fp32 are held in fp32. `deterministic`: a token's result
    is to have the same bits in every batch (see `EngineConfig`). Raises ValueError where fused
    matrices cannot share their scales.
    """

    def __init__(
        self,
        config: ModelConfig,
        keep: WeightFormat | None,
        dtype: torch.dtype,
        native: bool,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        self.config, self.keep, self.dtype, self.native, self.device = config, keep, dtype, native, device
        self.deterministic = deterministic
        self.specs = weight_specs(config)
        self.slots: dict[str, Slot] = {}
        self._stacks: dict[str, list[Weight]] = {}  # w13 and w2 by the layer's prefix

    @contextmanager
    def filling(self) -> Iterator[None]:
        """While the context lasts `slots` may be written: at first, or anew in a running engine (no step may run).

        Outside of it a layer's stacks may lie in the order that their kernel reads; within, everything is in the
        checkpoint's. What is not written keeps its value. Whether stacks can be arranged depends on their values, so
        a captured graph stays good only if each `Weight.form` is what it was before.
        """
        for stacks in self._stacks.values():
            restore_experts(stacks)
        try:
            yield
        finally:
            for stacks in self._stacks.values():
                arrange_experts(stacks, self.dtype)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One unfused tensor, by default in the model's dtype."""
        value = self._empty(self.specs[name].shape, dtype or self.dtype)
        self.slots[name] = Slot(value)
        return value

    def wide(self, name: str) -> Tensor:
        """One tensor in the precision of norms and gates: fp32, or fp64 in an fp64 model."""
        return self.tensor(name, gate_dtype(self.dtype))

    def gate(self, name: str) -> Tensor:
        """A router's gate, in bf16 where that is how it comes and bf16 is the model's dtype: a kernel reads half."""
        stored = "fp32" if self.keep is None else self.keep.of(self.specs[name].kind)
        narrow = stored == "bf16" and self.dtype == torch.bfloat16
        return self.tensor(name) if narrow else self.wide(name)

    def integers(self, name: str) -> Tensor:
        """One table of indices."""
        return self.tensor(name, torch.int64)

    def matrix(self, *names: str) -> Weight:
        """The matrices `names` (without `.weight`), their rows concatenated into one [sum of rows, in]."""
        specs = [self.specs[f"{name}.weight"] for name in names]
        rows, columns = sum(spec.shape[0] for spec in specs), specs[0].shape[1]
        weight = self._allocate((rows, columns), specs[0].kind, [spec.shape[0] for spec in specs])
        start = 0
        for name, spec in zip(names, specs, strict=True):
            self._add_slot(f"{name}.weight", weight, slice(start, start + spec.shape[0]))
            start += spec.shape[0]
        return weight

    def experts(self, prefix: str, *names: str) -> Weight:
        """The routed experts' matrices `names` of `prefix`, rows concatenated, stacked [E, sum of rows, in]."""
        count = self.config.n_routed_experts
        shapes = [self.specs[f"{prefix}.0.{name}.weight"].shape for name in names]
        parts = [shape[0] for shape in shapes]
        stack = self._allocate((count, sum(parts), shapes[0][1]), "expert", parts)
        for index in range(count):
            start = 0
            for name, size in zip(names, parts, strict=True):
                rows = slice(start, start + size)
                self._add_slot(f"{prefix}.{index}.{name}.weight", stack.expert(index), rows)
                start += size
        self._stacks.setdefault(prefix, []).append(stack)
        return stack

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """A wide tensor of zeros, of which the checkpoint fills parts (see `place`)."""
        return self._empty(shape, gate_dtype(self.dtype)).zero_()

    def place(self, name: str, view: Tensor) -> None:
        """Let the checkpoint's tensor `name` fill `view`."""
        self.slots[name] = Slot(view)

    def mixing(self, prefix: str) -> Mixing:
        """A hyper-connection's `fn`, `base` and `scale`."""
        return Mixing(self.wide(f"{prefix}_fn"), self.wide(f"{prefix}_base"), self.wide(f"{prefix}_scale"))

    def _allocate(self, shape: tuple[int, ...], kind: str, parts: list[int]) -> Weight:
        rounds = self.native and kind in ("fp8", "expert")
        stored = self._stored(kind)
        if stored == "fp8":
            if any(size % FP8_BLOCK for size in parts[:-1]):
                raise ValueError(
                    f"fp8 matrices of {parts} rows cannot be joined in checkpoint format: all but the last must have "
                    f"a multiple of {FP8_BLOCK} rows; choose dtype='bfloat16'"
                )
            blocks = (-(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))
            scale = self._empty((*shape[:-2], *blocks), self._scale_dtype())
            return Weight(self._empty(shape, torch.float8_e4m3fn), scale, rounds, self.deterministic)
        if stored == "fp4":
            scale = self._empty((*shape[:-1], shape[-1] // FP4_BLOCK), self._scale_dtype())
            packed = self._empty((*shape[:-1], shape[-1] // 2), torch.int8)
            return Weight(packed, scale, rounds, self.deterministic)
        return Weight(self._empty(shape, self.dtype), None, rounds, self.deterministic)

    def _stored(self, kind: str) -> str:
        """The format in which a matrix is kept: "fp8", "fp4" or "plain"."""
        if self.keep is None or kind not in ("fp8", "expert"):
            return "plain"
        stored = self.keep.experts if kind == "expert" else self.keep.dense
        return stored if stored in ("fp8", "fp4") else "plain"

    def _scale_dtype(self) -> torch.dtype:
        assert self.keep is not None
        return torch.float8_e8m0fnu if self.keep.scales == "e8m0" else torch.float32

    def _add_slot(self, name: str, weight: Weight, rows: slice) -> None:
        scale = weight.scale
        if scale is not None and weight.data.dtype == torch.float8_e4m3fn:
            scale = scale[rows.start // FP8_BLOCK : -(-rows.stop // FP8_BLOCK)]
        elif scale is not None:
            scale = scale[rows]
        self.slots[name] = Slot(weight.data[rows], scale)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)
