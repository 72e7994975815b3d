"""The tensors that hold requests' state: history pages and frontier slots, for all layers.

    history   a page is 128 tokens: in every CSA layer 32 entries and 32 index keys, in every HCA layer one entry
    frontier  a slot is, in every layer, a ring of the last `sliding_window` window rows (position % ring); in every
              CSA layer a ring of 8 pending rows; in every HCA layer an online softmax

Behind the slots of each frontier pool lies scratch for the tokens of one step. Layers find their tensors by index:
`window[i]` for main layer i, the others by the layer's rank among its kind. Nothing here is initialised: no result
may depend on a row that no token wrote.

Native numerics on a GPU keep window rows, entries and index keys packed (see `leadline.kernels.packed`). A page is then
half a block of CSA rows, or one row of HCA's: rows are found by number alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.config import PAGE_TOKENS, ModelConfig
from leadline.kernels.packed import BLOCK_ROWS, IndexRows, KvRows, index_rows, kv_rows
from leadline.model.batch import Batch
from leadline.model.pools import Packed, copy_rows, packed_keys, packed_kv, row_words

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


def keeps_packed(native: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model's state is kept packed: native numerics on a GPU. Packed rows hold what bf16 activations give."""
    return native and dtype == torch.bfloat16 and device.type == "cuda"


def page_bytes(config: ModelConfig, dtype: torch.dtype, packed: bool = False) -> int:
    """Bytes of one history page over all layers; packed, rounded up to whole bytes a row."""
    kv, key = _kv_row_bytes(config, dtype, packed), _key_row_bytes(config, dtype, packed)
    return len(config.csa_layers) * CSA_PER_PAGE * (kv + key) + len(config.hca_layers) * kv


def _kv_row_bytes(config: ModelConfig, dtype: torch.dtype, packed: bool) -> int:
    """Bytes of a window row or entry, its share of its block's padding included."""
    if not packed:
        return config.head_dim * dtype.itemsize
    block = kv_rows(BLOCK_ROWS, config.head_dim, config.qk_rope_head_dim, torch.device("meta")).blocks
    return -(-block.nbytes // BLOCK_ROWS)


def _key_row_bytes(config: ModelConfig, dtype: torch.dtype, packed: bool) -> int:
    if not packed:
        return config.index_head_dim * dtype.itemsize
    return index_rows(BLOCK_ROWS, config.index_head_dim, torch.device("meta")).blocks.nbytes // BLOCK_ROWS


def _window_row_bytes(config: ModelConfig, dtype: torch.dtype, packed: bool) -> int:
    return config.num_hidden_layers * _kv_row_bytes(config, dtype, packed)


def _pending_row_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return len(config.csa_layers) * 4 * (config.head_dim + config.index_head_dim) * gate_dtype(dtype).itemsize


def _fold_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return len(config.hca_layers) * 3 * config.head_dim * gate_dtype(dtype).itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype, packed: bool = False) -> int:
    """Bytes of one frontier slot over all layers."""
    rings = config.sliding_window * _window_row_bytes(config, dtype, packed)
    return rings + PENDING_RING * _pending_row_bytes(config, dtype) + _fold_bytes(config, dtype)


def scratch_bytes(config: ModelConfig, dtype: torch.dtype, size: StateSize, packed: bool = False) -> int:
    """Bytes of the scratch rows of one step; packed, also of what fills up each pool's last block, at most."""
    per_token = _window_row_bytes(config, dtype, packed) + _pending_row_bytes(config, dtype)
    scratch = size.step_tokens * per_token + size.step_pieces * _fold_bytes(config, dtype)
    if not packed:
        return scratch
    kv, key = _kv_row_bytes(config, dtype, packed), _key_row_bytes(config, dtype, packed)
    csa, hca = len(config.csa_layers), len(config.hca_layers)
    return scratch + (BLOCK_ROWS - 1) * ((config.num_hidden_layers + csa + hca) * kv + csa * key)


