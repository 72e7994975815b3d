"""query: norm and rotate the attention queries; rotate, spread and round the indexer's."""

import torch
from torch import Tensor

from leadline.formats import fp4_round_trip, hadamard
from leadline.kernels.rope import Angles, rotate
from leadline.kernels.rowwise import rms_norm


def query(q: Tensor, by: Angles, eps: float) -> Tensor:
    """`q` [T, H, D]: per-head rms norm without a weight, then RoPE."""
    if q.is_cuda and q.dtype != torch.float64:
        from leadline.kernels.gpu import query as gpu

        return gpu.query(q, by, eps)
    return rotate(rms_norm(q, None, eps), by)


def index_query(q: Tensor, by: Angles, native: bool) -> Tensor:
    """`q` [T, heads, c]: RoPE; in native numerics Hadamard and e2m1 rounding per 32 channels."""
    if q.is_cuda and q.dtype != torch.float64:
        from leadline.kernels.gpu import query as gpu

        return gpu.index_query(q, by, native)
    return index_round(rotate(q, by), native)


def index_round(x: Tensor, native: bool) -> Tensor:
    """Index queries and keys as they are scored: the same Hadamard turn on both sides, then fp4."""
    return fp4_round_trip(hadamard(x)) if native else x
