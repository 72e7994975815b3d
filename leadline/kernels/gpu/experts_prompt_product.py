"""The experts' two products for many tokens on Hopper: packed fp4 weights, fp8 activations, in warp-specialised Gluon.

A program has three groups of warps. One fetches, with the copy engine, units of 128 columns into a ring in shared
memory: a tile of up to 224 activations, and the words of 128 rows of weights. Two multiply, 64 rows each: they unpack
their words once for the whole tile, straight into the registers where the matrix instruction wants its left operand,
and take the activations in chunks of 64, so that one chunk is multiplied while another is added to the sums.
`leadline.kernels.gpu.experts_arrange` says how weights are packed.

The instruction keeps about 14 bits of a sum of fp8 products, so sums leave it every 128 columns, in the same order and
with the same rounding as in the kernel for few tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from leadline.kernels.gpu.experts_unpack import row_words_layout, unpack
from leadline.kernels.gpu.gluon_names import copy_box

UNIT = gl.constexpr(128)
"""Columns that share a scale of the activations, and that one step of the inner loop takes."""
CHUNK = gl.constexpr(64)
"""Activations of one matrix product."""
TAIL = gl.constexpr(32)
"""Activations of a last chunk that is at most half full."""
WIDTH = gl.constexpr(224)
"""Activations of the widest tile: with the sums of 256 there are not enough registers."""
CHUNKS = gl.constexpr(4)
"""Chunks of the widest tile."""
FOLDED = gl.constexpr(32)
"""Words of 64 rows of a unit as the copy engine takes them: 32 times 32, 4,096 bytes."""


@gluon.constexpr_function
def _linear(shape, registers, lanes, warps):
    """A layout whose bases are given as (dimension, value)."""

    def bases(pairs):
        return [[value if i == at else 0 for i in range(len(shape))] for at, value in pairs]

    return gl.DistributedLinearLayout(bases(registers), bases(lanes), bases(warps), [], shape)


@gluon.constexpr_function
def _folded_layout():
    """[32, 32]: the words that each thread multiplies, as they lie in memory."""
    lanes = [(1, 4), (1, 8), (1, 16), (0, 1), (0, 2)]
    return _linear([32, 32], [(1, 1), (1, 2), (0, 16)], lanes, [(0, 4), (0, 8)])


@gluon.constexpr_function
def _mma(width):
    """The layout of sums [64, width]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])


@gluon.constexpr_function
def _width(chunk, chunks, tail):
    """Activations of a tile's chunk: the last one may be half full."""
    return tail if chunk == chunks - 1 else 64


@gluon.jit
def _operand(b_word, b_row_word):
    """Words [32, 32] of 64 rows of a unit and the rows' scale words [64] -> e4m3 [64, 128] and the rows' factors."""
    mma: gl.constexpr = _mma(CHUNK)
    b_w = gl.convert_layout(unpack(b_word.reshape([256, 4]), b_row_word), gl.DotOperandLayout(0, mma, 4))
    b_exponent = b_row_word.reshape([2, 4, 8]).permute([1, 0, 2]).reshape([64])
    b_factor = gl.convert_layout(((b_exponent & 255) + 5) << 23, gl.SliceLayout(1, mma))
    return b_w, b_factor.to(gl.float32, bitcast=True)


@gluon.jit
def _with(values, value):
    """A tuple with one value more."""
    return values + (value,)  # noqa: RUF005 - Triton knows no other way


@gluon.jit
def _zeros(width: gl.constexpr):
    return gl.zeros([64, width], gl.float32, _mma(width))


@gluon.jit
def _product(b_w, x, at, width: gl.constexpr):
    """Start a product of 64 rows with a chunk."""
    chunk = x.index(at).slice(0, width).permute((1, 0))
    return warpgroup_mma(b_w, chunk, _zeros(width), use_acc=False, is_async=True)


@gluon.jit
def _chunk_scales(scales, slot, chunk: gl.constexpr, width: gl.constexpr):
    """The scales of a chunk's activations; read before the wait for its product."""
    return scales.index(slot).slice(chunk * CHUNK, width).load(gl.SliceLayout(0, _mma(width)))


@gluon.jit
def _sum(acc, part, b_factor, b_scale, width: gl.constexpr):
    """Sums [64, width] and a unit's part, times the factors of its rows and of the chunk's activations."""
    b_factor = gl.convert_layout(b_factor, gl.SliceLayout(1, _mma(width)))
    return acc + part * (b_factor[:, None] * b_scale[None, :])


