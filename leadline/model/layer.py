"""One layer: attention, then experts; each reads one mix of the streams and writes back into all of them."""

from torch import Tensor

from leadline.config import ModelConfig
from leadline.kernels.experts import routed_experts, shared_expert
from leadline.kernels.mix import Mixing, Reading, close_sublayer, open_sublayer
from leadline.kernels.route import route
from leadline.model.attention import Attention
from leadline.model.batch import Batch
from leadline.model.rows import StepRows
from leadline.model.state import State
from leadline.model.weights import WeightStore


class Layer:
    """A main layer of the model."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        name = f"layers.{layer}"
        self.config = config
        self.attention_mixing = weights.mixing(f"{name}.hc_attn")
        self.attention_norm = weights.wide(f"{name}.attn_norm.weight")
        self.attention = Attention(config, layer, weights)
        self.experts_mixing = weights.mixing(f"{name}.hc_ffn")
        self.experts_norm = weights.wide(f"{name}.ffn_norm.weight")
        self.experts = Experts(config, layer, weights)

    def forward(self, streams: Tensor, batch: Batch, rows: StepRows, state: State) -> Tensor:
        """`streams` [T, n, d] -> streams."""
        reading = self._open(streams, self.attention_mixing, self.attention_norm)
        streams = close_sublayer(streams, self.attention.forward(reading.x, batch, rows, state), reading)
        reading = self._open(streams, self.experts_mixing, self.experts_norm)
        return close_sublayer(streams, self.experts.forward(reading.x, batch.ids), reading)

    def _open(self, streams: Tensor, mixing: Mixing, norm: Tensor) -> Reading:
        c = self.config
        return open_sublayer(streams, mixing, norm, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)


class Experts:
    """The experts sublayer: routed experts and the shared one, summed in fp32."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightStore) -> None:
        name = f"layers.{layer}.ffn"
        self.config = config
        self.gate = weights.wide(f"{name}.gate.weight")
        hashed = config.is_hash_layer(layer)
        self.by_token = weights.integers(f"{name}.gate.tid2eid") if hashed else None
        self.bias = None if hashed else weights.wide(f"{name}.gate.bias")
        self.w13 = weights.experts(f"{name}.experts", "w1", "w3")
        self.w2 = weights.experts(f"{name}.experts", "w2")
        shared = f"{name}.shared_experts"
        self.shared_w13 = weights.matrix(f"{shared}.w1", f"{shared}.w3")
        self.shared_w2 = weights.matrix(f"{shared}.w2")

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """`x` [T, d], normed, and the tokens' ids [T] -> [T, d]."""
        c = self.config
        chosen, weights = route(
            x, self.gate, self.bias, self.by_token, ids, c.num_experts_per_tok, c.routed_scaling_factor
        )
        routed = routed_experts(x, chosen, weights, self.w13, self.w2, c.swiglu_limit)
        return (routed + shared_expert(x, self.shared_w13, self.shared_w2, c.swiglu_limit)).to(x.dtype)
