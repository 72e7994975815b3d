"""Packed rows of one kind in all layers: a layer's pool by its number, and copies in all layers at once."""

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from leadline.kernels.packed import BLOCK_ROWS, IndexRows, KvRows, index_rows, kv_rows

Rows = TypeVar("Rows", KvRows, IndexRows)


@dataclass(frozen=True)
class Packed(Generic[Rows]):
    """`whole` holds the rows of `layers` layers one after another, each from a block of its own on."""

    whole: Rows
    layers: int

    def __getitem__(self, layer: int) -> Rows:
        """The pool of one layer, a view."""
        count = len(self.whole.blocks) // self.layers
        return replace(self.whole, blocks=self.whole.blocks[layer * count : (layer + 1) * count])

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.whole.blocks.device

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self.whole.blocks.nbytes

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Values and scales, [layers, blocks, 64, bytes]: views."""
        shape = (self.layers, len(self.whole.blocks) // max(1, self.layers))
        return self.whole.data.unflatten(0, shape), self.whole.scales.unflatten(0, shape)


def packed_kv(layers: int, rows: int, width: int, rotated: int, device: torch.device) -> Packed[KvRows]:
    """Uninitialised window rows or entries of `layers` layers."""
    return Packed(kv_rows(layers * _whole_blocks(rows), width, rotated, device), layers)


def packed_keys(layers: int, rows: int, width: int, device: torch.device) -> Packed[IndexRows]:
    """Uninitialised index keys of `layers` layers."""
    return Packed(index_rows(layers * _whole_blocks(rows), width, device), layers)


def copy_rows(pool: Tensor | Packed, source: Tensor, target: Tensor) -> None:
    """In every layer copy rows `source` [n] to rows `target` [n]. Every source is read before any target is written."""
    if isinstance(pool, Tensor):
        pool[:, target] = pool[:, source]
        return
    rows = torch.stack([source, target])
    (here, there), (from_place, to_place) = rows // BLOCK_ROWS, rows % BLOCK_ROWS
    for part in pool.parts:
        words = _words(part)
        words[:, there, to_place] = words[:, here, from_place]


def row_words(pool: Tensor | Packed) -> list[Tensor]:
    """Views of a pool's rows as integers, [layers, blocks, rows of a block, words]; a plain pool is one block."""
    parts = pool.parts if isinstance(pool, Packed) else (pool.flatten(2)[:, None].view(torch.uint8),)
    return [_words(part) for part in parts]


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK_ROWS) * BLOCK_ROWS


def _words(part: Tensor) -> Tensor:
    """The same bytes as words of 8 or 4 bytes where rows allow it, so that a copy moves fewer elements."""
    for dtype in (torch.int64, torch.int32):
        sizes = (part.shape[-1], part.storage_offset(), *part.stride()[:-1])
        if all(size % dtype.itemsize == 0 for size in sizes):
            return part.view(dtype)
    return part
