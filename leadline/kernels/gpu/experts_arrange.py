"""How packed fp4 experts lie in memory for the Hopper kernel: the checkpoint's bits in another order, no byte more.

A matrix is cut into tiles of 64 rows, two halves of 32, and units of 128 columns. Each unit of a tile is 1,024 words of
32 bits in the order [half 2][warp 4][row 8][thread 4][part 4]: the 16 bytes that a thread of the matrix instruction
holds lie together. A word has the codes of columns `32 part + 4 thread + 0..3` (front) and of those plus 16 (back):
the magnitudes of the front in its nibbles 0..3 and of the back in 4..7, three bits each, as selectors of a byte
look-up; the sign of front value b in bit 8b + 7 and of back value b in bit 8b + 3, where one mask takes four at once.

A row's four scales of a unit become one word: the least exponent in 8 bits and what each adds to it in four bits, 0 to
11, so that any scaled value is an e4m3 number. A tile's halves are 32 rows of the matrix's first half and the 32 rows
of its second half that belong to them: in `w13` the gates and their ups, so that one thread has both.

Stacks are arranged and restored in place, part by part, since a second copy of all experts fits nowhere.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.chips import chip_of
from leadline.kernels.project import Weight

MOST_SPREAD = tl.constexpr(11)
MOST_EXPONENT = tl.constexpr(249)
PART_BYTES = 256 << 20
"""Codes that are moved at once: that much memory is used besides."""


def arrange_experts(stacks: Sequence[Weight]) -> None:
    """Arrange a layer's stacks in place where the Hopper kernel runs and takes all of them."""
    if chip_of(stacks[0].data.device).name == "sm90" and all(map(takes, stacks)):
        arrange_stacks(stacks)


def takes(stack: Weight) -> bool:
    """Whether a stack [E, R, K] has a form and a shape that can be arranged: R a multiple of 64 and K of 128."""
    if stack.form != "fp4" or stack.scale is None or stack.scale.dtype != torch.float8_e8m0fnu:
        return False
    return stack.round_input and stack.data.shape[-2] % 64 == 0 and stack.data.shape[-1] % 64 == 0


def arrange_stacks(stacks: Sequence[Weight]) -> None:
    """Arrange stacks, all of which `takes` accepts, in place: all of them, or none where one's scales do not fit."""
    if not all(_fits(data, scale) for stack in stacks for data, scale in _parts(stack)):
        return
    for stack in stacks:
        for data, scale in _parts(stack):
            words, row_words = _words(data), _row_words(data, scale)[0]
            data.view(torch.int32).copy_(words)
            _as_words(scale).copy_(row_words)
        assert stack.scale is not None
        stack.data, stack.scale = stack.data.view(torch.int32), _as_words(stack.scale)


def restore_stacks(stacks: Sequence[Weight]) -> None:
    """The inverse, in place."""
    for stack in stacks:
        for words, row_words in _parts(stack):
            data, scale = restore(words, row_words)
            words.copy_(data.view(torch.int32))
            row_words.copy_(_as_words(scale))
        assert stack.scale is not None
        stack.data, stack.scale = stack.data.view(torch.int8), stack.scale.view(torch.float8_e8m0fnu)


