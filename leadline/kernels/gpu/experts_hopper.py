"""The experts' two products on Hopper for packed fp4 weights and fp8 activations, in Gluon.

Weights are the left operand of the matrix instruction, 64 rows at a time, and come from registers; tokens are its
narrow right side. `leadline.kernels.gpu.experts_arrange` puts the packed bytes so that each thread's 16-byte load is
its own part of that operand, and says how they are packed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

UNIT = gl.constexpr(128)
"""Columns that share a scale of the activations, and that one matrix product of the inner loop takes."""

# the second is the name before Triton 3.7
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

UNPACK = gl.constexpr("""
{
.reg .b32 magnitudes, high;
and.b32 magnitudes, $2, 0x77777777;
shr.u32 high, magnitudes, 16;
prmt.b32 $0, $6, $10, magnitudes;
prmt.b32 $1, $6, $10, high;
shl.b32 high, $2, 4;
lop3.b32 $0, $2, 0x80808080, $0, 0xEA;
lop3.b32 $1, high, 0x80808080, $1, 0xEA;
}
""")
"""A word of eight codes and the eight magnitudes as e4m3 -> two words of four e4m3 values, by two look-ups."""


@gluon.constexpr_function
def _words_layout(groups):
    """[groups * 256, 4]: each thread holds the two 16-byte pieces that it multiplies."""
    warps = [[32, 0], [64, 0]] + ([[256, 0]] if groups == 2 else [])
    lanes = [[1 << i, 0] for i in range(5)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [128, 0]], lanes, warps, [], [groups * 256, 4])


@gluon.constexpr_function
def _row_words_layout(groups):
    """[groups * 64]: each thread holds the words of the two rows that it multiplies; four threads hold the same."""
    warps = [[8], [16]] + ([[64]] if groups == 2 else [])
    return gl.DistributedLinearLayout([[32]], [[0], [0], [1], [2], [4]], warps, [], [groups * 64])


@gluon.constexpr_function
def _bytes_layout(groups):
    """[groups, half 2, warp 4, row 8, thread 4, part 4, byte 4]: the same with a word's four bytes apart."""

    def base(dim, value):
        return [value if i == dim else 0 for i in range(7)]

    registers = [base(6, 1), base(6, 2), base(5, 1), base(5, 2), base(1, 1)]
    lanes = [base(4, 1), base(4, 2), base(3, 1), base(3, 2), base(3, 4)]
    warps = [base(2, 1), base(2, 2)] + ([base(0, 1)] if groups == 2 else [])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, 2, 4, 8, 4, 4, 4])


@gluon.jit
def _unpack(b_word, b_row_word, groups: gl.constexpr):
    """Packed codes [groups * 256, 4] and their rows' scale words [groups * 64] -> e4m3 [groups * 64, 128]."""
    layout: gl.constexpr = _bytes_layout(groups)
    per_word: gl.constexpr = gl.SliceLayout(6, layout)
    per_row: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, per_word))
    per_part: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, per_word))))
    )
    b_word = gl.convert_layout(b_word.reshape([groups, 2, 4, 8, 4, 4]), per_word)
    b_row_word = gl.convert_layout(b_row_word.reshape([groups, 2, 4, 8]), per_row)
    o_part = gl.arange(0, 4, layout=per_part)
    o_part = o_part[None, :][None, :, :][None, :, :, :][None, :, :, :, :][None, :, :, :, :, :]
    b_shift = (b_row_word[:, :, :, :, None][:, :, :, :, :, None] >> (o_part * 4 + 8)) & 15
    b_low = b_shift * 0x08080800 + 0x14100800
    b_high = b_shift * 0x08080808 + 0x24201C18
    b_words = b_word[:, :, :, :, :, :, None] | gl.full([groups, 2, 4, 8, 4, 4, 4], 0, gl.int32, layout)
    b_front, b_back = gl.inline_asm_elementwise(
        UNPACK,
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [b_words, b_low[:, :, :, :, :, :, None], b_high[:, :, :, :, :, :, None]],
        (gl.int8, gl.int8),
        True,
        4,
    )
    b_values = gl.join(b_front, b_back).permute([0, 2, 1, 3, 5, 7, 4, 6]).reshape([groups * 64, UNIT])
    return b_values.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _stage(
    words,
    row_words,
    rows,
    row_scales,
    p_word,
    p_row_word,
    p_row,
    p_row_scale,
    m_row,
    slot,
    scale_stride,
    units: gl.constexpr,
):
    """Start the copies of `units` units of weights, scales, activations and their scales into a slot of the ring."""
    for unit in gl.static_range(units):
        at = slot * units + unit
        copy_async(words.index(at), p_word + unit * 1024)
        copy_async(row_words.index(at), p_row_word + unit * 64)
        copy_async(rows.index(at), p_row + unit * UNIT, m_row)
        copy_async(row_scales.index(at), p_row_scale + unit * scale_stride)
    async_copy.commit_group()


