"""experts on a GPU: see `leadline.kernels.experts` for what is computed."""

import torch
from torch import Tensor

from leadline.kernels.gpu.chips import chip_of
from leadline.kernels.gpu.experts_fp4 import arranged_outputs, fits_beside
from leadline.kernels.gpu.experts_products import blocks_for, down, gate_up
from leadline.kernels.gpu.experts_prompt import pays, prompt_outputs
from leadline.kernels.gpu.experts_rows import hidden_rows, product_input, summed
from leadline.kernels.gpu.experts_tiles import tiles_by_expert
from leadline.kernels.project import Weight, project


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
    """`x` [T, d] bf16 or fp32, `chosen` and `weights` [T, k] -> [T, d] in the dtype of `x`."""
    if len(x) == 0:
        return torch.empty_like(x)
    if fits_beside(len(x), w13, w2, shared_w13, shared_w2):
        outputs = arranged_outputs(x, chosen, weights, w13, w2, limit, (shared_w13, shared_w2))
        return summed(outputs, chosen, outputs[chosen.numel() :], x.dtype)
    shared = _shared_rows(x, shared_w13, shared_w2, limit)
    return summed(_routed_outputs(x, chosen, weights, w13, w2, limit), chosen, shared, x.dtype)


def routed_experts(x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """`x` [T, d] bf16 or fp32, `chosen` and `weights` [T, k] -> fp32 [T, d]; `w13` [E, 2 I, d], `w2` [E, d, I]."""
    if len(x) == 0:
        return x.new_empty(x.shape, dtype=torch.float32)
    return summed(_routed_outputs(x, chosen, weights, w13, w2, limit), chosen, None, torch.float32)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """The expert of every token: `x` [T, d] bf16 or fp32 -> fp32 [T, d]; `w13` [2 I, d], `w2` [d, I]."""
    if len(x) == 0:
        return x.new_empty(x.shape, dtype=torch.float32)
    return _shared_rows(x, w13, w2, limit).float()


def _routed_outputs(x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """Outputs [T * k, d] by pair, in the dtype of `x`. Where `chosen` is -1 an output is anything."""
    if w13.form == "arranged" and pays(chosen.numel(), w13, w2):
        return prompt_outputs(x, chosen, weights, w13, w2, limit)
    if w13.form == "arranged":
        return arranged_outputs(x, chosen, weights, w13, w2, limit, None)
    active, experts = chosen.shape[1], len(w13.data)
    blocks = blocks_for(chip_of(x.device), x.dtype, chosen.numel(), experts, w13.deterministic)
    tiles = tiles_by_expert(chosen, experts, blocks.tokens)
    hidden = gate_up(_input(x, w13), weights, w13, tiles, active, limit, blocks)
    return down(_input(hidden, w2), w2, tiles, blocks)


def _shared_rows(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """The shared expert's outputs [T, d], in the dtype of `x`."""
    return project(hidden_rows(project(x, w13), limit), w2)


def _input(x: Tensor, weight: Weight) -> Tensor:
    return product_input(x.contiguous(), weight.round_input, weight.form == "fp4")
