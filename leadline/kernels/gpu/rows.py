"""What query, store and compress share inside kernels: norm, rotation, Hadamard, and writing to plain or packed pools.

Tiles are [rows, channels] in fp32, channels padded to a power of two with zeros. A value that the definition holds in
the model's dtype is rounded to it at the same places here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.bits import (
    e2m1_to_float,
    float_to_e2m1,
    float_to_e4m3,
    float_to_e8m0,
    fp4_scale,
    fp8_scale,
    round_e4m3,
)
from leadline.kernels.packed import IndexPool, IndexRows, KvPool, KvRows

KV_BLOCK = tl.constexpr(64)
BLOCK_ROWS = tl.constexpr(64)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 -> the nearest value of `dtype`, in fp32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def norm_rows(x, eps, width: tl.constexpr):
    """`x` [N, block] without its root mean square over `width` channels; padding must be 0."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]


@triton.jit
def turn_rows(x, p_cos, p_sin, o_turn, m_row, width: tl.constexpr, turned: tl.constexpr):
    """Rotate the last `turned` channels of `x` [N, block] by rows `o_turn` [N] of angles [.., turned / 2]."""
    rows: tl.constexpr = x.shape[0]
    pairs: tl.constexpr = x.shape[1] // 2
    pair = tl.arange(0, pairs) - (width - turned) // 2
    mask = m_row[:, None] & ((pair >= 0) & (pair < turned // 2))[None, :]
    o_pair = o_turn[:, None] * (turned // 2) + pair[None, :]
    cos = tl.load(p_cos + o_pair, mask, other=1.0)
    sin = tl.load(p_sin + o_pair, mask, other=0.0)
    a, b = tl.split(tl.reshape(x, rows, pairs, 2))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), rows, 2 * pairs)


@triton.jit
def hadamard_rows(x, stages: tl.constexpr):
    """`leadline.formats.hadamard` of `x` [N, 2^stages], without the cast; every sum is taken in the definition's order.

    A stage takes neighbours, which differ in the lowest bit of their channel, and makes that bit the highest: after
    all stages the channels stand in their order again.
    """
    rows: tl.constexpr = x.shape[0]
    channels: tl.constexpr = x.shape[1]
    for _ in tl.static_range(stages):
        low, high = tl.split(tl.reshape(x, rows, channels // 2, 2))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), rows, channels)
    return x * channels**-0.5


@triton.jit
def inverse_power(power_of_two):
    """1 / x of powers of two between 2^-126 and 2^126, exactly."""
    return ((254 << 23) - power_of_two.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def put_kv_rows(
    x, o_row, m_row, p_pool, p_halves, stride, form: tl.constexpr, width: tl.constexpr, turned: tl.constexpr
):
    """Write `x` [N, block] to rows `o_row` [N] (int64) of a pool, in the `form` that `kv_target` says.

    The definition is `leadline.kernels.store.put_rows`.
    """
    rows: tl.constexpr = x.shape[0]
    block: tl.constexpr = x.shape[1]
    groups: tl.constexpr = block // KV_BLOCK
    plain: tl.constexpr = width - turned
    channel = tl.arange(0, block)
    mask = m_row[:, None] & (channel < width)[None, :]
    if form == "plain":
        tl.store(p_pool + o_row[:, None] * stride + channel[None, :], x, mask)
    else:
        grouped = tl.reshape(tl.where((channel < plain)[None, :], x, 0.0), rows, groups, KV_BLOCK)
        scale = fp8_scale(tl.max(tl.abs(grouped), 2))
        scaled = grouped * inverse_power(scale)[:, :, None]
        if form == "rounded":
            kept = tl.reshape(round_e4m3(scaled) * scale[:, :, None], rows, block)
            kept = tl.where((channel < plain)[None, :], kept, x)
            tl.store(p_pool + o_row[:, None] * stride + channel[None, :], kept, mask)
        else:
            row_bytes: tl.constexpr = width + turned
            scale_bytes: tl.constexpr = (plain + KV_BLOCK * 8 - 1) // (KV_BLOCK * 8) * 8
            o_block = o_row // BLOCK_ROWS * stride
            place = o_row % BLOCK_ROWS
            o_byte = o_block + place * row_bytes
            codes = tl.reshape(float_to_e4m3(scaled), rows, block)
            tl.store(p_pool + o_byte[:, None] + channel[None, :], codes, mask & (channel < plain)[None, :])
            o_half = (o_byte + plain) // 2
            halves = p_halves + o_half[:, None] + (channel - plain)[None, :]
            tl.store(halves, x.to(tl.bfloat16), mask & (channel >= plain)[None, :])
            group = tl.arange(0, groups)
            o_scale = o_block + BLOCK_ROWS * row_bytes + place * scale_bytes
            m_scale = m_row[:, None] & (group * KV_BLOCK < plain)[None, :]
            tl.store(p_pool + o_scale[:, None] + group[None, :], float_to_e8m0(scale), m_scale)


@triton.jit
def fp4_groups(x, size: tl.constexpr):
    """`x` [N, channels] -> (codes [N, groups, size] int32, scales [N, groups]) of groups of `size` channels."""
    grouped = tl.reshape(x, x.shape[0], x.shape[1] // size, size)
    scale = fp4_scale(tl.max(tl.abs(grouped), 2))
    return float_to_e2m1(grouped * inverse_power(scale)[:, :, None]), scale


@triton.jit
def fp4_rounded(x, size: tl.constexpr):
    """`x` [N, channels] as fp4 keeps it."""
    codes, scale = fp4_groups(x, size)
    return tl.reshape(e2m1_to_float(codes) * scale[:, :, None], x.shape[0], x.shape[1])


@triton.jit
def put_index_rows(x, o_row, m_row, p_pool, stride, form: tl.constexpr, size: tl.constexpr):
    """Write `x` [N, channels], spread by Hadamard where `form` rounds, to rows `o_row` [N] (int64) of a pool."""
    rows: tl.constexpr = x.shape[0]
    channels: tl.constexpr = x.shape[1]
    channel = tl.arange(0, channels)
    if form != "packed":
        kept = fp4_rounded(x, size) if form == "rounded" else x
        tl.store(p_pool + o_row[:, None] * stride + channel[None, :], kept, m_row[:, None])
    else:
        codes, scale = fp4_groups(x, size)
        low, high = tl.split(tl.reshape(codes, rows, channels // 2, 2))
        o_block = o_row // BLOCK_ROWS * stride
        place = o_row % BLOCK_ROWS
        o_byte = o_block + place * (channels // 2)
        byte = tl.arange(0, channels // 2)
        tl.store(p_pool + o_byte[:, None] + byte[None, :], (low | high << 4).to(tl.uint8), m_row[:, None])
        groups: tl.constexpr = channels // size
        o_scale = o_block + BLOCK_ROWS * (channels // 2) + place * groups
        tl.store(p_pool + o_scale[:, None] + tl.arange(0, groups)[None, :], float_to_e8m0(scale), m_row[:, None])


def kv_target(pool: KvPool, native: bool) -> tuple[Tensor, Tensor, int, str]:
    """(pool, the same in halves, stride, form) as `put_kv_rows` takes them."""
    if isinstance(pool, KvRows):
        return pool.blocks, pool.blocks.view(torch.bfloat16), pool.blocks.stride(0), "packed"
    return pool, pool, pool.stride(0), "rounded" if native else "plain"


def index_target(pool: IndexPool, native: bool) -> tuple[Tensor, int, str]:
    """(pool, stride, form) as `put_index_rows` takes them."""
    if isinstance(pool, IndexRows):
        return pool.blocks, pool.blocks.stride(0), "packed"
    return pool, pool.stride(0), "rounded" if native else "plain"


def padded(width: int) -> int:
    """Channels of a tile that holds rows of `width`: a power of two, and whole blocks of scales."""
    return max(KV_BLOCK.value, triton.next_power_of_2(width))


def triton_dtype(pool: KvPool | IndexPool) -> tl.dtype:
    """The type in which rows are computed before a pool takes them."""
    return tl.float32 if isinstance(pool, Tensor) and pool.dtype == torch.float32 else tl.bfloat16
