"""One kernel for every linear layer: weights stream through as the tall side of the matrix product, tokens lie across.

A program owns `block_rows` rows of the weight, a slice of its columns and up to `block_tokens` tokens. Where a layer
has too few rows to occupy the GPU its columns are split over programs, whose sums meet in fp32 in a fixed order.
"""

import triton
import triton.language as tl

from leadline.kernels.gpu.bits import (
    e2m1_to_float,
    e4m3_to_float,
    e8m0_to_float,
    fp8_scale,
    power_of_two_ceil,
    round_e4m3,
)
from leadline.kernels.gpu.quantize import inverse


@triton.jit
def _e4m3_pairs_to_bf16(pair):
    """[R, c] int16, each two e4m3 bytes -> [R, 2 c] bf16: the seven bits move to exponent and mantissa, times 2^120.

    Pairs, because a matrix instruction wants two neighbours in a register: single bytes would have to be put together.
    """
    both = tl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, part, zero;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.b32 part, low, 4;
        and.b32 part, part, 0x07f007f0;
        lop3.b32 low, low, 0x80008000, part, 0xea;
        shr.b32 part, high, 4;
        and.b32 part, part, 0x07f007f0;
        lop3.b32 high, high, 0x80008000, part, 0xea;
        mov.b32 part, 0x7b807b80;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, low, part, zero;
        fma.rn.bf16x2 $1, high, part, zero;
        }""",
        "=r,=r,r",
        [pair],
        dtype=tl.int32,
        is_pure=True,
        pack=2,
    )
    first = (both & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    second = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(first, second).reshape(pair.shape[0], 2 * pair.shape[1])


@triton.jit
def half_scale(amax):
    """A power of two by which bf16 values up to `amax` go into fp16: the largest become 2^14 to 2^15.

    What is below 2^-39 of the largest is lost, far less than a sum in fp32 loses.
    """
    return power_of_two_ceil(tl.maximum(amax, 1e-30)) * (1 / 32768)


@triton.jit
def _scale_values(raw, e8m0: tl.constexpr):
    return e8m0_to_float(raw) if e8m0 else raw


@triton.jit
def _fp4_tile(p_w, p_scale, o_row, m_row, o_in, columns, e8m0: tl.constexpr, block_in: tl.constexpr):
    """[rows, block_in] fp32 of packed e2m1 [R, columns / 2] with a scale per 32 columns, from column `o_in`."""
    rows: tl.constexpr = o_row.shape[0]
    o_byte = o_in // 2 + tl.arange(0, block_in // 2)
    mask = m_row[:, None] & (o_byte < columns // 2)[None, :]
    b_byte = tl.load(p_w + o_row[:, None] * (columns // 2) + o_byte[None, :], mask, other=0)
    b_value = tl.join(e2m1_to_float(b_byte & 15), e2m1_to_float((b_byte >> 4) & 15)).reshape(rows, block_in)
    o_scale = o_in // 32 + tl.arange(0, block_in // 32)
    mask = m_row[:, None] & (o_scale < columns // 32)[None, :]
    b_scale = tl.load(p_scale + o_row[:, None] * (columns // 32) + o_scale[None, :], mask, other=0)
    b_scale = _scale_values(b_scale, e8m0)[:, :, None].broadcast_to(rows, block_in // 32, 32)
    return b_value * b_scale.reshape(rows, block_in)


@triton.jit(do_not_specialize=["tokens", "steps"])
def product_kernel(
    p_x,
    p_x_scale,
    p_w,
    p_w_scale,
    p_out,
    p_sums,
    p_arrived,
    tokens,
    rows,
    columns,
    x_stride,
    x_scale_stride,
    w_scale_stride,
    steps,
    input: tl.constexpr,
    weight: tl.constexpr,
    operand: tl.constexpr,
    unpack: tl.constexpr,
    e8m0: tl.constexpr,
    one_scale: tl.constexpr,
    even: tl.constexpr,
    block_rows: tl.constexpr,
    block_tokens: tl.constexpr,
    block_in: tl.constexpr,
    groups: tl.constexpr,
    splits: tl.constexpr,
    alone: tl.constexpr,
    early: tl.constexpr,
):
    """`x` [T, groups * columns] and `w` [groups * rows, columns] -> `out` [T, groups * rows].

    `input`: "plain", "round" (to fp8 here) or "codes" (e4m3 with scales [ceil(columns / 128), x_scale_stride], the
    stride a multiple of `block_tokens`).
    `weight`: "plain", "fp8" or "fp4". `operand`: the type in which tiles meet. `unpack`: how e4m3 bytes become it,
    by "type" (the chip has it), "asm" or "bits". `one_scale`: a tile of rows lies in one block of weight scales.
    The last program of a tile to finish adds up the sums [splits, T, rows] of all its splits, in their order; `alone`,
    a program makes them all and adds each when it is complete.
    """
    i_tile, i_split, i_tokens = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(rows, block_rows)
    i_group = i_tile // tiles
    o_local = (i_tile % tiles) * block_rows + tl.arange(0, block_rows)
    m_row = o_local < rows
    first_row = i_group * rows + (i_tile % tiles) * block_rows
    o_row = (i_group * rows + o_local).to(tl.int64)
    o_token = i_tokens * block_tokens + tl.arange(0, block_tokens)
    m_token = o_token < tokens
    o_x = o_token.to(tl.int64) * x_stride + i_group * columns
    blocks = tl.cdiv(columns, block_in)
    start = i_split * steps
    stop = blocks if alone else tl.minimum(start + steps, blocks)
    o_in = tl.arange(0, block_in)
    o_scale_row = first_row // 128 if one_scale else o_row // 128
    m_scale_row = True if one_scale else m_row

    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_sum = tl.zeros([block_rows, block_tokens], tl.float32)
    if alone:
        b_total = tl.zeros([block_rows, block_tokens], tl.float32)
    if weight == "fp8":
        b_w_next = tl.load(p_w_scale + o_scale_row * w_scale_stride + start, m_scale_row, other=0)
    if input == "codes":
        b_x_next = tl.load(p_x_scale + start * x_scale_stride + o_token)
    for i_block in range(start, stop):
        o_column = i_block * block_in + o_in
        m_x, m_w = m_token[:, None], m_row[:, None]
        if not even:
            m_x = m_x & (o_column < columns)[None, :]
            m_w = m_w & (o_column < columns)[None, :]
        b_x = tl.load(p_x + o_x[:, None] + o_column[None, :], m_x, other=0.0)
        # ------------------------------------------------------------ the weight's tile [block_rows, block_in]
        if weight == "fp4":
            b_w = _fp4_tile(p_w, p_w_scale, o_row, m_row, i_block * block_in, columns, e8m0, block_in).to(operand)
        else:
            if unpack == "asm":
                o_pair = i_block * (block_in // 2) + tl.arange(0, block_in // 2)
                m_pair = m_row[:, None] if even else m_row[:, None] & (o_pair < columns // 2)[None, :]
                b_w = tl.load(p_w + o_row[:, None] * (columns // 2) + o_pair[None, :], m_pair, other=0)
                b_w = _e4m3_pairs_to_bf16(b_w)
            else:
                b_w = tl.load(p_w + o_row[:, None] * columns + o_column[None, :], m_w, other=0.0)
            if unpack == "bits":
                b_w = e4m3_to_float(b_w).to(operand)
            elif unpack == "type":
                b_w = b_w.to(operand)
        # ------------------------------------------------------------ the input's tile [block_tokens, block_in]
        if input == "round":
            b_x = b_x.to(tl.float32)
            b_x_scale = fp8_scale(tl.max(tl.abs(b_x), 1))
            b_x = b_x * inverse(b_x_scale)[:, None]
            if operand == tl.float8e4nv:
                b_x = b_x.to(operand)
            else:
                b_x = (round_e4m3(b_x) * b_x_scale[:, None]).to(operand)
        elif operand == tl.float16:
            b_x = b_x.to(tl.float32)
            b_x_scale = half_scale(tl.max(tl.abs(b_x), 1))
            b_x = (b_x * inverse(b_x_scale)[:, None]).to(operand)
        elif input == "plain":
            b_x = b_x.to(operand)
        b_product = tl.dot(b_w, b_x.T, input_precision="ieee")
        # ------------------------------------------------------------ scales, which were loaded one turn ahead
        if weight == "fp8":
            b_w_scale = _scale_values(b_w_next, e8m0)
            turn = tl.minimum(i_block + 1, blocks - 1)
            b_w_next = tl.load(p_w_scale + o_scale_row * w_scale_stride + turn, m_scale_row, other=0)
            if input == "codes":
                b_x_scale = b_x_next
                b_x_next = tl.load(p_x_scale + turn * x_scale_stride + o_token)
            scaled: tl.constexpr = operand == tl.float8e4nv or operand == tl.float16
            if one_scale and scaled:
                b_sum += b_product * (b_x_scale * b_w_scale)[None, :]
            elif one_scale:
                b_sum += b_product * b_w_scale
            elif scaled:
                b_sum += b_product * (b_w_scale[:, None] * b_x_scale[None, :])
            else:
                b_sum += b_product * b_w_scale[:, None]
        else:
            b_sum += b_product
        if alone:  # noqa: SIM102, Triton evaluates both sides of an `and`
            if (i_block + 1) % steps == 0:
                b_total += b_sum
                b_sum = tl.zeros([block_rows, block_tokens], tl.float32)

    if alone:
        b_sum = b_total + b_sum
    all_rows = (rows * groups).to(tl.int64)
    o_out = o_token[None, :] * all_rows + o_row[:, None]
    m_out = m_row[:, None] & m_token[None, :]
    if splits == 1 or alone:
        tl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), m_out)
    else:
        split_stride = all_rows * tokens
        tl.store(p_sums + i_split * split_stride + o_out, b_sum, m_out)
        tl.debug_barrier()  # all of this program's sums are stored before its arrival is
        p_count = p_arrived + i_tokens * tl.num_programs(0) + i_tile
        if tl.atomic_add(p_count, 1, sem="acq_rel") == splits - 1:
            b_total = tl.zeros([block_rows, block_tokens], tl.float32)
            for index in tl.static_range(splits):
                b_total += tl.load(p_sums + index * split_stride + o_out, m_out, cache_modifier=".cg")
            tl.store(p_out + o_out, b_total.to(p_out.dtype.element_ty), m_out)
            tl.store(p_count, 0)
