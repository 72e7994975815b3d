"""Launches of the Hopper kernel: routed experts with arranged fp4 weights and fp8 activations."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.kernels.gpu.experts_hopper import fp4_product
from leadline.kernels.gpu.experts_rows import summed_pairs
from leadline.kernels.gpu.experts_tiles import Tiles, tiles_by_expert
from leadline.kernels.gpu.quantize import quantize_rows
from leadline.kernels.project import Weight


@dataclass(frozen=True)
class Shape:
    """One program's share: `width` pairs, `groups * 64` rows; `units` of 128 columns in each of `slots` of its ring."""

    width: int
    groups: int
    units: int
    slots: int


def shape_for(pairs: int, experts: int, columns: int) -> Shape:
    """The shape for `pairs` over `experts`; both products' columns are multiples of `columns`.

    The order of sums is the same for all shapes.
    """
    mean = pairs / experts
    units = 2 if columns % 256 == 0 else 1
    if mean <= 3:
        return Shape(8, 1, units, 4)
    if mean <= 8:
        return Shape(16, 1, units, 4)
    if mean <= 24:
        return Shape(32, 1, units, 4)
    return Shape(64, 1, 1, 4)


def routed_fp4(
    x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float, shape: Shape | None = None
) -> Tensor:
    """`x` bf16 [T, d] -> fp32 [T, d]: `routed_experts` for stacks that `experts_arrange.arrange` has arranged."""
    active, (experts, doubled, _) = chosen.shape[1], w13.data.shape
    shape = shape or shape_for(chosen.numel(), experts, math.gcd(x.shape[1], doubled // 2))
    tiles = tiles_by_expert(chosen, experts, shape.width)
    hidden = torch.empty(tiles.pairs, doubled // 2, dtype=x.dtype, device=x.device)
    _product(x, weights, w13, hidden, tiles, active, limit, True, shape)
    outputs = torch.empty(tiles.pairs, x.shape[1], dtype=x.dtype, device=x.device)
    _product(hidden, weights, w2, outputs, tiles, active, limit, False, shape)
    return summed_pairs(outputs, chosen)


def _product(
    x: Tensor,
    weights: Tensor,
    w: Weight,
    out: Tensor,
    tiles: Tiles,
    active: int,
    limit: float,
    gate_up: bool,
    shape: Shape,
) -> None:
    assert w.scale is not None and tiles.order is not None
    codes, scales = quantize_rows(x)
    rows = w.data.shape[1]
    grid = (rows // (64 * shape.groups), tiles.most)
    fp4_product[grid](
        codes,
        scales,
        weights,
        w.data,
        w.scale,
        out,
        tiles.order,
        tiles.records,
        tiles.most,
        active,
        scales.stride(1),
        rows,
        x.shape[1],
        limit,
        gate_up,
        shape.width,
        shape.groups,
        shape.units,
        shape.slots,
        num_warps=4 * shape.groups,
    )
