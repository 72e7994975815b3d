"""experts on a GPU: see `leadline.kernels.experts` for what is computed."""

import torch
from torch import Tensor

from leadline.kernels.gpu.chips import chip_of
from leadline.kernels.gpu.experts_fp4 import routed_fp4
from leadline.kernels.gpu.experts_products import blocks_for, down, gate_up
from leadline.kernels.gpu.experts_rows import hidden_rows, product_input, summed_pairs
from leadline.kernels.gpu.experts_tiles import tiles_by_expert
from leadline.kernels.project import Weight, project


def routed_experts(x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """`x` [T, d] bf16 or fp32, `chosen` and `weights` [T, k] -> fp32 [T, d]; `w13` [E, 2 I, d], `w2` [E, d, I]."""
    if len(x) == 0:
        return x.new_empty(x.shape, dtype=torch.float32)
    if w13.form == "arranged":
        return routed_fp4(x, chosen, weights, w13, w2, limit)
    active, experts = chosen.shape[1], len(w13.data)
    blocks = blocks_for(chip_of(x.device), x.dtype, chosen.numel(), experts)
    tiles = tiles_by_expert(chosen, experts, blocks.tokens)
    hidden = gate_up(_input(x, w13), weights, w13, tiles, active, limit, blocks)
    return summed_pairs(down(_input(hidden, w2), w2, tiles, blocks), chosen)


def shared_expert(x: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """The expert of every token: `x` [T, d] bf16 or fp32 -> fp32 [T, d]; `w13` [2 I, d], `w2` [d, I]."""
    if len(x) == 0:
        return x.new_empty(x.shape, dtype=torch.float32)
    return project(hidden_rows(project(x, w13), limit), w2).float()


def _input(x: Tensor, weight: Weight) -> Tensor:
    return product_input(x.contiguous(), weight.round_input, weight.form == "fp4")
