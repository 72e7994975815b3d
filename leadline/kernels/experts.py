"""experts: the clamped SwiGLU MLP, for the routed experts of each token and for the shared one."""

import torch
from torch import Tensor

from leadline.formats import fp8_round_trip
from leadline.kernels.project import Weight, round_input, row_product
from leadline.kernels.rowwise import high, silu


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """`gate_up` [T, 2 I], gate first -> fp32 [T, I]: `silu(min(gate, limit)) * clamp(up, -limit, limit)`."""
    gate, up = high(gate_up).chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return silu(gate) * up


def mlp(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """`x` [T, d], already rounded as `w13` [2 I, d] takes it -> [T, d]."""
    hidden = _hidden(row_product(x, w13.dense(x.dtype)), limit, w2)
    return row_product(hidden, w2.dense(x.dtype))


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    w13: Weight,
    w2: Weight,
    shared_w13: Weight,
    shared_w2: Weight,
    limit: float,
) -> Tensor:
    """Routed experts and the shared one, summed in fp32: `x` [T, d] -> [T, d] in its dtype.

    `chosen` and `weights` are [T, k]. `w13` and `w2` are stacks as `routed_experts` takes them, `shared_w13` [2 I, d]
    and `shared_w2` [d, I] matrices.
    """
    if x.is_cuda and x.dtype != torch.float64:
        from leadline.kernels.gpu import experts as gpu

        return gpu.experts(x, chosen, weights, w13, w2, shared_w13, shared_w2, limit)
    routed = routed_experts(x, chosen, weights, w13, w2, limit)
    return (routed + shared_expert(x, shared_w13, shared_w2, limit)).to(x.dtype)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """The expert of every token: `x` [T, d] -> fp32 [T, d]."""
    if x.is_cuda and x.dtype != torch.float64:
        from leadline.kernels.gpu import experts as gpu

        return gpu.shared_expert(x, w13, w2, limit)
    return high(mlp(round_input(x, w13), w13, w2, limit))


def routed_experts(x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """`x` [T, d], `chosen` and `weights` [T, k] -> fp32 [T, d], the sum over each token's experts in their order.

    `w13` is a stack [E, 2 I, d] and `w2` one of [E, d, I]; only the experts that were chosen are read. Where
    `chosen` is -1 no expert was, and nothing is added.
    """
    if x.is_cuda and x.dtype != torch.float64:
        from leadline.kernels.gpu import experts as gpu

        return gpu.routed_experts(x, chosen, weights, w13, w2, limit)
    tokens, active = chosen.shape
    order = torch.sort(chosen.flatten(), stable=True).indices
    start, *counts = torch.bincount(chosen.flatten() + 1, minlength=len(w13.data) + 1).tolist()
    places = []
    for expert, count in enumerate(counts):
        if count:
            places.append((expert, slice(start, start + count)))
            start += count
    gate_up = _products(round_input(x, w13)[order // active], w13, places)
    outputs = _products(_hidden(gate_up, limit, w2, weights.flatten()[order]), w2, places)
    in_order = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return high(in_order).unflatten(0, (tokens, active)).sum(1)


def _products(x: Tensor, stack: Weight, places: list[tuple[int, slice]]) -> Tensor:
    """Each expert of `stack` [E, out, in] times its rows of `x` [N, in] -> [N, out], 0 for rows of no expert."""
    out = x.new_zeros(len(x), stack.data.shape[1])
    for expert, rows in places:
        out[rows] = row_product(x[rows], stack.expert(expert).dense(x.dtype))
    return out


def _hidden(gate_up: Tensor, limit: float, w2: Weight, token_weights: Tensor | None = None) -> Tensor:
    """`gate_up` [N, 2 I] -> [N, I], scaled by `token_weights` [N], as `w2` takes it."""
    hidden = clamped_swiglu(gate_up, limit)
    if token_weights is not None:
        hidden = hidden * token_weights[:, None]
    hidden = hidden.to(gate_up.dtype)
    return fp8_round_trip(hidden) if w2.round_input else hidden
