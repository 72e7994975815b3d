"""attend on Hopper, in Triton's Gluon dialect: rows of 512 channels, 64 of them rotated, in bf16.

A program has two warpgroups that multiply, and others that bring keys: these gather rows (expanding packed ones) into
two stages of 64 keys in shared memory while the former work on the stage before. Of the logits each multiplying
warpgroup makes 32 keys' columns, of the output 256 channels. There are no more programs than multiprocessors; each
goes through its share of the work, and keys of its next token come in while it finishes the one before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from leadline.kernels.gpu.gluon_names import copy_async, reinterpret

PLAIN_BRINGERS = (4, 104)
PACKED_BRINGERS = (4, 136)
"""Warps that bring keys, and registers of a thread of theirs; the eight that multiply get what is left: 200 and 176.

By what ptxas spills: nothing in either loop of plain rows, and in those of packed rows a handful with 136, more with
less or with more. Eight bringing warps do not fit beside accumulators of 128 registers.
"""


@gluon.jit(
    do_not_specialize=[
        *("heads", "window_width", "entry_width", "window_list_stride", "entry_list_stride", "parts", "each", "shares")
    ]
)
def attend_on_hopper(
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
    shares,
    PACKED: gl.constexpr,
    SPLIT: gl.constexpr,
    BRINGERS: gl.constexpr,
    BRINGER_REGISTERS: gl.constexpr,
):
    """`shares` pieces of work: one per token, 64 heads and part (of `parts`) of the token's keys.

    A part is `each` tiles, or an equal share of the token's if that is 0.
    """
    gdc_wait()
    gdc_launch_dependents()
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_q = gl.allocate_shared_memory(gl.bfloat16, [64, 512], TILE)
    s_key = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 512], TILE)
    s_weight = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    s_bias = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    s_top = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(full.index(stage), count=32 * BRINGERS + 1)  # each thread's copies, and all threads' stores
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()

    work = (
        shares, parts, heads, each,
        p_window_rows, window_list_stride, window_width, p_entry_rows, entry_list_stride, entry_width,
    )  # fmt: skip
    stages = (s_key, s_bias, full, empty)
    outputs = (p_cos, p_sin, p_out, p_partial, p_sums)
    gl.warp_specialize(
        [
            (_multiply, (work, stages, s_q, s_weight, s_top, p_q, p_sink, outputs, SPLIT)),
            (
                _bring_packed if PACKED else _bring_plain,
                (work, stages, p_window, window_stride, p_entries, entries_stride),
            ),
        ],
        [BRINGERS],
        [BRINGER_REGISTERS],
    )


@gluon.jit
def _share(work, share):
    """Which piece of work is number `share`: token, part, first head, and tiles first .. last - 1 of its lists."""
    _, parts, heads, each, _, _, window_width, p_entry_rows, entry_list_stride, entry_width = work
    blocks = gl.cdiv(heads, 64)
    i_token = (share // (blocks * parts)).to(gl.int64)
    i_part = share // blocks % parts
    window_tiles = gl.cdiv(window_width, 64)
    tiles = window_tiles + _entry_tiles(p_entry_rows + i_token * entry_list_stride, entry_width)
    each = gl.where(each > 0, each, gl.cdiv(tiles, parts))
    first = gl.minimum(i_part * each, tiles)
    return i_token, i_part, share % blocks * 64, window_tiles, first, gl.minimum(first + each, tiles)


@gluon.jit
def _entry_tiles(p_rows, width):
    """How many tiles of a list hold rows: the first index of such a tile is not -1."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    tiles = gl.cdiv(width, 64)
    found = 0
    for start in range(0, tiles, 128):
        o_tile = start + gl.arange(0, 128, LAYOUT)
        found += gl.sum((gl.load(p_rows + o_tile * 64, o_tile < tiles, -1) >= 0).to(gl.int32), 0)
    return found


