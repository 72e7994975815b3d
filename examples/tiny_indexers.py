"""Indexers that choose as the attention of their layer would: how `train_tiny.py` gets them, with no loss of their own.

Top-k selection passes no gradient, so something else must teach an indexer. Here an index key has as many channels as
an entry, and an indexer can be a copy of the attention whose choice it makes: its compressor is the layer's own, and
its first heads are the layer's heads. What is left to find is how much each head counts, which `weights_proj` says for
every query: least squares fit it to the largest weight that the head gives to any entry. The other heads count nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from leadline.config import ModelConfig, Ratio
from leadline.reference import Attention, Reference, high, rms_norm, rotate

RIDGE = 1e-2
"""Added to the mean square of each channel, for stability."""


def is_indexer(name: str) -> bool:
    """Whether a parameter of the reference belongs to an indexer."""
    return ".attn.indexer." in name


def check_indexers(config: ModelConfig) -> None:
    """Raise ValueError unless index keys have an entry's channels and there are index heads for all heads."""
    if config.index_head_dim != config.head_dim or config.index_n_heads < config.num_attention_heads:
        raise ValueError("an indexer that copies attention needs index_head_dim = head_dim and no fewer heads")


def freeze_indexers(model: Reference) -> None:
    """Keep gradients away from a model's indexers; their unused heads count nothing from now on."""
    for attention in csa_attentions(model):
        attention.indexer.requires_grad_(False)
        attention.indexer.register_forward_pre_hook(lambda _, inputs: tuple(x.detach() for x in inputs))
        attention.indexer.weights_proj.weight.data.zero_()


def csa_attentions(model: Reference) -> Iterator[Attention]:
    """The attention modules of a model's CSA layers, in order."""
    for layer in model.layers:
        if layer.attn.ratio == Ratio.CSA:
            yield layer.attn


@torch.no_grad()
def copy_attention(model: Reference) -> None:
    """Let each indexer's keys be its layer's entries, and its first queries the heads' queries.

    Only copies between tensors that stay where they are, so that a CUDA graph may hold it.
    """
    for attention in csa_attentions(model):
        indexer, queries = attention.indexer, attention.wq_b.weight
        indexer.wq_b.weight[: len(queries)].copy_(queries)
        for name, value in attention.compressor.named_parameters():
            indexer.compressor.get_parameter(name).copy_(value)


@torch.no_grad()
def fit_head_weights(model: Reference, batches: list[Tensor]) -> None:
    """Set each `weights_proj`, rounded to bf16, so that a head counts as its largest weight says.

    `batches`: token ids [B, S] of rows to fit to, on the model's device. Each layer is fitted to what it reads with
    the selection as it was. Attention norms its queries and an indexer does not, so a head's weight is divided by the
    query's length. Queries count by their largest weight: those that look at many entries can do with any of them.
    """
    inputs: dict[nn.Module, list[Tensor]] = {attention: [] for attention in csa_attentions(model)}
    hooks = [a.register_forward_pre_hook(lambda module, given: inputs[module].append(given[0])) for a in inputs]
    for batch in batches:
        model.streams(batch)
    for hook in hooks:
        hook.remove()
    for attention in csa_attentions(model):
        fitted = fit_one(attention, inputs[attention])
        attention.indexer.weights_proj.weight[: len(fitted)].copy_(fitted.bfloat16())


def fit_one(attention: Attention, inputs: list[Tensor]) -> Tensor:
    """The rows [H, d] of `weights_proj` for the layer's own heads, fp64. `inputs`: of the layer, [B, S, d] each."""
    d = inputs[0].shape[-1]
    squares = products = total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    for x in inputs:
        largest, size = head_peaks(attention, x)
        counts = largest.amax(-1, keepdim=True).flatten(0, 1).double()
        wanted = (largest / size * attention.indexer.heads**0.5).flatten(0, 1).double()
        known = x.flatten(0, 1).double()
        squares, products = squares + known.T @ (counts * known), products + known.T @ (counts * wanted)
        total = total + counts.sum()
    ridge = RIDGE * torch.eye(d, dtype=torch.float64, device=inputs[0].device)
    return torch.linalg.solve(squares / total + ridge, products / total).T


def head_peaks(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """For `x` [B, S, d] each head's largest weight among visible entries and its queries' rms, both fp32 [B, S, H]."""
    config, positions = attention.config, torch.arange(x.shape[1], device=x.device)
    raw = attention.wq_b(attention.q_norm(attention.wq_a(x))).unflatten(-1, (config.num_attention_heads, -1))
    queries = rotate(rms_norm(raw, None, config.rms_norm_eps), positions, attention.frequencies)
    entries = attention._rounded(attention.compressor(x))
    logits = torch.einsum("bshd,bcd->bshc", high(queries), high(entries)) * config.head_dim**-0.5
    visible = torch.arange(entries.shape[1], device=x.device) < ((positions + 1) // Ratio.CSA)[:, None]
    largest = logits.masked_fill(~visible[:, None], -1e9).softmax(-1).amax(-1)
    largest[:, : Ratio.CSA] = 0  # these see no entry yet
    return largest, high(raw).square().mean(-1).sqrt()