@gluon.jit
def _sums(ring, begin, units, half: gl.constexpr, slots: gl.constexpr, chunks: gl.constexpr, tail: gl.constexpr):
    """64 rows times a tile: a tuple of sums, fp32 [64, CHUNK] and at last [64, tail]; `begin` is the first step."""
    x, scales, words, row_words, full, empty = ring
    sums = ()
    for chunk in gl.static_range(chunks):
        sums = _with(sums, _zeros(_width(chunk, chunks, tail)))
    for step in range(begin, begin + units):
        slot = step % slots
        mbarrier.wait(full.index(slot), step // slots % 2)
        b_word = words.index(slot * 2 + half).load(_folded_layout())
        b_w, b_factor = _operand(b_word, row_words.index(slot * 2 + half).load(row_words_layout()))
        parts = (_product(b_w, x, slot * CHUNKS, _width(0, chunks, tail)),)
        if chunks > 1:
            parts = _with(parts, _product(b_w, x, slot * CHUNKS + 1, _width(1, chunks, tail)))
        later = ()
        for chunk in gl.static_range(chunks):
            b_scale = _chunk_scales(scales, slot, chunk, _width(chunk, chunks, tail))
            part = warpgroup_mma_wait(1 if chunk < chunks - 1 else 0, deps=[parts[chunk]])
            later = _with(later, _sum(sums[chunk], part, b_factor, b_scale, _width(chunk, chunks, tail)))
            if chunk < chunks - 2:
                parts = _with(parts, _product(b_w, x, slot * CHUNKS + chunk + 2, _width(chunk + 2, chunks, tail)))
        sums = later
        fence_async_shared()
        mbarrier.arrive(empty.index(slot))
    return sums


@gluon.jit
def _hidden(gate, up, limit):
    """SwiGLU; the definition's product is cast to the activations' type before the clamp."""
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    if limit > 0:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    return gate / (1 + gl.exp(-gate)) * up


@gluon.jit
def _store(acc, p_out, p_weights, p_order, first, count, tile, rows, limit, gate_up: gl.constexpr):
    """Sums [64, width] of places from `first`, of which there are `count`: hidden rows by place, or outputs by pair.

    Rows lie 8 of the matrix's first half, 8 of its second, and so on: gates and ups, in one thread.
    """
    width: gl.constexpr = acc.shape[1]
    out: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    front, back = acc.reshape([4, 2, 8, width]).permute([0, 2, 3, 1]).reshape([32, width, 2]).split()
    o_place = gl.arange(0, width, layout=gl.SliceLayout(0, out))
    m_place = o_place < count
    o_row = tile * 32 + gl.arange(0, 32, layout=gl.SliceLayout(1, out))
    if gate_up:
        hidden = _hidden(front, back, limit)
        o_own = gl.arange(0, width, layout=gl.SliceLayout(0, hidden.type.layout))
        b_pair = gl.load(p_order + first + o_own, mask=o_own < count, other=0)
        hidden *= gl.load(p_weights + b_pair, mask=o_own < count, other=0.0)[None, :]
        p_row = p_out + (first + o_place).to(gl.int64)[None, :] * (rows // 2) + o_row[:, None]
        gl.store(p_row, gl.convert_layout(hidden.to(gl.bfloat16), out), mask=m_place[None, :])
    else:
        b_pair = gl.load(p_order + first + o_place, mask=m_place, other=0)
        p_row = p_out + b_pair.to(gl.int64)[None, :] * rows + o_row[:, None]
        gl.store(p_row, gl.convert_layout(front.to(gl.bfloat16), out), mask=m_place[None, :])
        gl.store(p_row + rows // 2, gl.convert_layout(back.to(gl.bfloat16), out), mask=m_place[None, :])


@gluon.jit
def _multiply(
    ring,
    work,
    p_out,
    p_weights,
    p_order,
    rows,
    limit,
    units,
    half: gl.constexpr,
    slots: gl.constexpr,
    gate_up: gl.constexpr,
):
    """One of the two groups that multiply: rows `64 half ..` of each item's 128. A tile's width chooses the code."""
    p_records, most, items = work
    blocks = rows // 128
    step = 0
    item = gl.program_id(0)
    count = gl.load(p_records + 2 * most + item // blocks)
    while count > 0:
        first = gl.load(p_records + most + item // blocks)
        tile = item % blocks * 2 + half
        for kind in gl.static_range(WIDTH // TAIL):
            if (count + TAIL - 1) // TAIL == kind + 1:
                sums = _sums(ring, step, units, half, slots, kind // 2 + 1, TAIL * (kind % 2 + 1))
                for chunk in gl.static_range(kind // 2 + 1):
                    begin = chunk * CHUNK
                    _store(
                        sums[chunk], p_out, p_weights, p_order, first + begin, count - begin, tile, rows, limit, gate_up
                    )
        step += units
        item += gl.num_programs(0)
        count = gl.load(p_records + 2 * most + item // blocks, mask=item < items, other=0)


@gluon.jit
def _fetch(ring, work, descriptors, rows, units, scale_stride, slots: gl.constexpr):
    """The group that fetches: each item's units, one after another, as slots of the ring come free."""
    x, scales, words, row_words, full, empty = ring
    x_desc, scale_desc, word_desc, row_word_desc = descriptors
    p_records, most, items = work
    blocks = rows // 128
    weight_bytes: gl.constexpr = 2 * (FOLDED * FOLDED * 4 + 64 * 4) + CHUNKS * CHUNK * 4
    step = 0
    item = gl.program_id(0)
    count = gl.load(p_records + 2 * most + item // blocks)
    while count > 0:
        first = gl.load(p_records + most + item // blocks)
        tile = gl.load(p_records + item // blocks) * (rows // 64) + item % blocks * 2
        chunks = (count + CHUNK - 1) // CHUNK
        for unit in range(units):
            slot = step % slots
            mbarrier.wait(empty.index(slot), step // slots % 2 ^ 1)
            bar = full.index(slot)
            for some in gl.static_range(1, CHUNKS + 1):
                mbarrier.expect(bar, some * CHUNK * UNIT + weight_bytes, pred=chunks == some)
            for half in gl.static_range(2):
                at = (tile + half) * units + unit
                copy_box(word_desc, [at * FOLDED, 0], bar, words.index(slot * 2 + half))
                copy_box(row_word_desc, [at * 64], bar, row_words.index(slot * 2 + half))
            copy_box(scale_desc, [unit * scale_stride + first], bar, scales.index(slot))
            for chunk in gl.static_range(CHUNKS):
                place = first + chunk * CHUNK
                copy_box(x_desc, [place, unit * UNIT], bar, x.index(slot * CHUNKS + chunk), pred=chunk < chunks)
            step += 1
        item += gl.num_programs(0)
        count = gl.load(p_records + 2 * most + item // blocks, mask=item < items, other=0)


@gluon.jit(do_not_specialize=["most", "items", "scale_stride"])
def prompt_product(
    x_desc,
    scale_desc,
    word_desc,
    row_word_desc,
    p_out,
    p_weights,
    p_order,
    p_records,
    most,
    items,
    scale_stride,
    rows,
    columns,
    limit,
    gate_up: gl.constexpr,
    slots: gl.constexpr,
    registers: gl.constexpr,
):
    """All items, a tile of pairs by 128 rows each, `items` or fewer, shared out to the programs in turn.

    `x_desc` e4m3 [places, columns] in boxes [64, 128] and `scale_desc` fp32 [columns / 128 * scale_stride] in boxes of
    256 are by place; `word_desc` int32 [.., 32] in boxes [32, 32] and `row_word_desc` int32 in boxes of 64 as arranged.
    With `gate_up` `p_out` bf16 [places, rows / 2] takes hidden rows by place, otherwise [pairs, rows] outputs by pair.
    """
    x = gl.allocate_shared_memory(gl.float8e4nv, [slots * CHUNKS, CHUNK, UNIT], x_desc.layout)
    words = gl.allocate_shared_memory(gl.int32, [slots * 2, FOLDED, FOLDED], word_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [slots, CHUNKS * CHUNK], scale_desc.layout)
    row_words = gl.allocate_shared_memory(gl.int32, [slots * 2, 64], row_word_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [slots, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(slots):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    units = columns // UNIT
    ring = (x, scales, words, row_words, full, empty)
    work = (p_records, most, items)
    descriptors = (x_desc, scale_desc, word_desc, row_word_desc)
    gl.warp_specialize(
        [
            (_multiply, (ring, work, p_out, p_weights, p_order, rows, limit, units, 0, slots, gate_up)),
            (_multiply, (ring, work, p_out, p_weights, p_order, rows, limit, units, 1, slots, gate_up)),
            (_fetch, (ring, work, descriptors, rows, units, scale_stride, slots)),
        ],
        [4, 1],
        [registers, 24],
    )
