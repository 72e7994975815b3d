"""Decode steps as CUDA graphs: the model's forward pass for a number of rows, recorded once and replayed.

A graph is of a size class: so many rows, and room for so many pages a request. A step takes the smallest that it fits
into; what it lacks is padding, which reads nothing, writes nothing and takes no expert. Recorded is what the model
computes, that its tokens become part of their requests' frontiers, and plain sampling. Tables, copies of frontiers
(`State.begin`, snapshots), and sampling with penalties, bias or masks follow each step's own lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leadline.config import CSA_RATIO, HCA_RATIO, PAGE_TOKENS
from leadline.engine.plan import Ints, StepPlan
from leadline.engine.sampling import SamplingRow, packed_rows, plain_tensors
from leadline.engine.transfer import joined, overwrite, send
from leadline.kernels.sample import SamplingTensors, sample
from leadline.model.batch import Batch
from leadline.model.state import Forward, State
from leadline.model.tokens import chosen_ids, keep_tokens

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
    """`rows` tokens, one a request, each of at most `pages` pages; `counting` tells whether experts are counted.

    `random`: whether tokens may be drawn, or each row's most probable one is taken.
    """

    rows: int
    pages: int
    counting: bool
    random: bool


@dataclass
class _Recorded:
    padding: "Padding"
    packed: Tensor
    """What `Padding.filled` gives: written before each replay."""
    replay: Callable[[], None]
    logits: Tensor
    """[rows, V], overwritten by each replay of whatever class."""
    tokens: Tensor
    """[rows] sampled, overwritten by each replay."""


_Results = tuple[Tensor, Tensor]
"""Logits and tokens."""


class DecodeGraphs:
    """Graphs by size class, recorded when first wanted or by `record`. They share the memory of their results."""

    def __init__(self, forward: Forward, state: State, rows: int, columns: int, vocab_size: int) -> None:
        """`rows`: the most requests of a step; `columns`: of the page table; `vocab_size`: of a row of logits."""
        self.forward, self.state = forward, state
        self.row_classes = row_classes(rows)
        self.page_classes = [pages for pages in PAGE_CLASSES if pages < columns] + [columns]
        self._graphs: dict[SizeClass, _Recorded] = {}
        self._logits = torch.empty(rows, vocab_size, device=state.page_table.device)
        self._pool: Any = None
        self._stream: Any = None

    def suits(self, plan: StepPlan) -> bool:
        """Whether each of the step's chunks is one token."""
        return len(plan.ids) == len(plan.slots) <= self.row_classes[-1]

    def size_class(self, plan: StepPlan, counting: bool, random: bool) -> SizeClass:
        """The smallest class that `plan`, which suits, fits into."""
        rows = next(rows for rows in self.row_classes if rows >= len(plan.ids))
        pages = next(pages for pages in self.page_classes if pages >= plan.most_pages)
        return SizeClass(rows, pages, counting, random)

    def run(
        self, plan: StepPlan, sampled: Sequence[SamplingRow], last_tokens: Tensor, counts: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run and commit a step: the logits [N, V] of `plan.logit_rows` and, if `sampled` has one row for each of the
        step's tokens, all plain, the tokens sampled, which are then also in `last_tokens`. The next step overwrites
        the results.
        """
        whole = np.array_equal(plan.logit_rows, np.arange(len(plan.logit_rows)))
        plain = whole and len(sampled) == len(plan.ids) and all(row.plain for row in sampled)
        rows = sampled if plain else []
        size = self.size_class(plan, counts is not None, any(not row.params.greedy for row in rows))
        self.record(size, last_tokens, counts)
        recorded = self._graphs[size]
        overwrite(recorded.packed, recorded.padding.filled(plan, rows))
        recorded.replay()
        if len(plan.window_target) > len(plan.ids):
            self.state.commit(snapshots(plan).to_batch(recorded.packed.device))
        if not whole:
            return recorded.logits[send(plan.logit_rows, recorded.logits.device)], None
        return recorded.logits[: len(plan.logit_rows)], recorded.tokens[: len(rows)] if plain else None

    def record(self, size: SizeClass, last_tokens: Tensor, counts: Tensor | None) -> None:
        """Record a class before anybody waits for it."""
        if size not in self._graphs:
            self._graphs[size] = self._record(size, last_tokens, counts)

    def classes(self, pages: int) -> list[SizeClass]:
        """All classes, without counting, for requests of `pages` pages at most."""
        longest = next((each for each in self.page_classes if each >= pages), self.page_classes[-1])
        lengths = [each for each in self.page_classes if each <= longest]
        return [
            SizeClass(rows, each, counting=False, random=random)
            for random in (False, True)
            for each in lengths
            for rows in self.row_classes
        ]

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
        empty = Padding(size)
        packed = send(empty.array, last_tokens.device).clone()
        batch, how = empty.parted(packed)
        given = replace(batch)
        batch.expert_counts = counts
        batch.logit_rows, batch.logits = None, self._logits[: size.rows]

        def step() -> tuple[Tensor, Tensor]:
            batch.ids = chosen_ids(given, last_tokens)
            logits = self.forward(batch, self.state)
            self.state.commit_tokens(batch)
            tokens = sample(logits, how)
            keep_tokens(batch, tokens, last_tokens)
            return logits, tokens

        replay, results = self._captured(step)
        return _Recorded(empty, packed, replay, *results)

    def _captured(self, step: Callable[[], _Results]) -> tuple[Callable[[], None], _Results]:
        """Run `step` once, so that every kernel is there, then record it: how to do it again, where its results are."""
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        side = self._stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            results = step()
        return graph.replay, results


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


class Padding:
    """A size class without any token, as the array that its graphs read, and how a step is written into it."""

    def __init__(self, size: SizeClass) -> None:
        self.plan, self.size = padding(size), size
        arrays = self.plan.arrays()
        self.array = joined([*arrays.values(), packed_rows([], size.rows)])
        ends = np.cumsum([array.size for array in arrays.values()])
        self._places = {name: int(end) - arrays[name].size for name, end in zip(arrays, ends, strict=True)}
        self._sampling = int(ends[-1])

    def filled(self, plan: StepPlan, sampled: Sequence[SamplingRow]) -> Ints:
        """`plan`, whose chunks are single tokens, in the place of as much of the padding, and how to sample.

        It lacks what only `State.begin` reads, and `snapshots`.
        """
        array = self.array.copy()
        for name in COPIED:
            _put(array, self._places[name], getattr(plan, name))
        for name, count in own_rows(plan).items():
            _put(array, self._places[name], getattr(plan, name)[:count])
        if sampled:
            _put(array, self._sampling, packed_rows(sampled, self.size.rows))
        return array

    def parted(self, packed: Tensor) -> tuple[Batch, SamplingTensors]:
        """What lies in such an array on a device, as views of it."""
        how = packed[self._sampling :].view(-1, self.size.rows)
        return self.plan.batch_of(packed[: self._sampling]), plain_tensors(how, self.size.random, self.size.random)


def _put(array: Ints, place: int, values: Ints) -> None:
    array[place : place + values.size] = values.ravel()


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
