"""store: norm, rotate and round each token's key-value row, and write it where attention will read it."""

import torch
from torch import Tensor

from leadline.formats import fp8_round_trip
from leadline.kernels.packed import KV_BLOCK, KvPool, KvRows
from leadline.kernels.query import query
from leadline.kernels.rope import Angles, rotate
from leadline.kernels.rowwise import rms_norm


def round_row(row: Tensor, rotated: int, native: bool) -> Tensor:
    """A window row or entry [..., D] as native numerics keep it: fp8, but for the last `rotated` channels."""
    if not native:
        return row
    return torch.cat([fp8_round_trip(row[..., :-rotated], KV_BLOCK), row[..., -rotated:]], -1)


def put_rows(values: Tensor, rotated: int, native: bool, pool: KvPool, rows: Tensor) -> None:
    """Round `values` [N, D] as native numerics keep them and write them to `rows` [N] of a plain or packed pool.

    A packed pool is native by nature. Where a row is -1 nothing is written.
    """
    kept = rows >= 0
    values, rows = values[kept], rows[kept]
    if isinstance(pool, KvRows):
        pool.write(rows, values)
    else:
        pool[rows] = round_row(values, rotated, native)


def store(kv: Tensor, norm: Tensor, by: Angles, eps: float, native: bool, pool: KvPool, first_row: int) -> None:
    """Write the rows of `kv` [T, D] to rows `first_row .. first_row + T - 1` of a plain or packed pool."""
    if kv.is_cuda and kv.dtype != torch.float64:
        from leadline.kernels.gpu import store as gpu

        return gpu.store(kv, norm, by, eps, native, pool, first_row)
    row = rotate(rms_norm(kv, norm, eps), by)
    if isinstance(pool, KvRows):
        pool.write(torch.arange(first_row, first_row + len(kv), device=kv.device), row)
    else:
        pool[first_row : first_row + len(kv)] = round_row(row, 2 * by.cos.shape[-1], native)


def query_and_store(
    q: Tensor, kv: Tensor, norm: Tensor, by: Angles, eps: float, native: bool, pool: KvPool, first_row: int
) -> Tensor:
    """`query` and `store` of the same tokens, which a GPU does in one launch: `q` [T, H, D] -> [T, H, D]."""
    if q.is_cuda and q.dtype != torch.float64:
        from leadline.kernels.gpu import store as gpu

        return gpu.query_and_store(q, kv, norm, by, eps, native, pool, first_row)
    store(kv, norm, by, eps, native, pool, first_row)
    return query(q, by, eps)
