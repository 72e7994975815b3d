"""The tiny model's data on a device, and what is measured on its held-out part."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.reference import Reference

EOS, ANSWER = 1, 6
"""Token ids that end an answer and that come before one (`</think>`)."""
LONGEST_ANSWER = 24
"""Longer answers are stories, of which no single text is right."""

ALONE_FROM = 2048
"""Long documents are lists, and two lists in a row may give one key two values."""

BATCH = 32
"""Rows measured at once."""


class Data:
    """`data.npz` as written by `tiny_data.py`, with the training parts on `device`."""

    def __init__(self, path: Path, device: str) -> None:
        arrays = np.load(path)
        self.device = device
        self.held_out = {
            part.removeprefix("held_out_"): (arrays[part].astype(np.int64), arrays[f"{part}_starts"])
            for part in arrays.files
            if part.startswith("held_out_") and not part.endswith(("_starts", "_answers"))
        }
        names = [n for n in arrays.files if n.startswith("train_") and not n.endswith(("_starts", "_answers"))]
        self.train = {
            int(name.removeprefix("train_")): (
                torch.from_numpy(arrays[name].astype(np.int16)).to(device),
                torch.from_numpy(arrays[f"{name}_starts"]).to(device),
                torch.from_numpy(np.append(arrays[f"{name}_starts"][1:], len(arrays[name]))).to(device),
                torch.from_numpy(arrays[f"{name}_answers"]).to(device),
            )
            for name in names
            if len(arrays[name])
        }
        """The longest document of a part in tokens -> its tokens, where rows may begin and documents end, and what is
        answer."""

    def rows(self, count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """`count` training rows [count, length], each BOS (id 0) and what follows a start drawn at random.

        They come from the part with the longest documents that fit into a row. Returns the token ids, which of them
        belong to answers, and which count at all: of rows of `ALONE_FROM` tokens or more the first document alone.
        The device is not waited for.
        """
        tokens, starts, ends, answers = self.train[max((s for s in self.train if s <= length), default=min(self.train))]
        drawn = torch.randint(len(starts), (count, 1), device=self.device)
        places = starts[drawn] + torch.arange(length, device=self.device)
        counted = places < ends[drawn] if length >= ALONE_FROM else torch.ones_like(places, dtype=torch.bool)
        places = places % len(tokens)  # what follows the last token is the first
        rows = tokens[places].long()
        rows[:, 0] = 0
        return rows, answers[places].bool(), counted

    def held_out_rows(self, kind: str, length: int, most: int) -> list[Tensor]:
        """Up to `most` held-out rows of at most `length` tokens: one a document, or one a stretch of a book."""
        tokens, starts = self.held_out[kind]
        rows: list[Tensor] = []
        end = 0
        for i, start in enumerate(starts.tolist()):
            if start < end or len(rows) == most:
                continue
            next_start = starts[i + 1] if i + 1 < len(starts) else len(tokens)
            end = min(start + length, len(tokens) if kind == "book" else next_start)
            row = torch.from_numpy(tokens[start:end].copy())
            row[0] = 0
            rows.append(row)
        return rows


@torch.no_grad()
def evaluate(
    model: Reference, data: Data, window_only: bool = False, length: int = 1024, most: int = 200
) -> dict[str, dict[str, float]]:
    """Per kind of held-out document: `loss` in nats a token, the share of short `answers` that are right in every
    token given the tokens before, and how often the MTP block's `draft` is the main model's own greedy choice.
    """
    return {
        kind: _evaluate_rows(model, data.held_out_rows(kind, length, most), data.device, window_only)
        for kind in data.held_out
    }


def _evaluate_rows(model: Reference, rows: list[Tensor], device: str, window_only: bool) -> dict[str, float]:
    size = max(len(row) for row in rows)
    loss = tokens = right = answers = agreed = drafts = 0.0
    for batch in (rows[i : i + BATCH] for i in range(0, len(rows), BATCH)):
        ids = torch.stack([F.pad(row, (0, size - len(row)), value=EOS) for row in batch]).to(device)
        streams = model.streams(ids, window_only)
        logits = model.logits(model, streams)
        choices = logits.argmax(-1)
        drafted = model.draft_logits(streams[:, :-1], ids[:, 1:]).argmax(-1)
        for i, row in enumerate(batch):
            end = len(row) - 1
            row = row.to(device)
            loss += F.cross_entropy(logits[i, :end], row[1:], reduction="sum").item()
            tokens += end
            agreed += (drafted[i, : end - 1] == choices[i, 1:end]).sum().item()
            drafts += end - 1
            correct = (choices[i, :end] == row[1:]).tolist()
            for span in answer_spans(row.tolist()):
                answers += 1
                right += all(correct[span])
    figures = {"loss": loss / tokens, "draft": agreed / drafts}
    return figures | ({"answers": right / answers} if answers else {})


def answer_spans(row: list[int]) -> list[slice]:
    """Positions that predict the tokens of each short answer, its EOS included."""
    spans = []
    for start in (i for i, token in enumerate(row) if token == ANSWER):
        end = next((i for i in range(start, len(row)) if row[i] == EOS), None)
        if end is not None and end - start <= LONGEST_ANSWER:
            spans.append(slice(start, end))
    return spans
