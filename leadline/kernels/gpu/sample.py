"""sample on a GPU: every pass over the vocabulary is made by many programs a row, and decisions by one.

Launches, of which greedy batches need the first two: `sample_tops` finds the highest logit of each part of a row (and
the logits as penalties, bias and masks change them) and draws where there are no filters; `sample_choose` takes the
token of every row but those of which min_p or top_p keep many; the three of `sample_draw` do those. Noise and order
are those of `leadline.kernels.sample`, so a seed draws the same tokens there and here, except where the rounding of
exponentials, logarithms and quotients decides.
"""

import torch
import triton
from torch import Tensor

from leadline.kernels.gpu.sample_choose import sample_choose_kernel
from leadline.kernels.gpu.sample_draw import sample_draw_kernel, sample_pick_kernel, sample_weigh_kernel
from leadline.kernels.gpu.sample_tops import sample_tops_kernel
from leadline.kernels.sample import SamplingTensors

PART = 4096
"""Tokens of a row that one program reads."""
GROUP = 32
"""Tokens of which the highest logit is kept: 128 bytes, what a read from memory brings at least."""
FEW, CHUNK = 512, 32
"""Tokens of a list that are compared each with each, and how many with one at a time."""
BLOCK = 4096
"""Entries of a longer list that a row's program holds at once."""
LISTED = 256
"""Entries of a list (bias, drafts, masks) that are looked at together."""
SAMPLED, WAYS, ROUNDS = 4096, 8, 4
"""Tokens by which top_p's cutoff is guessed where it keeps many: each round divides its range by up to WAYS."""
HALVINGS = 16
"""Halvings of the range of scores, 28, to bound the cutoff by the groups' highest: 0.0004 is left."""
WIDE = 32
"""Entries of each part's list that a row's program holds at once."""


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """See `leadline.kernels.sample.sample`; no value on the device is waited for."""
    batch, vocab = logits.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if batch == 0:
        return tokens
    parts, settings = triton.cdiv(vocab, PART), constants(vocab)
    random = batch if how.any_random else 0  # rows of what greedy batches do not need
    groups = torch.empty(random, parts * (PART // GROUP), dtype=torch.float32, device=logits.device)
    floats = torch.empty(3 + WAYS, batch, parts, dtype=torch.float32, device=logits.device)
    tops, weights, whole, sums = floats[0], floats[1], floats[2], floats[3:]
    ids, drawn, counts = torch.empty(3, batch, parts, dtype=torch.int32, device=logits.device)
    logits = _find_tops(logits.contiguous(), how, tops, ids, weights, groups)
    steps = torch.empty(random, WAYS, dtype=torch.float32, device=logits.device)
    listed = torch.empty(random, groups.shape[1] + parts * PART, dtype=torch.int32, device=logits.device)
    noise, size = (how.seed, how.position), listed.shape[1]
    sample_choose_kernel[(batch,)](
        logits, tops, ids, weights, groups, how.temperature, how.top_k, how.top_p, how.min_p, *noise, listed, steps,
        tokens, vocab, parts, size, any_random=how.any_random, **settings["choose"], num_warps=16,
    )  # fmt: skip
    if how.any_random:
        masses = torch.empty(2, batch, parts, dtype=torch.int64, device=logits.device)
        row = (logits, tops, how.temperature, how.top_p, how.min_p)
        sample_weigh_kernel[(parts, batch)](
            *row, steps, whole, sums, vocab, parts, batch, **settings["weigh"], num_warps=4
        )  # fmt: skip
        found = (*row, *noise, steps, whole, sums, listed, counts, masses, drawn)
        sample_draw_kernel[(parts, batch)](*found, vocab, parts, batch, size, **settings["draw"], num_warps=4)
        sample_pick_kernel[(batch,)](*found, tokens, vocab, parts, batch, size, **settings["pick"], num_warps=8)
    return tokens


def constants(vocab: int) -> dict[str, dict[str, int]]:
    """The constants of each launch for rows of `vocab` logits, besides the flags."""
    padded = triton.next_power_of_2(triton.cdiv(vocab, PART))
    guess = {"sampled": SAMPLED, "ways": WAYS, "rounds": ROUNDS, "halvings": HALVINGS}
    choose = {"few": FEW, "chunk": CHUNK, "part": PART, "group": GROUP, "block": BLOCK}
    return {
        "tops": {"part": PART, "group": GROUP, "listed": LISTED},
        "choose": {"parts_padded": padded, **choose, **guess},
        "weigh": {"parts_padded": padded, "ways": WAYS, "part": PART},
        "draw": {"parts_padded": padded, "ways": WAYS, "part": PART},
        "pick": {"parts_padded": padded, "ways": WAYS, "wide": WIDE, "part": PART},
    }


def _find_tops(
    logits: Tensor, how: SamplingTensors, tops: Tensor, ids: Tensor, weights: Tensor, groups: Tensor
) -> Tensor:
    """Fill what `sample_tops_kernel` finds of each part; the logits after penalties, bias and masks."""
    batch, vocab = logits.shape
    penalties, bias, allowed = how.penalties, how.bias, how.allowed
    changed = torch.empty_like(logits) if penalties or bias or allowed else logits
    sample_tops_kernel[(triton.cdiv(vocab, PART), batch)](
        logits, changed, tops, ids, weights, groups, how.temperature, how.top_k, how.top_p, how.min_p, how.seed,
        how.position,
        *((penalties.counts.output, penalties.counts.prompt, penalties.slot, penalties.repetition, penalties.presence,
           penalties.frequency, penalties.drafted_row, penalties.drafted_token, len(penalties.drafted_row))
          if penalties else (None,) * 8 + (0,)),
        *((bias.row, bias.token, bias.value, len(bias.row)) if bias else (None,) * 3 + (0,)),
        *((allowed.row, allowed.bits, allowed.bits.stride(0), len(allowed.row)) if allowed else (None,) * 2 + (0, 0)),
        vocab,
        penalised=penalties is not None, biased=bias is not None, constrained=allowed is not None,
        any_random=how.any_random, **constants(vocab)["tops"], num_warps=4,
    )  # fmt: skip
    return changed
