"""One layer: attention, then experts; each reads one mix of the streams and writes back into all of them."""

from dataclasses import dataclass

from torch import Tensor

from leadline.config import ModelConfig
from leadline.kernels.experts import experts
from leadline.kernels.mix import Mixing, Reading, close_and_open, close_sublayer, open_sublayer
from leadline.kernels.route import route
from leadline.model.attention import Attention
from leadline.model.batch import Batch
from leadline.model.rows import StepRows
from leadline.model.state import State
from leadline.model.weights import WeightStore


@dataclass
class Boundary:
    """Streams [T, n, d] and what is yet to be closed into them: a sublayer's output [T, d], and how it was read.

    Whoever opens the next sublayer closes this one on the way, in one operation. Before the first layer there is no
    output.
    """

    streams: Tensor
    closing: tuple[Tensor, Reading] | None = None

    def closed(self) -> Tensor:
        """The streams after the sublayer."""
        return self.streams if self.closing is None else close_sublayer(self.streams, *self.closing)


class Layer:
    """A main layer of the model."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        name = f"layers.{layer}"
        self.config, self.layer = config, layer
        self.attention_mixing = weights.mixing(f"{name}.hc_attn")
        self.attention_norm = weights.wide(f"{name}.attn_norm.weight")
        self.attention = Attention(config, layer, weights)
        self.experts_mixing = weights.mixing(f"{name}.hc_ffn")
        self.experts_norm = weights.wide(f"{name}.ffn_norm.weight")
        self.experts = Experts(config, layer, weights)

    def forward(self, before: Boundary, batch: Batch, rows: StepRows, state: State) -> Boundary:
        """From the boundary before the layer to the one after it."""
        streams, reading = self._open(before, self.attention_mixing, self.attention_norm)
        output = self.attention.forward(reading.x, batch, rows, state)
        streams, reading = self._open(Boundary(streams, (output, reading)), self.experts_mixing, self.experts_norm)
        counts = None if batch.expert_counts is None else batch.expert_counts[self.layer]
        return Boundary(streams, (self.experts.forward(reading.x, batch.ids, counts), reading))

    def _open(self, at: Boundary, mixing: Mixing, norm: Tensor) -> tuple[Tensor, Reading]:
        c = self.config
        rounds, eps = c.hc_sinkhorn_iters, c.hc_eps
        if at.closing is None:
            return at.streams, open_sublayer(at.streams, mixing, norm, rounds, eps, c.rms_norm_eps)
        output, reading = at.closing
        return close_and_open(at.streams, output, reading, mixing, norm, rounds, eps, c.rms_norm_eps)


class Experts:
    """The experts sublayer: routed experts and the shared one, summed in fp32."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        name = f"layers.{layer}.ffn"
        self.config = config
        self.gate = weights.gate(f"{name}.gate.weight")
        hashed = config.is_hash_layer(layer)
        self.by_token = weights.integers(f"{name}.gate.tid2eid") if hashed else None
        self.bias = None if hashed else weights.wide(f"{name}.gate.bias")
        self.w13 = weights.experts(f"{name}.experts", "w1", "w3")
        self.w2 = weights.experts(f"{name}.experts", "w2")
        shared = f"{name}.shared_experts"
        self.shared_w13 = weights.matrix(f"{shared}.w1", f"{shared}.w3")
        self.shared_w2 = weights.matrix(f"{shared}.w2")

    def forward(self, x: Tensor, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        """`x` [T, d], normed, and the tokens' ids [T] -> [T, d]. `counts` [E] int64 gains each expert's tokens.

        A row whose id is -1 is no token (a CUDA graph has a fixed number of rows): what it returns means nothing.
        """
        c = self.config
        chosen, weights = route(
            x, self.gate, self.bias, self.by_token, ids, c.num_experts_per_tok, c.routed_scaling_factor
        )
        if counts is not None:
            counts.index_add_(0, chosen.clamp(min=0).flatten(), (chosen >= 0).to(counts.dtype).flatten())
        shared = (self.shared_w13, self.shared_w2)
        return experts(x, chosen, weights, self.w13, self.w2, *shared, c.swiglu_limit)
