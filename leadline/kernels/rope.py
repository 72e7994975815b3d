"""Rotary position embedding on interleaved channel pairs, shared by query, store, compress and attend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.kernels.rowwise import high


@dataclass
class Angles:
    """Cosines and sines of each row's rotation, [T, R / 2]."""

    cos: Tensor
    sin: Tensor

    def reversed(self) -> "Angles":
        """The rotation that undoes this one."""
        return Angles(self.cos, -self.sin)


def angles(positions: Tensor, frequencies: Tensor) -> Angles:
    """`positions` [T] integers, `frequencies` [R / 2] fp32 or fp64 -> angles in the precision of `frequencies`."""
    phase = positions[:, None].to(frequencies.dtype) * frequencies
    return Angles(phase.cos(), phase.sin())


def rotate(x: Tensor, by: Angles) -> Tensor:
    """Turn the last R channels of `x` [T, c] or [T, heads, c]; the dtype stays."""
    width = 2 * by.cos.shape[-1]
    cos, sin = by.cos, by.sin
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    tail = high(x[..., -width:])
    a, b = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], -1)
