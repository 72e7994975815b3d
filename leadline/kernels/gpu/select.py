"""select on a GPU: scores of index keys on the matrix units, then an exact top-k without a sort.

Three launches for a tile of queries. The first writes every score, and the largest score of each group of eight
neighbours. The second sifts long rows: groups are joined until there are few, and since k of them have maxima of at
least some number, so have k scores; the k largest are among the scores that reach it. These are not many more than k,
and the third launch finds the k-th largest of them by bisection, one program for each query.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.bits import e2m1_to_float, e8m0_to_float
from leadline.kernels.gpu.chips import Chip, chip_of, processors
from leadline.kernels.packed import IndexPool, IndexRows

FEW_QUERIES, MOST_QUERIES = 128, 1024
"""Queries of a decode step, and in one tile of scores: each program of the first launch looks at all their lengths."""
SCRATCH = 1 << 25
"""Scores in one tile at most (128 MB)."""
GROUP = 8
SIFTED = 4096
"""Scores that a program sifts at a time."""
LEAST = tl.constexpr(-(2**31))
"""The order of what is no score: below that of every number."""


@dataclass(frozen=True)
class ScoreConfig:
    """How scores are made: `queries` share the keys that a program reads, `keys` at a time."""

    queries: int
    keys: int
    warps: int
    stages: int
    programs: int  # on each multiprocessor


def score_config(chip: Chip, dtype: torch.dtype, queries: int) -> ScoreConfig:
    """The configuration for a tile of `queries` queries of `dtype` on `chip`."""
    if dtype != torch.bfloat16:
        return ScoreConfig(1, 32, 4, 1, 2)
    if queries <= FEW_QUERIES:  # mostly queries of different requests, which share no keys
        return ScoreConfig(1, 128, 4, 5, 2)
    if chip.name in ("sm90", "sm100"):
        return ScoreConfig(4, 64, 4, 5, 2)
    return ScoreConfig(2, 64, 4, 2, 2)


def held_at_once(topk: int) -> int:
    """Scores that the second and third launch hold in registers; shorter rows are not sifted."""
    return max(1024, triton.next_power_of_2(4 * topk))


def select(
    q: Tensor, head_weights: Tensor, pool: IndexPool, page_rows: Tensor, visible: Tensor, longest: int, topk: int
) -> Tensor:
    """See `leadline.kernels.select.select`; no value on the device is waited for."""
    chosen = torch.empty(len(q), topk, dtype=torch.int64, device=q.device)
    q, head_weights = q.contiguous(), head_weights.contiguous()
    width = triton.cdiv(longest, 128) * 128
    group = GROUP if longest > held_at_once(topk) else 1
    tile = min(MOST_QUERIES, len(q), _power_below(SCRATCH // max(width, 1)))
    shape = (tile, width if longest > topk else 0)
    scores = torch.empty(shape, dtype=torch.float32, device=q.device)
    maxima = torch.empty((tile, shape[1] // group), dtype=torch.float32, device=q.device)
    for i in range(0, len(q), max(1, tile)):
        part = slice(i, i + tile)
        if longest > topk:
            _score(q[part], head_weights[part], pool, page_rows[part], visible[part], topk, scores, maxima)
        _choose(scores, maxima, visible[part], chosen[part], topk)
    return chosen


def _power_below(number: int) -> int:
    """The largest power of two up to `number`, at least 1: few sizes of tiles, so few kernels to compile."""
    return 1 << max(0, number.bit_length() - 1)


def entry_rows(page_rows: Tensor, ids: Tensor, per_page: int) -> Tensor:
    """See `leadline.kernels.select.entry_rows`."""
    ids = ids.contiguous()
    rows = torch.empty_like(ids)
    block = min(1024, triton.next_power_of_2(max(1, ids.shape[1])))
    grid = (ids.shape[0], triton.cdiv(ids.shape[1], block))
    if ids.numel():
        _entry_rows_kernel[grid](ids, page_rows, rows, ids.shape[1], page_rows.stride(0), per_page, block, num_warps=4)
    return rows


def _score(
    q: Tensor,
    head_weights: Tensor,
    pool: IndexPool,
    page_rows: Tensor,
    visible: Tensor,
    topk: int,
    scores: Tensor,
    maxima: Tensor,
) -> None:
    """Fill `scores` and `maxima` for the queries that see more than `topk` entries, as far as they see."""
    count, heads, channels = q.shape
    chip = chip_of(q.device)
    config = score_config(chip, q.dtype, count)
    packed = isinstance(pool, IndexRows)
    assert page_rows.stride(1) == 1 and scores.shape[1] % config.keys == 0
    _score_kernel[(config.programs * processors(q.device),)](
        q,
        head_weights,
        pool.blocks if isinstance(pool, IndexRows) else pool,
        page_rows,
        visible,
        scores,
        maxima,
        count,
        topk,
        pool.blocks.stride(0) if isinstance(pool, IndexRows) else pool.stride(0),
        page_rows.stride(0),
        scores.stride(0),
        (heads * channels) ** -0.5,
        **score_constants(config, count, heads, channels, packed, scores.shape[1] // maxima.shape[1]),
        operand=_operand(q),
        quick=packed and q.is_cuda and chip.backend == "cuda" and q.dtype == torch.bfloat16,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _operand(q: Tensor) -> tl.dtype:
    """What the matrix units multiply; Triton's interpreter has no product of bf16."""
    return tl.bfloat16 if q.is_cuda and q.dtype == torch.bfloat16 else tl.float32


