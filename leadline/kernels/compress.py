"""compress: from tokens to entries and index keys. Gating is in fp32 (fp64 in fp64 models) throughout.

CSA keeps raw rows, one per token: [kv of entries, 2 D | their scores, 2 D | kv of index keys, 2 c | their scores,
2 c], where the scores already contain the token's `ape`. HCA keeps an online softmax per window and channel: the
running maximum, the sum of weights and the weighted sum of values, folded token by token in order, so that its last
bit does not depend on how a prompt was cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.kernels.project import row_product
from leadline.kernels.query import index_round
from leadline.kernels.rope import Angles, rotate
from leadline.kernels.rowwise import high, rms_norm
from leadline.kernels.store import round_row


@dataclass
class Gating:
    """A compressor's weights: `matrix` [sum of widths, d], `ape` [ratio, sum of widths] (0 where no score)."""

    matrix: Tensor
    ape: Tensor


def gate_rows(x: Tensor, positions: Tensor, gating: Gating) -> Tensor:
    """`x` [T, d] -> fp32 raw rows [T, widths], with the score's position bias added."""
    ratio = len(gating.ape)
    return row_product(high(x), high(gating.matrix)) + gating.ape[positions % ratio]


def csa_entries(
    pending: Tensor, rows: Tensor, norm: Tensor, by: Angles, eps: float, dtype: torch.dtype, native: bool
) -> Tensor:
    """Close CSA windows. `pending` [rows, 4 D] holds kv and scores; returns entries [C, D] in `dtype`.

    `rows` [C, 8] are the previous window's four tokens, then the own four; -1 where a request has no previous
    window. A token's first half of channels belongs to the next window's entry, its second half to its own.
    """
    entry = _overlapping_sum(pending, rows, len(norm)).to(dtype)
    return round_row(rotate(rms_norm(entry, norm, eps), by), 2 * by.cos.shape[-1], native)


def csa_index_keys(
    pending: Tensor, rows: Tensor, norm: Tensor, by: Angles, eps: float, dtype: torch.dtype, native: bool
) -> Tensor:
    """As `csa_entries`, for the index keys: `pending` [rows, 4 c] -> [C, c], spread and rounded to fp4 if native."""
    key = _overlapping_sum(pending, rows, len(norm)).to(dtype)
    return index_round(rotate(rms_norm(key, norm, eps), by), native)


def _overlapping_sum(pending: Tensor, rows: Tensor, width: int) -> Tensor:
    picked = pending[rows.clamp(min=0)]
    first, second = picked[:, :4], picked[:, 4:]
    values = torch.cat([first[..., :width], second[..., width : 2 * width]], 1)
    scores = torch.cat([first[..., 2 * width : 3 * width], second[..., 3 * width :]], 1)
    missing = (rows < 0)[..., None]
    values = values.masked_fill(missing, 0)
    scores = scores.masked_fill(missing, float("-inf"))
    return (scores.softmax(1) * values).sum(1)


def hca_fold(raw: Tensor, first: Tensor, count: Tensor, longest: int, folded: Tensor, before: Tensor) -> Tensor:
    """Fold each piece's tokens into its window's online softmax; returns states [Q, 3, D].

    `raw` [T, 2 D] holds kv and scores. Piece q is tokens `first[q] .. first[q] + count[q] - 1` of one window and
    goes on from `folded[before[q]]` (maximum, sum, weighted sum), or from nothing where `before[q]` is -1.
    `longest` is the largest count.
    """
    width = raw.shape[1] // 2
    fresh = (before < 0)[:, None]
    top, total, weighted = folded[before.clamp(min=0)].unbind(1)
    top = top.masked_fill(fresh, float("-inf"))
    total, weighted = total.masked_fill(fresh, 0), weighted.masked_fill(fresh, 0)
    last_row = first + count - 1
    for step in range(longest):
        values, scores = raw[torch.minimum(first + step, last_row)].split(width, -1)
        new_top = torch.maximum(top, scores)
        old, new = torch.exp(top - new_top), torch.exp(scores - new_top)
        active = (step < count)[:, None]
        top = torch.where(active, new_top, top)
        total = torch.where(active, total * old + new, total)
        weighted = torch.where(active, weighted * old + new * values, weighted)
    return torch.stack([top, total, weighted], 1)


def hca_entries(states: Tensor, norm: Tensor, by: Angles, eps: float, dtype: torch.dtype, native: bool) -> Tensor:
    """Entries [Z, D] of the windows whose online softmax `states` [Z, 3, D] has all 128 tokens."""
    entry = (states[:, 2] / states[:, 1]).to(dtype)
    return round_row(rotate(rms_norm(entry, norm, eps), by), 2 * by.cos.shape[-1], native)
