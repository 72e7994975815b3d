"""The row-wise launches around the experts' products: rounding their input, summing their output."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.bits import fp8_scale, round_e4m3
from leadline.kernels.gpu.overlap import early_start


def product_input(x: Tensor, rounds: bool, halves: bool) -> Tensor:
    """`x` [T, K] as a product takes it -> [T, K]: rounded to fp8 in blocks of 128 where `rounds`.

    With `halves` the even columns come first and then the odd ones, as packed fp4 weights meet them.
    """
    if not (rounds or halves) or len(x) == 0:
        return x
    out = torch.empty_like(x)
    _product_input[(len(x), triton.cdiv(x.shape[1], 1024))](x, out, x.shape[1], rounds, halves, 8)
    return out


@triton.jit
def _product_input(p_x, p_out, columns, rounds: tl.constexpr, halves: tl.constexpr, b_blocks: tl.constexpr):
    i_row, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_column = (i_part * b_blocks + tl.arange(0, b_blocks))[:, None] * 128 + tl.arange(0, 128)[None, :]
    m_column = o_column < columns
    b_x = tl.load(p_x + i_row * columns + o_column, mask=m_column, other=0.0).to(tl.float32)
    if rounds:
        b_scale = fp8_scale(tl.max(tl.abs(b_x), 1))[:, None]
        b_x = round_e4m3(b_x / b_scale) * b_scale
    o_out = o_column
    if halves:
        o_out = (o_column % 2) * (columns // 2) + o_column // 2
    tl.store(p_out + i_row * columns + o_out, b_x.to(p_out.dtype.element_ty), mask=m_column)


def summed(outputs: Tensor, chosen: Tensor, shared: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`outputs` [T * k or more, d] by pair, and the shared expert's [T, d] if given -> [T, d] in `dtype`.

    Each token's rows are added in their order, and then the shared expert's, in fp32; none where `chosen` [T, k] is -1.
    """
    (tokens, active), columns = chosen.shape, outputs.shape[1]
    out = torch.empty(tokens, columns, dtype=dtype, device=outputs.device)
    early = early_start(outputs.device)
    if tokens:
        _summed_pairs[(tokens, triton.cdiv(columns, 512))](
            outputs, chosen, shared, out, columns, active, 512, bool(early), **early
        )
    return out


@triton.jit
def _summed_pairs(
    p_outputs, p_chosen, p_shared, p_out, columns, active: tl.constexpr, b_columns: tl.constexpr, early: tl.constexpr
):
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_token, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_column = i_part * b_columns + tl.arange(0, b_columns)
    m_column = o_column < columns
    b_sum = tl.zeros([b_columns], tl.float32)
    for rank in tl.static_range(active):
        # rows of pairs without an expert hold anything, and are read all the same: no load waits for another
        i_pair = i_token * active + rank
        b_output = tl.load(p_outputs + i_pair * columns + o_column, mask=m_column, other=0.0).to(tl.float32)
        b_sum += tl.where(tl.load(p_chosen + i_pair) >= 0, b_output, 0.0)
    if p_shared is not None:
        b_sum += tl.load(p_shared + i_token * columns + o_column, mask=m_column, other=0.0).to(tl.float32)
    tl.store(p_out + i_token * columns + o_column, b_sum.to(p_out.dtype.element_ty), mask=m_column)


def hidden_rows(gate_up: Tensor, limit: float) -> Tensor:
    """`gate_up` [T, 2 I], gate first -> [T, I] in its dtype: `silu(min(gate, limit)) * clamp(up, -limit, limit)`."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    early = early_start(gate_up.device)
    _hidden_rows[(tokens, triton.cdiv(width, 1024))](gate_up, out, width, limit, 1024, bool(early), **early)
    return out


@triton.jit
def _hidden_rows(p_gate_up, p_out, width, limit, b_columns: tl.constexpr, early: tl.constexpr):
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_token, i_part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_column = i_part * b_columns + tl.arange(0, b_columns)
    m_column = o_column < width
    p_row = p_gate_up + i_token * 2 * width + o_column
    gate = tl.load(p_row, mask=m_column, other=0.0).to(tl.float32)
    up = tl.load(p_row + width, mask=m_column, other=0.0).to(tl.float32)
    hidden = clamped_swiglu(gate, up, limit)
    tl.store(p_out + i_token * width + o_column, hidden.to(p_out.dtype.element_ty), mask=m_column)


@triton.jit
def clamped_swiglu(gate, up, limit):
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` of fp32; no clamp where `limit` is 0."""
    if limit > 0:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1 + tl.exp(-gate)) * up
