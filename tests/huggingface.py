"""The oracle: `transformers`' DeepSeek-V4 on CPU in fp32, given a test model's config and weights."""

from dataclasses import dataclass
from typing import Any

import torch
from models import native_weights
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils import logging

from leadline.reference import Reference

logging.disable_progress_bar()


@dataclass
class Answer:
    """`logits` [S, V], and for each position the smallest `gaps` [S] of any top-k selection made there.

    A gap is the last chosen score less the first one left out, over the largest score: where it is of the size of a
    rounding error, two right implementations may choose differently.
    """

    logits: Tensor
    gaps: Tensor


class HuggingFace:
    """`transformers`' own model, built from config.json as it is, and from DeepSeek's names by its own conversion."""

    def __init__(self, raw: dict[str, Any], reference: Reference) -> None:
        config = DeepseekV4Config(**raw)
        loaded = DeepseekV4ForCausalLM.from_pretrained(
            None,
            config=config,
            state_dict=native_weights(reference),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        self.model, report = loaded
        self.model.eval()
        assert not any(report.values()), report
        self._gaps: list[Tensor] = []
        for module in self.model.modules():
            kind = type(module).__name__
            if kind == "DeepseekV4TopKRouter":
                module.register_forward_hook(self._watch_router)
            elif kind == "DeepseekV4IndexerScorer":
                module.register_forward_hook(self._watch_indexer)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Answer:
        """Token ids [S] -> what the model says after each, computed at once and without a cache."""
        self._gaps = [torch.full((len(ids),), float("inf"))]
        logits = self.model(ids[None], use_cache=False).logits[0]
        return Answer(logits, torch.stack(self._gaps).amin(0))

    def _watch_router(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        scores = nn.functional.softplus(outputs[0]).sqrt() + module.e_score_correction_bias
        self._gaps.append(_gaps(scores, module.top_k))

    def _watch_indexer(self, module: nn.Module, inputs: Any, scores: Tensor) -> None:
        entries = torch.arange(scores.shape[-1], device=scores.device)
        closed = (torch.arange(scores.shape[1], device=scores.device) + 1)[:, None] // 4
        visible = scores[0].masked_fill(entries >= closed, float("-inf"))
        self._gaps.append(_gaps(visible, self.model.config.index_topk))


def _gaps(scores: Tensor, count: int) -> Tensor:
    """Scores [S, N], -inf where there is none -> [S]; infinity where everything is chosen."""
    if scores.shape[1] <= count:
        return torch.full((len(scores),), float("inf"))
    best = scores.topk(count + 1, -1).values
    largest = scores.abs().masked_fill(scores.isinf(), 0).amax(-1)
    return torch.where(best[:, count].isinf(), float("inf"), (best[:, count - 1] - best[:, count]) / largest)
