"""The serving model: embeds a step's tokens, runs the layers over the state, and reads logits where wanted."""

import torch
from torch import Tensor

from leadline.config import ModelConfig, Ratio
from leadline.kernels.mix import final_collapse
from leadline.kernels.project import wide_product
from leadline.model.batch import Batch
from leadline.model.layer import Boundary, Layer
from leadline.model.rows import StepRows
from leadline.model.state import State, gate_dtype
from leadline.model.weights import WeightStore
from leadline.reference import layer_frequencies


class Transformer:
    """All main layers. Its weights are filled through `weights.slots`; it keeps nothing of any batch."""

    def __init__(self, config: ModelConfig, weights: WeightStore) -> None:
        self.config, self.deterministic = config, weights.deterministic
        wide = gate_dtype(weights.dtype)
        self.embed = weights.tensor("embed.weight")
        self.layers = [Layer(config, layer, weights) for layer in range(config.num_hidden_layers)]
        self.mixing = weights.mixing("hc_head")
        self.norm = weights.wide("norm.weight")
        self.head = weights.tensor("head.weight")
        self.swa_frequencies = layer_frequencies(config, Ratio.SWA).to(weights.device, wide)
        self.compressed_frequencies = layer_frequencies(config, Ratio.CSA).to(weights.device, wide)

    @torch.inference_mode()
    def forward(self, batch: Batch, state: State) -> Tensor:
        """Run one step and return the logits [N, V] in fp32 of `batch.logit_rows`, in `batch.logits` if there is one.

        Entries are written to history pages; the frontiers stay as they are until `state.commit(batch)`.
        """
        frequencies = (self.swa_frequencies, self.compressed_frequencies)
        rows = StepRows.of(batch, state, *frequencies, expand=not self.deterministic)
        streams = self.embed[batch.ids][:, None].expand(-1, self.config.hc_mult, -1)
        boundary = Boundary(streams)
        for layer in self.layers:
            boundary = layer.forward(boundary, batch, rows, state)
        streams = boundary.closed()
        return self.logits(streams if batch.logit_rows is None else streams[batch.logit_rows], batch.logits)

    def logits(self, streams: Tensor, out: Tensor | None = None) -> Tensor:
        """Streams [N, n, d] -> vocabulary logits [N, V] in fp32, in `out` if given."""
        c = self.config
        hidden = final_collapse(streams, self.mixing, self.norm, c.hc_eps, c.rms_norm_eps)
        return wide_product(hidden, self.head, self.deterministic, out)
