"""The attention sublayer over history pages and frontier slots, for every layer kind."""

from collections.abc import Sequence

from torch import Tensor

from leadline.config import ModelConfig, Ratio
from leadline.kernels.attend import attend
from leadline.kernels.compress import (
    Gating,
    csa_entries,
    csa_index_keys,
    gate_rows,
    hca_entries,
    hca_fold,
)
from leadline.kernels.output import grouped_output
from leadline.kernels.project import project, row_product
from leadline.kernels.query import index_query, query
from leadline.kernels.rowwise import high, rms_norm
from leadline.kernels.select import entry_rows, select
from leadline.kernels.store import store
from leadline.model.batch import Batch
from leadline.model.rows import StepRows
from leadline.model.state import CSA_PER_PAGE, State
from leadline.model.weights import WeightStore


class Attention:
    """Queries, one shared key-value row per token, a window, and what the layer's compressor adds."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        self.config, self.layer = config, layer
        self.ratio = config.compress_ratios[layer]
        self.native = weights.native
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
        turns = rows.swa_turns if self.ratio == Ratio.SWA else rows.compressed_turns
        latent, kv = project(x, self.wqkv_a).split([c.q_lora_rank, c.head_dim], -1)
        latent = rms_norm(latent, self.q_norm, c.rms_norm_eps)
        q = query(project(latent, self.wq_b).unflatten(-1, (-1, c.head_dim)), turns.tokens, c.rms_norm_eps)
        window = state.window[self.layer]
        store(kv, self.kv_norm, turns.tokens, c.rms_norm_eps, self.native, window, state.window_scratch)
        entries, chosen = None, None
        if self.compressor is not None:
            entries, chosen = self.compressor.forward(x, latent, batch, rows, state)
        heads = attend(q, self.sink, window, rows.window, entries, chosen, turns.tokens)
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
        self.head_weights = weights.matrix(f"{indexer}.weights_proj").data

    def forward(self, x: Tensor, latent: Tensor, batch: Batch, rows: StepRows, state: State) -> tuple[Tensor, Tensor]:
        """Close windows, then choose: (the layer's entries, entry rows [T, index_topk])."""
        self._compress(x, batch, rows, state)
        c = self.config
        q = project(latent, self.index_wq_b).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        ids = select(
            index_query(q, rows.compressed_turns.tokens, self.native),
            row_product(high(x), high(self.head_weights)),
            state.index_keys[self.rank],
            rows.pages,
            rows.csa_visible,
            batch.most_csa_entries,
            c.index_topk,
        )
        return state.csa_entries[self.rank], entry_rows(rows.pages, ids, CSA_PER_PAGE)

    def _compress(self, x: Tensor, batch: Batch, rows: StepRows, state: State) -> None:
        pending = state.pending[self.rank]
        first = state.pending_scratch
        pending[first : first + len(x)] = gate_rows(x, batch.positions, self.gating)
        if len(batch.closing_rows) == 0:
            return
        main, index = pending.split([4 * len(self.norm), 4 * len(self.index_norm)], 1)
        shared = (rows.compressed_turns.closing, self.config.rms_norm_eps, x.dtype, self.native)
        entries = csa_entries(main, batch.closing_rows, self.norm, *shared)
        keys = csa_index_keys(index, batch.closing_rows, self.index_norm, *shared)
        state.csa_entries[self.rank][batch.closing_entries] = entries
        state.index_keys[self.rank][batch.closing_entries] = keys


class HcaCompressor:
    """An entry per 128 tokens; every query reads all of them."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        self.config, self.native = config, weights.native
        self.rank = config.hca_layers.index(layer)
        name = f"layers.{layer}.attn.compressor"
        self.gating = _gating(weights, Ratio.HCA, (name,))
        self.norm = weights.wide(f"{name}.norm.weight")

    def forward(self, x: Tensor, latent: Tensor, batch: Batch, rows: StepRows, state: State) -> tuple[Tensor, Tensor]:
        """Fold the step's tokens into their windows: (the layer's entries, entry rows [T, K])."""
        folds = state.folds[self.rank]
        raw = gate_rows(x, batch.positions, self.gating)
        states = hca_fold(raw, batch.piece_firsts, batch.piece_counts, batch.longest_piece, folds, batch.piece_slots)
        folds[state.fold_scratch : state.fold_scratch + len(states)] = states
        if len(batch.full_pieces):
            turn = rows.compressed_turns.full
            full = states[batch.full_pieces]
            entries = hca_entries(full, self.norm, turn, self.config.rms_norm_eps, x.dtype, self.native)
            state.hca_entries[self.rank][batch.full_pages] = entries
        return state.hca_entries[self.rank], rows.hca


def _gating(weights: WeightStore, ratio: Ratio, names: Sequence[str]) -> Gating:
    """The compressors `names`, which read the same input, as one product: kv and score rows of each in turn."""
    matrix = weights.matrix(*(f"{name}.{part}" for name in names for part in ("wkv", "wgate"))).data
    widths = [weights.specs[f"{name}.ape"].shape[1] for name in names]
    ape = weights.zeros((ratio, 2 * sum(widths)))
    column = 0
    for name, width in zip(names, widths, strict=True):
        weights.place(f"{name}.ape", ape[:, column + width : column + 2 * width])
        column += 2 * width
    return Gating(matrix, ape)
