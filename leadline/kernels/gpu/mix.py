"""mix on a GPU: close a sublayer and open the next in two launches (see `leadline/kernels/mix.py`).

The first launch splits rows and channels over many programs. Each closes its channels of all streams, writes them,
and multiplies them with its columns of `fn`: a part of the mixing logits and of the sum of squares. The second adds
the parts and finishes: some programs make `post` and `comb`, one program a row collapses the streams and norms them.

Every part covers SLICE channels, and parts are added in one order, whatever the number of rows: a row's result does
not depend on the batch. bf16 streams meet fp32 `fn` on the tensor cores without loss: `fn` is the exact sum of three
bf16 numbers, their products with bf16 are exact, and sums are fp32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.chips import Chip, chip_of
from leadline.kernels.gpu.overlap import early_start
from leadline.kernels.mix import Mixing, Reading

SLICE = 64
"""Channels (of every stream) that go into one part."""
GROUP = 8
"""Parts of neighbouring slices are added first, in order; then the groups."""


@dataclass(frozen=True)
class Config:
    """How the launches are cut.

    A program of the first takes `rows` rows and `slices` slices (1 or GROUP), and multiplies with `fn` padded to
    `outputs` rows. A program of the second, with `reading_warps`, collapses one row or makes its `post` and `comb`.
    """

    rows: int
    slices: int
    warps: int
    outputs: int = 64
    reading_warps: int = 8


def config(chip: Chip, rows: int) -> Config:
    """The cut for a number of rows: small programs while rows are few, so that all multiprocessors have work.

    Where matrix instructions take the closed streams from shared memory (64 rows of `fn` at least), a program closes
    them once; elsewhere each of its warps does, so that only small tiles pay.
    """
    if chip.name not in ("sm90", "sm100"):
        return Config(16, 1 if rows <= 2048 else GROUP, 4, outputs=32)
    if rows <= 16:
        return Config(16, 1, 4)
    if rows <= 2048:
        return Config(32, 1, 4)
    return Config(32, GROUP, 4)


def product_type(streams: Tensor) -> tl.dtype:
    """What the tensor cores multiply: bf16 where the streams are bf16; Triton's interpreter has no product of bf16."""
    return tl.bfloat16 if streams.dtype == torch.bfloat16 and streams.is_cuda else tl.float32


def close_and_open(
    streams: Tensor,
    output: Tensor,
    reading: Reading,
    weights: Mixing,
    norm: Tensor,
    rounds: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Reading]:
    """`close_sublayer`, then `open_sublayer` of the result: two launches."""
    cut = config(chip_of(streams.device), len(streams))
    closed, parts = _first(streams, (output, reading), weights, cut)
    return closed, _second(closed, parts, weights, norm, rounds, hc_eps, norm_eps, cut)


def open_sublayer(
    streams: Tensor, weights: Mixing, norm: Tensor, rounds: int, hc_eps: float, norm_eps: float
) -> Reading:
    """As the definition; `streams` [T, n, d] may be an expanded view. Two launches."""
    cut = config(chip_of(streams.device), len(streams))
    _, parts = _first(streams, None, weights, cut)
    return _second(streams, parts, weights, norm, rounds, hc_eps, norm_eps, cut)


def close_sublayer(streams: Tensor, output: Tensor, reading: Reading) -> Tensor:
    """As the definition. One launch."""
    cut = config(chip_of(streams.device), len(streams))
    return _first(streams, (output, reading), None, cut)[0]


def final_collapse(streams: Tensor, weights: Mixing, norm: Tensor, hc_eps: float, norm_eps: float) -> Tensor:
    """As the definition: [T, n, d] -> [T, d]. Two launches."""
    cut = config(chip_of(streams.device), len(streams))
    _, parts = _first(streams, None, weights, cut)
    return _second(streams, parts, weights, norm, 0, hc_eps, norm_eps, cut).x


