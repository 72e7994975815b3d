"""Sampled tokens stay on the device: a step reads those that the host does not know yet, and leaves its own."""

import torch
from torch import Tensor

from leadline.model.batch import Batch


def chosen_ids(batch: Batch, last_tokens: Tensor) -> Tensor:
    """The step's token ids [T]: those of `batch`, and where they are -1 what `last_tokens` [slots] holds for the slot.

    -1 again in rows that are padding (position -1). All are int64.
    """
    if batch.ids.is_cuda:
        from leadline.kernels.gpu.step_tokens import take_tokens

        return take_tokens(batch.ids, batch.positions, batch.chunks, batch.slots, last_tokens)
    known = torch.where(batch.ids < 0, last_tokens[batch.slots[batch.chunks]], batch.ids)
    return torch.where(batch.positions < 0, -1, known)


def keep_tokens(batch: Batch, tokens: Tensor, last_tokens: Tensor) -> None:
    """Put the sampled `tokens` [T] of a step whose chunks are single tokens into `last_tokens` [slots], both int64.

    Rows that are padding leave nothing.
    """
    if tokens.is_cuda:
        from leadline.kernels.gpu.step_tokens import leave_tokens

        leave_tokens(tokens, batch.positions, batch.slots, last_tokens)
        return
    real = batch.positions >= 0
    last_tokens[batch.slots[real]] = tokens[real]