def arrange(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Packed e2m1 int8 [.., R, K / 2], e8m0 scales [.., R, K / 32] -> int32 [.., R, K / 8] and [.., R, K / 128].

    R is a multiple of 64 and K of 128. None where the scales of a row's 128 columns lie more than 2^11 apart (groups of
    zeros aside), which this form cannot hold: nothing is rounded.
    """
    row_words, misfits = _row_words(data, scale)
    return None if misfits.item() else (_words(data), row_words)


def restore(words: Tensor, row_words: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `arrange`; a group of zeros may come back with another scale."""
    data = torch.empty(*words.shape[:-1], 4 * words.shape[-1], dtype=torch.int8, device=words.device)
    scale = torch.empty(*words.shape[:-1], words.shape[-1] // 4, dtype=torch.uint8, device=words.device)
    rows, columns = words.shape[-2], 8 * words.shape[-1]
    _restore_codes[_grid(words)](words, data.view(torch.int16), rows, columns)
    _restore_scales[_grid(words)](row_words, scale, rows, columns)
    return data, scale.view(torch.float8_e8m0fnu)


def _parts(stack: Weight) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs of a stack's experts, as views of its data and its scales."""
    assert stack.scale is not None
    count = max(1, PART_BYTES // stack.data[0].nbytes)
    return zip(stack.data.split(count), stack.scale.split(count), strict=True)


def _fits(data: Tensor, scale: Tensor) -> bool:
    return not _row_words(data, scale)[1].item()


def _words(data: Tensor) -> Tensor:
    words = torch.empty(*data.shape[:-1], data.shape[-1] // 4, dtype=torch.int32, device=data.device)
    _arrange_codes[_grid(words)](data.view(torch.int16), words, words.shape[-2], 8 * words.shape[-1])
    return words


def _row_words(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The rows' words, and a number [1] that is not 0 if some scales do not fit into them."""
    words, raw = data.view(torch.int32), scale.view(torch.uint8)
    row_words = torch.empty(*raw.shape[:-1], raw.shape[-1] // 4, dtype=torch.int32, device=raw.device)
    misfits = torch.zeros(1, dtype=torch.int32, device=raw.device)
    _arrange_scales[_grid(words)](words, raw, row_words, misfits, words.shape[-2], 8 * words.shape[-1])
    return row_words, misfits


def _as_words(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8).view(torch.int32)


def _grid(words: Tensor) -> tuple[int, int]:
    """A program for each unit of each tile of all matrices; `words` is int32 [.., R, K / 8]."""
    return words.shape[:-1].numel() // 64, words.shape[-1] // 16


@triton.jit
def _matrix_rows(i_tile, o_place, rows):
    """Which rows of all matrices, one after another, are the rows `o_place` of 64 of a tile."""
    tiles = rows // 64
    i_row = o_place // 32 * (rows // 2) + i_tile % tiles * 32 + o_place % 32
    return (i_tile // tiles).to(tl.int64) * rows + i_row


@triton.jit
def _places(i_tile, i_unit, rows, columns):
    """Of a unit's 1,024 words: where each stands, and its front in pairs of bytes; its back is 4 pairs further."""
    o_word = tl.arange(0, 1024)
    o_pair = i_unit * 32 + o_word % 4 * 8 + o_word // 4 % 4
    o_front = _matrix_rows(i_tile, o_word // 16, rows) * (columns // 4) + o_pair
    return (i_tile.to(tl.int64) * (columns // 128) + i_unit) * 1024 + o_word, o_front


@triton.jit
def _arrange_codes(p_pairs, p_words, rows, columns):
    o_word, o_front = _places(tl.program_id(0), tl.program_id(1), rows, columns)
    b_front = tl.load(p_pairs + o_front).to(tl.int32)
    b_back = tl.load(p_pairs + o_front + 4).to(tl.int32)
    b_word = (b_front & 0x7777) | (b_back & 0x7777) << 16
    b_word = b_word | _spread(b_front >> 3) << 7 | _spread(b_back >> 3) << 3
    tl.store(p_words + o_word, b_word)


@triton.jit
def _restore_codes(p_words, p_pairs, rows, columns):
    o_word, o_front = _places(tl.program_id(0), tl.program_id(1), rows, columns)
    b_word = tl.load(p_words + o_word)
    b_front = (b_word & 0x7777) | _gathered(b_word >> 7) << 3
    b_back = (b_word >> 16 & 0x7777) | _gathered(b_word >> 3) << 3
    tl.store(p_pairs + o_front, b_front.to(tl.int16))
    tl.store(p_pairs + o_front + 4, b_back.to(tl.int16))


@triton.jit
def _spread(signs):
    """Bits 0, 4, 8, 12 to bits 0, 8, 16, 24."""
    return (signs & 1) | (signs & 16) << 4 | (signs & 256) << 8 | (signs & 4096) << 12


@triton.jit
def _gathered(signs):
    """Bits 0, 8, 16, 24 to bits 0, 4, 8, 12."""
    return (signs & 1) | (signs >> 4 & 16) | (signs >> 8 & 256) | (signs >> 12 & 4096)


@triton.jit
def _arrange_scales(p_words, p_scales, p_row_words, p_misfits, rows, columns):
    i_tile, i_unit = tl.program_id(0), tl.program_id(1)
    o_place, o_part = tl.arange(0, 64), tl.arange(0, 4)
    o_row = _matrix_rows(i_tile, o_place, rows)
    b_codes = tl.load(p_words + o_row[:, None] * (columns // 8) + i_unit * 16 + tl.arange(0, 16)[None, :])
    b_filled = tl.max(((b_codes & 0x77777777) != 0).to(tl.int32).reshape(64, 4, 4), 2) > 0
    b_exponent = tl.load(p_scales + o_row[:, None] * (columns // 32) + i_unit * 4 + o_part[None, :]).to(tl.int32)
    b_least = tl.min(tl.where(b_filled, b_exponent, 255), 1)
    b_least = tl.where(b_least == 255, 0, b_least)
    b_added = tl.where(b_filled, b_exponent - b_least[:, None], 0)
    b_word = b_least + tl.sum(b_added << 8 + 4 * o_part[None, :], 1)
    tl.store(p_row_words + (i_tile.to(tl.int64) * (columns // 128) + i_unit) * 64 + o_place, b_word)
    most_added, most_least = tl.max(tl.max(b_added, 1), 0), tl.max(b_least, 0)
    if (most_added > MOST_SPREAD) | (most_least > MOST_EXPONENT):
        tl.store(p_misfits, 1)


@triton.jit
def _restore_scales(p_row_words, p_scales, rows, columns):
    i_tile, i_unit = tl.program_id(0), tl.program_id(1)
    o_place, o_part = tl.arange(0, 64), tl.arange(0, 4)[None, :]
    b_word = tl.load(p_row_words + (i_tile.to(tl.int64) * (columns // 128) + i_unit) * 64 + o_place)[:, None]
    b_exponent = (b_word & 255) + (b_word >> 8 + 4 * o_part & 15)
    o_scale = _matrix_rows(i_tile, o_place, rows)[:, None] * (columns // 32) + i_unit * 4 + o_part
    tl.store(p_scales + o_scale, b_exponent.to(tl.uint8))
