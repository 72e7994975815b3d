"""Packed fp4 weights, arranged by `leadline.kernels.gpu.experts_arrange`, to an operand of Hopper's instruction."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
def words_layout():
    """[256, 4]: each thread holds the two 16-byte pieces that it multiplies."""
    lanes = [[1 << i, 0] for i in range(5)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [128, 0]], lanes, [[32, 0], [64, 0]], [], [256, 4])


@gluon.constexpr_function
def row_words_layout():
    """[64]: each thread holds the words of the two rows that it multiplies; four threads hold the same."""
    return gl.DistributedLinearLayout([[32]], [[0], [0], [1], [2], [4]], [[8], [16]], [], [64])


@gluon.constexpr_function
def _bytes_layout():
    """[half 2, warp 4, row 8, thread 4, part 4, byte 4]: the same as `words_layout` with a word's four bytes apart."""

    def base(dim, value):
        return [value if i == dim else 0 for i in range(6)]

    registers = [base(5, 1), base(5, 2), base(4, 1), base(4, 2), base(0, 1)]
    lanes = [base(3, 1), base(3, 2), base(2, 1), base(2, 2), base(2, 4)]
    return gl.DistributedLinearLayout(registers, lanes, [base(1, 1), base(1, 2)], [], [2, 4, 8, 4, 4, 4])


@gluon.jit
def unpack(b_word, b_row_word):
    """Packed codes [256, 4] of 64 rows of 128 columns, and the rows' scale words [64] -> e4m3 [64, 128]."""
    layout: gl.constexpr = _bytes_layout()
    per_word: gl.constexpr = gl.SliceLayout(5, layout)
    per_row: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, per_word))
    per_part: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, per_word))))
    b_word = gl.convert_layout(b_word.reshape([2, 4, 8, 4, 4]), per_word)
    b_row_word = gl.convert_layout(b_row_word.reshape([2, 4, 8]), per_row)
    o_part = gl.arange(0, 4, layout=per_part)
    o_part = o_part[None, :][None, :, :][None, :, :, :][None, :, :, :, :]
    b_shift = (b_row_word[:, :, :, None][:, :, :, :, None] >> (o_part * 4 + 8)) & 15
    b_low = b_shift * 0x08080800 + 0x14100800
    b_high = b_shift * 0x08080808 + 0x24201C18
    b_words = b_word[:, :, :, :, :, None] | gl.full([2, 4, 8, 4, 4, 4], 0, gl.int32, layout)
    b_front, b_back = gl.inline_asm_elementwise(
        UNPACK,
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [b_words, b_low[:, :, :, :, :, None], b_high[:, :, :, :, :, None]],
        (gl.int8, gl.int8),
        True,
        4,
    )
    b_values = gl.join(b_front, b_back).permute([1, 0, 2, 4, 6, 3, 5]).reshape([64, 128])
    return b_values.to(gl.float8e4nv, bitcast=True)
