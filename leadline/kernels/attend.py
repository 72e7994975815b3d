"""attend: sparse attention over window rows and chosen entries, with a sink per head; V is K."""

import torch
from torch import Tensor

from leadline.kernels.packed import KvPool, KvRows
from leadline.kernels.rope import Angles, rotate
from leadline.kernels.rowwise import high

TOKENS_PER_TILE = 64
ENTRIES_PER_TILE = 64
"""Entries join the softmax in blocks of one shape, so that a longer request in the batch changes nothing for a
shorter one: a block of which a query reads no row leaves its running sums as they were, to the bit."""


def attend(
    q: Tensor,
    sink: Tensor,
    window: KvPool,
    window_rows: Tensor,
    entries: KvPool | None,
    entry_rows: Tensor | None,
    by: Angles,
    deterministic: bool = False,
) -> Tensor:
    """`q` [T, H, D] -> [T, H, D], with the values' rotation undone at the query's position (`by`).

    Query t reads rows `window_rows[t]` [W] of `window` [rows, D] and rows `entry_rows[t]` [K] of `entries`; -1 is
    no row, and what such an index would have addressed is never used, even if it is NaN. In `entry_rows` -1 comes
    only past the number of entries that a query reads. `sink` [H] is a logit that takes weight and gives no value.
    Softmax scale is D^-0.5; arithmetic is fp32. `deterministic`: on a GPU too a query's result has the same bits
    whatever other queries there are.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from leadline.kernels.gpu.attend import attend as attend_on_gpu

        return attend_on_gpu(q, sink, window, window_rows, entries, entry_rows, by, deterministic)
    outputs = []
    for start in range(0, len(q), TOKENS_PER_TILE):
        tile = slice(start, start + TOKENS_PER_TILE)
        sums = _Sums(high(q[tile]), high(sink))
        sums.add(window, window_rows[tile])
        if entries is not None and entry_rows is not None:
            for columns in entry_rows[tile].split(ENTRIES_PER_TILE, 1):
                sums.add(entries, _widened(columns))
        outputs.append(sums.result().to(q.dtype))
    return rotate(torch.cat(outputs), by.reversed())


class _Sums:
    """The running softmax of a tile of queries, starting from the sink."""

    def __init__(self, q: Tensor, sink: Tensor) -> None:
        self.q = q * q.shape[-1] ** -0.5
        self.top = sink[:, None].expand(*q.shape[:2], 1)
        self.total = torch.ones_like(self.top)
        self.weighted = torch.zeros_like(q)

    def add(self, pool: KvPool, rows: Tensor) -> None:
        """Bring in rows [t, K] of `pool`."""
        missing = rows < 0
        keys = high(_read(pool, rows.clamp(min=0))).masked_fill_(missing[..., None], 0)
        logits = torch.bmm(self.q, keys.transpose(1, 2)).masked_fill_(missing[:, None], float("-inf"))
        top = torch.maximum(self.top, logits.amax(-1, keepdim=True))
        weights = torch.exp(logits - top)
        old = torch.exp(self.top - top)
        self.total = self.total * old + weights.sum(-1, keepdim=True)
        self.weighted = torch.baddbmm(self.weighted * old, weights, keys)
        self.top = top

    def result(self) -> Tensor:
        return self.weighted / self.total


def _read(pool: KvPool, rows: Tensor) -> Tensor:
    return pool.read(rows.flatten()).unflatten(0, rows.shape) if isinstance(pool, KvRows) else pool[rows]


def _widened(rows: Tensor) -> Tensor:
    missing = ENTRIES_PER_TILE - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, missing), value=-1) if missing else rows
