"""Products of fp8 weights for at most 8 tokens on Hopper, in Gluon: decoding for one user, where latency counts.

The weight's tiles go round a ring in shared memory and start on their way before the kernel in front of this one has
ended. While they travel, every program rounds its slice of the input once; the loop that follows has nothing to do but
multiply, and adds one block of 128 columns while the matrix unit works on the next.

A weight must not be written by the kernel just in front of its product; one launch between them is enough, and a step
begins with many.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from leadline.kernels.gpu.gluon_names import barrier, copy_async

BLOCK = gl.constexpr(128)
"""Columns that share their scales, and that one turn of the loop takes."""


@gluon.jit
def _after_the_kernel_before():
    """Wait for the end of the kernel in front of this one, which may go on beside it (`griddepcontrol`)."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def _weight_scale(p_scale, e8m0: gl.constexpr):
    raw = gl.load(p_scale)
    return (raw.to(gl.int32) << 23).to(gl.float32, bitcast=True) if e8m0 else raw


@gluon.jit
def _scale_blocks(raw, values, scales, count, half: gl.constexpr, copied: gl.constexpr):
    """`count` blocks of bf16 rows [tokens, 128] as e4m3 or fp16 values with a power of two as scale per row.

    e4m3 rounds as `formats.fp8_quantize_rows`. fp16 takes the largest value to 2^14 or more, so that nothing is lost
    but what is below 2^-39 of it.
    """
    for block in range(count):
        b_x = raw.index(block).load(copied).to(gl.float32)
        b_amax = gl.max(gl.abs(b_x), axis=1)
        b_amax = gl.maximum(b_amax, 1e-30) if half else gl.maximum(b_amax, 1e-4) * (1 / 448)
        b_bits = (b_amax.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        b_scale = b_bits.to(gl.float32, bitcast=True)
        b_inverse = (0x7F000000 - b_bits).to(gl.float32, bitcast=True)
        if half:
            b_scale, b_inverse = b_scale * (1 / 32768), b_inverse * 32768
        values.index(block).store((b_x * b_inverse[:, None]).to(values.dtype))
        scales.index(block).store(b_scale)
    fence_async_shared()


@gluon.jit(do_not_specialize=["tokens", "steps"])
def few_product(
    p_x,
    p_w,
    p_w_scale,
    p_out,
    p_sums,
    p_arrived,
    tokens,
    rows,
    group_rows,
    columns,
    x_stride,
    w_scale_stride,
    steps,
    e8m0: gl.constexpr,
    block_rows: gl.constexpr,
    block_tokens: gl.constexpr,
    warps: gl.constexpr,
    slots: gl.constexpr,
    most: gl.constexpr,
    splits: gl.constexpr,
    half: gl.constexpr,
):
    """bf16 `x` [T, groups * columns], at most `block_tokens` rows, times `w` e4m3 [rows, columns], groups of rows with
    their part of the input. `x` is rounded to fp8, or with `half` kept as fp16 with scales.

    Every program scales its slice of at most `most` blocks once, while its weights are on their way. The last program
    of a tile to finish adds up the sums [splits, T, rows] of all its splits.
    """
    i_tile, i_split = gl.program_id(0), gl.program_id(1)
    start = i_split * steps
    count = gl.minimum(steps, columns // BLOCK - start)
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, block_tokens, 16 if half else 32])
    by_token: gl.constexpr = gl.SliceLayout(0, mma)
    l_w: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0])
    l_x: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    w = gl.allocate_shared_memory(gl.float8e4nv, [slots, block_rows, BLOCK], swizzled)
    raw = gl.allocate_shared_memory(gl.bfloat16, [most, block_tokens, BLOCK], plain)
    operand: gl.constexpr = gl.float16 if half else gl.float8e4nv
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16 if half else 8, 2)
    values = gl.allocate_shared_memory(operand, [most, block_tokens, BLOCK], wide)
    scales = gl.allocate_shared_memory(gl.float32, [most, block_tokens], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    o_row = i_tile * block_rows + gl.arange(0, block_rows, layout=gl.SliceLayout(1, l_w))
    p_w_tile = p_w + o_row.to(gl.int64)[:, None] * columns + start * BLOCK
    p_w_tile = p_w_tile + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, l_w))[None, :]
    o_x = gl.arange(0, block_tokens, layout=gl.SliceLayout(1, l_x))
    p_x_tile = p_x + o_x.to(gl.int64)[:, None] * x_stride + i_tile * block_rows // group_rows * columns + start * BLOCK
    p_x_tile = p_x_tile + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, l_x))[None, :]
    p_w_block = p_w_scale + i_tile * block_rows // BLOCK * w_scale_stride + start

    # the input is waited for with the first slots of weights; those behind it are still on their way meanwhile
    sooner: gl.constexpr = slots // 2
    for slot in gl.static_range(sooner):
        copy_async(w.index(slot), p_w_tile + slot * BLOCK, slot < count)
    _after_the_kernel_before()
    for block in range(count):
        copy_async(raw.index(block), p_x_tile + block * BLOCK, (o_x < tokens)[:, None])
    async_copy.commit_group()
    for slot in gl.static_range(sooner, slots - 1):
        copy_async(w.index(slot), p_w_tile + slot * BLOCK, slot < count)
        async_copy.commit_group()
    async_copy.wait_group(slots - 1 - sooner)
    _scale_blocks(raw, values, scales, count, half, l_x)

    none = gl.zeros([block_rows, block_tokens], gl.float32, mma)
    b_sum = gl.zeros([block_rows, block_tokens], gl.float32, mma)
    b_before = gl.zeros([block_rows, block_tokens], gl.float32, mma)
    b_scale = gl.zeros([block_tokens], gl.float32, by_token)
    w_scale = 0.0
    for pair in range((count + 1) // 2):
        for odd in gl.static_range(2):
            now = pair * 2 + odd
            here = gl.minimum(now, count - 1)
            async_copy.wait_group(slots - 2)
            fence_async_shared()
            b_w = w.index(now % slots)
            if half:
                b_w = b_w.load(gl.DotOperandLayout(0, mma, 2)).to(operand)
            part = warpgroup_mma(b_w, values.index(here).permute((1, 0)), none, use_acc=False, is_async=True)
            later = now + slots - 1
            copy_async(w.index(later % slots), p_w_tile + later * BLOCK, later < count)
            async_copy.commit_group()
            b_sum += b_before * (b_scale * w_scale)[None, :]
            w_scale = _weight_scale(p_w_block + here, e8m0)
            b_scale = scales.index(here).load(by_token)
            b_before = warpgroup_mma_wait(0, deps=[part])
    b_sum += b_before * (b_scale * w_scale)[None, :]

    o_token = gl.arange(0, block_tokens, layout=by_token)
    o_out = o_token.to(gl.int64)[None, :] * rows
    o_out = o_out + (i_tile * block_rows + gl.arange(0, block_rows, layout=gl.SliceLayout(1, mma)))[:, None]
    m_out = (o_token < tokens)[None, :]
    if splits == 1:
        gl.store(p_out + o_out, b_sum.to(p_out.dtype.element_ty), mask=m_out)
    else:
        split_stride = rows.to(gl.int64) * tokens
        gl.store(p_sums + i_split * split_stride + o_out, b_sum, mask=m_out)
        barrier()  # all of this program's sums are stored before its arrival is
        if gl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel") == splits - 1:
            b_total = gl.zeros([block_rows, block_tokens], gl.float32, mma)
            for index in gl.static_range(splits):
                b_total += gl.load(p_sums + index * split_stride + o_out, mask=m_out, other=0.0, cache_modifier=".cg")
            gl.store(p_out + o_out, b_total.to(p_out.dtype.element_ty), mask=m_out)
            gl.store(p_arrived + i_tile, 0)