@gluon.jit
def _multiply(work, stages, s_q, s_weight, s_top, p_q, p_sink, outputs, SPLIT: gl.constexpr):
    """The running softmax over the tiles that the bringing warps hand over, and its end."""
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    s_key, s_bias, full, empty = stages
    p_cos, p_sin, p_out, p_partial, p_sums = outputs
    heads = work[2]
    o_head = gl.arange(0, 64, gl.SliceLayout(1, LOGITS))
    used = 0
    for share in range(gl.program_id(0), work[0], gl.num_programs(0)):
        i_token, i_part, first_head, _, first, last = _share(work, share)
        _load_q(s_q, p_q + (i_token * heads + first_head) * 512, heads - first_head)
        m_head = o_head < heads - first_head
        b_sink = gl.load(p_sink + first_head + o_head, m_head, 0.0).to(gl.float32) * 1.4426950408889634
        b_top = gl.maximum(b_sink, -1e30)
        b_first = gl.where(i_part == 0, gl.exp2(b_sink - b_top), 0.0)
        b_none = gl.zeros([64, 64], gl.float32, LOGITS)
        b_total = _by_thread(b_none)
        b_out = gl.zeros([64, 512], gl.float32, OUT)
        for _ in range(first, last):
            stage = used & 1
            mbarrier.wait(full.index(stage), (used >> 1) & 1)
            s_tile = s_key.index(stage)
            logit = warpgroup_mma(s_q, s_tile.permute((1, 0)), b_none, use_acc=False, is_async=True)
            b_logit = warpgroup_mma_wait(0, deps=[logit])
            b_bias = s_bias.index(stage).load(gl.SliceLayout(0, LOGITS))
            b_logit = b_logit * (0.04419417382415922 * 1.4426950408889634) + b_bias[None, :]
            b_new = gl.maximum(b_top, _highest(s_top, b_logit, LOGITS))
            b_weight = gl.exp2(b_logit - b_new[:, None])
            b_old = gl.exp2(b_top - b_new)
            s_weight.store(b_weight.to(gl.bfloat16))
            b_first = b_first * b_old
            b_top = b_new
            b_part = _by_thread(b_weight)
            b_total = b_total * _like(b_old, b_part) + b_part
            b_out = b_out * gl.convert_layout(b_old, gl.SliceLayout(1, OUT))[:, None]
            fence_async_shared()
            out = warpgroup_mma(s_weight, s_tile, b_out, is_async=True)
            b_out = warpgroup_mma_wait(0, deps=[out])
            mbarrier.arrive(empty.index(stage), count=1)
            used += 1
        b_sum = b_first + _total(b_total, gl.SliceLayout(1, LOGITS))
        if SPLIT:
            o_sum = (i_token * work[1] + i_part) * heads + first_head
            sums = (work[0] // gl.cdiv(heads, 64)).to(gl.int64) * heads
            gl.store(p_sums + o_sum + o_head, gl.where(first < last, b_top, float("-inf")), m_head)
            gl.store(p_sums + sums + o_sum + o_head, b_sum, m_head)
            o_row = gl.arange(0, 64, gl.SliceLayout(1, OUT))
            o_channel = gl.arange(0, 512, gl.SliceLayout(0, OUT))
            m_row = (o_row < heads - first_head) & (first < last)
            gl.store(p_partial + (o_sum + o_row)[:, None] * 512 + o_channel[None, :], b_out, m_row[:, None])
        else:
            b_out = b_out * gl.convert_layout(1.0 / b_sum, gl.SliceLayout(1, OUT))[:, None]
            s_q.store(b_out.to(gl.bfloat16))
            p_row = p_out + (i_token * heads + first_head) * 512
            _store_out(s_q, p_row, p_cos + i_token * 32, p_sin + i_token * 32, heads - first_head)


@gluon.jit
def _highest(s_top, b_logit, LOGITS: gl.constexpr):
    """The maximum of each of 64 rows, over the columns of both warpgroups: [64]."""
    b_half = gl.max(gl.reshape(b_logit, [64, 2, 32]), 2)
    s_top.store(gl.reshape(gl.permute(b_half, [1, 0]), [128]))
    ROW: gl.constexpr = gl.SliceLayout(1, LOGITS)
    return gl.maximum(s_top.slice(0, 64).load(ROW), s_top.slice(64, 64).load(ROW))


@gluon.jit
def _by_thread(b_weight):
    """Sums of a row's columns that one thread holds: [64, 8]."""
    b_weight = gl.sum(gl.reshape(b_weight, [64, 2, 4, 4, 2]), 4)
    return gl.sum(b_weight, 2)


@gluon.jit
def _like(b_row, b_part):
    return gl.convert_layout(b_row, gl.SliceLayout(1, gl.SliceLayout(2, b_part.type.layout)))[:, None, None]


@gluon.jit
def _total(b_part, LAYOUT: gl.constexpr):
    return gl.convert_layout(gl.sum(gl.sum(b_part, 2), 1), LAYOUT)


@gluon.jit
def _load_q(s_q, p_q, heads):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    o_head = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    o_channel = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))
    s_q.store(gl.load(p_q + o_head[:, None] * 512 + o_channel[None, :], (o_head < heads)[:, None], 0.0))
    fence_async_shared()


