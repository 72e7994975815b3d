"""Launches of the Hopper kernels: arranged fp4 weights, fp8 activations, and beside them the shared expert in fp8."""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from leadline.kernels.gpu.experts_hopper import down_product, up_product
from leadline.kernels.gpu.experts_prepare import Prepared, prepared
from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.project import Weight

MOST_SHARED_TOKENS = 128
"""Up to so many tokens the shared expert's products are programs of the routed experts' launches."""


@dataclass(frozen=True)
class Shape:
    """One program's share: `width` pairs, 64 rows; `units` of 128 columns in each of `slots` of its ring.

    Programs of the shared expert take `shared_width` tokens and have `shared_slots` slots of one unit.
    """

    width: int
    units: int
    slots: int = 4
    shared_width: int = 8
    shared_slots: int = 4


def shape_for(tokens: int, active: int, experts: int, columns: int) -> Shape:
    """The shape for `tokens` of `active` of the `experts`; both products' columns are multiples of `columns`.

    The order of sums is the same for all shapes.
    """
    mean = tokens * active / experts
    units = 2 if columns % 256 == 0 else 1
    shared_width = min(32, max(8, triton.next_power_of_2(tokens)))
    shared_slots = 3 if shared_width == 32 else 4  # five programs fit on a multiprocessor, as with routed experts alone
    if mean > 24:
        return Shape(64, 1, 4, shared_width, shared_slots)
    return Shape(8 if mean <= 3 else 16 if mean <= 8 else 32, units, 4, shared_width, shared_slots)


def fits_beside(tokens: int, w13: Weight, w2: Weight, shared_w13: Weight, shared_w2: Weight) -> bool:
    """Whether the shared expert's products can be programs of the launches of the stacks `w13` and `w2`.

    Deterministic ones never: more tokens take `project`, whose sums run in another order.
    """
    both = ((w13, shared_w13), (w2, shared_w2))
    suits = tokens <= MOST_SHARED_TOKENS and not shared_w13.deterministic
    return suits and all(_alike(stack, shared) for stack, shared in both)


def _alike(stack: Weight, shared: Weight) -> bool:
    """Whether `shared` is fp8, its input too, and as large as each of the matrices of an arranged `stack`."""
    if stack.form != "arranged" or shared.form != "fp8" or shared.scale is None or not shared.round_input:
        return False
    _, rows, words = stack.data.shape
    return shared.scale.dtype == torch.float8_e8m0fnu and shared.data.shape == (rows, 8 * words)


def arranged_outputs(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    limit: float,
    shared: tuple[Weight, Weight] | None,
    shape: Shape | None = None,
) -> Tensor:
    """`x` bf16 [T, d], `chosen` and `weights` [T, k] -> bf16 outputs [T * k, d] by pair, of stacks that are arranged.

    With the `shared` expert's w13 [2 I, d] and w2 [d, I] its T outputs follow. Where `chosen` is -1 an output is
    anything.
    """
    (tokens, active), (experts, doubled, columns) = chosen.shape, w13.data.shape[:2] + x.shape[1:]
    shape = shape or shape_for(tokens, active, experts, math.gcd(columns, doubled // 2))
    ready = prepared(x, chosen, experts, shape.width, doubled // 256)
    rows = tokens * active + (tokens if shared else 0)
    codes = torch.empty(rows, doubled // 2, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(doubled // 256, rows, dtype=torch.float32, device=x.device)
    _up(ready, weights, w13, shared[0] if shared else None, codes, scales, limit, shape)
    outputs = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    _down(ready, codes, scales, w2, shared[1] if shared else None, outputs, tokens, active, shape)
    return outputs


def _up(
    ready: Prepared,
    weights: Tensor,
    w13: Weight,
    shared: Weight | None,
    codes: Tensor,
    scales: Tensor,
    limit: float,
    shape: Shape,
) -> None:
    """Hidden rows of pairs, by place, and of the shared expert: e4m3 `codes` [rows, I], `scales` [I / 128, rows]."""
    tokens, active = weights.shape
    hidden = torch.empty(codes.shape, dtype=torch.bfloat16, device=codes.device)
    shared_tiles = triton.cdiv(tokens, shape.shared_width) if shared else 0
    up_product[_grid(ready, w13, shared_tiles)](
        ready.codes,
        ready.scales,
        weights,
        w13.data,
        w13.scale,
        *_shared_arguments(shared),
        hidden,
        codes,
        scales,
        ready.counters,
        ready.tiles.order,
        ready.tiles.records,
        ready.tiles.most,
        active,
        tokens,
        shared_tiles,
        tokens,
        len(codes),
        w13.data.shape[1],
        ready.codes.shape[1],
        limit,
        *_shape_arguments(shape, shared),
        num_warps=4,
        **early_start(codes.device),
    )


def _down(
    ready: Prepared,
    codes: Tensor,
    scales: Tensor,
    w2: Weight,
    shared: Weight | None,
    outputs: Tensor,
    tokens: int,
    active: int,
    shape: Shape,
) -> None:
    shared_tiles = triton.cdiv(tokens, shape.shared_width) if shared else 0
    down_product[_grid(ready, w2, shared_tiles)](
        codes,
        scales,
        w2.data,
        w2.scale,
        *_shared_arguments(shared),
        outputs,
        ready.tiles.order,
        ready.tiles.records,
        ready.tiles.most,
        active,
        tokens,
        shared_tiles,
        len(codes),
        w2.data.shape[1],
        codes.shape[1],
        *_shape_arguments(shape, shared),
        num_warps=4,
        **early_start(codes.device),
    )


def _grid(ready: Prepared, stack: Weight, shared_tiles: int) -> tuple[int]:
    return ((shared_tiles + ready.tiles.most) * (stack.data.shape[1] // 64),)


def _shared_arguments(shared: Weight | None) -> tuple[Tensor | None, Tensor | None]:
    if shared is None or shared.scale is None:
        return None, None
    return shared.data, shared.scale.view(torch.uint8)


def _shape_arguments(shape: Shape, shared: Weight | None) -> tuple[int, ...]:
    return shape.width, shape.units, shape.slots, shape.shared_width if shared else 0, shape.shared_slots
