"""What all layers of a step share: where each token's keys lie, what it sees, and how far things are turned."""

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.config import CSA_RATIO, HCA_RATIO
from leadline.kernels.rope import Angles, angles
from leadline.kernels.select import entry_rows
from leadline.model.batch import Batch
from leadline.model.state import State


@dataclass
class Turns:
    """The rotations of a step in CSA and HCA layers: of its tokens, and of the windows that it completes."""

    tokens: Angles
    closing: Angles
    full: Angles


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

    @classmethod
    def of(cls, batch: Batch, state: State, swa_frequencies: Tensor, compressed_frequencies: Tensor) -> "StepRows":
        """Both frequency tables are [R / 2], on the batch's device."""
        if batch.positions.is_cuda and swa_frequencies.dtype == torch.float32:
            return cls._on_gpu(batch, state, swa_frequencies, compressed_frequencies)
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
    def _on_gpu(cls, batch: Batch, state: State, swa_frequencies: Tensor, compressed_frequencies: Tensor) -> "StepRows":
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
        return cls(window, pages, visible, hca, swa, Turns(tokens, closing, full))


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