@gluon.jit
def _store_out(s_out, p_out, p_cos, p_sin, heads):
    """Write 64 heads' outputs, with the rotation of the last 64 channels undone."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    o_head = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    o_channel = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    m_head = (o_head < heads)[:, None]
    p_part = p_out + o_head[:, None] * 512 + o_channel[None, :]
    for part in gl.static_range(3):
        gl.store(p_part + part * 128, s_out.slice(part * 128, 128, dim=1).load(LAYOUT), m_head)
    b_out = s_out.slice(384, 128, dim=1).load(LAYOUT).to(gl.float32)
    b_even, b_odd = gl.split(gl.reshape(b_out, [64, 64, 2]))
    o_pair = gl.arange(0, 64, gl.SliceLayout(0, b_even.type.layout)) - 32
    b_cos = gl.load(p_cos + o_pair, o_pair >= 0, 1.0).to(gl.float32)[None, :]
    b_sin = gl.load(p_sin + o_pair, o_pair >= 0, 0.0).to(gl.float32)[None, :]
    b_cos, b_even = gl.broadcast(b_cos, b_even)
    b_sin, b_odd = gl.broadcast(b_sin, b_odd)
    b_turned = gl.join(gl.fma(b_even, b_cos, b_odd * b_sin), gl.fma(b_odd, b_cos, -b_even * b_sin))
    b_turned = gl.convert_layout(gl.reshape(b_turned, [64, 128]), LAYOUT)
    gl.store(p_part + 384, b_turned.to(gl.bfloat16), m_head)


@gluon.jit
def _rows(work, i_token, window_tiles, tile, last, LAYOUT: gl.constexpr):
    """Row numbers of a tile's 64 keys; -1 for a tile from `last` on."""
    _, _, _, _, p_window_rows, window_list_stride, window_width, p_entry_rows, entry_list_stride, entry_width = work
    in_window = tile < window_tiles
    p_rows = gl.where(in_window, p_window_rows, p_entry_rows)
    p_rows += i_token * gl.where(in_window, window_list_stride, entry_list_stride)
    o_key = gl.where(in_window, tile, tile - window_tiles) * 64 + gl.arange(0, 64, LAYOUT)
    m_key = (o_key < gl.where(in_window, window_width, entry_width)) & (tile < last)
    return gl.load(p_rows + o_key, m_key, -1).to(gl.int32)