def score_constants(
    config: ScoreConfig, count: int, heads: int, channels: int, packed: bool, group: int
) -> dict[str, int | bool]:
    """The constants of `_score_kernel` besides `operand` and `quick`."""
    return {
        "queries": config.queries,
        "keys": config.keys,
        "blocks": (FEW_QUERIES if count <= FEW_QUERIES else MOST_QUERIES) // config.queries,
        "heads": heads,
        "heads_padded": triton.next_power_of_2(max(16, heads)),
        "channels": channels,
        "packed": packed,
        "group": group,
    }


def _choose(scores: Tensor, maxima: Tensor, visible: Tensor, chosen: Tensor, topk: int) -> None:
    """Write the entry ids of each query of a tile to `chosen`, with the constants of a tile that is full."""
    queries, width = len(chosen), scores.shape[1]
    constants = choose_constants(width, topk, len(scores), processors(scores.device))
    sections, held = constants["sections"], constants["held"]
    found = torch.empty(queries, width if sections else 0, dtype=torch.int32, device=scores.device)
    counts = torch.empty(queries, sections, dtype=torch.int32, device=scores.device)
    if sections:
        _sift_kernel[(sections, queries)](
            scores, maxima, visible, found, counts, topk, width, **sift_constants(width, held, sections), num_warps=8
        )
    _choose_kernel[(queries,)](
        scores, visible, found, counts, chosen, topk, width, **constants, num_warps=chooser_warps(held)
    )


def choose_constants(width: int, topk: int, queries: int, processors: int) -> dict[str, int]:
    """The constants of `_choose_kernel` for rows of `width` scores. `sections`: programs that sift a row, or none."""
    held = held_at_once(topk)
    sections = 0
    if width > held:
        most = triton.next_power_of_2(triton.cdiv(width, SIFTED))
        sections = min(most, triton.next_power_of_2(triton.cdiv(2 * processors, queries)))
    return {"held": held, "k_padded": triton.next_power_of_2(topk), "sections": sections, "block": SIFTED}


def sift_constants(width: int, held: int, sections: int) -> dict[str, int]:
    """The constants of `_sift_kernel`."""
    joined = triton.next_power_of_2(triton.cdiv(width, GROUP * held))
    return {"held": held, "group": GROUP, "joined": joined, "sections": sections, "block": SIFTED}


