"""How packed fp4 experts lie in memory for the Hopper kernel: the checkpoint's bits in another order, no byte more.

A matrix is cut into tiles of 64 rows, two halves of 32, and units of 128 columns. Each unit of a tile is 1,024 words of
32 bits in the order [half 2][warp 4][row 8][thread 4][part 4]: the 16 bytes that a thread of the matrix instruction
holds lie together. A word has the codes of columns `32 part + 4 thread + 0..3` (front) and of those plus 16 (back):
the magnitudes of the front in its nibbles 0..3 and of the back in 4..7, three bits each, as selectors of a byte
look-up; the sign of front value b in bit 8b + 7 and of back value b in bit 8b + 3, where one mask takes four at once.

A row's four scales of a unit become one word: the least exponent in 8 bits and what each adds to it in four bits, 0 to
11, so that any scaled value is an e4m3 number. A tile's halves are 32 rows of the matrix's first half and the 32 rows
of its second half that belong to them: in `w13` the gates and their ups, so that one thread has both.
"""

import torch
from torch import Tensor

MOST_SPREAD = 11
MOST_EXPONENT = 249


def arrange(data: Tensor, scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Packed e2m1 int8 [R, K / 2] and e8m0 scales [R, K / 32] -> int32 [R, K / 8] and [R, K / 128], arranged.

    R is a multiple of 64 and K of 128. None where the scales of a row's 128 columns lie more than 2^11 apart (groups of
    zeros aside), which this form cannot hold: nothing is rounded.
    """
    code, exponent = _tiles(data.view(torch.uint8)), _tiles(scale.view(torch.uint8))
    code = torch.stack([code & 15, code >> 4], -1).flatten(-2).unflatten(-1, (-1, 4, 2, 4, 4)).int()
    exponent = exponent.unflatten(-1, (-1, 4)).int()
    empty = (code & 7).amax((-3, -2, -1)) == 0
    least = torch.where(empty, 255, exponent).amin(-1)
    least = torch.where(least == 255, 0, least)
    added = torch.where(empty, 0, exponent - least[..., None])
    if added.numel() and (added.max() > MOST_SPREAD or least.max() > MOST_EXPONENT):
        return None
    place = torch.arange(4, dtype=torch.int32, device=data.device)
    front, back = code.unbind(-3)  # [tile, half, row 32, unit, part, thread, b]
    word = ((front & 7) << 4 * place) + ((back & 7) << 16 + 4 * place) + ((back & 8) << 8 * place)
    word = (word.sum(-1) & 0x7FFFFFFF).int() | ((front >> 3) << 8 * place + 7).sum(-1).int()
    word = word.permute(0, 3, 1, 2, 5, 4)  # [tile, unit, half, row 32, thread, part]
    row_word = (least + (added << 8 + 4 * place).sum(-1)).int().permute(0, 3, 1, 2)
    rows = data.shape[0]
    return word.reshape(rows, -1), row_word.reshape(rows, -1)


def restore(words: Tensor, row_words: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `arrange`; a group of zeros may come back with another scale."""
    rows, units = row_words.shape
    word = words.view(rows // 64, units, 2, 32, 4, 4).permute(0, 2, 3, 1, 5, 4)[..., None]
    place = torch.arange(4, dtype=torch.int32, device=words.device)
    front = word >> 4 * place & 7 | (word >> 8 * place + 7 & 1) << 3
    back = word >> 16 + 4 * place & 7 | (word >> 8 * place + 3 & 1) << 3
    code = _rows(torch.stack([front, back], -3).flatten(3).to(torch.uint8))
    row_word = row_words.view(rows // 64, units, 2, 32).permute(0, 2, 3, 1)[..., None]
    exponent = _rows(((row_word & 255) + (row_word >> 8 + 4 * place & 15)).flatten(3).to(torch.uint8))
    data = (code[..., 0::2] | code[..., 1::2] << 4).view(torch.int8)
    return data, exponent.view(torch.float8_e8m0fnu)


def _tiles(matrix: Tensor) -> Tensor:
    """[R, n] -> [R / 64, 2, 32, n]."""
    return matrix.unflatten(0, (2, -1, 32)).transpose(0, 1)


def _rows(tiles: Tensor) -> Tensor:
    """[R / 64, 2, 32, n] -> [R, n]."""
    return tiles.transpose(0, 1).flatten(0, 2)