class State:
    """All pools. `size` fixes them for the engine's life.

    Raises ValueError where rows are to be packed that cannot be: of a dtype that packing would round.
    """

    window: Tensor | Packed[KvRows]
    csa_entries: Tensor | Packed[KvRows]
    hca_entries: Tensor | Packed[KvRows]
    index_keys: Tensor | Packed[IndexRows]

    def __init__(
        self, config: ModelConfig, size: StateSize, dtype: torch.dtype, device: torch.device, packed: bool = False
    ) -> None:
        if packed and dtype != torch.bfloat16:
            raise ValueError(f"packed rows hold bfloat16 values in fp8; the activations here are {dtype}")
        c, wide = config, gate_dtype(dtype)
        self.size, self.ring = size, c.sliding_window

        def pool(layers: int, rows: int, *shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(layers, rows, *shape, dtype=dtype, device=device)

        def kv_pool(layers: int, rows: int) -> Tensor | Packed[KvRows]:
            if packed:
                return packed_kv(layers, rows, c.head_dim, c.qk_rope_head_dim, device)
            return pool(layers, rows, c.head_dim)

        csa, hca, keys = len(c.csa_layers), len(c.hca_layers), size.pages * CSA_PER_PAGE
        self.window = kv_pool(c.num_hidden_layers, size.slots * self.ring + size.step_tokens)
        pending_rows = size.slots * PENDING_RING + size.step_tokens
        self.pending = pool(csa, pending_rows, 4 * (c.head_dim + c.index_head_dim), dtype=wide)
        self.folds = pool(hca, size.slots + size.step_pieces, 3, c.head_dim, dtype=wide)
        self.csa_entries = kv_pool(csa, keys)
        self.index_keys = (
            packed_keys(csa, keys, c.index_head_dim, device) if packed else pool(csa, keys, c.index_head_dim)
        )
        self.hca_entries = kv_pool(hca, size.pages)
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
        if len(batch.table_slots):
            self.page_table[batch.table_slots, batch.table_columns] = batch.table_pages
        for pool, rows in self._frontier_pools():
            _copy_blocks(pool, rows, batch.slot_copies)
        for pool, rows in self._history_pools():
            _copy_blocks(pool, rows, batch.page_copies)

    def commit(self, batch: Batch) -> None:
        """Move what the step's tokens left in scratch into frontier slots, all layers at once.

        A source may be a ring row that the same lists overwrite: every source is read before any target is written.
        """
        copy_rows(self.window, batch.window_source, batch.window_target)
        copy_rows(self.pending, batch.pending_source, batch.pending_target)
        copy_rows(self.folds, batch.fold_source, batch.fold_target)

    def commit_tokens(self, batch: Batch) -> None:
        """`commit` of a step whose chunks are single tokens, in one launch on a GPU. All lists are of one length.

        Every source lies in scratch, so that the order of copies does not matter; a target of -1 is none.
        """
        lists = (
            (self.window, batch.window_source, batch.window_target),
            (self.pending, batch.pending_source, batch.pending_target),
            (self.folds, batch.fold_source, batch.fold_target),
        )
        if self.page_table.is_cuda:
            from leadline.kernels.gpu.commit import commit_rows

            return commit_rows([(part, source, target) for pool, source, target in lists for part in row_words(pool)])
        for pool, source, target in lists:
            copy_rows(pool, source[target >= 0], target[target >= 0])

    def _frontier_pools(self) -> list[tuple[Tensor | Packed, int]]:
        """Each frontier pool with its rows per slot."""
        return [(self.window, self.ring), (self.pending, PENDING_RING), (self.folds, 1)]

    def _history_pools(self) -> list[tuple[Tensor | Packed, int]]:
        """Each history pool with its rows per page."""
        return [(self.csa_entries, CSA_PER_PAGE), (self.index_keys, CSA_PER_PAGE), (self.hca_entries, 1)]


Forward = Callable[[Batch, State], Tensor]
"""A model's step: the logits [N, V] of `batch.logit_rows`."""


def _copy_blocks(pool: Tensor | Packed, rows: int, copies: Tensor) -> None:
    """Copy blocks of `rows` rows within each layer of `pool`; `copies` [2, n] are sources and targets."""
    if copies.shape[1]:
        offsets = torch.arange(rows, device=copies.device)
        copy_rows(pool, *((blocks[:, None] * rows + offsets).flatten() for blocks in copies))


def pages_for(tokens: int) -> int:
    """Pages that a request of `tokens` tokens holds."""
    return -(-tokens // PAGE_TOKENS)
