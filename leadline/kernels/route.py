"""route: choose each token's experts and weigh them."""

import torch
from torch import Tensor

from leadline.kernels.project import row_product
from leadline.kernels.rowwise import high, softplus


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, by_token: Tensor | None, ids: Tensor, active: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`x` [T, d], `weight` [E, d] -> (experts [T, active] int64, weights [T, active] fp32).

    Hash layers take the experts from `by_token` [V, active] by token id; the others the best of
    sqrt(softplus(score)) + `bias` [E], ties by lower index. Weights never contain the bias. A row whose token id is -1
    is no token: it gets experts -1 with weights 0.
    """
    if x.is_cuda and x.dtype != torch.float64:
        from leadline.kernels.gpu import route as gpu

        return gpu.route(x, weight, bias, by_token, ids, active, scale)
    scores = softplus(row_product(high(x), high(weight))).sqrt()
    if by_token is not None:
        chosen = by_token[ids.clamp(min=0)].long()
    else:
        assert bias is not None
        chosen = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :active]
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * scale
    no_token = (ids < 0)[:, None]
    return chosen.masked_fill(no_token, -1), weights.masked_fill(no_token, 0)
