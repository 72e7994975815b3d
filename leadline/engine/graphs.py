"""Decode steps as CUDA graphs: the model's forward pass for a number of rows, recorded once and replayed.

A graph is of a size class: so many rows, and room for so many pages a request. A step takes the smallest that it fits
into; what it lacks is padding, which reads nothing, writes nothing and takes no expert. Recorded is what the model
computes and that its tokens become part of their requests' frontiers; tables, copies of frontiers (`State.begin`,
snapshots) and sampling follow each step's own lists.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadline.config import CSA_RATIO, HCA_RATIO, PAGE_TOKENS
from leadline.engine.plan import Ints, StepPlan
from leadline.engine.transfer import joined, send
from leadline.model.batch import Batch
from leadline.model.state import Forward, State

PAGE_CLASSES = (16, 64, 256, 1024, 4096, 8192)
"""Pages a request: a class is up to four times as long as the one before. 16 pages hold 512 CSA entries, V4-Flash's
`index_topk`: below, nothing is scored."""


def row_classes(most: int) -> list[int]:
    """The numbers of rows that are recorded: 1, 2, 4, then steps of an eighth to a half, the last being `most`."""
    classes = [1, 2, 4]
    while classes[-1] < most:
        last = classes[-1]
        classes.append(last + max(4, 1 << (last.bit_length() - 3)))
    return [rows for rows in classes if rows < most] + [most]


@dataclass(frozen=True)
class SizeClass:
    """`rows` tokens, one a request, each of at most `pages` pages; `counting` tells whether experts are counted."""

    rows: int
    pages: int
    counting: bool


@dataclass
class _Recorded:
    empty: StepPlan
    """The class's padding."""
    packed: Tensor
    """The batch's arrays, one after another: written before each replay."""
    replay: Callable[[], None]
    logits: Tensor
    """[rows, V], overwritten by each replay of whatever class."""


