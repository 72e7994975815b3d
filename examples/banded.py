"""Attention over a window without the scores that the window forbids: the reference's result, for long rows.

`Attention._attend` of `leadline/reference.py` scores every pair of tokens and masks most of them. Here each block of
`sliding_window` queries meets its own and the previous block of keys, and then the entries.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline import reference
from leadline.reference import Attention, Observer, high


def use_banded_attention() -> None:
    """Let every model of `leadline.reference` in this process attend by `banded_attend`."""
    reference.Attention._attend = banded_attend  # type: ignore[method-assign]


def banded_attend(self: Attention, queries: Tensor, keys: Tensor, readable: Tensor, observe: Observer) -> Tensor:
    """In place of `Attention._attend`: `queries` [B, S, H, D], `keys` [B, S + C, D] -> [B, S, H, D].

    Observes the weights [B, S, H, C] of the entries alone.
    Only the entries' part of `readable` [B, S, S + C] is looked at: the window is known.
    """
    length = queries.shape[1]
    own, entries, seen = keys[:, :length], keys[:, length:], readable[:, :, None, length:]
    scaled = high(queries) * queries.shape[-1] ** -0.5
    near, pairs = _window_logits(scaled, high(own), self.config.sliding_window)
    far = torch.einsum("bshd,bcd->bshc", scaled, high(entries))
    sink = high(self.attn_sink)[:, None].expand(*near.shape[:-1], 1)
    far = far.masked_fill(~seen, -math.inf)
    weights = torch.cat([near, far, sink], -1).softmax(-1)
    near, far, _ = weights.split([near.shape[-1], far.shape[-1], 1], -1)
    observe("weights", far)
    blocks = _in_blocks(near, pairs.shape[2] // 2)
    outputs = torch.einsum("bnqht,bntd->bnqhd", blocks, pairs).flatten(1, 2)[:, :length]
    return (outputs + torch.einsum("bshc,bcd->bshd", far, high(entries))).to(queries.dtype)


def _window_logits(queries: Tensor, keys: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Logits [B, S, H, 2 W] of each query and the keys of its block and the one before, and those keys [B, N, 2 W, D].

    Keys that are younger than the query or have left its window get -inf.
    """
    length = queries.shape[1]
    blocks = _in_blocks(keys, window)
    pairs = torch.cat([F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :-1], blocks], 2)
    logits = torch.einsum("bnqhd,bntd->bnqht", _in_blocks(queries, window), pairs)
    place = torch.arange(window, device=keys.device)
    age = (window + place)[:, None] - torch.arange(2 * window, device=keys.device)
    allowed = ((age >= 0) & (age < window)).expand(blocks.shape[1], -1, -1).clone()
    allowed[0, :, :window] = False
    logits = logits.masked_fill(~allowed[:, :, None], -math.inf)
    return logits.flatten(1, 2)[:, :length], pairs


def _in_blocks(x: Tensor, size: int) -> Tensor:
    """[B, S, ...] -> [B, ceil(S / size), size, ...], filled up with zeros."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, size))
