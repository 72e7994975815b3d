"""mix: close one sublayer and open the next (manifold-constrained hyper-connections, official `hc_pre`/`hc_post`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.kernels.project import row_product
from leadline.kernels.rowwise import high, rms_norm, sigmoid


@dataclass
class Mixing:
    """Weights of one hyper-connection: `fn` [(2 + n) n, n d], `base` [(2 + n) n], `scale` [3], all fp32 (or fp64).

    For the final collapse `fn` is [n, n d], `base` [n] and `scale` [1].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass
class Reading:
    """What a sublayer needs: its input `x` [T, d], normed, and how its output returns to the streams."""

    x: Tensor
    post: Tensor
    comb: Tensor


def mixing_logits(streams: Tensor, weights: Mixing, eps: float) -> Tensor:
    """`streams` [T, n, d] -> fp32 [T, outputs]: a projection of all streams, over their common rms."""
    flat = high(streams.flatten(1))
    return row_product(flat, weights.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def sinkhorn(comb: Tensor, rounds: int, eps: float) -> Tensor:
    """`comb` [T, n, n] of logits (source, destination) -> weights whose columns sum to 1 and rows nearly so."""
    comb = comb.softmax(-1) + eps
    # A product with ones sums and adds eps in one operation: on a CPU these loops were a sixth of a small model's step.
    ones, added, sums = torch.ones_like(comb), torch.full_like(comb, eps), torch.empty_like(comb)
    comb /= torch.baddbmm(added, ones, comb, out=sums)
    for _ in range(rounds - 1):
        comb /= torch.baddbmm(added, comb, ones, out=sums)
        comb /= torch.baddbmm(added, ones, comb, out=sums)
    return comb


def collapse(pre: Tensor, streams: Tensor) -> Tensor:
    """`pre` [T, n], `streams` [T, n, d] -> their weighted sum [T, d]."""
    return (pre[..., None] * high(streams)).sum(1).to(streams.dtype)


def open_sublayer(
    streams: Tensor, weights: Mixing, norm: Tensor, rounds: int, hc_eps: float, norm_eps: float
) -> Reading:
    """Read the streams [T, n, d] for a sublayer whose input norm is `norm` [d]."""
    if streams.is_cuda and streams.dtype != torch.float64:
        from leadline.kernels.gpu import mix as gpu

        return gpu.open_sublayer(streams, weights, norm, rounds, hc_eps, norm_eps)
    n = streams.shape[1]
    pre, post, comb = mixing_logits(streams, weights, norm_eps).split([n, n, n * n], -1)
    scale, base = weights.scale, weights.base
    pre = sigmoid(pre * scale[0] + base[:n]) + hc_eps
    post = 2 * sigmoid(post * scale[1] + base[n : 2 * n])
    comb = sinkhorn((comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), rounds, hc_eps)
    return Reading(rms_norm(collapse(pre, streams), norm, norm_eps), post, comb)


def close_sublayer(streams: Tensor, output: Tensor, reading: Reading) -> Tensor:
    """The streams [T, n, d] after a sublayer put out `output` [T, d]: `comb` transposed, one cast at the end."""
    if streams.is_cuda and streams.dtype != torch.float64:
        from leadline.kernels.gpu import mix as gpu

        return gpu.close_sublayer(streams, output, reading)
    mixed = (reading.comb[..., None] * high(streams)[:, :, None]).sum(1)
    return (reading.post[..., None] * high(output)[:, None] + mixed).to(streams.dtype)


def close_and_open(
    streams: Tensor,
    output: Tensor,
    reading: Reading,
    weights: Mixing,
    norm: Tensor,
    rounds: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Reading]:
    """`close_sublayer`, then `open_sublayer` of the next: (streams [T, n, d], the next sublayer's reading)."""
    if streams.is_cuda and streams.dtype != torch.float64:
        from leadline.kernels.gpu import mix as gpu

        return gpu.close_and_open(streams, output, reading, weights, norm, rounds, hc_eps, norm_eps)
    streams = close_sublayer(streams, output, reading)
    return streams, open_sublayer(streams, weights, norm, rounds, hc_eps, norm_eps)


def final_collapse(streams: Tensor, weights: Mixing, norm: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    """The last read (official `hc_head`): no Sinkhorn, no factor 2. [T, n, d] -> normed [T, d]."""
    if streams.is_cuda and streams.dtype != torch.float64:
        from leadline.kernels.gpu import mix as gpu

        return gpu.final_collapse(streams, weights, norm, hc_eps, norm_eps)
    pre = sigmoid(mixing_logits(streams, weights, norm_eps) * weights.scale + weights.base) + hc_eps
    return rms_norm(collapse(pre, streams), norm, norm_eps)