@gluon.jit
def _store_hidden(
    acc, p_out, p_weights, p_order, first, count, tile, width_out, limit, groups: gl.constexpr, width: gl.constexpr
):
    """Gates and ups lie in the two halves of a warp's rows: their hidden values, by place."""
    both = acc.reshape([groups, 4, 2, 8, width]).permute([0, 1, 3, 4, 2]).reshape([groups * 32, width, 2])
    gate, up = both.split()
    # the definition's product is cast to the activations' type before the clamp
    gate = gate.to(gl.bfloat16).to(gl.float32)
    up = up.to(gl.bfloat16).to(gl.float32)
    if limit > 0:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
    hidden = gate / (1 + gl.exp(-gate)) * up
    layout: gl.constexpr = gate.type.layout
    o_place = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    m_place = o_place < count
    b_pair = gl.load(p_order + first + o_place, mask=m_place, other=0)
    hidden *= gl.load(p_weights + b_pair, mask=m_place, other=0.0)[None, :]
    o_row = tile * 32 + gl.arange(0, groups * 32, layout=gl.SliceLayout(1, layout))
    p_result = p_out + (first + o_place).to(gl.int64)[None, :] * width_out + o_row[:, None]
    gl.store(p_result, hidden.to(gl.bfloat16), mask=m_place[None, :])


@gluon.jit
def _store_outputs(
    acc, p_out, p_order, first, count, tile, rows, groups: gl.constexpr, width: gl.constexpr, mma: gl.constexpr
):
    """Outputs by pair. A warp's 16 rows of the instruction are 8 of the tile's first half and 8 of its second."""
    o_place = gl.arange(0, width, layout=gl.SliceLayout(0, mma))
    m_place = o_place < count
    b_pair = gl.load(p_order + first + o_place, mask=m_place, other=0).to(gl.int64)
    o_row = gl.arange(0, groups * 64, layout=gl.SliceLayout(1, mma))
    o_row = o_row // 8 % 2 * (rows // 2) + (tile + o_row // 64) * 32 + o_row % 64 // 16 * 8 + o_row % 8
    gl.store(p_out + b_pair[None, :] * rows + o_row[:, None], acc.to(gl.bfloat16), mask=m_place[None, :])


