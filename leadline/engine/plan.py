"""The step plan: everything a step does, built on the host with NumPy and sent to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.config import CSA_RATIO, HCA_RATIO, PAGE_TOKENS
from leadline.engine.transfer import joined, parted, send
from leadline.model.batch import Batch
from leadline.model.state import CSA_PER_PAGE, PENDING_RING

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Where rows lie in the frontier pools: what a plan must know of `State`."""

    slots: int
    ring: int


@dataclass(slots=True)
class Chunk:
    """Tokens `start .. start + count - 1` of the request in `slot`."""

    slot: int
    start: int
    count: int


@dataclass(frozen=True)
class FrontierWrite:
    """Also keep the frontier of chunk `chunk` as it is after `position` tokens, in `slot`.

    `position` is the chunk's end, or a page boundary inside the chunk (where no HCA window is partly filled).
    """

    chunk: int
    position: int
    slot: int


@dataclass(frozen=True)
class StepPlan:
    """The arrays of a `Batch`, field by field, on the host."""

    ids: Ints
    positions: Ints
    chunks: Ints
    starts: Ints
    firsts: Ints
    slots: Ints
    table_slots: Ints
    table_columns: Ints
    table_pages: Ints
    slot_copies: Ints
    page_copies: Ints
    closing_rows: Ints
    closing_entries: Ints
    closing_positions: Ints
    piece_firsts: Ints
    piece_counts: Ints
    piece_slots: Ints
    full_pieces: Ints
    full_pages: Ints
    full_positions: Ints
    window_source: Ints
    window_target: Ints
    pending_source: Ints
    pending_target: Ints
    fold_source: Ints
    fold_target: Ints
    logit_rows: Ints
    most_pages: int
    most_csa_entries: int
    most_hca_entries: int
    longest_piece: int

    def arrays(self) -> dict[str, Ints]:
        """The fields that are arrays, by name."""
        return {name: getattr(self, name) for name in _ARRAYS}

    @property
    def prepares(self) -> bool:
        """Whether `State.begin` has anything to do before the step."""
        return bool(len(self.table_slots) or self.slot_copies.size or self.page_copies.size)

    def to_batch(self, device: torch.device) -> Batch:
        """Send all arrays in one copy and cut them apart again on the device."""
        return self.batch_of(send(joined(list(self.arrays().values())), device))

    def batch_of(self, packed: Tensor) -> Batch:
        """The batch whose arrays lie one after another in `packed`, views of it."""
        arrays = self.arrays()
        parts = parted(packed, [array.shape for array in arrays.values()])
        values: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        values.update(zip(arrays, parts, strict=True))
        return Batch(**values)


_ARRAYS = tuple(field.name for field in fields(StepPlan) if field.type == Ints)
_NUMBERS = tuple(field.name for field in fields(StepPlan) if field.name not in _ARRAYS)


@dataclass(frozen=True)
class Preparation:
    """What must be true of tables and frontiers before a step: lists of (slot, column, page) and (from, to)."""

    table: list[tuple[int, int, int]]
    slot_copies: list[tuple[int, int]]
    page_copies: list[tuple[int, int]]


