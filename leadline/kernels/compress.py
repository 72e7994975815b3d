"""compress: from tokens to entries and index keys. Gating is in fp32 (fp64 in fp64 models) throughout.

CSA keeps raw rows, one per token: [kv of entries, 2 D | their scores, 2 D | kv of index keys, 2 c | their scores,
2 c]. HCA keeps an online softmax per window and channel: the running maximum, the sum of weights and the weighted sum
of values, folded token by token in order, so that its last bit does not depend on how a prompt was cut. Scores get
their position's bias (`ape`) when they enter a softmax.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.formats import hadamard
from leadline.kernels.packed import IndexPool, IndexRows, KvPool
from leadline.kernels.project import wide_product
from leadline.kernels.query import index_round
from leadline.kernels.rope import Angles, rotate
from leadline.kernels.rowwise import rms_norm
from leadline.kernels.store import put_rows


@dataclass
class Gating:
    """A compressor's weights: `matrix` [sum of widths, d], `ape` [ratio, sum of widths] (0 where no score).

    `deterministic` as in `project.Weight`.
    """

    matrix: Tensor
    ape: Tensor
    deterministic: bool = False


@dataclass
class Pieces:
    """The parts of a step's chunks that lie in one HCA window each.

    Piece q is `count[q]` tokens from row `first[q]` on. It goes on from row `before[q]` of the online softmaxes, or
    from nothing where that is -1. All [Q] and int64; a piece of no token is left out. `full` [Z] are the pieces that
    complete their window, whose entries go to rows `targets` [Z]. `longest` is the largest count.
    """

    first: Tensor
    count: Tensor
    before: Tensor
    full: Tensor
    targets: Tensor
    longest: int


def gate_rows(x: Tensor, gating: Gating, out: Tensor) -> None:
    """`x` [T, d] -> raw rows in `out` [T, widths], which is fp32, or fp64 for fp64."""
    if x.is_cuda and x.dtype != torch.float64:
        from leadline.kernels.gpu import compress as gpu

        return gpu.gate_rows(x, gating, out)
    out.copy_(wide_product(x, gating.matrix, gating.deterministic))


def close_csa(
    pending: Tensor,
    rows: Tensor,
    gating: Gating,
    norms: tuple[Tensor, Tensor],
    by: Angles,
    eps: float,
    native: bool,
    pools: tuple[KvPool, IndexPool],
    targets: Tensor,
) -> None:
    """Close CSA windows: an entry and an index key each, written to rows `targets` [C] of the two pools.

    `pending` [.., 4 D + 4 c] holds raw rows; `rows` [C, 8] are the previous window's four tokens, then the own four;
    -1 where a request has no previous window. `norms` are [D] and [c]. Where a target is -1 nothing is written.
    """
    if pending.is_cuda and pending.dtype != torch.float64:
        from leadline.kernels.gpu import compress as gpu

        return gpu.close_csa(pending, rows, gating, norms, by, eps, native, pools, targets)
    entries, keys = pools
    sizes = [4 * len(norm) for norm in norms]
    (main, index), (ape, index_ape) = pending.split(sizes, 1), gating.ape.split(sizes, 1)
    made = csa_entries(main, rows, ape, norms[0], by, eps, _row_dtype(entries))
    put_rows(made, 2 * by.cos.shape[-1], native, entries, targets)
    made = csa_entries(index, rows, index_ape, norms[1], by, eps, _row_dtype(keys))
    put_index_keys(made, native, keys, targets)


def csa_entries(
    pending: Tensor, rows: Tensor, ape: Tensor, norm: Tensor, by: Angles, eps: float, dtype: torch.dtype
) -> Tensor:
    """Entries [C, D] in `dtype`, not rounded, of raw rows `pending` [.., 4 D]; or index keys, which are made alike.

    `ape` is [4, 4 D]. A token's first half of channels belongs to the next window's entry, its second half to its own.
    """
    return rotate(rms_norm(_overlapping_sum(pending, rows, ape, len(norm)).to(dtype), norm, eps), by)


def put_index_keys(values: Tensor, native: bool, pool: IndexPool, rows: Tensor) -> None:
    """Write index keys [N, c], spread and rounded to fp4 if native, to `rows` [N] of a pool; none where a row is -1."""
    kept = rows >= 0
    values, rows = values[kept], rows[kept]
    if isinstance(pool, IndexRows):
        pool.write(rows, hadamard(values))
    else:
        pool[rows] = index_round(values, native)


def _row_dtype(pool: KvPool | IndexPool) -> torch.dtype:
    return pool.dtype if isinstance(pool, Tensor) else torch.bfloat16


def _overlapping_sum(pending: Tensor, rows: Tensor, ape: Tensor, width: int) -> Tensor:
    picked = pending[rows.clamp(min=0)]
    first, second = picked[:, :4], picked[:, 4:]
    values = torch.cat([first[..., :width], second[..., width : 2 * width]], 1)
    scores = torch.cat([first[..., 2 * width : 3 * width], second[..., 3 * width :]], 1)
    scores = scores + torch.cat([ape[:, 2 * width : 3 * width], ape[:, 3 * width :]])
    missing = (rows < 0)[..., None]
    values = values.masked_fill(missing, 0)
    scores = scores.masked_fill(missing, float("-inf"))
    return (scores.softmax(1) * values).sum(1)


def hca_fold(
    raw: Tensor,
    positions: Tensor,
    gating: Gating,
    pieces: Pieces,
    folds: Tensor,
    scratch: int,
    norm: Tensor,
    by: Angles,
    eps: float,
    native: bool,
    pool: KvPool,
) -> None:
    """Fold each piece's tokens into its window's online softmax, and write the entries of windows that are complete.

    `raw` [T, 2 D] holds kv and scores of the tokens at `positions` [T]. Piece q's state (maximum, sum, weighted sum)
    goes to row `scratch + q` of `folds` [.., 3, D]; `by` turns the entry of each of `pieces.full`.
    """
    if raw.is_cuda and raw.dtype != torch.float64:
        from leadline.kernels.gpu import compress as gpu

        return gpu.hca_fold(raw, positions, gating, pieces, folds, scratch, norm, by, eps, native, pool)
    states = _folded(raw, positions, gating.ape, pieces, folds)
    folds[scratch : scratch + len(states)] = states
    if len(pieces.full):
        entries = hca_entries(states[pieces.full], norm, by, eps, _row_dtype(pool))
        put_rows(entries, 2 * by.cos.shape[-1], native, pool, pieces.targets)


def _folded(raw: Tensor, positions: Tensor, ape: Tensor, pieces: Pieces, folds: Tensor) -> Tensor:
    width = raw.shape[1] // 2
    first, count = pieces.first, pieces.count
    fresh = (pieces.before < 0)[:, None]
    top, total, weighted = folds[pieces.before.clamp(min=0)].unbind(1)
    top = top.masked_fill(fresh, float("-inf"))
    total, weighted = total.masked_fill(fresh, 0), weighted.masked_fill(fresh, 0)
    last_row = first + count - 1
    for step in range(pieces.longest):
        row = torch.minimum(first + step, last_row)
        values, scores = raw[row].split(width, -1)
        scores = scores + ape[positions[row] % len(ape), width:]
        new_top = torch.maximum(top, scores)
        old, new = torch.exp(top - new_top), torch.exp(scores - new_top)
        active = (step < count)[:, None]
        top = torch.where(active, new_top, top)
        total = torch.where(active, total * old + new, total)
        weighted = torch.where(active, weighted * old + new * values, weighted)
    return torch.stack([top, total, weighted], 1)


def hca_entries(states: Tensor, norm: Tensor, by: Angles, eps: float, dtype: torch.dtype) -> Tensor:
    """Entries [Z, D] in `dtype`, not rounded, of the windows whose online softmax `states` [Z, 3, D] is complete."""
    entry = (states[:, 2] / states[:, 1]).to(dtype)
    return rotate(rms_norm(entry, norm, eps), by)
