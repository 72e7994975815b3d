"""Which rows of weights meet which tokens: (token, expert) pairs sorted by expert and cut into tiles, on the device."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_PAIRS = 1024
"""Up to so many pairs (170 tokens of 6 experts) every program counts all of them for itself: one launch, not two."""
PAIRS_PER_PROGRAM = 256
"""Of more pairs, so many are counted and placed by a program."""
FEW_PER_PROGRAM = 32


@dataclass(frozen=True)
class Tiles:
    """Pairs in the order of their experts, cut into tiles of at most `width` pairs of one expert.

    `order` int32 [places]: place -> pair, a pair being `token * active + rank`; one without an expert has no place. The
    last places have no pair, and some before an expert's first one, where that has to be a multiple of a number.
    `records` int32 [3, most]: each tile's expert, first place and number of pairs. `most` is a bound that shapes give;
    the tiles beyond the last have 0 pairs.
    """

    pairs: int
    most: int
    order: Tensor
    records: Tensor

    @property
    def places(self) -> int:
        """How many places there are."""
        return len(self.order)


def most_tiles(pairs: int, experts: int, width: int) -> int:
    """The largest number of tiles of `pairs`: an expert that is hit has at most one that is not full."""
    return min(pairs, min(pairs, experts) + pairs // width)


def tiles_by_expert(chosen: Tensor, experts: int, width: int, multiple: int = 1) -> Tiles:
    """`chosen` [T, k] (integers: k different ones of 0 .. experts - 1 a token, or -1) -> its tiles, in stable order.

    `width` is a multiple of `multiple`; an expert's first place and the number of places become one.
    """
    tiles, placing = empty_tiles(chosen, experts, width, multiple)
    _place[(placing.blocks,)](
        chosen,
        placing.counts,
        tiles.order,
        tiles.records,
        tiles.pairs,
        placing.blocks,
        tiles.most,
        width,
        placing.b_pairs,
        placing.b_experts,
        placing.b_all,
        multiple,
    )
    return tiles


@dataclass(frozen=True)
class Placing:
    """How `place_pairs` is launched: `blocks` programs of `b_pairs` pairs; `b_all` is 0 where `counts` are made."""

    blocks: int
    b_pairs: int
    b_experts: int
    b_all: int
    counts: Tensor


def empty_tiles(chosen: Tensor, experts: int, width: int, multiple: int = 1) -> tuple[Tiles, Placing]:
    """Tiles for `chosen` [T, k], to be filled by `place_pairs`; many pairs are counted here, by a launch."""
    pairs = chosen.numel()
    most = most_tiles(pairs, experts, width)
    places = triton.cdiv(pairs + min(pairs, experts) * (multiple - 1), multiple) * multiple
    order = torch.empty(places, dtype=torch.int32, device=chosen.device)
    records = torch.empty(3, most, dtype=torch.int32, device=chosen.device)
    b_experts = triton.next_power_of_2(max(experts, 16))
    if pairs <= FEW_PAIRS:
        b_all = max(FEW_PER_PROGRAM, triton.next_power_of_2(pairs))
        placing = Placing(triton.cdiv(pairs, FEW_PER_PROGRAM), FEW_PER_PROGRAM, b_experts, b_all, order)
    else:
        blocks = triton.cdiv(pairs, PAIRS_PER_PROGRAM)
        counts = torch.empty(blocks, b_experts, dtype=torch.int32, device=chosen.device)
        _count[(blocks,)](chosen, counts, pairs, PAIRS_PER_PROGRAM, b_experts)
        placing = Placing(blocks, PAIRS_PER_PROGRAM, b_experts, 0, counts)
    return Tiles(pairs, most, order, records), placing


@triton.jit
def _histogram(p_chosen, first, stop, b_pairs: tl.constexpr, b_experts: tl.constexpr):
    """How many of the pairs `first` .. `stop - 1`, at most `b_pairs`, each expert has: int32 [b_experts]."""
    o_pair = first + tl.arange(0, b_pairs)
    b_expert = tl.load(p_chosen + o_pair, mask=o_pair < stop, other=-1).to(tl.int32)
    return tl.histogram(tl.maximum(b_expert, 0), b_experts, mask=b_expert >= 0)


@triton.jit(do_not_specialize=["pairs"])
def _count(p_chosen, p_counts, pairs, b_pairs: tl.constexpr, b_experts: tl.constexpr):
    i_block = tl.program_id(0)
    counts = _histogram(p_chosen, i_block * b_pairs, pairs, b_pairs, b_experts)
    tl.store(p_counts + i_block * b_experts + tl.arange(0, b_experts), counts)


@triton.jit(do_not_specialize=["pairs", "blocks", "most"])
def _place(
    p_chosen,
    p_counts,
    p_order,
    p_records,
    pairs,
    blocks,
    most,
    width: tl.constexpr,
    b_pairs: tl.constexpr,
    b_experts: tl.constexpr,
    b_all: tl.constexpr,
    multiple: tl.constexpr,
):
    place_pairs(
        tl.program_id(0),
        p_chosen,
        p_counts,
        p_order,
        p_records,
        pairs,
        blocks,
        most,
        width,
        b_pairs,
        b_experts,
        b_all,
        multiple,
    )


@triton.jit
def place_pairs(
    i_block,
    p_chosen,
    p_counts,
    p_order,
    p_records,
    pairs,
    blocks,
    most,
    width: tl.constexpr,
    b_pairs: tl.constexpr,
    b_experts: tl.constexpr,
    b_all: tl.constexpr,
    multiple: tl.constexpr = 1,
):
    """Each pair of a block finds its own place, and the first pair of a tile writes its record: nothing is sorted."""
    if b_all > 0:
        b_count = _histogram(p_chosen, 0, pairs, b_all, b_experts)
        b_earlier = _histogram(p_chosen, 0, i_block * b_pairs, b_all, b_experts)
    else:
        b_count = tl.zeros([b_experts], tl.int32)
        b_earlier = tl.zeros([b_experts], tl.int32)
        for block in range(blocks):
            b_block = tl.load(p_counts + block * b_experts + tl.arange(0, b_experts))
            b_count += b_block
            b_earlier += tl.where(block < i_block, b_block, 0)
    b_tiles = (b_count + width - 1) // width
    b_taken = (b_count + multiple - 1) // multiple * multiple
    b_first_place = tl.cumsum(b_taken) - b_taken
    b_first_tile = tl.cumsum(b_tiles) - b_tiles

    o_pair = i_block * b_pairs + tl.arange(0, b_pairs)
    b_expert = tl.load(p_chosen + o_pair, mask=o_pair < pairs, other=-1).to(tl.int32)
    m_pair = b_expert >= 0
    b_expert = tl.maximum(b_expert, 0)
    b_rank = tl.gather(b_earlier, b_expert, 0)
    for start in tl.static_range(0, b_pairs, 32):
        o_other = i_block * b_pairs + start + tl.arange(0, 32)
        b_other = tl.load(p_chosen + o_other, mask=o_other < pairs, other=-1).to(tl.int32)
        before = (b_other[None, :] == b_expert[:, None]) & (o_other[None, :] < o_pair[:, None])
        b_rank += tl.sum(before.to(tl.int32), 1)
    b_place = tl.gather(b_first_place, b_expert, 0) + b_rank
    tl.store(p_order + b_place, o_pair, mask=m_pair)

    leads = m_pair & (b_rank % width == 0)
    p_record = p_records + tl.gather(b_first_tile, b_expert, 0) + b_rank // width
    tl.store(p_record, b_expert, mask=leads)
    tl.store(p_record + most, b_place, mask=leads)
    tl.store(p_record + 2 * most, tl.minimum(tl.gather(b_count, b_expert, 0) - b_rank, width), mask=leads)
    if i_block == 0:
        total = tl.sum(b_tiles)
        for tile in range(0, most, 256):
            o_tile = tile + tl.arange(0, 256)
            tl.store(p_records + 2 * most + o_tile, 0, mask=(o_tile >= total) & (o_tile < most))