def build_plan(
    chunks: Sequence[Chunk],
    ids: Ints,
    page_table: NDArray[np.int32],
    layout: Layout,
    logit_rows: Ints,
    writes: list[FrontierWrite],
    preparation: Preparation,
) -> StepPlan:
    """Plan a step over `chunks`, of which each belongs to another request.

    `ids` [T] are the chunks' tokens in order (-1: sampled by the last step, still on the device); `page_table`
    [slots, P] already holds every page that the chunks reach.
    """
    if not writes and all(chunk.count == 1 for chunk in chunks):
        rows = _Rows.of_tokens(chunks)
        pieces = _token_pieces(rows, page_table)
        kept = _token_keeps(rows, layout)
    else:
        rows = _Rows.of(chunks)
        pieces = _pieces(rows, page_table)
        kept = _keeps(rows, pieces, layout, writes)
    closings = _closings(rows, page_table, layout)
    last = rows.starts + rows.counts
    return StepPlan(
        ids=ids,
        positions=rows.positions,
        chunks=rows.chunks,
        starts=rows.starts,
        firsts=rows.firsts,
        slots=rows.slots,
        **_columns(preparation.table, "table_slots", "table_columns", "table_pages"),
        slot_copies=_pairs(preparation.slot_copies),
        page_copies=_pairs(preparation.page_copies),
        **closings,
        piece_firsts=pieces.firsts,
        piece_counts=pieces.counts,
        piece_slots=pieces.slots,
        full_pieces=pieces.full,
        full_pages=pieces.full_pages,
        full_positions=pieces.full_positions,
        **kept,
        logit_rows=logit_rows,
        most_pages=int(-(-last.max() // PAGE_TOKENS)),
        most_csa_entries=int(last.max() // CSA_RATIO),
        most_hca_entries=int(last.max() // HCA_RATIO),
        longest_piece=int(pieces.counts.max()),
    )


@dataclass(frozen=True)
class _Rows:
    """Per chunk (starts, counts, slots, firsts) and per token (positions, chunks)."""

    starts: Ints
    counts: Ints
    slots: Ints
    firsts: Ints
    positions: Ints
    chunks: Ints

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> "_Rows":
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        counts = np.array([chunk.count for chunk in chunks], np.int64)
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        firsts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(chunks)), counts)
        positions = np.arange(counts.sum()) + (starts - firsts)[owner]
        return cls(starts, counts, slots, firsts, positions, owner)

    @classmethod
    def of_tokens(cls, chunks: Sequence[Chunk]) -> "_Rows":
        """`of` for chunks of one token each, which is what most steps have: while one request decodes, its step is
        as long as the host's work for it.
        """
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        slots = np.array([chunk.slot for chunk in chunks], np.int64)
        rows = np.arange(len(chunks))
        return cls(starts, np.ones_like(starts), slots, rows, starts, rows)


def _closings(rows: _Rows, page_table: NDArray[np.int32], layout: Layout) -> dict[str, Ints]:
    """CSA windows closed in this step: the eight pending rows each reads and where its entry goes."""
    closers = np.flatnonzero(rows.positions % CSA_RATIO == CSA_RATIO - 1)
    if not len(closers):
        return {
            "closing_rows": np.empty((0, 2 * CSA_RATIO), np.int64),
            "closing_entries": closers,
            "closing_positions": closers,
        }
    last, owner = rows.positions[closers], rows.chunks[closers]
    back = np.arange(1 - 2 * CSA_RATIO, 1)
    position = last[:, None] + back
    scratch = layout.slots * PENDING_RING + closers[:, None] + back
    ring = rows.slots[owner][:, None] * PENDING_RING + position % PENDING_RING
    source = np.where(position >= rows.starts[owner][:, None], scratch, ring)
    pages = page_table[rows.slots[owner], last // PAGE_TOKENS].astype(np.int64)
    return {
        "closing_rows": np.where(position < 0, -1, source),
        "closing_entries": pages * CSA_PER_PAGE + last // CSA_RATIO % CSA_PER_PAGE,
        "closing_positions": last - (CSA_RATIO - 1),
    }


@dataclass(frozen=True)
class _Pieces:
    """The HCA pieces of a step (see `Batch`); `last_of_chunk` [R] is the last piece of each chunk."""

    firsts: Ints
    counts: Ints
    slots: Ints
    full: Ints
    full_pages: Ints
    full_positions: Ints
    last_of_chunk: Ints


def _pieces(rows: _Rows, page_table: NDArray[np.int32]) -> _Pieces:
    begins = rows.positions % HCA_RATIO == 0
    begins[rows.firsts] = True
    firsts = np.flatnonzero(begins)
    counts = np.diff(firsts, append=len(rows.positions))
    owner, start = rows.chunks[firsts], rows.positions[firsts]
    end = start + counts
    full = np.flatnonzero(end % HCA_RATIO == 0)
    window = end[full] // HCA_RATIO - 1
    return _Pieces(
        firsts,
        counts,
        np.where(start % HCA_RATIO == 0, -1, rows.slots[owner]),
        full,
        page_table[rows.slots[owner[full]], window].astype(np.int64),
        window * HCA_RATIO,
        np.searchsorted(firsts, rows.firsts + rows.counts) - 1,
    )


def _token_pieces(rows: _Rows, page_table: NDArray[np.int32]) -> _Pieces:
    """`_pieces` of chunks of one token each."""
    place = rows.positions % HCA_RATIO
    full = np.flatnonzero(place == HCA_RATIO - 1)
    return _Pieces(
        rows.firsts,
        rows.counts,
        np.where(place == 0, -1, rows.slots),
        full,
        page_table[rows.slots[full], rows.positions[full] // HCA_RATIO].astype(np.int64),
        rows.positions[full] - (HCA_RATIO - 1),
        rows.firsts,
    )


def _token_keeps(rows: _Rows, layout: Layout) -> dict[str, Ints]:
    """`_keeps` of chunks of one token each, without further writes."""
    unfilled = np.flatnonzero((rows.positions + 1) % HCA_RATIO)
    return {
        "window_source": layout.slots * layout.ring + rows.firsts,
        "window_target": rows.slots * layout.ring + rows.positions % layout.ring,
        "pending_source": layout.slots * PENDING_RING + rows.firsts,
        "pending_target": rows.slots * PENDING_RING + rows.positions % PENDING_RING,
        "fold_source": layout.slots + unfilled,
        "fold_target": rows.slots[unfilled],
    }


def _keeps(rows: _Rows, pieces: _Pieces, layout: Layout, writes: list[FrontierWrite]) -> dict[str, Ints]:
    """Frontier writes: each chunk's end into its own slot, then whatever `writes` asks for besides."""
    ends = rows.starts + rows.counts
    window = [_own_rows(rows, ends, layout.ring, layout.slots * layout.ring)]
    pending = [_own_rows(rows, ends, PENDING_RING, layout.slots * PENDING_RING)]
    open_chunks = np.flatnonzero(ends % HCA_RATIO)
    folds = [np.stack([layout.slots + pieces.last_of_chunk[open_chunks], rows.slots[open_chunks]])]
    for write in writes:
        assert write.position == ends[write.chunk] or write.position % PAGE_TOKENS == 0
        assert write.position > rows.starts[write.chunk]
        window.append(_other_rows(rows, write, layout.ring, layout.slots * layout.ring))
        pending.append(_other_rows(rows, write, PENDING_RING, layout.slots * PENDING_RING))
        if write.position % HCA_RATIO:
            folds.append(np.array([[layout.slots + pieces.last_of_chunk[write.chunk]], [write.slot]]))
    joined = {"window": window, "pending": pending, "fold": folds}
    return {
        f"{name}_{end}": np.concatenate([part[row] for part in parts])
        for name, parts in joined.items()
        for row, end in enumerate(("source", "target"))
    }


def _own_rows(rows: _Rows, ends: Ints, ring: int, scratch: int) -> Ints:
    """[2, M] from scratch to the own ring: the last `ring` tokens of each chunk."""
    kept = np.flatnonzero(rows.positions >= (ends - ring)[rows.chunks])
    return np.stack([scratch + kept, rows.slots[rows.chunks[kept]] * ring + rows.positions[kept] % ring])


def _other_rows(rows: _Rows, write: FrontierWrite, ring: int, scratch: int) -> Ints:
    """[2, M] to another slot's ring: the `ring` tokens before `position`, from scratch or, if older, the own ring."""
    chunk = write.chunk
    positions = np.arange(max(0, write.position - ring), write.position)
    fresh = scratch + rows.firsts[chunk] + positions - rows.starts[chunk]
    older = rows.slots[chunk] * ring + positions % ring
    return np.stack([np.where(positions >= rows.starts[chunk], fresh, older), write.slot * ring + positions % ring])


def _columns(triples: list[tuple[int, int, int]], *names: str) -> dict[str, Ints]:
    return dict(zip(names, np.array(triples, np.int64).reshape(-1, len(names)).T, strict=True))


def _pairs(pairs: list[tuple[int, int]]) -> Ints:
    return np.array(pairs, np.int64).reshape(-1, 2).T
