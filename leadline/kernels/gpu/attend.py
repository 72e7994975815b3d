"""attend on a GPU: one program per token, block of heads and share of the token's keys.

All heads read the same rows, so a tile of keys is brought in once for up to 64 heads, and what a program multiplies
is [heads, D] x [D, keys] and [heads, keys] x [keys, D]. Packed rows are expanded to bf16 on the way, which is exact.
At small batch a token's keys are shared out over several programs and a second launch joins their sums.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.bits import e4m3_to_float, e8m0_to_float
from leadline.kernels.gpu.chips import Chip, chip_of, processors
from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.packed import KvPool, KvRows
from leadline.kernels.rope import Angles

PRICE_OF_JOINING, PRICE_OF_PART, PRICE_OF_PARTIAL = 0.6, 0.02, 0.01
"""What sharing out a token's keys costs, in tiles of 64 keys (3.1 us): a launch, each part that a program of the second
launch reads in turn, and each partial sum in memory. Fitted to an H200 with packed rows: 1 x 128 keys takes 12.2 us
with 1 part and 10.8 with 2; 1 x 640 keys 39.7 / 15.1 / 12.7 with 1 / 5 / 10; 1 x 8320 keys 24.0 / 21.3 / 24.5 with 33 /
65 / 130; 16 x 640 keys 41.3 / 26.9 / 19.1 / 18.7 with 1 / 2 / 5 / 8.
"""
MOST_SPLITS = 132
KEYS_OF_A_PART = 1152
"""Keys of a part where results are to be the same in every batch: what a query of V4-Pro's CSA layers reads, so that
only HCA layers beyond 131,072 tokens are split, and prompts seldom write partial sums."""
MOST_PARTIALS = 1 << 26
"""Partial sums in memory at a time, in numbers (256 MB), where parts do not depend on how many tokens there are."""


@dataclass(frozen=True)
class Tiling:
    """How a program's tiles are cut: heads and keys in a tile, warps, and tiles in flight."""

    heads: int
    keys: int
    warps: int
    stages: int


TILINGS = {
    "sm80": Tiling(64, 32, 8, 2),
    "sm86": Tiling(32, 16, 8, 2),
    "sm89": Tiling(32, 16, 8, 2),
    "sm90": Tiling(64, 64, 8, 2),
    "sm100": Tiling(64, 32, 8, 2),
    "sm120": Tiling(32, 16, 8, 2),
    "gfx942": Tiling(32, 16, 8, 1),
    "gfx950": Tiling(32, 32, 8, 1),
}
"""By chip, for bf16 rows of 512 channels: what fits its shared memory. Only sm90's was timed."""
HOPPER_TILING = Tiling(64, 64, 8, 2)
"""What `attend_hopper` is written for."""
WIDE_TILING = Tiling(16, 16, 4, 1)
"""fp32 is multiplied without matrix units."""


def tiling(chip: Chip, heads: int, width: int, bits: int) -> Tiling:
    """The tiles for `heads` query heads and rows of `width` channels, multiplied in `bits` bits."""
    chosen = TILINGS[chip.name] if bits == 16 else WIDE_TILING
    block = min(chosen.heads, max(16, triton.next_power_of_2(heads)))
    warps = chosen.warps if width > 128 else 4
    return Tiling(block, chosen.keys, warps, chosen.stages)


def widths(width: int, rotated: int) -> dict[str, int]:
    """The constants of a kernel that follow from the rows' width."""
    return {"D": width, "R": rotated, "BLOCK_D": max(64, triton.next_power_of_2(width))}