class DecodeGraphs:
    """Graphs by size class, recorded when first wanted or by `record`. They share the memory of their results."""

    def __init__(self, forward: Forward, state: State, rows: int, columns: int) -> None:
        """`rows`: the most requests of a step; `columns`: of the page table."""
        self.forward, self.state = forward, state
        self.row_classes = row_classes(rows)
        self.page_classes = [pages for pages in PAGE_CLASSES if pages < columns] + [columns]
        self._graphs: dict[SizeClass, _Recorded] = {}
        self._logits: Tensor | None = None
        self._pool: Any = None
        self._stream: Any = None

    def suits(self, plan: StepPlan) -> bool:
        """Whether each of the step's chunks is one token."""
        return len(plan.ids) == len(plan.slots) <= self.row_classes[-1]

    def size_class(self, plan: StepPlan, counting: bool) -> SizeClass:
        """The smallest class that `plan`, which suits, fits into."""
        rows = next(rows for rows in self.row_classes if rows >= len(plan.ids))
        pages = next(pages for pages in self.page_classes if pages >= plan.most_pages)
        return SizeClass(rows, pages, counting)

    def run(self, plan: StepPlan, last_tokens: Tensor, counts: Tensor | None) -> Tensor:
        """Run and commit a step: the logits [N, V] of `plan.logit_rows`, until the next step overwrites them."""
        size = self.size_class(plan, counts is not None)
        self.record(size, last_tokens, counts)
        recorded = self._graphs[size]
        padded = pad(plan, recorded.empty)
        recorded.packed.copy_(send(joined(list(padded.arrays().values())), recorded.packed.device), non_blocking=True)
        recorded.replay()
        if len(plan.window_target) > len(plan.ids):
            self.state.commit(snapshots(plan).to_batch(recorded.packed.device))
        if np.array_equal(plan.logit_rows, np.arange(len(plan.logit_rows))):
            return recorded.logits[: len(plan.logit_rows)]
        return recorded.logits[send(plan.logit_rows, recorded.logits.device)]

    def record(self, size: SizeClass, last_tokens: Tensor, counts: Tensor | None) -> None:
        """Record a class before anybody waits for it."""
        if size not in self._graphs:
            self._graphs[size] = self._record(size, last_tokens, counts)

    def classes(self, pages: int) -> list[SizeClass]:
        """All classes, without counting, for requests of `pages` pages at most."""
        longest = next((each for each in self.page_classes if each >= pages), self.page_classes[-1])
        lengths = [each for each in self.page_classes if each <= longest]
        return [SizeClass(rows, each, counting=False) for each in lengths for rows in self.row_classes]

    @property
    def recorded(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    @property
    def memory(self) -> int:
        """Bytes of a GPU that the graphs' scratch and results take; nothing else uses them."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == self._pool)

    def _record(self, size: SizeClass, last_tokens: Tensor, counts: Tensor | None) -> _Recorded:
        """Run the model on padding alone, which changes nothing, and record that."""
        empty = padding(size)
        packed = send(joined(list(empty.arrays().values())), last_tokens.device).clone()
        batch = empty.batch_of(packed)
        ids = batch.ids
        batch.expert_counts = counts

        def step() -> Tensor:
            batch.ids = chosen_ids(ids, batch, last_tokens)
            logits = self._kept(self.forward(batch, self.state))
            self.state.commit_tokens(batch)
            return logits

        replay, logits = self._captured(step)
        return _Recorded(empty, packed, replay, logits)

    def _kept(self, logits: Tensor) -> Tensor:
        """`logits` [rows, V] in fp32, in memory that all graphs share: a V4-Flash row takes half a megabyte."""
        if self._logits is None:
            shape = (self.row_classes[-1], logits.shape[1])
            self._logits = torch.empty(shape, dtype=torch.float32, device=logits.device)
        return self._logits[: len(logits)].copy_(logits)

    def _captured(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run `step` once, so that every kernel is there, then record it: (how to do it again, where its result is)."""
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        side = self._stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            logits = step()
        return graph.replay, logits


def chosen_ids(ids: Tensor, batch: Batch, last_tokens: Tensor) -> Tensor:
    """`ids` [T] with tokens that are still on the device (-1) filled in; -1 again in rows that are padding."""
    known = torch.where(ids < 0, last_tokens[batch.slots[batch.chunks]], ids)
    return torch.where(batch.positions < 0, -1, known)


def padding(size: SizeClass) -> StepPlan:
    """A step of `size.rows` rows that are all padding: position -1, no target, no piece, no token."""
    none, rows = np.full(size.rows, -1, np.int64), np.arange(size.rows, dtype=np.int64)
    zero, empty = np.zeros(size.rows, np.int64), np.empty(0, np.int64)
    pairs = np.empty((2, 0), np.int64)
    return StepPlan(
        ids=none,
        positions=none,
        chunks=rows,
        starts=none,
        firsts=rows,
        slots=zero,
        table_slots=empty,
        table_columns=empty,
        table_pages=empty,
        slot_copies=pairs,
        page_copies=pairs,
        closing_rows=np.full((size.rows, 8), -1, np.int64),
        closing_entries=none,
        closing_positions=zero,
        piece_firsts=rows,
        piece_counts=zero,
        piece_slots=none,
        full_pieces=none,
        full_pages=none,
        full_positions=zero,
        window_source=zero,
        window_target=none,
        pending_source=zero,
        pending_target=none,
        fold_source=zero,
        fold_target=none,
        logit_rows=rows,
        most_pages=size.pages,
        most_csa_entries=size.pages * PAGE_TOKENS // CSA_RATIO,
        most_hca_entries=size.pages * PAGE_TOKENS // HCA_RATIO,
        longest_piece=1,
    )


COPIED = (
    *("ids", "positions", "starts", "slots", "closing_rows", "closing_entries", "closing_positions"),
    *("piece_counts", "piece_slots", "full_pieces", "full_pages", "full_positions"),
)
"""What a decode step has of its own; the rest of a padded plan is the same for all of a class."""


def pad(plan: StepPlan, empty: StepPlan) -> StepPlan:
    """`plan`, whose chunks are single tokens, in the place of as much of the padding `empty`.

    It lacks what only `State.begin` reads, and `snapshots`.
    """
    filled: dict[str, Any] = {name: _over(getattr(empty, name), getattr(plan, name)) for name in COPIED}
    for name, count in own_rows(plan).items():
        filled[name] = _over(getattr(empty, name), getattr(plan, name)[:count])
    return replace(empty, **filled)


def own_rows(plan: StepPlan) -> dict[str, int]:
    """How many rows of each list that `State.commit` reads are the tokens' own: the first; the others are snapshots."""
    tokens, folded = len(plan.ids), int(np.count_nonzero((plan.positions + 1) % HCA_RATIO))
    counts = {"window": tokens, "pending": tokens, "fold": folded}
    return {f"{name}_{end}": count for name, count in counts.items() for end in ("source", "target")}


def snapshots(plan: StepPlan) -> StepPlan:
    """`plan` with its snapshots alone to commit.

    They may be copied after the tokens' own rows, which overwrite nothing that they read: a snapshot of a step of
    single tokens is made at its end, and a ring holds as many tokens as it keeps.
    """
    return replace(plan, **{name: getattr(plan, name)[count:] for name, count in own_rows(plan).items()})


def _over(padding: Ints, values: Ints) -> Ints:
    """A copy of `padding` that begins with `values`."""
    padded = padding.copy()
    padded[: len(values)] = values
    return padded