def _first(
    streams: Tensor, closing: tuple[Tensor, Reading] | None, weights: Mixing | None, cut: Config
) -> tuple[Tensor, Tensor]:
    """Close where there is something to close, project where there are weights: (streams, parts [parts, T, width])."""
    rows, n, d = streams.shape
    assert streams.stride(2) == 1 or d == 1
    outputs = 0 if weights is None else len(weights.fn)
    slices = triton.cdiv(d, SLICE)
    programs = triton.cdiv(slices, cut.slices)
    width = triton.next_power_of_2(outputs + 1)
    parts = torch.empty((programs if weights else 0, rows, width), dtype=torch.float32, device=streams.device)
    closed = streams if closing is None else torch.empty((rows, n, d), dtype=streams.dtype, device=streams.device)
    if rows == 0:
        return closed, parts
    output, reading = closing if closing is not None else (streams, Reading(streams, parts, parts))
    assert closing is None or (output.is_contiguous() and reading.post.is_contiguous() and reading.comb.is_contiguous())
    overlap = early_start(streams.device)
    _close_and_project[(programs, triton.cdiv(rows, cut.rows))](
        streams,
        output,
        reading.post,
        reading.comb,
        parts if weights is None else weights.fn,
        closed,
        parts,
        rows,
        streams.stride(0),
        streams.stride(1),
        N=n,
        D=d,
        OUTPUTS=outputs,
        WIDTH=width,
        CLOSE=closing is not None,
        B_OUT=cut.outputs,
        B_ROWS=cut.rows,
        B_CHANNELS=SLICE,
        SLICES=cut.slices,
        MULTIPLY=product_type(streams),
        OVERLAP=bool(overlap),
        num_warps=cut.warps,
        num_stages=1,
        **overlap,
    )
    return closed, parts


def _second(
    streams: Tensor,
    parts: Tensor,
    weights: Mixing,
    norm: Tensor,
    rounds: int,
    hc_eps: float,
    norm_eps: float,
    cut: Config,
) -> Reading:
    """Add the parts and read the streams; without `rounds` there is no `post` and no `comb` (both empty)."""
    rows, n, d = streams.shape
    x = torch.empty((rows, d), dtype=streams.dtype, device=streams.device)
    kept = rows if rounds else 0
    post = torch.empty((kept, n), dtype=torch.float32, device=streams.device)
    comb = torch.empty((kept, n, n), dtype=torch.float32, device=streams.device)
    if rows == 0:
        return Reading(x, post, comb)
    per_group = triton.cdiv(GROUP, cut.slices)
    overlap = early_start(streams.device)
    _mix_and_read[(2 * rows if rounds else rows,)](
        streams,
        parts,
        weights.base,
        weights.scale,
        norm,
        x,
        post,
        comb,
        rows,
        streams.stride(0),
        streams.stride(1),
        hc_eps,
        norm_eps,
        N=n,
        D=d,
        OUTPUTS=len(weights.fn),
        WIDTH=parts.shape[2],
        PARTS=len(parts),
        PER_GROUP=per_group,
        GROUPS=triton.next_power_of_2(triton.cdiv(len(parts), per_group)),
        ROUNDS=rounds,
        B_D=triton.next_power_of_2(d),
        OVERLAP=bool(overlap),
        num_warps=cut.reading_warps,
        **overlap,
    )
    return Reading(x, post, comb)


