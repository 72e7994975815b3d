"""The experts' two products for every chip and weight format, with weights in checkpoint order."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.bits import e2m1_to_float, e4m3_to_float, e8m0_to_float
from leadline.kernels.gpu.chips import Chip, chip_of
from leadline.kernels.gpu.experts_rows import clamped_swiglu
from leadline.kernels.gpu.experts_tiles import Tiles
from leadline.kernels.project import Weight


@dataclass(frozen=True)
class Blocks:
    """The block of one program: `rows` of the weight, `tokens` of a tile, `columns` of both a step."""

    rows: int
    tokens: int
    columns: int
    warps: int
    stages: int


def blocks_for(chip: Chip, dtype: torch.dtype, pairs: int, experts: int, deterministic: bool = False) -> Blocks:
    """The blocks for `pairs` of tokens and experts, from what a chip can do and from how many an expert gets.

    Columns in a step decide in which order fp4's products are added, so if `deterministic` they are always as many.
    """
    mean = pairs / experts
    if dtype == torch.float32:
        return Blocks(32, 16 if mean <= 16 else 32, 32, 4, 2)
    stages = 3 if chip.shared_bytes > 160 * 1024 else 2
    columns = 64 if deterministic else 128
    if mean <= 12:
        return Blocks(64, 16, columns, 4, stages)
    if mean <= 48:
        return Blocks(64, 32, columns, 4, stages)
    return Blocks(64, 64, 64, 4, stages)


def dot_type(x: Tensor) -> tl.dtype:
    """The type of the products' operands: that of `x`; Triton's interpreter multiplies bf16 wrongly, so fp32 there."""
    return tl.bfloat16 if x.dtype == torch.bfloat16 and x.is_cuda else tl.float32


def as_bytes(tensor: Tensor | None) -> Tensor | None:
    """A tensor of 8-bit numbers as uint8, which every chip can load; others as they are."""
    return tensor.view(torch.uint8) if tensor is not None and tensor.element_size() == 1 else tensor


def gate_up(
    x: Tensor, weights: Tensor | None, w13: Weight, tiles: Tiles, active: int, limit: float, b: Blocks
) -> Tensor:
    """The hidden rows of all pairs by place -> [pairs, I] in the dtype of `x`.

    `x` [T, K] as `product_input` gives it, `weights` [T, k] scale the hidden rows, `w13` is a stack [E, 2 I, K].
    """
    width = w13.data.shape[1] // 2
    hidden = torch.empty(tiles.pairs, width, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, b.rows), tiles.most)
    scale = as_bytes(w13.scale)
    _gate_up[grid](
        x,
        weights,
        as_bytes(w13.data),
        scale,
        hidden,
        tiles.order,
        tiles.records,
        tiles.most,
        active,
        width,
        x.shape[1],
        limit,
        w13.form,
        chip_of(x.device).fp8_type,
        dot_type(x),
        b.rows,
        b.tokens,
        b.columns,
        num_warps=b.warps,
        num_stages=b.stages,
    )
    return hidden


def down(hidden: Tensor, w2: Weight, tiles: Tiles, b: Blocks) -> Tensor:
    """`hidden` [pairs, I] by place, as `product_input` gives it -> [pairs, d] by pair; `w2` is a stack [E, d, I]."""
    rows = w2.data.shape[1]
    out = torch.empty(tiles.pairs, rows, dtype=hidden.dtype, device=hidden.device)
    grid = (triton.cdiv(rows, b.rows), tiles.most)
    scale = as_bytes(w2.scale)
    _down[grid](
        hidden,
        as_bytes(w2.data),
        scale,
        out,
        tiles.order,
        tiles.records,
        tiles.most,
        rows,
        hidden.shape[1],
        w2.form,
        chip_of(hidden.device).fp8_type,
        dot_type(hidden),
        b.rows,
        b.tokens,
        b.columns,
        num_warps=b.warps,
        num_stages=b.stages,
    )
    return out


@triton.jit
def _scale_value(b_scale):
    """Scales as stored, e8m0 bytes or fp32, -> fp32."""
    return e8m0_to_float(b_scale) if b_scale.dtype == tl.uint8 else b_scale


@triton.jit
def _plus_fp4(
    acc,
    p_x,
    p_w,
    p_scale,
    o_token,
    m_token,
    o_row,
    m_row,
    start,
    columns,
    dot_type: tl.constexpr,
    b_columns: tl.constexpr,
):
    """One step with packed fp4: low halves of bytes meet the even columns, which `x` holds first, high ones the odd."""
    b_groups: tl.constexpr = b_columns // 32
    b_bytes: tl.constexpr = b_columns // 2
    o_byte = start // 2 + tl.arange(0, b_bytes)
    m_byte = o_byte < columns // 2
    b_w = tl.load(
        p_w + o_row[:, None] * (columns // 2) + o_byte[None, :], mask=m_row[:, None] & m_byte[None, :], other=0
    )
    o_group = start // 32 + tl.arange(0, b_groups)
    m_scale = m_row[:, None] & (o_group < columns // 32)[None, :]
    b_scale = _scale_value(
        tl.load(p_scale + o_row[:, None] * (columns // 32) + o_group[None, :], mask=m_scale, other=0)
    )
    b_scale = tl.broadcast_to(b_scale[:, :, None], (b_w.shape[0], b_groups, 16)).reshape(b_w.shape[0], b_bytes)
    p_even = p_x + o_token[None, :] * columns + o_byte[:, None]
    m_x = m_byte[:, None] & m_token[None, :]
    b_even = tl.load(p_even, mask=m_x, other=0.0)
    b_odd = tl.load(p_even + columns // 2, mask=m_x, other=0.0)
    b_low = (e2m1_to_float(b_w & 15) * b_scale).to(b_even.dtype)
    b_high = (e2m1_to_float(b_w >> 4) * b_scale).to(b_even.dtype)
    acc = tl.dot(b_low.to(dot_type), b_even.to(dot_type), acc, input_precision="ieee")
    return tl.dot(b_high.to(dot_type), b_odd.to(dot_type), acc, input_precision="ieee")


@triton.jit
def _plus(
    acc,
    p_x,
    p_w,
    p_scale,
    o_token,
    m_token,
    o_row,
    m_row,
    start,
    columns,
    form: tl.constexpr,
    fp8_type: tl.constexpr,
    dot_type: tl.constexpr,
    b_columns: tl.constexpr,
):
    """`acc` [rows, tokens] plus the product of columns `start` .. `start + b_columns`."""
    if form == "fp4":
        acc = _plus_fp4(acc, p_x, p_w, p_scale, o_token, m_token, o_row, m_row, start, columns, dot_type, b_columns)
    else:
        o_column = start + tl.arange(0, b_columns)
        m_column = o_column < columns
        m_w = m_row[:, None] & m_column[None, :]
        m_x = m_column[:, None] & m_token[None, :]
        b_x = tl.load(p_x + o_token[None, :] * columns + o_column[:, None], mask=m_x, other=0.0)
        b_w = tl.load(p_w + o_row[:, None] * columns + o_column[None, :], mask=m_w, other=0)
        if form == "fp8":
            o_scale = (o_row // 128) * ((columns + 127) // 128) + start // 128
            b_scale = _scale_value(tl.load(p_scale + o_scale, mask=m_row, other=0))
            if fp8_type:
                b_w = b_w.to(tl.float8e4nv, bitcast=True).to(tl.float32) * b_scale[:, None]
            else:
                b_w = e4m3_to_float(b_w) * b_scale[:, None]
        b_w = b_w.to(b_x.dtype).to(dot_type)
        acc = tl.dot(b_w, b_x.to(dot_type), acc, input_precision="ieee")
    return acc


@triton.jit
def _matrix(p_w, expert, rows, columns, form: tl.constexpr):
    """Where a matrix [rows, columns] of a stack begins."""
    size = tl.cast(rows, tl.int64) * columns
    return p_w + expert * (size // 2 if form == "fp4" else size)


@triton.jit
def _matrix_scale(expert, rows, columns, form: tl.constexpr):
    """How many scales come before those of that matrix."""
    if form == "fp4":
        return expert * (tl.cast(rows, tl.int64) * (columns // 32))
    return expert * (tl.cast((rows + 127) // 128, tl.int64) * ((columns + 127) // 128))


@triton.jit(do_not_specialize=["most"])
def _gate_up(
    p_x,
    p_weights,
    p_w,
    p_scale,
    p_hidden,
    p_order,
    p_records,
    most,
    active,
    width,
    columns,
    limit,
    form: tl.constexpr,
    fp8_type: tl.constexpr,
    dot_type: tl.constexpr,
    b_rows: tl.constexpr,
    b_tokens: tl.constexpr,
    b_columns: tl.constexpr,
):
    p_record = p_records + tl.program_id(1)
    expert, first, count = tl.load(p_record), tl.load(p_record + most), tl.load(p_record + 2 * most)
    if count == 0:
        return
    p_w = _matrix(p_w, expert, 2 * width, columns, form)
    if form != "plain":
        p_scale += _matrix_scale(expert, 2 * width, columns, form)
    o_place = first + tl.arange(0, b_tokens)
    m_token = tl.arange(0, b_tokens) < count
    b_pair = tl.load(p_order + o_place, mask=m_token, other=0)
    o_token = (b_pair // active).to(tl.int64)
    o_row = tl.program_id(0) * b_rows + tl.arange(0, b_rows)
    m_row = o_row < width
    gate = tl.zeros([b_rows, b_tokens], tl.float32)
    up = tl.zeros([b_rows, b_tokens], tl.float32)
    for start in range(0, columns, b_columns):
        gate = _plus(
            gate, p_x, p_w, p_scale, o_token, m_token, o_row, m_row, start, columns, form, fp8_type, dot_type, b_columns
        )
        up = _plus(
            up,
            p_x,
            p_w,
            p_scale,
            o_token,
            m_token,
            o_row + width,
            m_row,
            start,
            columns,
            form,
            fp8_type,
            dot_type,
            b_columns,
        )
    # the definition's product is cast to the activations' type before the clamp
    gate = gate.to(p_hidden.dtype.element_ty).to(tl.float32)
    up = up.to(p_hidden.dtype.element_ty).to(tl.float32)
    hidden = clamped_swiglu(gate, up, limit)
    if p_weights is not None:
        hidden *= tl.load(p_weights + b_pair, mask=m_token, other=0.0).to(tl.float32)[None, :]
    p_out = p_hidden + o_place.to(tl.int64)[None, :] * width + o_row[:, None]
    tl.store(p_out, hidden.to(p_hidden.dtype.element_ty), mask=m_row[:, None] & m_token[None, :])


@triton.jit(do_not_specialize=["most"])
def _down(
    p_hidden,
    p_w,
    p_scale,
    p_out,
    p_order,
    p_records,
    most,
    rows,
    columns,
    form: tl.constexpr,
    fp8_type: tl.constexpr,
    dot_type: tl.constexpr,
    b_rows: tl.constexpr,
    b_tokens: tl.constexpr,
    b_columns: tl.constexpr,
):
    p_record = p_records + tl.program_id(1)
    expert, first, count = tl.load(p_record), tl.load(p_record + most), tl.load(p_record + 2 * most)
    if count == 0:
        return
    p_w = _matrix(p_w, expert, rows, columns, form)
    if form != "plain":
        p_scale += _matrix_scale(expert, rows, columns, form)
    o_place = first + tl.arange(0, b_tokens)
    m_token = tl.arange(0, b_tokens) < count
    o_row = tl.program_id(0) * b_rows + tl.arange(0, b_rows)
    m_row = o_row < rows
    acc = tl.zeros([b_rows, b_tokens], tl.float32)
    for start in range(0, columns, b_columns):
        acc = _plus(
            acc,
            p_hidden,
            p_w,
            p_scale,
            o_place.to(tl.int64),
            m_token,
            o_row,
            m_row,
            start,
            columns,
            form,
            fp8_type,
            dot_type,
            b_columns,
        )
    b_pair = tl.load(p_order + o_place, mask=m_token, other=0).to(tl.int64)
    p_result = p_out + b_pair[None, :] * rows + o_row[:, None]
    tl.store(p_result, acc.to(p_out.dtype.element_ty), mask=m_row[:, None] & m_token[None, :])