@gluon.jit
def _bring_plain(work, stages, p_window, window_stride, p_entries, entries_stride):
    """Gather bf16 rows."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gdc_wait()
    s_key, s_bias, full, empty = stages
    o_channel = gl.arange(0, 512, gl.SliceLayout(0, LAYOUT))[None, :]
    used = 0
    for share in range(gl.program_id(0), work[0], gl.num_programs(0)):
        i_token, _, _, window_tiles, first, last = _share(work, share)
        b_row = _rows(work, i_token, window_tiles, first, last, ROW)
        b_flat = _rows(work, i_token, window_tiles, first, last, FLAT)
        for tile in range(first, last):
            stage = used & 1
            p_pool = gl.where(tile < window_tiles, p_window, p_entries)
            stride = gl.where(tile < window_tiles, window_stride, entries_stride)
            p_key = p_pool + (b_row.to(gl.int64) * stride)[:, None] + o_channel
            mbarrier.wait(empty.index(stage), ((used >> 1) & 1) ^ 1)
            copy_async(s_key.index(stage), p_key, (b_row >= 0)[:, None])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            s_bias.index(stage).store(gl.where(b_flat >= 0, 0.0, float("-inf")))
            mbarrier.arrive(full.index(stage), count=1)
            b_row = _rows(work, i_token, window_tiles, tile + 1, last, ROW)
            b_flat = _rows(work, i_token, window_tiles, tile + 1, last, FLAT)
            used += 1


@gluon.jit
def _bring_packed(work, stages, p_window, window_stride, p_entries, entries_stride):
    """Gather packed rows: 448 e4m3 codes are expanded here, 64 bf16 channels copied.

    While a tile's codes are expanded, or wait for their stage, those of the next tile are on their way to registers,
    and the row numbers of the one after it.
    """
    TAIL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    gdc_wait()
    s_key, s_bias, full, empty = stages
    pools = (p_window, window_stride, p_entries, entries_stride)
    o_tail = gl.arange(0, 64, gl.SliceLayout(0, TAIL))[None, :]
    used = 0
    for share in range(gl.program_id(0), work[0], gl.num_programs(0)):
        i_token, _, _, window_tiles, first, last = _share(work, share)
        place = (work, i_token, window_tiles)
        b_4, b_2, b_1 = _code_rows(place, first, last)
        b_code_4, b_scale_4 = _load_codes(pools, first < window_tiles, b_4, 0, 4)
        b_code_2, b_scale_2 = _load_codes(pools, first < window_tiles, b_2, 4, 2)
        b_code_1, b_scale_1 = _load_codes(pools, first < window_tiles, b_1, 6, 1)
        b_4, b_2, b_1 = _code_rows(place, first + 1, last)
        b_row = _rows(*place, first, last, gl.SliceLayout(1, TAIL))
        b_flat = _rows(*place, first, last, FLAT)
        for tile in range(first, last):
            stage = used & 1
            p_row = _packed_rows(pools, tile < window_tiles, b_row, 576) + 448
            p_tail = p_row.to(gl.pointer_type(gl.bfloat16), bitcast=True)[:, None] + o_tail
            mbarrier.wait(empty.index(stage), ((used >> 1) & 1) ^ 1)
            s_tile = s_key.index(stage)
            copy_async(s_tile.slice(448, 64, dim=1), p_tail, (b_row >= 0)[:, None])
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            s_bias.index(stage).store(gl.where(b_flat >= 0, 0.0, float("-inf")))
            s_words = reinterpret(s_tile, gl.int32, [64, 256], WORDS)
            in_window = tile + 1 < window_tiles
            _store_codes(s_words, b_code_4, b_scale_4, 0, 4)
            b_code_4, b_scale_4 = _load_codes(pools, in_window, b_4, 0, 4)
            _store_codes(s_words, b_code_2, b_scale_2, 4, 2)
            b_code_2, b_scale_2 = _load_codes(pools, in_window, b_2, 4, 2)
            _store_codes(s_words, b_code_1, b_scale_1, 6, 1)
            b_code_1, b_scale_1 = _load_codes(pools, in_window, b_1, 6, 1)
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)
            b_4, b_2, b_1 = _code_rows(place, tile + 2, last)
            b_row = _rows(*place, tile + 1, last, gl.SliceLayout(1, TAIL))
            b_flat = _rows(*place, tile + 1, last, FLAT)
            used += 1


@gluon.constexpr_function
def _codes_layout(groups, warps):
    """[64 keys, groups, 16 words of four codes]: 16 bytes a thread.

    Threads run over a group of a key, then keys, then groups, so that stores meet no bank conflicts.
    """
    return gl.BlockedLayout([1, 1, 4], [8 // groups, groups, 4], [warps, 1, 1], [2, 0, 1])


@gluon.jit
def _code_rows(place, tile, last):
    """Row numbers of a tile as the threads that load 4, 2 and 1 groups of its codes want them."""
    b_4 = _rows(*place, tile, last, gl.SliceLayout(1, gl.SliceLayout(2, _codes_layout(4, gl.num_warps()))))
    b_2 = _rows(*place, tile, last, gl.SliceLayout(1, gl.SliceLayout(2, _codes_layout(2, gl.num_warps()))))
    b_1 = _rows(*place, tile, last, gl.SliceLayout(1, gl.SliceLayout(2, _codes_layout(1, gl.num_warps()))))
    return b_4, b_2, b_1


@gluon.jit
def _packed_rows(pools, in_window, b_row, BYTES: gl.constexpr):
    """Pointers to the rows' beginnings in a block's part whose rows take `BYTES`."""
    p_window, window_stride, p_entries, entries_stride = pools
    p_pool = gl.where(in_window, p_window, p_entries)
    stride = gl.where(in_window, window_stride, entries_stride)
    return p_pool + (b_row >> 6).to(gl.int64) * stride + (b_row & 63) * BYTES


@gluon.jit
def _load_codes(pools, in_window, b_row, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Codes as int32 words [64, GROUPS, 16] and scale bytes [64, GROUPS] of 64-channel groups FIRST and on."""
    LAYOUT: gl.constexpr = _codes_layout(GROUPS, gl.num_warps())
    o_group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    o_word = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    p_row = _packed_rows(pools, in_window, b_row, 576) + FIRST * 64
    p_word = p_row.to(gl.pointer_type(gl.int32), bitcast=True)
    m_row = (b_row >= 0)[:, None]
    p_code = (p_word[:, None] + o_group[None, :] * 16)[:, :, None] + o_word[None, None, :]
    p_scale = _packed_rows(pools, in_window, b_row, 8) + (64 * 576 + FIRST)
    b_scale = gl.load(p_scale[:, None] + o_group[None, :], m_row, 0)
    return gl.load(p_code, m_row[:, :, None], 0), b_scale.to(gl.int32)


@gluon.jit
def _store_codes(s_words, b_code, b_scale, FIRST: gl.constexpr, GROUPS: gl.constexpr):
    """Expand codes to bf16 (see `attend._expanded`) and put them at their channels of 64 rows, two to a word."""
    b_factor = (b_scale + 120) << 7
    b_factor = b_factor | (b_factor << 16)
    b_code, b_factor = gl.broadcast(b_code, b_factor[:, :, None])
    b_low, b_high = gl.inline_asm_elementwise(
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
        fma.rn.bf16x2 $1, d, $3, zero;
        }
        """,
        "=r,=r,r,r",
        [b_code, b_factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    b_pair = gl.reshape(gl.join(b_low, b_high), [64, GROUPS * 32])
    s_words.slice(FIRST * 32, GROUPS * 32, dim=1).store(b_pair)
