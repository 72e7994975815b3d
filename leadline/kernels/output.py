"""output: the grouped low-rank output projection's first factor."""

import torch
from torch import Tensor

from leadline.kernels.project import Weight, row_product


def grouped_output(heads: Tensor, weight: Weight, groups: int) -> Tensor:
    """`heads` [T, H, D]; group g's heads meet rows `g*rank .. (g+1)*rank` of `weight` [groups * rank, H D / groups].

    Returns [T, groups * rank]. Its input is never rounded: official code runs this product in bf16.
    """
    if heads.is_cuda and heads.dtype == torch.bfloat16:
        from leadline.kernels.gpu import output as gpu

        return gpu.grouped_output(heads, weight, groups)
    grouped = heads.flatten(1).unflatten(1, (groups, -1))
    factors = weight.dense(heads.dtype).unflatten(0, (groups, -1))
    return torch.cat([row_product(grouped[:, g], factors[g], weight.deterministic) for g in range(groups)], 1)
