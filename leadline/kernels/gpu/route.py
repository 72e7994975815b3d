"""route on a GPU: scores of all experts, then the choice, in two launches (see `leadline/kernels/route.py`).

The first launch multiplies: its programs split the experts, the rows and, while rows are few, the channels. The second
adds the parts of a row in one order, whatever the number of rows, and chooses by as many rounds of "largest" as there
are active experts. bf16 rows meet fp32 gates without loss: see `leadline/kernels/gpu/mix.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.chips import Chip, chip_of
from leadline.kernels.gpu.mix import _upper_half, product_type
from leadline.kernels.gpu.overlap import early_start

UNIT = 128
"""Channels whose products are summed by the tensor cores; everything above is added in fp32, in order."""
GROUP = 4
"""Units that are added first."""


@dataclass(frozen=True)
class Config:
    """Rows and groups of a program of the first launch, and the warps of both launches.

    Groups are 0 (a program adds one unit), 1, or all that there are: then sums run in the same order.
    """

    rows: int
    groups: int
    warps: int = 4
    choosing_warps: int = 4


def config(chip: Chip, rows: int, d: int) -> Config:
    """The cut for a number of rows: channels are split until all multiprocessors have work."""
    if rows <= 16:
        return Config(16, 0)
    if rows <= 1024:
        return Config(32, 1)
    return Config(64, triton.cdiv(d, UNIT * GROUP), choosing_warps=1)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, by_token: Tensor | None, ids: Tensor, active: int, scale: float
) -> tuple[Tensor, Tensor]:
    """As the definition; `weight` may be bf16. Token ids beyond the table count as its last one."""
    rows, experts = len(x), len(weight)
    chosen = torch.empty((rows, active), dtype=torch.int64, device=x.device)
    weights = torch.empty((rows, active), dtype=torch.float32, device=x.device)
    if rows == 0:
        return chosen, weights
    cut = config(chip_of(x.device), rows, x.shape[1])
    parts = _scores(x, weight, cut)
    overlap = early_start(x.device)
    _choose[(rows,)](
        parts,
        bias,
        by_token,
        ids,
        chosen,
        weights,
        rows,
        0 if by_token is None else len(by_token),
        scale,
        EXPERTS=experts,
        B_EXPERTS=triton.next_power_of_2(experts),
        ACTIVE=active,
        PARTS=len(parts),
        GROUP_PARTS=1 if cut.groups else GROUP,
        OVERLAP=bool(overlap),
        num_warps=cut.choosing_warps,
        **overlap,
    )
    return chosen, weights


def _scores(x: Tensor, weight: Tensor, cut: Config) -> Tensor:
    """The products of `x` [T, d] and `weight` [E, d]: parts [parts, T, E] in fp32, to be added."""
    rows, d = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    experts = len(weight)
    units = max(1, cut.groups * GROUP)
    parts = torch.empty((triton.cdiv(d, UNIT * units), rows, experts), dtype=torch.float32, device=x.device)
    block = min(64, max(16, triton.next_power_of_2(experts)))
    overlap = early_start(x.device)
    _multiply[(triton.cdiv(experts, block), len(parts), triton.cdiv(rows, cut.rows))](
        x,
        weight,
        parts,
        rows,
        x.stride(0),
        D=d,
        EXPERTS=experts,
        B_EXPERTS=block,
        B_ROWS=cut.rows,
        B_CHANNELS=UNIT // 2,
        GROUPS=max(1, cut.groups),
        UNITS=GROUP if cut.groups else 1,
        MULTIPLY=product_type(x),
        OVERLAP=bool(overlap),
        num_warps=cut.warps,
        **overlap,
    )
    return parts


@triton.jit
def _multiply(
    p_x,
    p_weight,
    p_parts,
    rows,
    s_row,
    D: tl.constexpr,
    EXPERTS: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNITS: tl.constexpr,
    MULTIPLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_expert, i_part, i_rows = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_expert = i_expert * B_EXPERTS + tl.arange(0, B_EXPERTS)
    o_row = (i_rows * B_ROWS + tl.arange(0, B_ROWS)).to(tl.int64)
    m_expert, m_row = o_expert < EXPERTS, o_row < rows
    m_weight, m_x = m_expert[:, None], m_row[:, None]
    p_weight += o_expert[:, None] * D
    p_x += o_row[:, None] * s_row
    o_left = tl.arange(0, B_CHANNELS)[None, :]
    o_right = B_CHANNELS + o_left
    if GROUPS * UNITS == 1:
        # the weights are fetched before the previous launch has finished
        first = i_part * 2 * B_CHANNELS
        left, right = first + o_left, first + o_right
        w_left = tl.load(p_weight + left, m_weight & (left < D), 0.0)
        w_right = tl.load(p_weight + right, m_weight & (right < D), 0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        scores = tl.zeros([B_EXPERTS, B_ROWS], tl.float32)
        scores = _add_product(scores, w_left, tl.load(p_x + left, m_x & (left < D), 0.0), MULTIPLY)
        scores = _add_product(scores, w_right, tl.load(p_x + right, m_x & (right < D), 0.0), MULTIPLY)
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        scores = tl.zeros([B_EXPERTS, B_ROWS], tl.float32)
        for i_group in range(GROUPS):
            group = tl.zeros([B_EXPERTS, B_ROWS], tl.float32)
            for i_unit in range(UNITS):
                first = ((i_part * GROUPS + i_group) * UNITS + i_unit) * 2 * B_CHANNELS
                left, right = first + o_left, first + o_right
                # two products, so that the compiler cannot let the tensor cores add to `group` themselves
                unit = tl.zeros([B_EXPERTS, B_ROWS], tl.float32)
                w_left = tl.load(p_weight + left, m_weight & (left < D), 0.0)
                unit = _add_product(unit, w_left, tl.load(p_x + left, m_x & (left < D), 0.0), MULTIPLY)
                w_right = tl.load(p_weight + right, m_weight & (right < D), 0.0)
                unit = _add_product(unit, w_right, tl.load(p_x + right, m_x & (right < D), 0.0), MULTIPLY)
                group += unit
            scores += group
    p_out = p_parts + (i_part * rows + o_row[None, :]) * EXPERTS + o_expert[:, None]
    tl.store(p_out, scores, m_expert[:, None] & m_row[None, :])


@triton.jit
def _add_product(total, weight, x, MULTIPLY: tl.constexpr):
    """`total` [E, T] plus `weight` [E, C] times `x` [T, C] transposed, exact but for the fp32 sum."""
    column = tl.trans(x).to(MULTIPLY)
    if weight.dtype == tl.float32 and x.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            top = _upper_half(weight)
            weight -= top.to(tl.float32)
            total = tl.dot(top.to(MULTIPLY), column, total, input_precision="ieee")
    else:
        total = tl.dot(weight.to(MULTIPLY), column, total, input_precision="ieee")
    return total


@triton.jit
def _choose(
    p_parts,
    p_bias,
    p_by_token,
    p_ids,
    p_chosen,
    p_weights,
    rows,
    tokens,
    scale,
    EXPERTS: tl.constexpr,
    B_EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_expert = tl.arange(0, B_EXPERTS)
    m_expert = o_expert < EXPERTS
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([B_EXPERTS], tl.float32)
    for i_group in tl.static_range((PARTS + GROUP_PARTS - 1) // GROUP_PARTS):
        group = tl.zeros([B_EXPERTS], tl.float32)
        for i in tl.static_range(GROUP_PARTS):
            i_part = i_group * GROUP_PARTS + i
            if i_part < PARTS:
                group += tl.load(p_parts + (i_part * rows + i_row) * EXPERTS + o_expert, m_expert, 0.0)
        total += group
    scores = tl.sqrt_rn(tl.maximum(total, 0.0) + _log1p(tl.exp(-tl.abs(total))))
    token = tl.load(p_ids + i_row)
    if p_by_token is None:
        key = _sortable(scores + tl.load(p_bias + o_expert, m_expert, 0.0), o_expert, B_EXPERTS)
        key = tl.where(m_expert, key, -(2**63))
    else:
        p_by_token += tl.minimum(tl.maximum(token, 0), tokens - 1) * ACTIVE
    chosen: tl.tuple = ()
    weights: tl.tuple = ()
    total_weight = 0.0
    for i in tl.static_range(ACTIVE):
        if p_by_token is None:
            best = (B_EXPERTS - 1) - (tl.max(key) & 0xFFFFFFFF)
            key = tl.where(o_expert == best, -(2**63), key)
        else:
            best = tl.load(p_by_token + i)
        weight = tl.sum(tl.where(o_expert == best, scores, 0.0))
        total_weight += weight
        chosen += (best,)
        weights += (weight,)
    for i in tl.static_range(ACTIVE):
        tl.store(p_chosen + i_row * ACTIVE + i, tl.where(token >= 0, chosen[i], -1))
        tl.store(p_weights + i_row * ACTIVE + i, tl.where(token >= 0, weights[i] / total_weight * scale, 0.0))


@triton.jit
def _sortable(x, o_expert, B_EXPERTS: tl.constexpr):
    """fp32 scores as int64 in the same order, a lower index before a higher one where they are equal."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (B_EXPERTS - 1 - o_expert).to(tl.int64)


@triton.jit
def _log1p(x):
    """log(1 + x) for 0 <= x <= 1 to fp32's precision, also for tiny x: 2 artanh(z) of z = x / (2 + x) <= 1/3."""
    z = x / (2 + x)
    square = z * z
    series = square / 15 + 1 / 13
    for term in tl.static_range(6):
        series = series * square + 1 / (11 - 2 * term)
    return 2 * z * series