@gluon.jit(do_not_specialize=["most", "active", "scale_stride"])
def fp4_product(
    p_x,
    p_x_scale,
    p_weights,
    p_words,
    p_row_words,
    p_out,
    p_order,
    p_records,
    most,
    active,
    scale_stride,
    rows,
    columns,
    limit,
    gate_up: gl.constexpr,
    width: gl.constexpr,
    groups: gl.constexpr,
    units: gl.constexpr,
    slots: gl.constexpr,
):
    """One tile of pairs times `groups * 64` rows of its expert.

    `p_x` e4m3 [T or pairs, columns], `p_x_scale` fp32 [columns / 128, scale_stride], one a row of `p_x`; `p_words` and
    `p_row_words` int32 as arranged. With `gate_up` `p_x` is by token, and `p_out` bf16 [pairs, rows / 2] takes the
    hidden values by place; otherwise `p_x` is by place and `p_out` takes [pairs, rows] by pair.
    """
    i_tile = gl.program_id(1)
    count = gl.load(p_records + 2 * most + i_tile)
    if count > 0:
        expert = gl.load(p_records + i_tile).to(gl.int64)
        first = gl.load(p_records + most + i_tile)
        tile = gl.program_id(0) * groups
        steps = columns // (UNIT * units)

        warps: gl.constexpr = 4 * groups
        mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, width, 32])
        by_column: gl.constexpr = gl.SliceLayout(0, mma)
        by_row: gl.constexpr = gl.SliceLayout(1, mma)
        l_word: gl.constexpr = _words_layout(groups)
        l_row_word: gl.constexpr = gl.BlockedLayout([4], [32], [warps], [0])
        l_x: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])
        l_scale: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])

        words = gl.allocate_shared_memory(
            gl.int32, [slots * units, groups * 256, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
        row_words = gl.allocate_shared_memory(
            gl.int32, [slots * units, groups * 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
        x = gl.allocate_shared_memory(gl.float8e4nv, [slots * units, width, UNIT], gl.NVMMASharedLayout(128, 8, 2))
        x_scale = gl.allocate_shared_memory(gl.float32, [slots * units, width], gl.SwizzledSharedLayout(1, 1, 1, [0]))

        o_word = gl.arange(0, groups * 256, layout=gl.SliceLayout(1, l_word))
        o_part = gl.arange(0, 4, layout=gl.SliceLayout(0, l_word))
        all_units = columns // UNIT
        first_word = (expert * (rows // 64) + tile) * all_units
        p_word = p_words + first_word * 1024
        p_word = p_word + (o_word // 256 * all_units * 1024 + o_word % 256 * 4)[:, None] + o_part[None, :]
        o_row_word = gl.arange(0, groups * 64, layout=l_row_word)
        p_row_word = p_row_words + first_word * 64 + o_row_word // 64 * all_units * 64 + o_row_word % 64

        o_x = gl.arange(0, width, layout=gl.SliceLayout(1, l_x))
        m_x = o_x < count
        x_pair = gl.load(p_order + first + o_x, mask=m_x, other=0)
        x_row = x_pair // active if gate_up else first + o_x
        o_byte = gl.arange(0, UNIT, layout=gl.SliceLayout(0, l_x))
        p_row = p_x + x_row.to(gl.int64)[:, None] * columns + o_byte[None, :]
        o_scale = gl.arange(0, width, layout=l_scale)
        scale_pair = gl.load(p_order + first + o_scale, mask=o_scale < count, other=0)
        scale_row = scale_pair // active if gate_up else gl.where(o_scale < count, first + o_scale, 0)
        p_row_scale = p_x_scale + scale_row

        for step in gl.static_range(slots - 1):
            if step < steps:
                _stage(
                    words,
                    row_words,
                    x,
                    x_scale,
                    p_word,
                    p_row_word,
                    p_row,
                    p_row_scale,
                    m_x[:, None],
                    step,
                    scale_stride,
                    units,
                )
                p_word += units * 1024
                p_row_word += units * 64
                p_row += units * UNIT
                p_row_scale += units * scale_stride
            else:
                async_copy.commit_group()

        acc = gl.zeros([groups * 64, width], gl.float32, mma)
        none = gl.zeros([groups * 64, width], gl.float32, mma)
        for step in range(steps):
            async_copy.wait_group(slots - 2)
            fence_async_shared()
            if step + slots - 1 < steps:
                _stage(
                    words,
                    row_words,
                    x,
                    x_scale,
                    p_word,
                    p_row_word,
                    p_row,
                    p_row_scale,
                    m_x[:, None],
                    (step + slots - 1) % slots,
                    scale_stride,
                    units,
                )
                p_word += units * 1024
                p_row_word += units * 64
                p_row += units * UNIT
                p_row_scale += units * scale_stride
            else:
                async_copy.commit_group()
            for unit in gl.static_range(units):
                at = (step % slots) * units + unit
                b_row_word = row_words.index(at).load(_row_words_layout(groups))
                b_w = _unpack(words.index(at).load(l_word), b_row_word, groups)
                b_w = gl.convert_layout(b_w, gl.DotOperandLayout(0, mma, 4))
                part = warpgroup_mma(b_w, x.index(at).permute((1, 0)), none, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                b_scale = x_scale.index(at).load(by_column)
                b_exponent = b_row_word.reshape([groups, 2, 4, 8]).permute([0, 2, 1, 3]).reshape([groups * 64])
                b_factor = gl.convert_layout(((b_exponent & 255) + 5) << 23, by_row).to(gl.float32, bitcast=True)
                acc += part * (b_factor[:, None] * b_scale[None, :])

        if gate_up:
            _store_hidden(acc, p_out, p_weights, p_order, first, count, tile, rows // 2, limit, groups, width)
        else:
            _store_outputs(acc, p_out, p_order, first, count, tile, rows, groups, width, mma)
