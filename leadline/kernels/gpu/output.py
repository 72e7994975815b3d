"""output on a GPU: the grouped factor is a product of which every group of rows meets its own part of the input."""

import torch
from torch import Tensor

from leadline.kernels.gpu.expand import expanded
from leadline.kernels.gpu.product_plan import MOST_TOKENS
from leadline.kernels.gpu.project import Input, multiply
from leadline.kernels.project import Weight


def grouped_output(heads: Tensor, weight: Weight, groups: int) -> Tensor:
    """See `leadline.kernels.output.grouped_output`; `heads` is bf16."""
    x = heads.flatten(1)
    if len(x) <= MOST_TOKENS or weight.deterministic:
        return multiply(Input(x, None, "plain"), weight, groups, x.dtype)
    factors = expanded(weight).unflatten(0, (groups, -1))
    out = torch.empty(len(x), *factors.shape[:2], dtype=x.dtype, device=x.device)
    by_group = x.unflatten(1, (groups, -1)).transpose(0, 1)
    torch.bmm(by_group, factors.transpose(1, 2), out=out.transpose(0, 1))
    return out.flatten(1)
