"""What the indexer is worth: key-value recall with its selection, and with others in its place.

    python examples/tiny_ablate.py --model leadline/tiny

This reads `leadline/reference.py`, where a selection is one function of one module to replace: the serving model
needs no switch for it. The right answers before a token are given (teacher forcing). For an exact answer that is as
good as greedy decoding: it is said if and only if each of its tokens is the most probable one after the right ones.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from banded import use_banded_attention
from export_tiny import read_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tiny_eval import EOS, answer_spans
from tiny_tasks import document, token_measure
from tokenizers import Tokenizer
from torch import Tensor

from leadline.reference import Indexer, Reference
from leadline.tasks.suite import EVALUATION_SEEDS, KINDS, dialogue

Choose = Callable[[Tensor, Tensor], Tensor]
"""Index scores [B, S, C] and which entries are visible [B, S, C] -> which are read [B, S, C], both booleans."""

SELECTIONS: dict[str, Callable[[Indexer], Choose]] = {
    "trained": lambda indexer: indexer.choose,
    "random": lambda indexer: lambda scores, visible: Indexer.choose(indexer, torch.rand_like(scores), visible),
    "every entry": lambda indexer: lambda scores, visible: visible,
    "window only": lambda indexer: lambda scores, visible: torch.zeros_like(visible),
}
"""Name -> what to read of a CSA layer's entries. "window only" hides those of HCA layers as well."""

MOST_PAIRS = 1 << 24
"""Pairs of tokens in one batch of rows: attention over whole rows needs memory as their square."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=KINDS["recall"].lengths, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=25, help="texts of each length, with several questions each")
    parser.add_argument("--seed", type=int, default=0, choices=EVALUATION_SEEDS, metavar="SEED")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file to write the shares to")
    arguments = parser.parse_args()
    use_banded_attention()
    model = read_model(arguments.model).to(arguments.device)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    shares = {}
    for length in track(arguments.lengths, description="evaluating"):
        rows = recall_rows(tokenizer, length, arguments.count, arguments.seed)
        shares[length] = {name: recall_share(model, rows, name) for name in SELECTIONS}
    show(shares)
    if arguments.json:
        arguments.json.write_text(json.dumps(shares, indent=1) + "\n")


def recall_rows(tokenizer: Tokenizer, length: int, count: int, seed: int) -> list[Tensor]:
    """The token ids of `count` dialogues about texts of `length` tokens, right answers included."""
    measure = token_measure(tokenizer)
    texts = [document(dialogue("recall", seed, number, length, measure)) for number in range(count)]
    return [torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


@torch.no_grad()
def recall_share(model: Reference, rows: list[Tensor], selection: str) -> float:
    """The share of all answers in `rows` that the model says, every token of them, with a selection of SELECTIONS."""
    torch.manual_seed(0)
    right: list[bool] = []
    size = max(map(len, rows))
    device = model.embed.weight.device
    padded = torch.stack([F.pad(row, (0, size - len(row)), value=EOS) for row in rows])
    with selecting(model, selection):
        for batch in padded.split(max(1, MOST_PAIRS // size**2)):
            ids = batch.to(device)
            choices = model(ids, window_only=selection == "window only").argmax(-1)
            correct = choices[:, :-1] == ids[:, 1:]
            right += [
                bool(correct[i, span].all()) for i, row in enumerate(batch.tolist()) for span in answer_spans(row)
            ]
    return sum(right) / len(right)


@contextmanager
def selecting(model: Reference, selection: str) -> Iterator[None]:
    """Let every indexer of a model choose by a selection of SELECTIONS."""
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]
    for indexer in indexers:
        indexer.choose = SELECTIONS[selection](indexer)  # hides the method
    try:
        yield
    finally:
        for indexer in indexers:
            del indexer.choose


def show(shares: dict[int, dict[str, float]]) -> None:
    table = Table("tokens", *SELECTIONS)
    for length, row in shares.items():
        table.add_row(str(length), *(f"{share:.1%}" for share in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
