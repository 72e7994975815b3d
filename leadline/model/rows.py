"""What all layers of a step share: where each token's keys lie, what it sees, and how far things are turned."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leadline.config import CSA_RATIO, HCA_RATIO, PAGE_TOKENS
from leadline.kernels.rope import Angles, angles
from leadline.kernels.select import entry_rows
from leadline.model.batch import Batch
from leadline.model.pools import Packed
from leadline.model.state import CSA_PER_PAGE, State


@dataclass
class Turns:
    """The rotations of a step in CSA and HCA layers: of its tokens, and of the windows that it completes."""

    tokens: Angles
    closing: Angles
    full: Angles


EXPANDED_TOKENS = 512
"""From so many tokens on a step brings the packed rows that it reads into bf16 once, instead of for every query."""
EXPANDED_ROWS = 16
"""Not if that would be more than so many rows for each token of the step: a short chunk behind a very long prompt, or
beside many other requests."""


@dataclass
class Expansion:
    """Rows of packed pools that a step reads, by their places in a copy that holds these rows alone.

    Of the window rows the copy holds those of the step's T tokens, then the rings of its R chunks; of entries those
    of all pages that its chunks have, P for each, in order.
    """

    window: Tensor
    """[T + R * W] rows of the window pool."""
    window_places: Tensor
    """[T, W] as `StepRows.window`, in the copy."""
    chunks: Tensor
    """[T, 1] the chunk of each token."""
    pages: Tensor
    """[R, P] pages of each chunk, -1 past its end."""
    hca_places: Tensor
    """[T, K] as `StepRows.hca`, in the copy."""

    @staticmethod
    def pays(batch: Batch, ring: int) -> bool:
        """Whether the copies are small beside the step."""
        rows = len(batch.slots) * (ring + batch.most_pages * CSA_PER_PAGE)
        return len(batch.ids) >= EXPANDED_TOKENS and rows <= EXPANDED_ROWS * len(batch.ids)

    @classmethod
    def of(cls, batch: Batch, rows: "StepRows", page_table: Tensor, scratch: int) -> "Expansion":
        """`scratch` is the first window row of this step's tokens."""
        tokens, device = len(batch.ids), batch.positions.device
        ring, columns = rows.window.shape[1], torch.arange(batch.most_pages, device=device)
        chunks = batch.chunks[:, None]
        places = torch.where(
            rows.window >= scratch, rows.window - scratch, tokens + chunks * ring + rows.window % ring
        ).masked_fill_(rows.window < 0, -1)
        rings = batch.slots[:, None] * ring + torch.arange(ring, device=device)
        own = scratch + torch.arange(tokens, device=device)
        last = torch.cat([batch.firsts[1:], batch.firsts.new_full((1,), tokens)]) - 1
        reached = batch.positions[last][:, None] // PAGE_TOKENS
        pages = torch.where(columns <= reached, page_table[batch.slots, : batch.most_pages], -1)
        hca = chunks * batch.most_pages + columns[: rows.hca.shape[1]]
        return cls(torch.cat([own, rings.flatten()]), places, chunks, pages, torch.where(rows.hca < 0, -1, hca))

    @cached_property
    def csa(self) -> Tensor:
        """[R * P * 32] rows of a CSA entry pool."""
        places = torch.arange(CSA_PER_PAGE, device=self.pages.device)
        rows = self.pages[..., None] * CSA_PER_PAGE + places
        return rows.masked_fill_(self.pages[..., None] < 0, -1).flatten()

    def csa_places(self, ids: Tensor) -> Tensor:
        """Entry ids [T, k], -1 for none, as places in the copy."""
        return entry_rows(self.chunks, ids, self.pages.shape[1] * CSA_PER_PAGE)


@dataclass
class StepRows:
    """Index lists made once per step, from the batch's compact description."""

    window: Tensor
    """[T, W] window rows of each token's keys, oldest first; -1 before the request's beginning."""
    pages: Tensor
    """[T, P] the pages of each token's request."""
    csa_visible: Tensor
    """[T] CSA entries each token sees: a window is visible from its closing token on."""
    hca: Tensor
    """[T, K] HCA entry rows each token sees; -1 past them."""
    swa_turns: Angles
    """How far each token is turned in SWA layers."""
    compressed_turns: Turns
    expansion: Expansion | None = None
    """What a long step reads of packed pools; None where attention reads the pools themselves."""

    @classmethod
    def of(
        cls, batch: Batch, state: State, swa_frequencies: Tensor, compressed_frequencies: Tensor, expand: bool = True
    ) -> "StepRows":
        """Both frequency tables are [R / 2], on the batch's device. `expand`: a long step may read copies of packed
        rows, over which attention may add up in another order.
        """
        if batch.positions.is_cuda and swa_frequencies.dtype == torch.float32:
            return cls._on_gpu(batch, state, swa_frequencies, compressed_frequencies, expand)
        pages = state.page_table[batch.slots, : batch.most_pages][batch.chunks]
        ids = torch.arange(batch.most_hca_entries, device=batch.positions.device)
        seen = ((batch.positions + 1) // HCA_RATIO)[:, None]
        return cls(
            _window_rows(batch, state),
            pages,
            (batch.positions + 1) // CSA_RATIO,
            entry_rows(pages, torch.where(ids < seen, ids, -1), 1),
            angles(batch.positions, swa_frequencies),
            _turns(batch, compressed_frequencies),
        )

    @classmethod
    def _on_gpu(
        cls, batch: Batch, state: State, swa_frequencies: Tensor, compressed_frequencies: Tensor, expand: bool
    ) -> "StepRows":
        from leadline.kernels.gpu.step_rows import step_rows

        window, pages, visible, hca, swa, (tokens, closing, full) = step_rows(
            (batch.positions, batch.chunks),
            (batch.starts, batch.firsts, batch.slots),
            state.page_table,
            (batch.closing_positions, batch.full_positions),
            (swa_frequencies, compressed_frequencies),
            batch.most_pages,
            state.ring,
            state.window_scratch,
            (CSA_RATIO, HCA_RATIO),
        )
        hca = hca[:, : batch.most_hca_entries]
        made = cls(window, pages, visible, hca, swa, Turns(tokens, closing, full))
        if expand and isinstance(state.window, Packed) and Expansion.pays(batch, state.ring):
            made.expansion = Expansion.of(batch, made, state.page_table, state.window_scratch)
        return made


def _window_rows(batch: Batch, state: State) -> Tensor:
    """Keys from before the chunk lie in the request's ring, those of the chunk itself in scratch."""
    chunk = batch.chunks
    back = torch.arange(state.ring - 1, -1, -1, device=batch.positions.device)
    key = batch.positions[:, None] - back
    start = batch.starts[chunk][:, None]
    scratch = state.window_scratch + batch.firsts[chunk][:, None] + key - start
    ring = batch.slots[chunk][:, None] * state.ring + key % state.ring
    return torch.where(key < 0, -1, torch.where(key >= start, scratch, ring))


def _turns(batch: Batch, frequencies: Tensor) -> Turns:
    return Turns(
        angles(batch.positions, frequencies),
        angles(batch.closing_positions, frequencies),
        angles(batch.full_positions, frequencies),
    )
