"""Routed experts of a prompt on Hopper: arranged fp4 weights, fp8 activations, many tokens an expert.

The products take their activations in boxes, by the copy engine. So activations are put in the order of their experts
when they are rounded, which writes each token as often as it has experts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from leadline.kernels.gpu.chips import chip_of
from leadline.kernels.gpu.experts_prompt_product import WIDTH, prompt_product
from leadline.kernels.gpu.experts_tiles import Tiles, tiles_by_expert
from leadline.kernels.gpu.quantize import as_fp8, quantize_rows
from leadline.kernels.project import Weight

SLOTS = 4
"""Units of 128 columns in the ring: 43 KB of shared memory each."""
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Three groups of four warps share a multiprocessor's registers: 240 a thread for those that multiply, 24 to fetch."""
MEAN_PAIRS = 64
"""Pairs an expert from which this kernel is faster (H200, V4-Flash: 0.76 of the time at 96, 1.04 at 48)."""
ALIGNED = 4
"""The copy engine begins at a multiple of 16 bytes: four scales."""
BLOCKS = 16
"""Blocks of 128 columns that one program rounds."""


def pays(pairs: int, w13: Weight, w2: Weight) -> bool:
    """Whether `prompt_outputs` takes arranged stacks of that shape, and is the faster way for `pairs`."""
    suits = w13.data.shape[1] % 256 == 0 and w2.data.shape[1] % 128 == 0
    return suits and pairs >= MEAN_PAIRS * len(w13.data)


def prompt_outputs(x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """`x` bf16 [T, d], `chosen` and `weights` [T, k] -> bf16 outputs [T * k, d] by pair, of stacks that are arranged.

    `w13` [E, 2 I, d] and `w2` [E, d, I], with d and I multiples of 128. Where `chosen` is -1 an output is anything.
    """
    active, experts = chosen.shape[1], len(w13.data)
    tiles = tiles_by_expert(chosen, experts, WIDTH.value, ALIGNED)
    hidden = product(*gathered(x, tiles, active), weights, w13, tiles, limit, gate_up=True)
    return product(*quantize_rows(hidden), weights, w2, tiles, limit, gate_up=False)


def gathered(x: Tensor, tiles: Tiles, active: int) -> tuple[Tensor, Tensor]:
    """`x` bf16 [T, d] by place, rounded as by `quantize_rows`: e4m3 [places, d], fp32 scales [places, d / 128].

    A pair is of token `pair // active`; d is a multiple of 128. Places without a pair hold anything.
    """
    tokens, columns = x.shape
    codes = torch.empty(tiles.places, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(columns // 128, tiles.places, dtype=torch.float32, device=x.device)
    fp8_type = chip_of(x.device).fp8_type
    out = codes if fp8_type else codes.view(torch.uint8)
    grid = (tiles.places, triton.cdiv(columns, 128 * BLOCKS))
    _gather_rounded[grid](
        x.contiguous(), tiles.order, out, scales, tokens, active, columns, tiles.places, fp8_type, BLOCKS
    )
    return codes, scales.T


@triton.jit(do_not_specialize=["tokens", "active", "places"])
def _gather_rounded(
    p_x,
    p_order,
    p_codes,
    p_scales,
    tokens,
    active,
    columns,
    places,
    fp8_type: tl.constexpr,
    b_blocks: tl.constexpr,
):
    i_place = tl.program_id(0).to(tl.int64)
    # the last places may have no pair, and then hold any number
    i_token = tl.minimum(tl.maximum(tl.load(p_order + i_place) // active, 0), tokens - 1).to(tl.int64)
    o_block = tl.program_id(1) * b_blocks + tl.arange(0, b_blocks)
    o_column = o_block[:, None] * 128 + tl.arange(0, 128)[None, :]
    m_column = o_column < columns
    b_x = tl.load(p_x + i_token * columns + o_column, mask=m_column, other=0.0).to(tl.float32)
    b_code, b_scale = as_fp8(b_x, fp8_type)
    tl.store(p_codes + i_place * columns + o_column, b_code, mask=m_column)
    tl.store(p_scales + o_block * places + i_place, b_scale, mask=o_block * 128 < columns)


def boxes() -> dict[str, tuple[list[int], Any]]:
    """The boxes in which the copy engine takes each operand, and how they lie in shared memory."""
    plain = gl.NVMMASharedLayout(0, 32, 1)
    return {
        "x_desc": ([64, 128], gl.NVMMASharedLayout(128, 8, 2)),
        "scale_desc": ([256], plain),
        "word_desc": ([32, 32], gl.NVMMASharedLayout(128, 32, 2)),
        "row_word_desc": ([64], plain),
    }


def product(
    codes: Tensor, scales: Tensor, weights: Tensor, w: Weight, tiles: Tiles, limit: float, *, gate_up: bool
) -> Tensor:
    """One product of all pairs, bf16: hidden rows [places, R / 2] by place with `gate_up`, else [pairs, R] by pair.

    `codes` e4m3 [places, K] and `scales` fp32 [places, K / 128], contiguous in the places, are by place; `w` [E, R, K].
    `tiles` are those of `tiles_by_expert(.., WIDTH, ALIGNED)`.
    """
    assert w.scale is not None
    rows, columns = w.data.shape[1], codes.shape[1]
    shape = (tiles.places, rows // 2) if gate_up else (tiles.pairs, rows)
    out = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    sources = (codes, scales.T.reshape(-1), w.data.view(-1, 32), w.scale.view(-1))
    descriptors = [
        TensorDescriptor.from_tensor(source, *box) for source, box in zip(sources, boxes().values(), strict=True)
    ]
    items = tiles.most * (rows // 128)
    programs = min(items, torch.cuda.get_device_properties(codes.device).multi_processor_count)
    prompt_product[(programs,)](
        *descriptors,
        out,
        weights,
        tiles.order,
        tiles.records,
        tiles.most,
        items,
        scales.stride(1),
        rows,
        columns,
        limit,
        gate_up=gate_up,
        slots=SLOTS,
        registers=240,
        **OPTIONS,
    )
    return out
