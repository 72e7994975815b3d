"""What a step cannot take less than: the bytes it must read over the memory's bandwidth, its products over the rate
of multiplication. Both are measured on the machine itself, in the same run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray

from leadline.checkpoint.headers import DTYPE_BITS
from leadline.checkpoint.names import WeightFormat, stored_tensors, weight_of_scale, weight_specs
from leadline.config import CSA_RATIO, HCA_RATIO, ModelConfig, Ratio
from leadline.kernels.packed import KvRows
from leadline.model.pools import Packed
from leadline.model.state import State

OPERATIONS = (
    *("mix", "project", "query/store", "compress", "select", "attend"),
    *("output", "route", "experts", "head", "sample", "other"),
)
"""The parts of a step. `select` has the indexer's projections, `query/store` the norm of the latent query."""

_PLACES = (
    ("hc_", "mix"),
    ("norm.", "mix"),
    ("attn_sink", "attend"),
    (".wo_a.", "output"),
    ("compressor.", "compress"),
    (".indexer.", "select"),
    (".attn.w", "project"),
    (".ffn.gate.", "route"),
    (".shared_experts.", "experts"),
    ("head.weight", "head"),
)
"""The first that a tensor's name contains tells which operation reads it."""
_SPARSE = ("embed.weight", "tid2eid", ".ffn.experts.", "mtp.")
"""Of these a decode step reads a row or two, what it chose, or nothing."""


