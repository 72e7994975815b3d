"""What comes before the Hopper kernels, in one launch: tiles of pairs, activations rounded to fp8, counters at zero."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.formats import FP8_BLOCK
from leadline.kernels.gpu.chips import chip_of
from leadline.kernels.gpu.experts_tiles import Tiles, empty_tiles, place_pairs
from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.gpu.quantize import BLOCKS_PER_PROGRAM, as_fp8


@dataclass(frozen=True)
class Prepared:
    """`codes` e4m3 [T, d] and `scales` fp32 [d / 128, T] of the activations, and `counters` int32, all of them 0."""

    tiles: Tiles
    codes: Tensor
    scales: Tensor
    counters: Tensor


def prepared(x: Tensor, chosen: Tensor, experts: int, width: int, counters: int) -> Prepared:
    """`x` [T, d], d a multiple of 128, and `chosen` [T, k]: tiles of at most `width` pairs, and `counters` a tile.

    There are as many counters again for one more tile per token, for tiles of tokens.
    """
    tokens, columns = x.shape
    chip, early = chip_of(x.device), early_start(x.device)
    tiles, placing = empty_tiles(chosen, experts, width)
    blocks = columns // FP8_BLOCK
    codes = torch.empty(tokens, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(blocks, tokens, dtype=torch.float32, device=x.device)
    counts = torch.empty((tiles.most + tokens) * counters, dtype=torch.int32, device=x.device)
    rounding = triton.cdiv(tokens * blocks, BLOCKS_PER_PROGRAM)
    _prepare[(placing.blocks + rounding,)](
        x.contiguous(),
        codes if chip.fp8_type else codes.view(torch.uint8),
        scales,
        counts,
        chosen,
        placing.counts,
        tiles.order,
        tiles.records,
        tokens,
        columns,
        counts.numel(),
        tiles.pairs,
        placing.blocks,
        tiles.most,
        width,
        placing.b_pairs,
        placing.b_experts,
        placing.b_all,
        FP8_BLOCK,
        BLOCKS_PER_PROGRAM,
        chip.fp8_type,
        bool(early),
        **early,
    )
    return Prepared(tiles, codes, scales, counts)


@triton.jit(do_not_specialize=["tokens", "counters", "pairs", "blocks", "most"])
def _prepare(
    p_x,
    p_codes,
    p_scales,
    p_counters,
    p_chosen,
    p_counts,
    p_order,
    p_records,
    tokens,
    columns,
    counters,
    pairs,
    blocks,
    most,
    width: tl.constexpr,
    b_pairs: tl.constexpr,
    b_experts: tl.constexpr,
    b_all: tl.constexpr,
    block: tl.constexpr,
    per_program: tl.constexpr,
    fp8_type: tl.constexpr,
    early: tl.constexpr,
):
    """The first `blocks` programs place pairs; each of the others rounds `per_program` blocks of 128 channels."""
    if early:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i_program = tl.program_id(0)
    if i_program < blocks:
        place_pairs(
            i_program, p_chosen, p_counts, p_order, p_records, pairs, blocks, most, width, b_pairs, b_experts, b_all
        )
    else:
        i_program -= blocks
        _round(p_x, p_codes, p_scales, i_program, tokens, columns, block, per_program, fp8_type)
        for start in range(i_program * 1024, counters, (tl.num_programs(0) - blocks) * 1024):
            o_counter = start + tl.arange(0, 1024)
            tl.store(p_counters + o_counter, 0, mask=o_counter < counters)


@triton.jit
def _round(
    p_x,
    p_codes,
    p_scales,
    i_program,
    tokens,
    columns,
    block: tl.constexpr,
    per_program: tl.constexpr,
    fp8_type: tl.constexpr,
):
    """As `leadline.kernels.gpu.quantize.quantize_kernel`, with the scales of a block side by side."""
    blocks = columns // block
    i_block = i_program.to(tl.int64) * per_program + tl.arange(0, per_program)
    i_token, i_part = i_block // blocks, i_block % blocks
    m_block = i_token < tokens
    o_x = i_token[:, None] * columns + i_part[:, None] * block + tl.arange(0, block)[None, :]
    b_x = tl.load(p_x + o_x, m_block[:, None], other=0.0).to(tl.float32)
    b_code, b_scale = as_fp8(b_x, fp8_type)
    tl.store(p_codes + o_x, b_code, m_block[:, None])
    tl.store(p_scales + i_part * tokens + i_token, b_scale, m_block)