@triton.jit
def _close_and_project(
    p_streams,
    p_output,
    p_post,
    p_comb,
    p_fn,
    p_closed,
    p_parts,
    rows,
    s_row,
    s_stream,
    N: tl.constexpr,
    D: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CLOSE: tl.constexpr,
    B_OUT: tl.constexpr,
    B_ROWS: tl.constexpr,
    B_CHANNELS: tl.constexpr,
    SLICES: tl.constexpr,
    MULTIPLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i_part, i_rows = tl.program_id(0), tl.program_id(1)
    o_row = (i_rows * B_ROWS + tl.arange(0, B_ROWS)).to(tl.int64)
    m_row = o_row < rows
    logits = tl.zeros([B_OUT, B_ROWS], tl.float32)
    squares = tl.zeros([B_ROWS], tl.float32)
    first = i_part * SLICES
    # the weights are fetched before the previous launch has finished
    b_fn = _columns_of_fn(p_fn, first, N, D, OUTPUTS, B_OUT, B_CHANNELS)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    factors = _closing_factors(p_post, p_comb, o_row, m_row, N, CLOSE)
    for i_slice in range(first, first + SLICES):
        o_channel = i_slice * B_CHANNELS + tl.arange(0, B_CHANNELS)
        m_x = m_row[:, None] & (o_channel < D)[None, :]
        streams: tl.tuple = ()
        for j in tl.static_range(N):
            o_x = o_row[:, None] * s_row + j * s_stream + o_channel[None, :]
            streams += (tl.load(p_streams + o_x, m_x, 0.0),)
        if CLOSE:
            o_y = o_row[:, None] * D + o_channel[None, :]
            y = tl.load(p_output + o_y, m_x, 0.0).to(tl.float32)
            streams = _closed(streams, y, factors, N, p_closed.dtype.element_ty)
            for k in tl.static_range(N):
                tl.store(p_closed + o_row[:, None] * (N * D) + k * D + o_channel[None, :], streams[k], m_x)
        if OUTPUTS > 0:
            logits += _products(b_fn, streams, N, MULTIPLY)
            squares += _sum_of_squares(streams, N)
            if SLICES > 1:
                b_fn = _columns_of_fn(p_fn, i_slice + 1, N, D, OUTPUTS, B_OUT, B_CHANNELS)
    if OUTPUTS > 0:
        o_out = tl.arange(0, B_OUT)
        o_part = (i_part * rows + o_row) * WIDTH
        tl.store(p_parts + o_part[None, :] + o_out[:, None], logits, (o_out < OUTPUTS)[:, None] & m_row[None, :])
        tl.store(p_parts + o_part + OUTPUTS, squares, m_row)


@triton.jit
def _columns_of_fn(
    p_fn, i_slice, N: tl.constexpr, D: tl.constexpr, OUTPUTS: tl.constexpr, B_OUT: tl.constexpr, B: tl.constexpr
):
    """One slice of `fn` [OUTPUTS, N D]: for every stream fp32 [B_OUT, B]."""
    o_out = tl.arange(0, B_OUT)
    o_channel = i_slice * B + tl.arange(0, B)
    mask = (o_out < OUTPUTS)[:, None] & (o_channel < D)[None, :]
    columns: tl.tuple = ()
    for j in tl.static_range(N):
        columns += (tl.load(p_fn + o_out[:, None] * (N * D) + j * D + o_channel[None, :], mask, 0.0),)
    return columns


@triton.jit
def _closing_factors(p_post, p_comb, o_row, m_row, N: tl.constexpr, CLOSE: tl.constexpr):
    """For every destination its `post` [B] and its `comb` [B] from every source, one after another."""
    factors: tl.tuple = ()
    if CLOSE:
        for k in tl.static_range(N):
            factors += (tl.load(p_post + o_row * N + k, m_row, 0.0),)
            for j in tl.static_range(N):
                factors += (tl.load(p_comb + (o_row * N + j) * N + k, m_row, 0.0),)
    return factors


@triton.jit
def _closed(streams, y, factors, N: tl.constexpr, dtype: tl.constexpr):
    """The streams after a sublayer that put out `y` [B_ROWS, B_CHANNELS]."""
    closed: tl.tuple = ()
    for k in tl.static_range(N):
        mixed = factors[k * (N + 1)][:, None] * y
        for j in tl.static_range(N):
            # fused as written: left to the compiler, the choice depends on the cut
            factor = tl.broadcast_to(factors[k * (N + 1) + 1 + j][:, None], y.shape)
            mixed = tl.fma(factor, streams[j].to(tl.float32), mixed)
        closed += (mixed.to(dtype),)
    return closed


@triton.jit
def _products(b_fn, streams, N: tl.constexpr, MULTIPLY: tl.constexpr):
    """`fn` times the streams: [B_OUT, B_ROWS] in fp32."""
    logits = tl.zeros([b_fn[0].shape[0], streams[0].shape[0]], tl.float32)
    for j in tl.static_range(N):
        x = tl.trans(streams[j]).to(MULTIPLY)
        if streams[j].dtype == tl.float32:
            logits = tl.dot(b_fn[j], x, logits, input_precision="ieee")
        else:
            rest = b_fn[j]
            for _ in tl.static_range(3):
                top = _upper_half(rest)
                rest -= top.to(tl.float32)
                logits = tl.dot(top.to(MULTIPLY), x, logits, input_precision="ieee")
    return logits


@triton.jit
def _upper_half(x):
    """The bf16 number that the upper 16 bits of an fp32 number are: not beyond `x`, and `x` less it is exact."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _sum_of_squares(streams, N: tl.constexpr):
    squares = tl.zeros([streams[0].shape[0], streams[0].shape[1]], tl.float32)
    for j in tl.static_range(N):
        x = streams[j].to(tl.float32)
        squares = tl.fma(x, x, squares)
    return tl.sum(squares, 1)


@triton.jit
def _mix_and_read(
    p_streams,
    p_parts,
    p_base,
    p_scale,
    p_norm,
    p_x,
    p_post,
    p_comb,
    rows,
    s_row,
    s_stream,
    hc_eps,
    norm_eps,
    N: tl.constexpr,
    D: tl.constexpr,
    OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    B_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    SIZES: tl.constexpr = (N, D, OUTPUTS, WIDTH, PARTS, PER_GROUP, GROUPS)
    PER_ROW: tl.constexpr = 2 if ROUNDS > 0 else 1
    i_program = tl.program_id(0)
    # the last rows first: the launch before wrote them last, so they are still in the cache
    i_row = (rows - 1 - i_program // PER_ROW).to(tl.int64)
    parts = (p_parts, rows * WIDTH)
    if i_program % PER_ROW == 1:
        # programs that calculate run beside programs that wait for memory
        _mix(parts, p_base, p_scale, p_post, p_comb, i_row, hc_eps, norm_eps, ROUNDS, OVERLAP, SIZES)
    else:
        p_stream = p_streams + i_row * s_row
        _read(parts, p_stream, s_stream, p_base, p_scale, p_norm, p_x, i_row, hc_eps, norm_eps, B_D, OVERLAP, SIZES)


@triton.jit
def _total(parts, o_value, m_value, SIZES: tl.constexpr):
    """The sum of all parts at `o_value` [M], an offset into one part: groups of parts in order, then the groups."""
    p_parts, s_part = parts
    PARTS: tl.constexpr = SIZES[4]
    PER_GROUP: tl.constexpr = SIZES[5]
    GROUPS: tl.constexpr = SIZES[6]
    i_group = tl.arange(0, GROUPS)
    total = tl.zeros([GROUPS, o_value.shape[0]], tl.float32)
    for i in tl.static_range(PER_GROUP):
        i_part = i_group * PER_GROUP + i
        o_part = i_part.to(tl.int64)[:, None] * s_part + o_value[None, :]
        total += tl.load(p_parts + o_part, (i_part < PARTS)[:, None] & m_value[None, :], 0.0)
    return tl.sum(total, 0)


@triton.jit
def _mix(
    parts,
    p_base,
    p_scale,
    p_post,
    p_comb,
    i_row,
    hc_eps,
    norm_eps,
    ROUNDS: tl.constexpr,
    OVERLAP: tl.constexpr,
    SIZES: tl.constexpr,
):
    """`post` and `comb` of one row. `comb` [source, destination] is padded with zeros to a power of two."""
    N: tl.constexpr = SIZES[0]
    D: tl.constexpr = SIZES[1]
    OUTPUTS: tl.constexpr = SIZES[2]
    SIDE: tl.constexpr = triton.next_power_of_2(N)
    o_side, o_flat = tl.arange(0, SIDE), tl.arange(0, SIDE * SIDE)
    o_pair, m_pair = o_flat // SIDE * N + o_flat % SIDE, (o_flat // SIDE < N) & (o_flat % SIDE < N)
    post_base = tl.load(p_base + N + o_side, o_side < N, 0.0)
    base = tl.load(p_base + 2 * N + o_pair, m_pair, 0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    o_row = i_row * SIZES[3]
    squares = tl.sum(_total(parts, o_row + OUTPUTS + tl.arange(0, 1), tl.arange(0, 1) == 0, SIZES))
    scale = tl.rsqrt(squares / (N * D) + norm_eps)
    post = _total(parts, o_row + N + o_side, o_side < N, SIZES) * scale * tl.load(p_scale + 1) + post_base
    tl.store(p_post + i_row * N + o_side, 2 / (1 + tl.exp(-post)), o_side < N)

    logits = _total(parts, o_row + 2 * N + o_pair, m_pair, SIZES) * scale * tl.load(p_scale + 2) + base
    square = tl.reshape(m_pair, [SIDE, SIDE])
    logits = tl.where(square, tl.reshape(logits, [SIDE, SIDE]), -1e30)
    comb = tl.where(square, tl.exp(logits - tl.max(logits, 1, keep_dims=True)), 0.0)
    comb = tl.where(square, comb / tl.sum(comb, 1, keep_dims=True) + hc_eps, 0.0)
    comb = comb / (tl.sum(comb, 0, keep_dims=True) + hc_eps)
    for _ in range(ROUNDS - 1):
        comb = comb / (tl.sum(comb, 1, keep_dims=True) + hc_eps)
        comb = comb / (tl.sum(comb, 0, keep_dims=True) + hc_eps)
    tl.store(p_comb + i_row * (N * N) + o_pair, tl.reshape(comb, [SIDE * SIDE]), m_pair)


@triton.jit
def _read(
    parts,
    p_stream,
    s_stream,
    p_base,
    p_scale,
    p_norm,
    p_x,
    i_row,
    hc_eps,
    norm_eps,
    B_D: tl.constexpr,
    OVERLAP: tl.constexpr,
    SIZES: tl.constexpr,
):
    """Collapse the streams of one row, and norm."""
    N: tl.constexpr = SIZES[0]
    D: tl.constexpr = SIZES[1]
    OUTPUTS: tl.constexpr = SIZES[2]
    WIDTH: tl.constexpr = SIZES[3]
    o_channel = tl.arange(0, B_D)
    m_channel = o_channel < D
    norm = tl.load(p_norm + o_channel, m_channel, 0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    streams: tl.tuple = ()
    for j in tl.static_range(N):
        streams += (tl.load(p_stream + j * s_stream + o_channel, m_channel, 0.0),)
    o_out = tl.arange(0, WIDTH)
    totals = _total(parts, i_row * WIDTH + o_out, o_out <= OUTPUTS, SIZES)
    squares = tl.sum(tl.where(o_out == OUTPUTS, totals, 0.0))
    base = tl.load(p_base + o_out, o_out < OUTPUTS, 0.0)
    logits = totals * tl.rsqrt(squares / (N * D) + norm_eps) * tl.load(p_scale) + base
    pre = 1 / (1 + tl.exp(-logits)) + hc_eps
    collapsed = tl.zeros([B_D], tl.float32)
    for j in tl.static_range(N):
        weight = tl.sum(tl.where(o_out == j, pre, 0.0))
        collapsed = tl.fma(tl.broadcast_to(weight, [B_D]), streams[j].to(tl.float32), collapsed)
    x = collapsed.to(p_x.dtype.element_ty).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x) / D + norm_eps) * norm
    tl.store(p_x + i_row * D + o_channel, x.to(p_x.dtype.element_ty), m_channel)
