"""Small functions of single rows, whose last bit does not depend on what other rows there are.

PyTorch's own `sigmoid`, `silu` and `softplus` take another code path for the elements that do not fill a vector
register, with another rounding; `exp` does not (checked by `tests/test_invariance.py`).
"""

import torch
from torch import Tensor


def high(x: Tensor) -> Tensor:
    """`x` in fp32, or unchanged in fp64: the precision of norms, gates, softmaxes and streams' mixing."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return torch.reciprocal(1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x / (1 + e^-x)."""
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), in the form that overflows nowhere."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in fp32, cast once to the dtype of `x`."""
    if x.is_cuda and x.dtype != torch.float64:
        from leadline.kernels.gpu import norm as gpu

        return gpu.rms_norm(x, weight, eps)
    wide = high(x)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * high(weight)).to(x.dtype)
