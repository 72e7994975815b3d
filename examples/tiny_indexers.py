"""Give a trained tiny model indexers that choose as its attention would: the start of `train_tiny.py`'s second stage.

    python examples/tiny_indexers.py --weights build/first --data build/tiny-data --out build/indexed

An index key has as many channels as an entry here, so an indexer can be a copy of the attention whose choice it makes:
its compressor is the layer's own, and its first heads are the layer's heads. What is left to find is how much each
head counts, which `weights_proj` says for every query: least squares fit it to the largest weight that the head gives
to any entry. The other heads begin at random and count nothing.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
from banded import use_banded_attention
from safetensors.torch import load_file, save_file
from tiny_eval import Data
from torch import Tensor
from train_tiny import CONFIG, is_indexer

from leadline.config import ModelConfig, Ratio
from leadline.reference import Attention, Reference, high, rms_norm, rotate

RIDGE = 1e-2
"""Added to the mean square of each channel, for stability."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder written by train_tiny.py")
    parser.add_argument("--data", type=Path, required=True, help="folder written by tiny_data.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the weights to")
    parser.add_argument("--rows", type=int, default=24, help="training rows to fit to")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    use_banded_attention()
    values = {n: v for file in sorted(arguments.weights.glob("*.safetensors")) for n, v in load_file(file).items()}
    rows, _, _ = Data(arguments.data / "data.npz", "cpu").rows(arguments.rows, arguments.length)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file(with_indexers(values, rows), arguments.out / "weights-1.safetensors")


@torch.no_grad()
def with_indexers(values: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """Unrounded values by reference name, of any indexers or none -> the same values with new indexers.

    `rows` [B, S] are token ids to fit to. Raises ValueError unless index keys have an entry's channels and there are
    index heads for all heads.
    """
    config = ModelConfig.from_dict(CONFIG)
    if config.index_head_dim != config.head_dim or config.index_n_heads < config.num_attention_heads:
        raise ValueError("an indexer that copies attention needs index_head_dim = head_dim and no fewer heads")
    model = Reference(dataclasses.replace(config, index_topk=rows.shape[1]), native=True)
    model.load_state_dict({n: v for n, v in values.items() if not is_indexer(n)}, strict=False)
    layers = [layer.attn for layer in model.layers if layer.attn.ratio == Ratio.CSA]
    for attention in layers:
        copy_attention(attention)
    inputs: dict[Attention, list[Tensor]] = {attention: [] for attention in layers}
    for attention in layers:
        attention.register_forward_pre_hook(lambda module, given: inputs[module].append(given[0]))
    for row in rows:
        model.streams(row[None])
    for attention in layers:
        fit_head_weights(attention, inputs[attention])
    stored = {n: v.dtype for n, v in values.items()}
    return {n: v.to(stored.get(n, v.dtype)).contiguous() for n, v in model.state_dict().items()}


def copy_attention(attention: Attention) -> None:
    """Let the indexer's keys be the layer's entries, its first queries the heads' queries, and no head count."""
    indexer, queries = attention.indexer, attention.wq_b.weight
    indexer.compressor.load_state_dict(attention.compressor.state_dict())
    indexer.wq_b.weight.normal_(std=queries.std().item())
    indexer.wq_b.weight[: len(queries)] = queries
    indexer.weights_proj.weight.zero_()


def fit_head_weights(attention: Attention, inputs: list[Tensor]) -> None:
    """Set `weights_proj`, so that a head counts as its largest weight says. `inputs`: of the layer, [1, S, d] each.

    Attention norms its queries and an indexer does not, so the weight is divided by the query's length. Queries count
    by their largest weight: those that look at many entries can do with any of them.
    """
    known, wanted, counts = [], [], []
    for x in inputs:
        largest, size = head_peaks(attention, x)
        known.append(x[0])
        wanted.append(largest / size * attention.indexer.heads**0.5)
        counts.append(largest.amax(-1, keepdim=True))
    x, y, c = torch.cat(known), torch.cat(wanted), torch.cat(counts)
    squares = x.T @ (c * x) / c.sum()
    fitted = torch.linalg.solve(squares + RIDGE * torch.eye(len(squares)), x.T @ (c * y) / c.sum())
    attention.indexer.weights_proj.weight[: y.shape[1]] = fitted.T


def head_peaks(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """For `x` [1, S, d] each head's largest weight among the visible entries [S, H], and its queries' rms [S, H]."""
    config, positions = attention.config, torch.arange(x.shape[1])
    raw = attention.wq_b(attention.q_norm(attention.wq_a(x))).unflatten(-1, (config.num_attention_heads, -1))
    queries = rotate(rms_norm(raw, None, config.rms_norm_eps), positions, attention.frequencies)
    entries = attention._rounded(attention.compressor(x))
    logits = torch.einsum("shd,cd->shc", high(queries[0]), high(entries[0])) * config.head_dim**-0.5
    visible = torch.arange(entries.shape[1]) < ((positions + 1) // Ratio.CSA)[:, None]
    largest = logits.masked_fill(~visible[:, None], -1e9).softmax(-1).amax(-1)
    largest[: Ratio.CSA] = 0  # these see no entry yet
    return largest, raw[0].square().mean(-1).sqrt()


if __name__ == "__main__":
    main()
