"""store: norm, rotate and round each token's key-value row, and write it where attention will read it."""

import torch
from torch import Tensor

from leadline.formats import fp8_round_trip
from leadline.kernels.rope import Angles, rotate
from leadline.kernels.rowwise import rms_norm

KV_BLOCK = 64
"""Channels of a row that share one fp8 scale."""


def round_row(row: Tensor, rotated: int, native: bool) -> Tensor:
    """A window row or entry [..., D] as native numerics keep it: fp8, but for the last `rotated` channels."""
    if not native:
        return row
    return torch.cat([fp8_round_trip(row[..., :-rotated], KV_BLOCK), row[..., -rotated:]], -1)


def store(kv: Tensor, norm: Tensor, by: Angles, eps: float, native: bool, pool: Tensor, first_row: int) -> None:
    """Write the rows of `kv` [T, D] to `pool[first_row : first_row + T]`."""
    row = rotate(rms_norm(kv, norm, eps), by)
    pool[first_row : first_row + len(kv)] = round_row(row, 2 * by.cos.shape[-1], native)
