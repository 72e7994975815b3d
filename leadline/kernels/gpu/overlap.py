"""Launches that overlap: a kernel may start while the one before it on the stream still runs (Hopper and later), and
one that leaves the memory idle asks for the weights of those behind it."""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.chips import chip_of

PIECE = tl.constexpr(4096)
"""Bytes that are asked for at once."""
MOST_AHEAD = 40 << 20
"""Bytes: an H200's L2 cache holds 50 MB."""
MOST_ROWS_AHEAD = 256
"""Beyond, products are no longer bound by how fast weights come."""


@functools.cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Options of a launch that need not wait for the end of the kernel before it; none where a chip cannot.

    A kernel launched so must call `tl.extra.cuda.gdc_wait()` before it touches anything that another kernel wrote,
    or writes anything itself, and every one of its programs must call it.
    """
    chip = chip_of(device)
    able = device.type == "cuda" and chip.backend == "cuda" and int(chip.arch) >= 90
    return {"launch_pdl": True} if able else {}


def wanted_ahead(weights: Sequence[Tensor], rows: int) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """What `read_ahead` takes before a product of `rows` rows: weights as bytes, and how many pieces of each; nothing
    where a chip cannot."""
    if not weights or rows > MOST_ROWS_AHEAD or not early_start(weights[0].device):
        return (), ()
    room, tensors, pieces = MOST_AHEAD // PIECE.value, [], []
    for weight in weights:
        if weight.is_contiguous() and weight.data_ptr() % 16 == 0:
            tensors.append(weight.view(torch.uint8))
            pieces.append(min(weight.nbytes // PIECE.value, room))
            room -= pieces[-1]
    return tuple(tensors), tuple(pieces)


@triton.jit
def read_ahead(p_weights, pieces, i_program, programs, threads: tl.constexpr):
    """Let this program, of `programs` with `threads` each, fetch its share of the first pieces of each weight into L2.

    Nobody waits for it. A kernel calls it behind `gdc_wait`, or its weights might push out those that the kernel
    before it still reads.
    """
    for i_weight in tl.static_range(len(p_weights)):
        p_weight = p_weights[i_weight].to(tl.uint64)
        for first in range(i_program * threads, pieces[i_weight], programs * threads):
            o_piece = tl.minimum(first + tl.arange(0, threads), pieces[i_weight] - 1)
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], 4096; mov.b32 $0, 0;",
                "=r,l",
                [p_weight + o_piece.to(tl.uint64) * PIECE],
                tl.int32,
                False,
                1,
            )