def splits(programs: int, tiles: int, side_by_side: int) -> int:
    """Over how many programs each token's `tiles` tiles of keys are shared out.

    `programs` is how many there are with one per token and block of heads; `side_by_side` run at a time. The cheapest
    number by rounds of programs, tiles in each, and the price of joining.
    """
    most = max(1, min(tiles, MOST_SPLITS, side_by_side // programs * 2))

    def cost(n: int) -> float:
        price = PRICE_OF_JOINING + PRICE_OF_PART * n + PRICE_OF_PARTIAL * n * programs if n > 1 else 0
        return -(-programs * n // side_by_side) * -(-tiles // n) + price

    return min(range(1, most + 1), key=lambda n: (cost(n), n))


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
    """See `leadline.kernels.attend.attend`. `entry_rows` holds -1 only past the number of entries that a query reads.

    bf16 rows are multiplied in bf16 (weights are rounded to it for the product with the values), fp32 in fp32; sums
    are fp32. Over how many programs a token's keys are shared out, and so the order of its sums, follows from the
    number of tokens in the call and from the width of the lists: see `splits`. If `deterministic`, a part has
    KEYS_OF_A_PART keys, whatever else there is.
    """
    tokens, heads, width = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    if entries is None or entry_rows is None or entry_rows.shape[1] == 0:
        entries, entry_rows = window, window_rows[:, :0]
    window_rows, entry_rows = _lists(window_rows), _lists(entry_rows)
    lists = (window_rows.shape[1], entry_rows.shape[1])
    constants = widths(width, 2 * by.cos.shape[1])
    plan = _plan(q, window, entries, lists, constants["R"], deterministic)
    split = plan.parts > 1
    most = MOST_PARTIALS // (plan.parts * heads * width)
    if deterministic and split and tokens > most:
        for i in range(0, tokens, most):
            t = slice(i, i + most)
            turn = Angles(by.cos[t], by.sin[t])
            out[t] = attend(q[t], sink, window, window_rows[t], entries, entry_rows[t], turn, deterministic)
        return out
    rows = tokens * plan.parts * heads if split else 0
    partial, sums = torch.empty(rows, width, device=q.device), torch.empty(2, rows, device=q.device)
    pools = [pool.blocks if isinstance(pool, KvRows) else pool for pool in (window, entries)]
    arguments = (
        *(q.contiguous(), sink, pools[0], window_rows, pools[1], entry_rows, by.cos, by.sin, out, partial, sums),
        *(heads, *lists),
        *(tensor.stride(0) for tensor in (*pools, window_rows, entry_rows)),
        plan.parts,
        plan.each,
    )
    packed = [isinstance(pool, KvRows) for pool in (window, entries)]
    shares = tokens * triton.cdiv(heads, plan.tile.heads) * plan.parts
    if plan.on_hopper:
        _launch_on_hopper(q.device, shares, arguments, packed[0], split)
    else:
        _attend[(shares,)](
            *arguments,
            **constants,
            **{"OPERAND": plan.operand, "PACKED_WINDOW": packed[0], "PACKED_ENTRIES": packed[1], "SPLIT": split},
            **{"HEADS": plan.tile.heads, "KEYS": plan.tile.keys},
            ASSEMBLY=q.is_cuda and chip_of(q.device).backend == "cuda",
            num_warps=plan.tile.warps,
            num_stages=plan.tile.stages,
        )
    if split:
        cut = joining(tokens * heads, plan.parts, constants["BLOCK_D"], deterministic)
        _launch_join(tokens, heads, plan.parts, cut, (partial, sums, by.cos, by.sin, out), constants)
    return out


@dataclass(frozen=True)
class _Plan:
    operand: tl.dtype
    on_hopper: bool
    tile: Tiling
    parts: int
    each: int
    """Tiles of a part; 0: a token's tiles are shared out equally."""


def _plan(
    q: Tensor, window: KvPool, entries: KvPool, lists: tuple[int, int], rotated: int, deterministic: bool
) -> _Plan:
    """`lists` are the widths of the window's and the entries' lists."""
    tokens, heads, width = q.shape
    chip, operand = chip_of(q.device), _operand(q, window, entries)
    on_hopper = _suits_hopper(chip, operand, width, rotated, window, entries)
    tile = HOPPER_TILING if on_hopper else tiling(chip, heads, width, operand.primitive_bitwidth)
    tiles = sum(triton.cdiv(length, tile.keys) for length in lists)
    if deterministic:
        each = KEYS_OF_A_PART // tile.keys
        return _Plan(operand, on_hopper, tile, max(1, triton.cdiv(tiles, each)), each)
    parts = splits(tokens * triton.cdiv(heads, tile.heads), tiles, processors(q.device))
    return _Plan(operand, on_hopper, tile, parts, 0)


def _launch_on_hopper(
    device: torch.device, shares: int, arguments: tuple[object, ...], packed: bool, split: bool
) -> None:
    from leadline.kernels.gpu.attend_hopper import PACKED_BRINGERS, PLAIN_BRINGERS, attend_on_hopper

    warps, registers = PACKED_BRINGERS if packed else PLAIN_BRINGERS
    attend_on_hopper[(min(shares, processors(device)),)](
        *arguments,
        shares,
        PACKED=packed,
        SPLIT=split,
        BRINGERS=warps,
        BRINGER_REGISTERS=registers,
        num_warps=8,
        **early_start(device),
    )


def _launch_join(
    tokens: int, heads: int, parts: int, cut: dict[str, int], tensors: tuple[Tensor, ...], constants: dict[str, int]
) -> None:
    overlap = early_start(tensors[0].device)
    grid = (tokens * heads, constants["BLOCK_D"] // cut["CHANNELS"])
    _join[grid](*tensors, heads, parts, D=constants["D"], R=constants["R"], **cut, OVERLAP=bool(overlap), **overlap)


def joining(rows: int, parts: int, width: int, deterministic: bool) -> dict[str, int]:
    """How many channels and parts at a time a program joins, for `rows` tokens times heads.

    Small programs for one or two tokens only: 16 tokens' sums in pieces of 128 channels took 10 us more on an H200.
    How many parts decides in which order they are added.
    """
    if deterministic:
        return {"CHANNELS": min(512, width), "PARTS": 8}
    channels = 128 if rows <= 128 else 512
    at_once = 8192 // channels
    return {"CHANNELS": min(channels, width), "PARTS": min(at_once, max(2, triton.next_power_of_2(parts)))}


def _suits_hopper(chip: Chip, operand: tl.dtype, width: int, rotated: int, *pools: KvPool) -> bool:
    """Whether the kernel of `attend_hopper` can do it: official widths, bf16, both pools of one kind."""
    alike = len({isinstance(pool, KvRows) for pool in pools}) == 1
    return chip.name == "sm90" and operand == tl.bfloat16 and (width, rotated) == (512, 64) and alike


def _operand(q: Tensor, *pools: KvPool) -> tl.dtype:
    """The type of what is multiplied: bf16 if all is bf16 or packed. Triton's interpreter cannot multiply bf16."""
    if not q.is_cuda:
        return tl.float32
    kinds = [q.dtype] + [pool.dtype for pool in pools if isinstance(pool, Tensor)]
    return tl.bfloat16 if all(kind == torch.bfloat16 for kind in kinds) else tl.float32


def _lists(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit(
    do_not_specialize=[
        *("heads", "window_width", "entry_width", "window_list_stride", "entry_list_stride", "parts", "each")
    ]
)
def _attend(
    p_q,
    p_sink,
    p_window,
    p_window_rows,
    p_entries,
    p_entry_rows,
    p_cos,
    p_sin,
    p_out,
    p_partial,
    p_sums,
    heads,
    window_width,
    entry_width,
    window_stride,
    entries_stride,
    window_list_stride,
    entry_list_stride,
    parts,
    each,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OPERAND: tl.constexpr,
    PACKED_WINDOW: tl.constexpr,
    PACKED_ENTRIES: tl.constexpr,
    SPLIT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):
    blocks = tl.cdiv(heads, HEADS)
    i_token = (tl.program_id(0) // (blocks * parts)).to(tl.int64)
    i_part = tl.program_id(0) // blocks % parts
    o_head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    o_channel = tl.arange(0, BLOCK_D)
    p_window_rows += i_token * window_list_stride
    p_entry_rows += i_token * entry_list_stride

    window_tiles = tl.cdiv(window_width, KEYS)
    tiles = window_tiles + _entry_tiles(p_entry_rows, entry_width, KEYS)
    if each == 0:
        each = tl.cdiv(tiles, parts)
    first = i_part * each
    last = tl.minimum(first + each, tiles)
    m_head = o_head < heads
    o_sum = (i_token * parts + i_part) * heads + o_head
    sums = tl.num_programs(0) // blocks * heads
    if first >= tiles:
        if SPLIT:
            tl.store(p_sums + o_sum, float("-inf"), m_head)
        return

    m_q = m_head[:, None] & (o_channel < D)
    b_q = tl.load(p_q + (i_token * heads + o_head[:, None]) * D + o_channel, m_q, 0.0).to(OPERAND)
    b_sink = tl.load(p_sink + o_head, m_head, 0.0).to(tl.float32) * 1.4426950408889634
    b_top = tl.maximum(b_sink, -1e30)
    b_total = tl.where(i_part == 0, tl.exp2(b_sink - b_top), 0.0)
    b_out = tl.zeros((HEADS, BLOCK_D), tl.float32)
    b_top, b_total, b_out = _bring_in(
        b_q, b_top, b_total, b_out, p_window, p_window_rows, window_width, window_stride,
        tl.minimum(first, window_tiles), tl.minimum(last, window_tiles),
        D, R, OPERAND, PACKED_WINDOW, ASSEMBLY, KEYS,
    )  # fmt: skip
    b_top, b_total, b_out = _bring_in(
        b_q, b_top, b_total, b_out, p_entries, p_entry_rows, entry_width, entries_stride,
        tl.maximum(first - window_tiles, 0), tl.maximum(last - window_tiles, 0),
        D, R, OPERAND, PACKED_ENTRIES, ASSEMBLY, KEYS,
    )  # fmt: skip
    if SPLIT:
        tl.store(p_sums + o_sum, b_top, m_head)
        tl.store(p_sums + sums + o_sum, b_total, m_head)
        tl.store(p_partial + o_sum[:, None] * D + o_channel, b_out, m_q)
    else:
        b_out = (b_out * (1.0 / b_total)[:, None]).to(p_out.dtype.element_ty)
        b_out = _turned_back(b_out, p_cos + i_token * (R // 2), p_sin + i_token * (R // 2), 0, D, R)
        tl.store(p_out + (i_token * heads + o_head[:, None]) * D + o_channel, b_out.to(p_out.dtype.element_ty), m_q)


@triton.jit
def _entry_tiles(p_rows, width, KEYS: tl.constexpr):
    """How many tiles of a list hold rows: the first index of such a tile is not -1."""
    tiles = tl.cdiv(width, KEYS)
    found = 0
    for start in range(0, tiles, 128):
        o_tile = start + tl.arange(0, 128)
        found += tl.sum((tl.load(p_rows + o_tile * KEYS, o_tile < tiles, -1) >= 0).to(tl.int32))
    return found


@triton.jit
def _bring_in(
    b_q,
    b_top,
    b_total,
    b_out,
    p_pool,
    p_rows,
    width,
    stride,
    first,
    last,
    D: tl.constexpr,
    R: tl.constexpr,
    OPERAND: tl.constexpr,
    PACKED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Bring tiles first .. last - 1 of a list into the running softmax (highest logit, total weight, weighted sum)."""
    BLOCK_D: tl.constexpr = b_q.shape[1]
    for tile in range(first, last):
        o_key = tile * KEYS + tl.arange(0, KEYS)
        b_row = tl.load(p_rows + o_key, o_key < width, -1).to(tl.int64)
        if PACKED:
            b_key = unpacked(p_pool, b_row, stride, D, R, BLOCK_D, ASSEMBLY).to(OPERAND)
        else:
            o_channel = tl.arange(0, BLOCK_D)
            m_key = (b_row >= 0)[:, None] & (o_channel < D)
            b_key = tl.load(p_pool + b_row[:, None] * stride + o_channel, m_key, 0.0).to(OPERAND)
        b_logit = tl.dot(b_q, tl.trans(b_key), input_precision="ieee") * (D**-0.5 * 1.4426950408889634)
        b_logit = tl.where(b_row >= 0, b_logit, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_logit, 1))
        b_weight = tl.exp2(b_logit - b_new[:, None])
        b_old = tl.exp2(b_top - b_new)
        b_total = b_total * b_old + tl.sum(b_weight, 1)
        b_out = tl.dot(b_weight.to(OPERAND), b_key, b_out * b_old[:, None], input_precision="ieee")
        b_top = b_new
    return b_top, b_total, b_out


@triton.jit
def unpacked(p_blocks, b_row, stride, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Rows of a packed pool -> bf16 [keys, BLOCK_D]; zeros for -1."""
    GROUPS: tl.constexpr = BLOCK_D // 64
    LAST: tl.constexpr = (D - 1) // 64
    m_row = b_row >= 0
    p_block = p_blocks + (b_row >> 6) * stride
    p_row = p_block + (b_row & 63) * (D + R)
    p_scale = p_block + 64 * (D + R) + (b_row & 63) * (8 * tl.cdiv(tl.cdiv(D - R, 64), 8))
    o_group, o_place = tl.arange(0, GROUPS), tl.arange(0, 64)
    o_channel = o_group[:, None] * 64 + o_place
    m_code = m_row[:, None, None] & (o_channel < D - R)
    b_code = tl.load(p_row[:, None, None] + o_channel, m_code, 0)
    m_scale = m_row[:, None] & (o_group * 64 < D - R)
    b_scale = tl.load(p_scale[:, None] + o_group, m_scale, 0)
    o_tail = LAST * 64 + o_place - (D - R)
    m_tail = m_row[:, None] & (o_tail >= 0) & (o_tail < R)
    b_tail = tl.load(((p_row + (D - R)).to(tl.pointer_type(tl.bfloat16)))[:, None] + o_tail, m_tail, 0.0)
    b_plain = _expanded(b_code, b_scale, ASSEMBLY)
    return tl.reshape(tl.where(o_channel < D - R, b_plain, b_tail[:, None, :]), (b_row.shape[0], BLOCK_D))


@triton.jit
def _expanded(b_code, b_scale, ASSEMBLY: tl.constexpr):
    """e4m3 bytes [keys, groups, 64] and e8m0 bytes [keys, groups] -> their products in bf16, exactly."""
    if ASSEMBLY:
        # The seven bits at bf16's exponent and mantissa make a number that is 2^120 too small, subnormals included;
        # the scale makes up for it (scales above 2^7 would overflow: rows are normed, so none is near).
        b_factor = ((b_scale.to(tl.int16) + 120) << 7).to(tl.bfloat16, bitcast=True)
        b_factor = tl.broadcast_to(b_factor[:, :, None], b_code.shape)
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, zero;
            mov.b32 zero, 0x80008000;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07F007F0;
            and.b32 d, d, 0x07F007F0;
            lop3.b32 c, a, 0x80008000, c, 0xEA;
            lop3.b32 d, b, 0x80008000, d, 0xEA;
            fma.rn.bf16x2 $0, c, $3, zero;
            fma.rn.bf16x2 $1, d, $4, zero;
            }
            """,
            "=r,=r,r,r,r",
            [b_code, b_factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return (e4m3_to_float(b_code) * e8m0_to_float(b_scale)[:, :, None]).to(tl.bfloat16)


@triton.jit
def _turned_back(b_out, p_cos, p_sin, first, D: tl.constexpr, R: tl.constexpr):
    """Undo the rotation of the last R of D channels in [rows, channels], whose first channel is `first` (even).

    Products and sums are fused as written: left to the compiler, the choice may differ between kernels.
    """
    ROWS: tl.constexpr = b_out.shape[0]
    PAIRS: tl.constexpr = b_out.shape[1] // 2
    o_pair = first // 2 + tl.arange(0, PAIRS) - (D - R) // 2
    m_pair = (o_pair >= 0) & (o_pair < R // 2)
    b_cos = tl.broadcast_to(tl.load(p_cos + o_pair, m_pair, 1.0).to(tl.float32)[None, :], (ROWS, PAIRS))
    b_sin = tl.broadcast_to(tl.load(p_sin + o_pair, m_pair, 0.0).to(tl.float32)[None, :], (ROWS, PAIRS))
    b_even, b_odd = tl.split(tl.reshape(b_out.to(tl.float32), (ROWS, PAIRS, 2)))
    b_turned = tl.join(tl.fma(b_even, b_cos, b_odd * b_sin), tl.fma(b_odd, b_cos, -b_even * b_sin))
    return tl.reshape(b_turned, (ROWS, 2 * PAIRS))


@triton.jit(do_not_specialize=["heads", "parts"])
def _join(
    p_partial,
    p_sums,
    p_cos,
    p_sin,
    p_out,
    heads,
    parts,
    D: tl.constexpr,
    R: tl.constexpr,
    CHANNELS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the sums of a token's programs for one head and `CHANNELS` channels, and finish."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i_token = (tl.program_id(0) // heads).to(tl.int64)
    i_head = tl.program_id(0) % heads
    sums = tl.num_programs(0).to(tl.int64) * parts
    first = tl.program_id(1) * CHANNELS
    o_channel = first + tl.arange(0, CHANNELS)
    top = float("-inf")
    total = 0.0
    b_out = tl.zeros((CHANNELS,), tl.float32)
    for start in range(0, parts, PARTS):
        o_part = start + tl.arange(0, PARTS)
        o_sum = (i_token * parts + o_part) * heads + i_head
        b_top = tl.load(p_sums + o_sum, o_part < parts, float("-inf"))
        m_part = b_top > float("-inf")
        b_total = tl.load(p_sums + sums + o_sum, m_part, 0.0)
        m_partial = m_part[:, None] & (o_channel < D)
        b_partial = tl.load(p_partial + o_sum[:, None] * D + o_channel, m_partial, 0.0)
        new = tl.maximum(top, tl.max(b_top))
        b_weight = tl.where(m_part, tl.exp2(b_top - new), 0.0)
        old = tl.exp2(top - new)
        total = total * old + tl.sum(b_weight * b_total)
        b_out = b_out * old + tl.sum(b_weight[:, None] * b_partial, 0)
        top = new
    # as where nothing is joined, to the bit: the same quotient, rounded before it is turned
    b_out = tl.reshape(b_out * (1.0 / total), (1, CHANNELS)).to(p_out.dtype.element_ty)
    b_out = _turned_back(b_out, p_cos + i_token * (R // 2), p_sin + i_token * (R // 2), first, D, R)
    p_out += (i_token * heads + i_head) * D
    tl.store(p_out + o_channel, tl.reshape(b_out, (CHANNELS,)).to(p_out.dtype.element_ty), o_channel < D)
