"""The tensors that hold requests' state: history pages and frontier slots, for all layers.

    history   a page is 128 tokens: in every CSA layer 32 entries and 32 index keys, in every HCA layer one entry
    frontier  a slot is, in every layer, a ring of the last `sliding_window` window rows (position % ring); in every
              CSA layer a ring of 8 pending rows; in every HCA layer an online softmax

Behind the slots of each frontier pool lies scratch for the tokens of one step. Layers find their tensors by index:
`window[i]` for main layer i, the others by the layer's rank among its kind. Nothing here is initialised: no result
may depend on a row that no token wrote.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.config import PAGE_TOKENS, ModelConfig
from leadline.model.batch import Batch

PENDING_RING = 8
CSA_PER_PAGE = 32


@dataclass(frozen=True)
class StateSize:
    """How many pages and slots there are, and the most tokens and chunks that one step may hold."""

    pages: int
    slots: int
    step_tokens: int
    step_chunks: int

    @property
    def step_pieces(self) -> int:
        """The most HCA pieces of a step: a chunk touches at most two windows that it does not fill."""
        return min(self.step_tokens, 2 * self.step_chunks + self.step_tokens // PAGE_TOKENS)


def gate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Compressor state is fp32, or fp64 in an fp64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one history page over all layers."""
    csa = len(config.csa_layers) * CSA_PER_PAGE * (config.head_dim + config.index_head_dim)
    return (csa + len(config.hca_layers) * config.head_dim) * dtype.itemsize


def _window_row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.num_hidden_layers * config.head_dim * dtype.itemsize


def _pending_row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return len(config.csa_layers) * 4 * (config.head_dim + config.index_head_dim) * gate_dtype(dtype).itemsize


def _fold_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return len(config.hca_layers) * 3 * config.head_dim * gate_dtype(dtype).itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one frontier slot over all layers."""
    rings = config.sliding_window * _window_row_bytes(config, dtype) + PENDING_RING * _pending_row_bytes(config, dtype)
    return rings + _fold_bytes(config, dtype)


def scratch_bytes(config: ModelConfig, dtype: torch.dtype, size: StateSize) -> int:
    """Bytes of the scratch rows of one step."""
    per_token = _window_row_bytes(config, dtype) + _pending_row_bytes(config, dtype)
    return size.step_tokens * per_token + size.step_pieces * _fold_bytes(config, dtype)


class State:
    """All pools. `size` fixes them for the engine's life."""

    def __init__(self, config: ModelConfig, size: StateSize, dtype: torch.dtype, device: torch.device) -> None:
        c, wide = config, gate_dtype(dtype)
        self.size, self.ring = size, c.sliding_window

        def pool(layers: int, rows: int, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(layers, rows, *shape, dtype=dtype, device=device)

        csa, hca = len(c.csa_layers), len(c.hca_layers)
        self.window = pool(c.num_hidden_layers, size.slots * self.ring + size.step_tokens, c.head_dim)
        pending_rows = size.slots * PENDING_RING + size.step_tokens
        self.pending = pool(csa, pending_rows, 4 * (c.head_dim + c.index_head_dim), dtype=wide)
        self.folds = pool(hca, size.slots + size.step_pieces, 3, c.head_dim, dtype=wide)
        self.csa_entries = pool(csa, size.pages * CSA_PER_PAGE, c.head_dim)
        self.index_keys = pool(csa, size.pages * CSA_PER_PAGE, c.index_head_dim)
        self.hca_entries = pool(hca, size.pages, c.head_dim)
        columns = pages_for(c.max_position_embeddings)
        self.page_table = torch.empty(size.slots, columns, dtype=torch.int64, device=device)

    @property
    def window_scratch(self) -> int:
        """The first scratch row of `window`."""
        return self.size.slots * self.ring

    @property
    def pending_scratch(self) -> int:
        """The first scratch row of `pending`."""
        return self.size.slots * PENDING_RING

    @property
    def fold_scratch(self) -> int:
        """The first scratch row of `folds`."""
        return self.size.slots

    def begin(self, batch: Batch) -> None:
        """Bring page table and frontiers to where the step starts: new pages, reused snapshots, forks."""
        self.page_table[batch.table_slots, batch.table_columns] = batch.table_pages
        for pool, rows in self._frontier_pools():
            _copy_blocks(pool, rows, batch.slot_copies)
        for pool, rows in self._history_pools():
            _copy_blocks(pool, rows, batch.page_copies)

    def commit(self, batch: Batch) -> None:
        """Move what the step's tokens left in scratch into frontier slots, all layers at once.

        A source may be a ring row that the same lists overwrite: every source is read before any target is written.
        """
        self.window[:, batch.window_target] = self.window[:, batch.window_source]
        self.pending[:, batch.pending_target] = self.pending[:, batch.pending_source]
        self.folds[:, batch.fold_target] = self.folds[:, batch.fold_source]

    def _frontier_pools(self) -> list[tuple[Tensor, int]]:
        """Each frontier pool with its rows per slot."""
        return [(self.window, self.ring), (self.pending, PENDING_RING), (self.folds, 1)]

    def _history_pools(self) -> list[tuple[Tensor, int]]:
        """Each history pool with its rows per page."""
        return [(self.csa_entries, CSA_PER_PAGE), (self.index_keys, CSA_PER_PAGE), (self.hca_entries, 1)]


def _copy_blocks(pool: Tensor, rows: int, copies: Tensor) -> None:
    """Copy blocks of `rows` rows within each layer of `pool`; `copies` [2, n] are sources and targets."""
    if copies.shape[1]:
        offsets = torch.arange(rows, device=pool.device)
        source, target = ((blocks[:, None] * rows + offsets).flatten() for blocks in copies)
        pool[:, target] = pool[:, source]


def pages_for(tokens: int) -> int:
    """Pages that a request of `tokens` tokens holds."""
    return -(-tokens // PAGE_TOKENS)
