"""select: the CSA entries that each query reads. Exact top-k, ties to the lower entry, in entry order."""

import torch
from torch import Tensor

from leadline.kernels.packed import IndexPool, IndexRows
from leadline.kernels.rowwise import high

TOKENS_PER_TILE = 64
ENTRIES_PER_TILE = 128
"""Scores are made tile by tile: bounded memory, and products of one shape whatever the batch (see
`project.ROW_MULTIPLE`)."""


def index_scores(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """`q` [t, heads, c], `head_weights` [t, heads] fp32, `keys` [t, E, c] -> fp32 [t, E].

    The weighted sum over heads of ReLU(q . k), with the constants heads^-0.5 and c^-0.5.
    """
    dots = torch.bmm(high(q), high(keys).transpose(1, 2)).relu()
    scaled = head_weights * (q.shape[1] ** -0.5 * q.shape[2] ** -0.5)
    return torch.bmm(scaled[:, None], dots)[:, 0]


def select(
    q: Tensor, head_weights: Tensor, pool: IndexPool, page_rows: Tensor, visible: Tensor, longest: int, topk: int
) -> Tensor:
    """Entry ids [T, topk] int64 of each query in ascending order, -1 past the number it reads.

    `pool` holds index keys, 32 to a page: [rows, c] or packed; `page_rows` [T, P] are the pages of each query's
    request in order; query t sees its first `visible[t]` entries, and none sees more than `longest`.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from leadline.kernels.gpu import select as gpu

        return gpu.select(q, head_weights, pool, page_rows, visible, longest, topk)
    if longest <= topk:
        ids = torch.arange(topk, device=q.device).expand(len(q), -1)
        return torch.where(ids < visible[:, None], ids, -1)
    chosen = []
    for start in range(0, len(q), TOKENS_PER_TILE):
        tile = slice(start, start + TOKENS_PER_TILE)
        chosen.append(_select_tile(q[tile], head_weights[tile], pool, page_rows[tile], visible[tile], longest, topk))
    return torch.cat(chosen)


def entry_rows(page_rows: Tensor, ids: Tensor, per_page: int) -> Tensor:
    """Pool rows of entry `ids` [T, k] (-1 stays -1) through each token's pages [T, P]; all int64."""
    if page_rows.is_cuda:
        from leadline.kernels.gpu import select as gpu

        return gpu.entry_rows(page_rows, ids, per_page)
    known = ids.clamp(min=0)
    rows = page_rows.gather(1, known // per_page) * per_page + known % per_page
    return torch.where(ids < 0, -1, rows)


def _keys(pool: IndexPool, rows: Tensor) -> Tensor:
    """Index keys [t, E, c] at `rows` [t, E]."""
    return pool.read(rows.flatten()).unflatten(0, rows.shape) if isinstance(pool, IndexRows) else pool[rows]


def _select_tile(
    q: Tensor, head_weights: Tensor, pool: IndexPool, page_rows: Tensor, visible: Tensor, longest: int, topk: int
) -> Tensor:
    scores = []
    for start in range(0, longest, ENTRIES_PER_TILE):
        ids = torch.arange(start, start + ENTRIES_PER_TILE, device=q.device).expand(len(q), -1)
        seen = ids < visible[:, None]
        rows = entry_rows(page_rows, torch.where(seen, ids, -1), 32)
        tile = index_scores(q, head_weights, _keys(pool, rows.clamp(min=0)))
        scores.append(torch.where(seen, tile, float("-inf")))
    ranked = torch.sort(torch.cat(scores, 1), dim=1, descending=True, stable=True).indices[:, :topk]
    end = torch.iinfo(torch.int64).max
    ordered = torch.where(ranked < visible[:, None], ranked, end).sort(1).values
    return torch.where(ordered == end, -1, ordered)