def chooser_warps(held: int) -> int:
    """Warps that choose among `held` scores: 8 of them for a thread."""
    return max(4, min(16, held // 256))


@triton.jit
def _quick_keys(packed, factor):
    """e2m1 bytes -> bf16 (low halves, high halves) times `factor` * 2^-126.

    Which four elements share a register is up to the layout, so none may depend on another or change its place.
    The three bits of a magnitude at bf16's lowest exponent bits and highest mantissa bit are the number * 2^-126. One
    product moves them and the sign to their places: it runs beside the integer unit, which is what limits this kernel.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, t, z;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        and.b32 t, a, 0x000F000F;
        mul.lo.u32 t, t, 0x1040;
        and.b32 t, t, 0x81C081C0;
        fma.rn.bf16x2 $0, t, $5, z;
        and.b32 t, b, 0x000F000F;
        mul.lo.u32 t, t, 0x1040;
        and.b32 t, t, 0x81C081C0;
        fma.rn.bf16x2 $1, t, $6, z;
        and.b32 t, a, 0x00F000F0;
        mul.lo.u32 t, t, 0x0104;
        and.b32 t, t, 0x81C081C0;
        fma.rn.bf16x2 $2, t, $5, z;
        and.b32 t, b, 0x00F000F0;
        mul.lo.u32 t, t, 0x0104;
        and.b32 t, t, 0x81C081C0;
        fma.rn.bf16x2 $3, t, $6, z;
        }
        """,
        "=r,=r,=r,=r,r,r,r",
        [packed, factor],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _quick_relu(x):
    """max(x, 0) for x below 1, as saturation: on the units for fp32, which have time to spare."""
    return tl.inline_asm_elementwise(
        "add.sat.f32 $0, $1, 0f00000000;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _spread(x, n: tl.constexpr, channels: tl.constexpr):
    """[n, channels / 32, 16, 2] -> [n, channels] in the order of channels in which products are summed.

    The order is such that the 16 bytes of 32 channels, as they lie in a packed pool, end in one thread.
    """
    x = tl.permute(tl.reshape(x, (n, channels // 32, 8, 2, 2)), (0, 4, 2, 1, 3))
    return tl.reshape(x, (n, channels))


@triton.jit
def _packed_keys(p_pool, page, place, stride, channels: tl.constexpr, quick: tl.constexpr, operand: tl.constexpr):
    """The index keys at `place` [n] of `page` [n]: [n, channels] of type `operand`, channels in the order of `_spread`.

    `quick`: times 2^-64, so that the factor that undoes 2^-126 fits into a bf16. Exact for scales from 2^-61 to 2^65.
    """
    n: tl.constexpr = page.shape[0]
    p_block = p_pool + (page // 2).to(tl.int64) * stride
    place += (page % 2) * 32
    o_scale = 32 * channels + place * (channels // 32)
    b_scale = tl.load(p_block[:, None] + (o_scale[:, None] + tl.arange(0, channels // 32)[None, :]))[:, :, None]
    o_code = place * (channels // 2)
    b_code = tl.load(p_block[:, None] + (o_code[:, None] + tl.arange(0, channels // 2)[None, :]))
    b_code = tl.reshape(b_code, (n, channels // 32, 16))
    if quick:
        factor = ((b_scale.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)
        even, odd = _quick_keys(b_code, tl.broadcast_to(factor, (n, channels // 32, 16)))
    else:
        factor = e8m0_to_float(b_scale)
        even = (e2m1_to_float(b_code & 15) * factor).to(operand)
        odd = (e2m1_to_float(b_code >> 4) * factor).to(operand)
    return _spread(tl.join(even, odd), n, channels)


@triton.jit
def _score_tiles(
    p_q,
    p_weight,
    p_pool,
    p_page,
    p_visible,
    p_score,
    p_largest,
    count,
    pool_stride,
    width,
    constant,
    first,
    begin,
    end,
    queries: tl.constexpr,
    keys: tl.constexpr,
    heads: tl.constexpr,
    heads_padded: tl.constexpr,
    channels: tl.constexpr,
    packed: tl.constexpr,
    group: tl.constexpr,
    operand: tl.constexpr,
    quick: tl.constexpr,
):
    """Tiles `begin` to `end` of the scores of `queries` queries from `first` on, all with the pages at `p_page`."""
    o_query = first + tl.arange(0, queries)
    m_query = o_query < count
    b_visible = tl.load(p_visible + o_query, m_query, other=0).to(tl.int32)
    last = tl.max(b_visible)
    o_row = tl.arange(0, queries * heads_padded)
    m_row = (first + o_row // heads_padded < count) & (o_row % heads_padded < heads)
    o_row = ((first + o_row // heads_padded) * heads + o_row % heads_padded).to(tl.int64)
    b_weight = tl.load(p_weight + o_row, m_row, other=0.0).to(tl.float32) * constant
    b_q = tl.load(p_q + o_row[:, None] * channels + tl.arange(0, channels)[None, :], m_row[:, None], other=0.0)
    if quick:
        # 2^64, which keys lack, less 2^40, so that products stay below 1
        b_q = b_q.to(tl.float32) * 16777216.0
        b_weight *= 1099511627776.0
    b_q = b_q.to(operand)
    if packed:
        b_q = tl.reshape(b_q, (queries * heads_padded, channels // 32, 16, 2))
        b_q = _spread(b_q, queries * heads_padded, channels)
    b_q = tl.trans(b_q)
    for i_tile in range(begin, end):
        o_key = i_tile * keys + tl.arange(0, keys)
        m_key = o_key < last
        page = tl.load(p_page + o_key // 32, m_key, other=0).to(tl.int32)  # page 0 where there is nothing to see
        if packed:
            b_key = _packed_keys(p_pool, page, o_key % 32, pool_stride, channels, quick, operand)
        else:
            o_pool = (page.to(tl.int64) * 32 + o_key % 32) * pool_stride
            b_key = tl.load(p_pool + o_pool[:, None] + tl.arange(0, channels)[None, :]).to(operand)
        dots = tl.dot(b_key, b_q, input_precision="ieee")
        # with several queries the units for fp32 have more to do than those for integers
        weighted = (_quick_relu(dots) if quick and queries == 1 else tl.maximum(dots, 0.0)) * b_weight[None, :]
        score = tl.sum(tl.reshape(weighted, (keys, queries, heads_padded)), 2)
        m_score = o_key[:, None] < b_visible[None, :]
        tl.store(p_score + o_query[None, :].to(tl.int64) * width + o_key[:, None], score, m_score)
        if group > 1:
            score = tl.where(m_score, score, float("-inf"))
            largest = tl.max(tl.reshape(score, (keys // group, group, queries)), 1)
            o_group = i_tile * (keys // group) + tl.arange(0, keys // group)
            o_largest = o_query[None, :].to(tl.int64) * (width // group) + o_group[:, None]
            tl.store(p_largest + o_largest, largest, m_query[None, :])


@triton.jit(do_not_specialize=["count", "topk"])
def _score_kernel(
    p_q,
    p_weight,
    p_pool,
    p_page,
    p_visible,
    p_score,
    p_largest,
    count,
    topk,
    pool_stride,
    page_stride,
    width,
    constant,
    queries: tl.constexpr,
    keys: tl.constexpr,
    blocks: tl.constexpr,
    heads: tl.constexpr,
    heads_padded: tl.constexpr,
    channels: tl.constexpr,
    packed: tl.constexpr,
    group: tl.constexpr,
    operand: tl.constexpr,
    quick: tl.constexpr,
):
    """Scores of `count` queries. Tiles are (block of `queries` queries, `keys` keys), counted block by block.

    Every program makes the same number of tiles, whatever the lengths: it finds its first one by a prefix sum.
    """
    o_query = tl.arange(0, blocks)[:, None] * queries + tl.arange(0, queries)[None, :]
    b_visible = tl.load(p_visible + o_query, o_query < count, other=0).to(tl.int32)
    b_tiles = tl.cdiv(tl.max(tl.where(b_visible > topk, b_visible, 0), 1), keys)
    ends = tl.cumsum(b_tiles)
    total = tl.sum(b_tiles)
    share = tl.cdiv(total, tl.num_programs(0))
    done = tl.program_id(0) * share
    stop = tl.minimum(done + share, total)
    block = tl.sum((ends <= done).to(tl.int32))
    tile = done - tl.sum(tl.where(ends <= done, b_tiles, 0))
    while done < stop:
        first = block * queries
        o_own = first + tl.arange(0, queries)
        seen = tl.load(p_visible + o_own, o_own < count, other=0).to(tl.int32)
        tiles = tl.cdiv(tl.max(tl.where(seen > topk, seen, 0)), keys)
        end = tl.minimum(tiles, tile + stop - done)
        p_pages = p_page + first.to(tl.int64) * page_stride
        if queries == 1:
            _score_tiles(
                p_q, p_weight, p_pool, p_pages, p_visible, p_score, p_largest, count, pool_stride, width, constant,
                first, tile, end, 1, keys, heads, heads_padded, channels, packed, group, operand, quick
            )  # fmt: skip
        elif _same_pages(p_pages, page_stride, tile * keys // 32, tl.cdiv(end * keys, 32), seen, queries):
            _score_tiles(
                p_q, p_weight, p_pool, p_pages, p_visible, p_score, p_largest, count, pool_stride, width, constant,
                first, tile, end, queries, keys, heads, heads_padded, channels, packed, group, operand, quick
            )  # fmt: skip
        else:
            for i in range(tl.minimum(queries, count - first)):
                _score_tiles(
                    p_q, p_weight, p_pool, p_pages + i * page_stride, p_visible, p_score, p_largest, count,
                    pool_stride, width, constant, first + i, tile, end, 1, keys, heads, heads_padded, channels,
                    packed, group, operand, quick
                )  # fmt: skip
        done += tl.maximum(end - tile, 0)
        block += 1
        tile = 0


@triton.jit
def _same_pages(p_page, page_stride, begin, end, seen, queries: tl.constexpr):
    """Whether `queries` queries that see `seen` entries have the same pages `begin` to `end`, as far as they see."""
    differ = 0
    for column in range(begin, end, 64):
        o_page = column + tl.arange(0, 64)
        m_first = (o_page < end) & (o_page < tl.cdiv(tl.max(seen), 32))
        m_page = m_first[None, :] & (o_page[None, :] < tl.cdiv(seen, 32)[:, None])
        b_first = tl.load(p_page + o_page, m_first, other=0)
        b_page = tl.load(p_page + tl.arange(0, queries)[:, None] * page_stride + o_page[None, :], m_page, other=0)
        differ += tl.sum(tl.sum((m_page & (b_page != b_first[None, :])).to(tl.int32), 1))
    return differ == 0


@triton.jit
def _order(x):
    """fp32 -> int32 in the same order; -0.0 counts as 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["topk"])
def _sift_kernel(
    p_score,
    p_largest,
    p_visible,
    p_found,
    p_count,
    topk,
    width,
    held: tl.constexpr,
    group: tl.constexpr,
    joined: tl.constexpr,
    sections: tl.constexpr,
    block: tl.constexpr,
):
    """One section of a row: the ids of the scores that may be among the k largest, in order, and their number.

    Every `held`-th group is joined, up to `joined` groups, so that each of `held` threads' values is one maximum.
    """
    section, query = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seen = tl.load(p_visible + query).to(tl.int32)
    span = tl.cdiv(width, sections * block) * block
    first, last = section * span, tl.minimum((section + 1) * span, seen)
    found = 0
    if (seen > topk) & (first < last):
        o_group = tl.arange(0, held)
        groups = tl.cdiv(seen, group)
        p_largest += query * (width // group)
        largest = tl.load(p_largest + o_group, o_group < groups, other=float("-inf"))
        for i in tl.static_range(1, joined):
            m_group = o_group + i * held < groups
            largest = tl.maximum(largest, tl.load(p_largest + o_group + i * held, m_group, other=float("-inf")))
        order = tl.where(o_group < groups, _order(largest), LEAST)
        least = LEAST
        if groups > topk:
            least = _reached(order, tl.max(order), topk, topk + topk // 4)
        for start in range(first, last, block):
            o_score = start + tl.arange(0, block)
            score = _order(tl.load(p_score + query * width + o_score, o_score < last, other=0.0))
            taken = (o_score < last) & (score >= least)
            running = tl.cumsum(taken.to(tl.int32))
            tl.store(p_found + query * width + first + found + running - 1, o_score, taken)
            found += tl.sum(taken.to(tl.int32))
    tl.store(p_count + query * sections + section, found)


@triton.jit
def _reached(x, largest, k, most):
    """A number that at least `k` of int32 `x` reach, and at most `most` unless they are equal; LEAST does not count.

    Bisection: `low` is reached by at least k, `high` by fewer.
    """
    low = tl.min(tl.where(x == LEAST, 0x7FFFFFFF, x)).to(tl.int64)
    high = largest.to(tl.int64) + 1
    reached = tl.sum((x != LEAST).to(tl.int32))
    while (high - low > 1) & (reached > most):
        middle = (low + high) >> 1
        count = tl.sum((x >= middle.to(tl.int32)).to(tl.int32))
        reached = tl.where(count >= k, count, reached)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
    return low.to(tl.int32)


@triton.jit
def _candidates(p_score, p_found, p_count, start, count, span, held: tl.constexpr, sections: tl.constexpr):
    """Ids and orders of a row's candidates `start` to `start + held` of `count`; LEAST past the end."""
    o_found = start + tl.arange(0, held)
    m_found = o_found < count
    if sections > 0:
        counts = tl.load(p_count + tl.arange(0, sections))
        ends = tl.cumsum(counts)
        section = tl.zeros([held], tl.int32)  # how many sections end before each candidate, by bisection
        for i in tl.static_range(1, 16):
            if sections >> i > 0:
                end = tl.gather(ends, section + ((sections >> i) - 1), 0)
                section += tl.where(end <= o_found, sections >> i, 0)
        o_found += section * span - tl.gather(ends - counts, section, 0)
        ids = tl.load(p_found + o_found, m_found, other=0)
    else:
        ids = o_found
    order = _order(tl.load(p_score + ids, m_found, other=0.0))
    return ids, tl.where(m_found, order, LEAST)


@triton.jit(do_not_specialize=["topk"])
def _choose_kernel(
    p_score,
    p_visible,
    p_found,
    p_count,
    p_chosen,
    topk,
    width,
    held: tl.constexpr,
    k_padded: tl.constexpr,
    sections: tl.constexpr,
    block: tl.constexpr,
):
    """One query's entry ids: the k largest of its candidates (all scores if nothing was sifted), the first of equals.

    Candidates beyond the first `held` are loaded again for each look, which only rows with many equal scores need.
    """
    query = tl.program_id(0).to(tl.int64)
    seen = tl.load(p_visible + query).to(tl.int32)
    p_chosen += query * topk
    if seen <= topk:
        o_place = tl.arange(0, k_padded)
        tl.store(p_chosen + o_place, tl.where(o_place < seen, o_place, -1).to(tl.int64), o_place < topk)
    else:
        p_score += query * width
        p_found += query * width
        p_count += query * sections
        count, span = seen, 0
        if sections > 0:
            count = tl.sum(tl.load(p_count + tl.arange(0, sections)))
            span = tl.cdiv(width, sections * block) * block
        ids, order = _candidates(p_score, p_found, p_count, 0, count, span, held, sections)
        if count <= held:
            least = _reached(order, tl.max(order), topk, topk)
            _write_largest(p_chosen, ids, order, least, topk - tl.sum((order > least).to(tl.int32)), 0, 0)
        else:
            _choose_of_many(p_score, p_found, p_count, p_chosen, order, topk, count, span, held, sections)


@triton.jit
def _write_largest(p_chosen, ids, order, least, wanted, above, ties):
    """Write the ids whose order is above `least`, and the first `wanted` of those that are equal, in their order.

    `above` and `ties` are how many of both kinds came before.
    """
    m_above, m_equal = order > least, order == least
    running = tl.cumsum(m_above.to(tl.int32) + (m_equal.to(tl.int32) << 15))  # two counts in one
    o_tie = ties + (running >> 15)
    place = above + (running & 0x7FFF) + tl.minimum(o_tie, wanted) - 1
    tl.store(p_chosen + place, ids.to(tl.int64), m_above | (m_equal & (o_tie <= wanted)))


@triton.jit
def _choose_of_many(
    p_score, p_found, p_count, p_chosen, order, topk, count, span, held: tl.constexpr, sections: tl.constexpr
):
    """What `_choose_kernel` does, for more than `held` candidates, of which `order` holds the first."""
    low = tl.min(order).to(tl.int64)
    high = tl.full([], 0x7FFFFFFF, tl.int64)
    while high - low > 1:
        middle = (low + high) >> 1
        reached = 0
        for start in range(0, count, held):
            _, x = _candidates(p_score, p_found, p_count, start, count, span, held, sections)
            reached += tl.sum((x >= middle.to(tl.int32)).to(tl.int32))
        low = tl.where(reached >= topk, middle, low)
        high = tl.where(reached >= topk, high, middle)
    least = low.to(tl.int32)
    wanted = topk
    for start in range(0, count, held):
        _, x = _candidates(p_score, p_found, p_count, start, count, span, held, sections)
        wanted -= tl.sum((x > least).to(tl.int32))
    above, ties = 0, 0
    for start in range(0, count, held):
        ids, x = _candidates(p_score, p_found, p_count, start, count, span, held, sections)
        _write_largest(p_chosen, ids, x, least, wanted, above, ties)
        above += tl.sum((x > least).to(tl.int32))
        ties += tl.sum((x == least).to(tl.int32))


@triton.jit
def _entry_rows_kernel(p_id, p_page, p_row, columns, page_stride, per_page, block: tl.constexpr):
    """Pool rows of entry ids through the pages of each token."""
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * block + tl.arange(0, block)
    m_column = o_column < columns
    b_id = tl.load(p_id + token * columns + o_column, m_column, other=-1)
    b_page = tl.load(p_page + token * page_stride + b_id // per_page, m_column & (b_id >= 0), other=0)
    b_row = b_page.to(tl.int64) * per_page + b_id % per_page
    tl.store(p_row + token * columns + o_column, tl.where(b_id < 0, -1, b_row), m_column)