@dataclass(frozen=True)
class RowBytes:
    """Bytes that reading one KV row (a window row or an entry) and one index key takes."""

    kv: int
    key: int

    @classmethod
    def of(cls, state: State) -> "RowBytes":
        """As the engine keeps them; without the padding of blocks."""
        window, keys = state.window, state.index_keys
        if isinstance(window, Packed) and isinstance(keys, Packed):
            rows: KvRows = window.whole
            return cls(rows.row_bytes + rows.scale_bytes, keys.whole.width // 2 + keys.whole.width // 32)
        assert not isinstance(window, Packed) and not isinstance(keys, Packed)
        return cls(window.shape[-1] * window.itemsize, keys.shape[-1] * keys.itemsize)


@dataclass(frozen=True)
class Machine:
    """What was measured of a device: bytes read per second, and operations per second of large products."""

    bandwidth: float
    rate: float

    @classmethod
    def measured(cls, device: torch.device) -> "Machine":
        """The best of a few: a sum of fp32 values far larger than any cache, and a square product (bf16 on a GPU)."""
        if device.type == "cuda":
            count = 1 << 30 if torch.cuda.mem_get_info(device)[0] > 6 << 30 else 1 << 26
            return cls(_bandwidth(count, device), _rate(8192, torch.bfloat16, device))
        return cls(_bandwidth(1 << 24, device), _rate(512, torch.float32, device))


def _bandwidth(count: int, device: torch.device) -> float:
    values = torch.zeros(count, device=device)
    return values.nbytes / _best_seconds(values.sum, device)


def _rate(side: int, dtype: torch.dtype, device: torch.device) -> float:
    square = torch.randn(side, side, device=device).to(dtype)
    return 2 * side**3 / _best_seconds(lambda: square @ square, device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(6):
        wait(device)
        begun = perf_counter()
        work()
        wait(device)
        times.append(perf_counter() - begun)
    return min(times[1:])


def wait(device: torch.device) -> None:
    """Until the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Floors:
    """The least that steps of a model can take, weights read as `stored` and rows as `rows` has them."""

    def __init__(self, model: ModelConfig, stored: WeightFormat, rows: RowBytes, machine: Machine) -> None:
        self.model, self.rows, self.machine = model, rows, machine
        self.dense = dense_bytes(model, stored)
        self.expert = expert_bytes(model, stored)

    def decode(self, batch: int, context: int, experts_hit: float) -> dict[str, float]:
        """Seconds of a decode step of `batch` requests with `context` tokens each, by operation.

        `experts_hit` is the number of distinct routed experts that the step reads, over all layers.
        """
        moved: dict[str, float] = dict(self.dense)
        moved["experts"] += experts_hit * self.expert
        for ratio in self.model.compress_ratios:
            attended, scored = self.row_bytes(ratio, context)
            moved["attend"] += batch * attended
            moved["select"] += batch * scored
        return {operation: count / self.machine.bandwidth for operation, count in moved.items()}

    def row_bytes(self, ratio: Ratio, context: int) -> tuple[int, int]:
        """Bytes that one token reads in a layer: of window rows and entries, and of index keys."""
        entries, scored = 0, 0
        if ratio == Ratio.CSA:
            entries = min(self.model.index_topk, context // CSA_RATIO)
            scored = context // CSA_RATIO if context // CSA_RATIO > self.model.index_topk else 0
        elif ratio == Ratio.HCA:
            entries = context // HCA_RATIO
        return (min(self.model.sliding_window, context) + entries) * self.rows.kv, scored * self.rows.key

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt of `tokens`, by its operations alone: weights' products, attention and index scores.

        Only the last token's logits are wanted, so that the head does not count.
        """
        model, at = self.model, np.arange(1, tokens + 1)
        total = 2.0 * tokens * (dense_parameters(model) + _expert_parameters(model) * model.num_hidden_layers)
        per_row = 4 * model.num_attention_heads * model.head_dim
        per_key = 2 * model.index_n_heads * model.index_head_dim
        total += per_row * model.num_hidden_layers * float(np.minimum(at, model.sliding_window).sum())
        entries = at // CSA_RATIO
        chosen = np.minimum(entries, model.index_topk).sum()
        total += len(model.csa_layers) * float(per_row * chosen + per_key * entries[entries > model.index_topk].sum())
        total += len(model.hca_layers) * float(per_row * (at // HCA_RATIO).sum())
        return total / self.machine.rate


def dense_bytes(model: ModelConfig, stored: WeightFormat) -> dict[str, int]:
    """Bytes of the weights that every decode step reads, by operation: all but embedding, tables, routed experts."""
    found = dict.fromkeys(OPERATIONS, 0)
    for name, (dtype, shape) in stored_tensors(model, stored).items():
        if not any(part in name for part in _SPARSE):
            found[_operation(weight_of_scale(name) or name)] += int(np.prod(shape)) * DTYPE_BITS[dtype] // 8
    return found


def _operation(name: str) -> str:
    return next(operation for part, operation in _PLACES if part in name)


def expert_bytes(model: ModelConfig, stored: WeightFormat) -> int:
    """Bytes of one routed expert."""
    prefix = "layers.0.ffn.experts.0."
    sizes = [
        int(np.prod(shape)) * DTYPE_BITS[dtype] // 8
        for name, (dtype, shape) in stored_tensors(model, stored).items()
        if name.startswith(prefix)
    ]
    return sum(sizes)


def dense_parameters(model: ModelConfig) -> int:
    """Elements of the matrices that every token of a prompt meets: all but the head and the routed experts."""
    skipped = (*_SPARSE, "head.weight", "hc_head", ".ape")
    return sum(
        int(np.prod(spec.shape))
        for name, spec in weight_specs(model).items()
        if len(spec.shape) == 2 and not any(part in name for part in skipped)
    )


def _expert_parameters(model: ModelConfig) -> int:
    return 3 * model.hidden_size * model.moe_intermediate_size * model.num_experts_per_tok


def experts_hit(counts: NDArray[np.int64], batch: int, active: int) -> float:
    """Distinct experts that a step of `batch` tokens reads, over all layers, expected from how often each was chosen.

    `counts` [L, E] over some steps. Tokens choose independently with the probabilities that the counts tell:
    sum of 1 - (1 - p)^batch, where the p of a layer sum to `active`.
    """
    chosen = np.minimum(1.0, active * counts / np.maximum(1, counts.sum(1, keepdims=True)))
    return float((1 - (1 - chosen) ** batch).sum())
