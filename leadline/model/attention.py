"""The attention sublayer over history pages and frontier slots, for every layer kind."""

from collections.abc import Sequence

import torch
from torch import Tensor

from leadline.config import ModelConfig, Ratio
from leadline.kernels.attend import attend
from leadline.kernels.compress import Gating, Pieces, close_csa, gate_rows, hca_fold
from leadline.kernels.output import grouped_output
from leadline.kernels.packed import KvPool, KvRows
from leadline.kernels.project import project, wide_product
from leadline.kernels.query import index_query
from leadline.kernels.rowwise import rms_norm
from leadline.kernels.select import entry_rows, select
from leadline.kernels.store import query_and_store
from leadline.model.batch import Batch
from leadline.model.rows import StepRows
from leadline.model.state import CSA_PER_PAGE, State
from leadline.model.weights import WeightStore


class Attention:
    """Queries, one shared key-value row per token, a window, and what the layer's compressor adds."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        self.config, self.layer = config, layer
        self.ratio = config.compress_ratios[layer]
        self.native, self.deterministic = weights.native, weights.deterministic
        name = f"layers.{layer}.attn"
        self.wqkv_a = weights.matrix(f"{name}.wq_a", f"{name}.wkv")
        self.q_norm = weights.wide(f"{name}.q_norm.weight")
        self.kv_norm = weights.wide(f"{name}.kv_norm.weight")
        self.wq_b = weights.matrix(f"{name}.wq_b")
        self.wo_a = weights.matrix(f"{name}.wo_a")
        self.wo_b = weights.matrix(f"{name}.wo_b")
        self.sink = weights.wide(f"{name}.attn_sink")
        self.compressor: CsaCompressor | HcaCompressor | None = None
        if self.ratio == Ratio.CSA:
            self.compressor = CsaCompressor(config, layer, weights)
        elif self.ratio == Ratio.HCA:
            self.compressor = HcaCompressor(config, layer, weights)

    def forward(self, x: Tensor, batch: Batch, rows: StepRows, state: State) -> Tensor:
        """`x` [T, d], normed -> [T, d]. Writes the step's window rows and entries into `state`."""
        c = self.config
        turns = rows.swa_turns if self.ratio == Ratio.SWA else rows.compressed_turns.tokens
        latent, kv = project(x, self.wqkv_a).split([c.q_lora_rank, c.head_dim], -1)
        latent = rms_norm(latent, self.q_norm, c.rms_norm_eps)
        q = project(latent, self.wq_b).unflatten(-1, (-1, c.head_dim))
        window = state.window[self.layer]
        q = query_and_store(q, kv, self.kv_norm, turns, c.rms_norm_eps, self.native, window, state.window_scratch)
        entries, chosen = None, None
        if self.compressor is not None:
            entries, chosen = self.compressor.forward(x, latent, batch, rows, state)
        reads = rows.window
        if rows.expansion is not None and isinstance(window, KvRows):
            window, reads = window.read(rows.expansion.window), rows.expansion.window_places
        heads = attend(q, self.sink, window, reads, entries, chosen, turns, self.deterministic)
        del q  # in a long step as large as what is made from here on
        return project(grouped_output(heads, self.wo_a, c.o_groups), self.wo_b)


class CsaCompressor:
    """An entry and an index key per 4 tokens, and the indexer that picks `index_topk` entries for each query."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        self.config, self.native = config, weights.native
        self.rank = config.csa_layers.index(layer)
        main, index = f"layers.{layer}.attn.compressor", f"layers.{layer}.attn.indexer.compressor"
        self.gating = _gating(weights, Ratio.CSA, (main, index))
        self.norm = weights.wide(f"{main}.norm.weight")
        self.index_norm = weights.wide(f"{index}.norm.weight")
        indexer = f"layers.{layer}.attn.indexer"
        self.index_wq_b = weights.matrix(f"{indexer}.wq_b")
        self.head_weights = weights.matrix(f"{indexer}.weights_proj")

    def forward(self, x: Tensor, latent: Tensor, batch: Batch, rows: StepRows, state: State) -> tuple[KvPool, Tensor]:
        """Close windows, then choose: (the layer's entries, entry rows [T, index_topk])."""
        self._compress(x, batch, rows, state)
        c = self.config
        q = project(latent, self.index_wq_b).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        ids = select(
            index_query(q, rows.compressed_turns.tokens, self.native),
            wide_product(x, self.head_weights.data, self.head_weights.deterministic),
            state.index_keys[self.rank],
            rows.pages,
            rows.csa_visible,
            batch.most_csa_entries,
            c.index_topk,
        )
        pool = state.csa_entries[self.rank]
        if rows.expansion is not None and isinstance(pool, KvRows):
            return pool.read(rows.expansion.csa), rows.expansion.csa_places(ids)
        return pool, entry_rows(rows.pages, ids, CSA_PER_PAGE)

    def _compress(self, x: Tensor, batch: Batch, rows: StepRows, state: State) -> None:
        pending = state.pending[self.rank]
        first = state.pending_scratch
        gate_rows(x, self.gating, pending[first : first + len(x)])
        if len(batch.closing_rows):
            close_csa(
                pending,
                batch.closing_rows,
                self.gating,
                (self.norm, self.index_norm),
                rows.compressed_turns.closing,
                self.config.rms_norm_eps,
                self.native,
                (state.csa_entries[self.rank], state.index_keys[self.rank]),
                batch.closing_entries,
            )


class HcaCompressor:
    """An entry per 128 tokens; every query reads all of them."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        self.config, self.native = config, weights.native
        self.rank = config.hca_layers.index(layer)
        name = f"layers.{layer}.attn.compressor"
        self.gating = _gating(weights, Ratio.HCA, (name,))
        self.norm = weights.wide(f"{name}.norm.weight")

    def forward(self, x: Tensor, latent: Tensor, batch: Batch, rows: StepRows, state: State) -> tuple[KvPool, Tensor]:
        """Fold the step's tokens into their windows: (the layer's entries, entry rows [T, K])."""
        pool = state.hca_entries[self.rank]
        raw = torch.empty(len(x), len(self.gating.matrix), dtype=self.gating.ape.dtype, device=x.device)
        gate_rows(x, self.gating, raw)
        hca_fold(
            raw,
            batch.positions,
            self.gating,
            _pieces(batch),
            state.folds[self.rank],
            state.fold_scratch,
            self.norm,
            rows.compressed_turns.full,
            self.config.rms_norm_eps,
            self.native,
            pool,
        )
        if rows.expansion is not None and isinstance(pool, KvRows):
            return pool.read(rows.expansion.pages.flatten()), rows.expansion.hca_places
        return pool, rows.hca


def _pieces(batch: Batch) -> Pieces:
    b = batch
    return Pieces(b.piece_firsts, b.piece_counts, b.piece_slots, b.full_pieces, b.full_pages, b.longest_piece)


def _gating(weights: WeightStore, ratio: Ratio, names: Sequence[str]) -> Gating:
    """The compressors `names`, which read the same input, as one product: kv and score rows of each in turn."""
    matrix = weights.matrix(*(f"{name}.{part}" for name in names for part in ("wkv", "wgate"))).data
    widths = [weights.specs[f"{name}.ape"].shape[1] for name in names]
    ape = weights.zeros((ratio, 2 * sum(widths)))
    column = 0
    for name, width in zip(names, widths, strict=True):
        weights.place(f"{name}.ape", ape[:, column + width : column + 2 * width])
        column += 2 * width
    return Gating(matrix, ape, weights.deterministic)
