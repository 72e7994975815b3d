"""Models without a checkpoint: the geometry of a preset, weights drawn at random in the official formats.

For measuring. Every matrix turns inputs of variance 1 into outputs of variance about 1, norms are 1, biases and sinks
small, and the gate's scores are alike for all experts, so that routing is near uniform.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leadline.checkpoint.loader import Slot
from leadline.checkpoint.names import WeightFormat
from leadline.config import EngineConfig, ModelConfig, Ratio
from leadline.engine.engine import Engine
from leadline.engine.loading import BUILT_IN, build_engine
from leadline.engine.start import Start
from leadline.formats import E2M1_VALUES
from leadline.kernels.project import Weight
from leadline.model.weights import WeightStore
from leadline.presets import PRESETS, preset, with_layers

TINY = "tiny"
"""The name of the built-in model's geometry; it is no released model, and so no preset."""
SMALL = 0.1
"""The standard deviation of sinks, biases and the like."""
TABLE_ROWS = 1 << 14
"""Rows of a hash table that are drawn at a time."""


def geometry(name: str, ratios: Sequence[int] | int | None = None) -> ModelConfig:
    """The model `name` of the presets, or "tiny", with its own layers, the first `ratios` of them, or layers of these
    compression ratios. Raises ValueError for an unknown name and for layers that such a model cannot have.
    """
    if name != TINY and name not in PRESETS:
        raise ValueError(f"there are no random weights of {name!r}; there are {', '.join([TINY, *PRESETS])}")
    model = ModelConfig.from_folder(BUILT_IN) if name == TINY else preset(name)
    if ratios is None:
        return with_layers(model, model.compress_ratios)
    if isinstance(ratios, int):
        if not 1 <= ratios <= model.num_hidden_layers:
            raise ValueError(f"{name} has {model.num_hidden_layers} layers; {ratios} of them were asked for")
        return with_layers(model, model.compress_ratios[:ratios])
    unknown = sorted(set(ratios) - set(Ratio))
    if unknown or not ratios:
        raise ValueError(f"layers of ratio {unknown or 'none'} were asked for; there are {[int(r) for r in Ratio]}")
    return with_layers(model, [Ratio(ratio) for ratio in ratios])


def official_format(model: ModelConfig) -> WeightFormat:
    """How the released checkpoints of such a model store its weights."""
    if not model.quantized:
        return WeightFormat("bf16", "bf16")
    return WeightFormat("fp8", "fp4") if model.expert_dtype == "fp4" else WeightFormat("fp8", "fp8", "f32")


def random_engine(config: EngineConfig, model: ModelConfig, stacks: int, progress: bool) -> tuple[Engine, int]:
    """An engine of `model` with random weights of seed `config.seed`, and the bytes that they take.

    `stacks` is the number of distinct stacks of experts (see `RandomWeights`).
    """
    made: list[RandomWeights] = []

    def fill(weights: WeightStore) -> None:
        assert isinstance(weights, RandomWeights)
        made.append(weights)
        fill_random(weights, config.seed)

    store = functools.partial(RandomWeights, stacks)
    engine = build_engine(model, config, official_format(model), store, fill, None, Start(progress))
    return engine, made[0].bytes


class RandomWeights(WeightStore):
    """Weights of which layer i has the experts of layer i % `stacks`, so that a deep model fits.

    The layers' gates differ, and so do the experts that they choose. With two stacks or more, of which each is far
    larger than any cache, a layer finds no expert in the cache that an earlier one has read. Raises ValueError for
    less than one stack.
    """

    def __init__(
        self,
        stacks: int,
        config: ModelConfig,
        keep: WeightFormat | None,
        dtype: torch.dtype,
        native: bool,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        if stacks < 1:
            raise ValueError(f"{stacks} distinct stacks of experts were asked for; there must be 1 at least")
        super().__init__(config, keep, dtype, native, device, deterministic)
        self.stacks = stacks
        self.bytes = 0
        self._shared: dict[tuple[int, tuple[str, ...]], Weight] = {}

    def experts(self, prefix: str, *names: str) -> Weight:
        """As in `WeightStore`; the same object for layers that share."""
        layer = int(prefix.split(".")[1])
        key = (layer % self.stacks, names)
        if key not in self._shared:
            self._shared[key] = super().experts(prefix, *names)
        return self._shared[key]

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = super()._empty(shape, dtype)
        self.bytes += tensor.nbytes
        return tensor


def fill_random(weights: WeightStore, seed: int) -> None:
    """Fill every slot, on the weights' device."""
    draw = torch.Generator(weights.device).manual_seed(seed)
    for name, slot in weights.slots.items():
        _fill(name, slot, weights.config, draw)


def _fill(name: str, slot: Slot, config: ModelConfig, draw: torch.Generator) -> None:
    values = slot.weight
    if slot.scale is not None:
        _fill_codes(values, slot.scale, draw)
    elif name.endswith("tid2eid"):
        _fill_table(values, config.n_routed_experts, draw)
    elif name.endswith(("norm.weight", "_scale")):
        values.fill_(1)
    elif name.endswith(("attn_sink", "_base", ".bias", ".ape")):
        values.normal_(0, SMALL, generator=draw)
    else:
        values.normal_(0, 1 if name == "embed.weight" else values.shape[-1] ** -0.5, generator=draw)


def _fill_codes(codes: Tensor, scale: Tensor, draw: torch.Generator) -> None:
    """Every code is equally likely, NaN aside; each block has one of two neighbouring scales."""
    codes.view(torch.uint8).random_(generator=draw)
    columns, square = codes.shape[-1], _E4M3_SQUARE
    if codes.dtype == torch.int8:
        columns, square = 2 * columns, _E2M1_SQUARE
    else:
        bits = codes.view(torch.uint8)
        bits.masked_fill_((bits & 0x7F) == 0x7F, 0)
    wanted = 1 / (columns * square)
    if scale.dtype == torch.float32:
        scale.fill_(math.sqrt(wanted))
        return
    exponent = math.floor(math.log2(wanted) / 2)
    larger = (wanted / 4**exponent - 1) / 3  # the share that has the next power of two
    scale.view(torch.uint8).bernoulli_(larger, generator=draw).add_(127 + exponent)


def _fill_table(table: Tensor, experts: int, draw: torch.Generator) -> None:
    """`table` [V, k]: k different experts for every token id."""
    for rows in table.split(TABLE_ROWS):
        order = torch.rand(len(rows), experts, generator=draw, device=table.device)
        rows.copy_(order.topk(table.shape[1]).indices)


_E2M1_SQUARE = sum(value**2 for value in E2M1_VALUES) / len(E2M1_VALUES)
_E4M3_SQUARE = float(
    torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0).square().mean()
)
"""The mean square of a code drawn at random."""
