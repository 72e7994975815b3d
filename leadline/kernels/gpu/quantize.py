"""Rounding of activations to fp8 in blocks of 128 channels, as a launch of its own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.formats import FP8_BLOCK
from leadline.kernels.gpu.bits import float_to_e4m3, fp8_scale, round_e4m3
from leadline.kernels.gpu.chips import chip_of
from leadline.kernels.gpu.overlap import early_start

BLOCKS_PER_PROGRAM = 16
"""16 blocks of 128 in 4 warps: each thread loads 32 bytes of bf16."""


@triton.jit
def inverse(power_of_two):
    """1 / x of normal powers of two in fp32, exactly: the exponent fields add up to 254."""
    return (0x7F000000 - power_of_two.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def as_fp8(b_x, fp8_type: tl.constexpr):
    """fp32 [blocks, 128] -> e4m3 (its bytes without `fp8_type`) and each block's scale: `formats.fp8_quantize_rows`."""
    b_scale = fp8_scale(tl.max(tl.abs(b_x), 1))
    b_x = b_x * inverse(b_scale)[:, None]
    return b_x.to(tl.float8e4nv) if fp8_type else float_to_e4m3(b_x), b_scale


@triton.jit
def quantize_kernel(
    p_x,
    p_codes,
    p_scales,
    tokens,
    columns,
    blocks,
    scale_stride,
    round_only: tl.constexpr,
    fp8_type: tl.constexpr,
    block: tl.constexpr,
    per_program: tl.constexpr,
    early: tl.constexpr,
):
    """`per_program` blocks of `block` channels: codes and scales, or with `round_only` the rounded values."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_block = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    i_token, i_part = i_block // blocks, i_block % blocks
    o_column = i_part[:, None] * block + tl.arange(0, block)[None, :]
    mask = (i_token[:, None] < tokens) & (o_column < columns)
    o_x = i_token[:, None] * columns + o_column
    b_x = tl.load(p_x + o_x, mask, other=0.0).to(tl.float32)
    if round_only:
        b_scale = fp8_scale(tl.max(tl.abs(b_x), 1))
        tl.store(p_codes + o_x, round_e4m3(b_x * inverse(b_scale)[:, None]) * b_scale[:, None], mask)
    else:
        b_code, b_scale = as_fp8(b_x, fp8_type)
        tl.store(p_codes + o_x, b_code, mask)
        tl.store(p_scales + i_part * scale_stride + i_token, b_scale, i_token < tokens)


def quantize_rows(x: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """`x` [T, c] -> (e4m3 codes [T, c], fp32 scales [T, ceil(c / 128)]); see `leadline.formats.fp8_quantize_rows`.

    The scales lie token by token in memory, as matrix products want them: strides 1 and T rounded up to `multiple`.
    """
    tokens, columns = x.shape
    blocks = triton.cdiv(columns, FP8_BLOCK)
    codes = torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(blocks, triton.cdiv(tokens, multiple) * multiple, dtype=torch.float32, device=x.device)
    fp8_type = chip_of(x.device).fp8_type
    _launch(x, codes if fp8_type else codes.view(torch.uint8), scales, round_only=False, fp8_type=fp8_type)
    return codes, scales.T[:tokens]


def round_rows(x: Tensor) -> Tensor:
    """`x` [T, c] as fp8 keeps it, in the dtype of `x`; see `leadline.formats.fp8_round_trip`."""
    rounded = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, rounded, rounded, round_only=True, fp8_type=False)
    return rounded


def _launch(x: Tensor, codes: Tensor, scales: Tensor, *, round_only: bool, fp8_type: bool) -> None:
    tokens, columns = x.shape
    blocks = triton.cdiv(columns, FP8_BLOCK)
    if tokens == 0:
        return
    grid = (triton.cdiv(tokens * blocks, BLOCKS_PER_PROGRAM),)
    quantize_kernel[grid](
        x.contiguous(),
        codes,
        scales,
        tokens,
        columns,
        blocks,
        scales.stride(0),
        round_only=round_only,
        fp8_type=fp8_type,
        block=FP8_BLOCK,
        per_program=BLOCKS_PER_PROGRAM,
        early=bool(early_start(x.device)),
        num_warps=4,
        **early_start(x.device),
    )
