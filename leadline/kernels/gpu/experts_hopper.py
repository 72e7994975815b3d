"""The experts' two products on Hopper for packed fp4 weights and fp8 activations, in Gluon.

Weights are the left operand of the matrix instruction, 64 rows at a time; tokens are its narrow right side. Packed
weights come from registers: `leadline.kernels.gpu.experts_arrange` puts their bytes so that each thread's 16-byte load
is its own part of that operand, and says how they are packed. The shared expert's fp8 weights come from shared memory,
by further programs of the same launches, with the same rows in the same threads.

Both kernels start while the one in front of them still runs. `up_product` lets `down_product` start only when what
came before itself has ended, so `down_product` knows its tiles, and fetches weights, before the hidden rows are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from leadline.kernels.gpu.experts_unpack import row_words_layout, unpack, words_layout
from leadline.kernels.gpu.gluon_names import barrier, copy_async

UNIT = gl.constexpr(128)
"""Columns that share a scale of the activations, and that one matrix product of the inner loop takes."""
UNIT_WORDS = gl.constexpr(1024)
"""Words of 64 rows of a unit."""
PARTS = gl.constexpr(4)
"""Programs whose hidden values, 32 each, share a scale."""


@gluon.jit
def _after_the_kernel_before():
    """Wait for the end of the kernel in front of this one, then let the next one start."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def _matrix_row(o_row, tile, rows):
    """Which rows of a matrix are the rows `o_row` of a tile's 64: 8 of its first half, 8 of its second, and so on."""
    return o_row // 8 % 2 * (rows // 2) + tile * 32 + o_row // 16 * 8 + o_row % 8


@gluon.jit
def _row_pointers(p_x, p_x_scale, first, count, p_order, active, columns, by_token: gl.constexpr, width: gl.constexpr):
    """Where a tile's activations and their scales begin, and which of its `width` rows there are.

    Its rows are `first` .. `first + count - 1`, or with `by_token` the tokens of the pairs at these places.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_x = gl.arange(0, width, layout=gl.SliceLayout(1, layout))
    o_scale = gl.arange(0, width, layout=flat)
    m_x, m_scale = o_x < count, o_scale < count
    x_row, scale_row = first + o_x, gl.where(m_scale, first + o_scale, 0)
    if by_token:
        x_row = gl.load(p_order + x_row, mask=m_x, other=0) // active
        scale_row = gl.load(p_order + scale_row, mask=m_scale, other=0) // active
    o_byte = gl.arange(0, UNIT, layout=gl.SliceLayout(0, layout))
    p_row = p_x + x_row.to(gl.int64)[:, None] * columns + o_byte[None, :]
    return p_row, p_x_scale + scale_row, m_x[:, None], m_scale


@gluon.jit
def _copy_rows(rows, scales, p_row, p_scale, m_row, m_scale, at):
    """Start the copies of a unit of activations and their scales to place `at` of the ring."""
    copy_async(rows.index(at), p_row, m_row)
    copy_async(scales.index(at), p_scale, m_scale)


@gluon.jit
def _copy_words(words, row_words, p_word, p_row_word, at):
    """The same for packed weights and their rows' scale words."""
    copy_async(words.index(at), p_word)
    copy_async(row_words.index(at), p_row_word)


@gluon.jit
def _word_pointers(p_words, p_row_words, expert, tile, rows, columns):
    """Where the words of a tile of an expert begin."""
    first = (expert.to(gl.int64) * (rows // 64) + tile) * (columns // UNIT)
    layout: gl.constexpr = words_layout()
    o_word = gl.arange(0, 256, layout=gl.SliceLayout(1, layout))
    o_part = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    p_word = p_words + first * UNIT_WORDS + (o_word * 4)[:, None] + o_part[None, :]
    return p_word, p_row_words + first * 64 + gl.arange(0, 64, layout=gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def _allocate_rows(count: gl.constexpr, width: gl.constexpr):
    """Shared memory for `count` units of activations [width, 128] and their scales."""
    rows = gl.allocate_shared_memory(gl.float8e4nv, [count, width, UNIT], gl.NVMMASharedLayout(128, 8, 2))
    scales = gl.allocate_shared_memory(gl.float32, [count, width], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return rows, scales


@gluon.jit
def _routed_sums(
    p_x,
    p_x_scale,
    p_words,
    p_row_words,
    p_order,
    expert,
    first,
    count,
    tile,
    active,
    scale_stride,
    rows,
    columns,
    by_token: gl.constexpr,
    mma: gl.constexpr,
    width: gl.constexpr,
    units: gl.constexpr,
    slots: gl.constexpr,
):
    """64 rows of an expert times a tile of pairs: fp32 [64, width].

    Without `by_token` the activations come from the kernel in front: the weights do not wait for it.
    """
    words = gl.allocate_shared_memory(gl.int32, [slots * units, 256, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row_words = gl.allocate_shared_memory(gl.int32, [slots * units, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x, x_scale = _allocate_rows(slots * units, width)
    steps = columns // (UNIT * units)
    p_word, p_row_word = _word_pointers(p_words, p_row_words, expert, tile, rows, columns)
    for step in gl.static_range(slots - 1):
        if step < steps:
            for unit in gl.static_range(units):
                _copy_words(words, row_words, p_word, p_row_word, step * units + unit)
                p_word += UNIT_WORDS
                p_row_word += 64
    if not by_token:
        _after_the_kernel_before()
    p_row, p_scale, m_row, m_scale = _row_pointers(
        p_x, p_x_scale, first, count, p_order, active, columns, by_token, width
    )
    for step in gl.static_range(slots - 1):
        if step < steps:
            for unit in gl.static_range(units):
                _copy_rows(x, x_scale, p_row, p_scale, m_row, m_scale, step * units + unit)
                p_row += UNIT
                p_scale += scale_stride
        async_copy.commit_group()

    acc = gl.zeros([64, width], gl.float32, mma)
    none = gl.zeros([64, width], gl.float32, mma)
    for step in range(steps):
        async_copy.wait_group(slots - 2)
        fence_async_shared()
        if step + slots - 1 < steps:
            slot = (step + slots - 1) % slots
            for unit in gl.static_range(units):
                _copy_words(words, row_words, p_word, p_row_word, slot * units + unit)
                _copy_rows(x, x_scale, p_row, p_scale, m_row, m_scale, slot * units + unit)
                p_word += UNIT_WORDS
                p_row_word += 64
                p_row += UNIT
                p_scale += scale_stride
        async_copy.commit_group()
        for unit in gl.static_range(units):
            at = (step % slots) * units + unit
            b_row_word = row_words.index(at).load(row_words_layout())
            b_w = unpack(words.index(at).load(words_layout()), b_row_word)
            b_w = gl.convert_layout(b_w, gl.DotOperandLayout(0, mma, 4))
            part = warpgroup_mma(b_w, x.index(at).permute((1, 0)), none, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            b_scale = x_scale.index(at).load(gl.SliceLayout(0, mma))
            b_exponent = b_row_word.reshape([2, 4, 8]).permute([1, 0, 2]).reshape([64])
            b_factor = gl.convert_layout(((b_exponent & 255) + 5) << 23, gl.SliceLayout(1, mma))
            acc += part * (b_factor.to(gl.float32, bitcast=True)[:, None] * b_scale[None, :])
    return acc


@gluon.jit
def _shared_sums(
    p_x,
    p_x_scale,
    p_w,
    p_w_scale,
    first,
    count,
    tile,
    scale_stride,
    rows,
    columns,
    mma: gl.constexpr,
    width: gl.constexpr,
    slots: gl.constexpr,
):
    """64 rows of the shared expert times rows `first` .. `first + count - 1` of the activations: fp32 [64, width]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    w = gl.allocate_shared_memory(gl.float8e4nv, [slots, 64, UNIT], gl.NVMMASharedLayout(128, 8, 2))
    x, x_scale = _allocate_rows(slots, width)
    steps = columns // UNIT
    o_row = _matrix_row(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), tile, rows)
    p_tile = p_w + o_row.to(gl.int64)[:, None] * columns
    p_tile = p_tile + gl.arange(0, UNIT, layout=gl.SliceLayout(0, layout))[None, :]
    for step in gl.static_range(slots - 1):
        if step < steps:
            copy_async(w.index(step), p_tile + step * UNIT)
    p_tile += (slots - 1) * UNIT
    _after_the_kernel_before()
    p_row, p_scale, m_row, m_scale = _row_pointers(p_x, p_x_scale, first, count, p_x, 1, columns, False, width)
    for step in gl.static_range(slots - 1):
        if step < steps:
            _copy_rows(x, x_scale, p_row, p_scale, m_row, m_scale, step)
            p_row += UNIT
            p_scale += scale_stride
        async_copy.commit_group()

    acc = gl.zeros([64, width], gl.float32, mma)
    none = gl.zeros([64, width], gl.float32, mma)
    p_factor = p_w_scale + _matrix_row(gl.arange(0, 64, layout=gl.SliceLayout(1, mma)), tile, rows) // UNIT * steps
    b_next = gl.load(p_factor)
    for step in range(steps):
        async_copy.wait_group(slots - 2)
        fence_async_shared()
        slot = step % slots
        part = warpgroup_mma(w.index(slot), x.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        if step + slots - 1 < steps:
            later = (step + slots - 1) % slots
            copy_async(w.index(later), p_tile)
            _copy_rows(x, x_scale, p_row, p_scale, m_row, m_scale, later)
            p_tile += UNIT
            p_row += UNIT
            p_scale += scale_stride
        async_copy.commit_group()
        b_scale = x_scale.index(slot).load(gl.SliceLayout(0, mma))
        b_factor = (b_next.to(gl.int32) << 23).to(gl.float32, bitcast=True)
        b_next = gl.load(p_factor + gl.minimum(step + 1, steps - 1))
        part = warpgroup_mma_wait(0, deps=[part])
        acc += part * (b_factor[:, None] * b_scale[None, :])
    return acc


@gluon.jit
def _hidden_values(acc, limit, width: gl.constexpr):
    """Gates and ups lie in the two halves of a warp's rows: fp32 [64, width] -> [32, width]."""
    both = acc.reshape([4, 2, 8, width]).permute([0, 2, 3, 1]).reshape([32, width, 2])
    gate, up = both.split()
    # the definition's product is cast to the activations' type before the clamp
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    if limit > 0:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    return gate / (1 + gl.exp(-gate)) * up


@gluon.jit
def _store_hidden(
    hidden, p_hidden, p_codes, p_scales, p_arrived, first, count, tile, columns, scale_stride, width: gl.constexpr
):
    """Hidden values [32, width] of rows from `first`; the last program of 128 columns to finish rounds them to fp8."""
    layout: gl.constexpr = hidden.type.layout
    o_place = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    o_column = tile * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    p_result = p_hidden + (first + o_place).to(gl.int64)[None, :] * columns + o_column[:, None]
    gl.store(p_result, hidden.to(gl.bfloat16), mask=(o_place < count)[None, :])
    barrier()  # all of this program's values are stored before its arrival is
    if gl.atomic_add(p_arrived + tile // PARTS, 1, sem="acq_rel") == PARTS - 1:
        _round_hidden(p_hidden, p_codes, p_scales, first, count, tile // PARTS, columns, scale_stride, width)


@gluon.jit
def _round_hidden(p_hidden, p_codes, p_scales, first, count, block, columns, scale_stride, width: gl.constexpr):
    """A block of 128 columns as e4m3 with a power of two per row as its scale: `formats.fp8_quantize_rows`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_place = gl.arange(0, width, layout=gl.SliceLayout(1, layout))
    o_column = block * UNIT + gl.arange(0, UNIT, layout=gl.SliceLayout(0, layout))
    m_place = o_place < count
    o_value = (first + o_place).to(gl.int64)[:, None] * columns + o_column[None, :]
    b_x = gl.load(p_hidden + o_value, mask=m_place[:, None], other=0.0, cache_modifier=".cg").to(gl.float32)
    b_amax = gl.maximum(gl.max(gl.abs(b_x), axis=1), 1e-4) * (1 / 448)
    b_bits = (b_amax.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    b_inverse = (0x7F000000 - b_bits).to(gl.float32, bitcast=True)
    gl.store(p_codes + o_value, (b_x * b_inverse[:, None]).to(gl.float8e4nv), mask=m_place[:, None])
    gl.store(p_scales + block * scale_stride + first + o_place, b_bits.to(gl.float32, bitcast=True), mask=m_place)


@gluon.jit
def _store_outputs(acc, p_out, o_target, m_place, tile, rows, mma: gl.constexpr):
    """fp32 [64, width] to the rows `o_target` of the outputs."""
    o_row = _matrix_row(gl.arange(0, 64, layout=gl.SliceLayout(1, mma)), tile, rows)
    p_result = p_out + o_target.to(gl.int64)[None, :] * rows + o_row[:, None]
    gl.store(p_result, acc.to(gl.bfloat16), mask=m_place[None, :])


@gluon.jit(do_not_specialize=["most", "active", "tokens", "shared_tiles", "scale_stride", "hidden_stride"])
def up_product(
    p_x,
    p_x_scale,
    p_weights,
    p_words,
    p_row_words,
    p_shared,
    p_shared_scale,
    p_hidden,
    p_codes,
    p_code_scales,
    p_arrived,
    p_order,
    p_records,
    most,
    active,
    tokens,
    shared_tiles,
    scale_stride,
    hidden_stride,
    rows,
    columns,
    limit,
    width: gl.constexpr,
    units: gl.constexpr,
    slots: gl.constexpr,
    shared_width: gl.constexpr,
    shared_slots: gl.constexpr,
):
    """Hidden rows: tiles of pairs, or of tokens in the first `shared_tiles * rows / 64` programs, times 64 rows.

    `p_x` e4m3 [T, columns], `p_x_scale` fp32 [columns / 128, scale_stride], one a row of `p_x`; `p_words` and
    `p_row_words` int32 as arranged; `p_shared` e4m3 [rows, columns] with e8m0 `p_shared_scale` per 128 x 128.
    `p_hidden` bf16, `p_codes` e4m3 [pairs + T, rows / 2] and `p_code_scales` fp32 [rows / 256, hidden_stride] take the
    hidden rows by place, and then the shared expert's. `p_arrived` int32 [most + shared_tiles, rows / 256] is zero.
    """
    i_program, row_tiles = gl.program_id(0), rows // 64
    i_tile, tile = i_program // row_tiles, i_program % row_tiles
    hidden_columns, blocks = rows // 2, rows // 256
    if i_tile < shared_tiles:
        if shared_width > 0:
            shared_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shared_width, 32])
            first = i_tile * shared_width
            count = gl.minimum(tokens - first, shared_width)
            acc = _shared_sums(
                p_x, p_x_scale, p_shared, p_shared_scale, first, count, tile, scale_stride, rows, columns,
                shared_mma, shared_width, shared_slots,
            )  # fmt: skip
            hidden = _hidden_values(acc, limit, shared_width)
            first += tokens * active
            p_count = p_arrived + (most + i_tile) * blocks
            _store_hidden(
                hidden, p_hidden, p_codes, p_code_scales, p_count, first, count, tile, hidden_columns, hidden_stride,
                shared_width,
            )  # fmt: skip
    else:
        _after_the_kernel_before()
        i_tile -= shared_tiles
        count = gl.load(p_records + 2 * most + i_tile)
        if count > 0:
            mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])
            expert = gl.load(p_records + i_tile)
            first = gl.load(p_records + most + i_tile)
            acc = _routed_sums(
                p_x, p_x_scale, p_words, p_row_words, p_order, expert, first, count, tile, active, scale_stride,
                rows, columns, True, mma, width, units, slots,
            )  # fmt: skip
            hidden = _hidden_values(acc, limit, width)
            o_place = gl.arange(0, width, layout=gl.SliceLayout(0, hidden.type.layout))
            b_pair = gl.load(p_order + first + o_place, mask=o_place < count, other=0)
            hidden *= gl.load(p_weights + b_pair, mask=o_place < count, other=0.0)[None, :]
            p_count = p_arrived + i_tile * blocks
            _store_hidden(
                hidden, p_hidden, p_codes, p_code_scales, p_count, first, count, tile, hidden_columns, hidden_stride,
                width,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["most", "active", "tokens", "shared_tiles", "scale_stride"])
def down_product(
    p_codes,
    p_code_scales,
    p_words,
    p_row_words,
    p_shared,
    p_shared_scale,
    p_out,
    p_order,
    p_records,
    most,
    active,
    tokens,
    shared_tiles,
    scale_stride,
    rows,
    columns,
    width: gl.constexpr,
    units: gl.constexpr,
    slots: gl.constexpr,
    shared_width: gl.constexpr,
    shared_slots: gl.constexpr,
):
    """Outputs from hidden rows as `up_product` leaves them: `p_out` bf16 [pairs + T, rows], by pair, then by token."""
    i_program, row_tiles = gl.program_id(0), rows // 64
    i_tile, tile = i_program // row_tiles, i_program % row_tiles
    if i_tile < shared_tiles:
        if shared_width > 0:
            shared_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shared_width, 32])
            first = i_tile * shared_width
            count = gl.minimum(tokens - first, shared_width)
            first += tokens * active
            acc = _shared_sums(
                p_codes, p_code_scales, p_shared, p_shared_scale, first, count, tile, scale_stride, rows, columns,
                shared_mma, shared_width, shared_slots,
            )  # fmt: skip
            o_token = gl.arange(0, shared_width, layout=gl.SliceLayout(0, shared_mma))
            _store_outputs(acc, p_out, first + o_token, o_token < count, tile, rows, shared_mma)
    else:
        i_tile -= shared_tiles
        count = gl.load(p_records + 2 * most + i_tile, cache_modifier=".cg")
        if count > 0:
            mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])
            expert = gl.load(p_records + i_tile, cache_modifier=".cg")
            first = gl.load(p_records + most + i_tile, cache_modifier=".cg")
            acc = _routed_sums(
                p_codes, p_code_scales, p_words, p_row_words, p_order, expert, first, count, tile, active,
                scale_stride, rows, columns, False, mma, width, units, slots,
            )  # fmt: skip
            o_place = gl.arange(0, width, layout=gl.SliceLayout(0, mma))
            b_pair = gl.load(p_order + first + o_place, mask=o_place < count, other=0)
            _store_outputs(acc, p_out, b_pair, o_place < count, tile, rows, mma)
        else:
            _after_the_kernel_before()
