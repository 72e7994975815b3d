"""Rows of several pools copied in all layers, in one launch: what a decode step leaves in frontier slots."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from leadline.kernels.gpu.overlap import early_start

WORDS = 256
"""Words that a program moves at a time."""


@triton.jit
def _copy_row(p_pool, layer, i_pair, p_source, p_target, strides, per_block: tl.constexpr, words: tl.constexpr, block):
    """Copy one row within a layer; `strides` are those of layers, blocks and rows."""
    source, target = tl.load(p_source + i_pair), tl.load(p_target + i_pair)
    if target >= 0:
        p_layer = p_pool + layer.to(tl.int64) * strides[0]
        p_from = p_layer + source // per_block * strides[1] + source % per_block * strides[2]
        p_to = p_layer + target // per_block * strides[1] + target % per_block * strides[2]
        for begin in range(0, words, block):
            o_word = begin + tl.arange(0, block)
            tl.store(p_to + o_word, tl.load(p_from + o_word, o_word < words), o_word < words)


@triton.jit
def commit_kernel(
    p_pools,
    p_sources,
    p_targets,
    strides,
    layers: tl.constexpr,
    per_block: tl.constexpr,
    words: tl.constexpr,
    block: tl.constexpr,
    overlap: tl.constexpr,
):
    """Program (i, j) copies pair i of the list that belongs to layer j, counted through all parts."""
    if overlap:
        tl.extra.cuda.gdc_wait()
    i_pair, layer = tl.program_id(0), tl.program_id(1)
    for part in tl.static_range(len(layers)):
        if layer >= 0 and layer < layers[part]:
            _copy_row(
                p_pools[part],
                layer,
                i_pair,
                p_sources[part],
                p_targets[part],
                strides[part],
                per_block[part],
                words[part],
                block,
            )
        layer -= layers[part]


def commit_rows(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
    """For each (pool [layers, blocks, rows of a block, words], source [n], target [n]): copy rows, numbered through
    all blocks, in every layer; nothing where the target is -1.

    All lists are int64 and of one length; no source may be a target. Words are integers next to one another.
    """
    pairs = len(parts[0][1])
    assert all(len(rows) == pairs for _, *lists in parts for rows in lists)
    parts = [part for part in parts if len(part[0])]
    if not pairs or not parts:
        return
    pools, sources, targets = (tuple(each) for each in zip(*parts, strict=True))
    shape: dict[str, Any] = {
        "layers": tuple(len(pool) for pool in pools),
        "per_block": tuple(pool.shape[2] for pool in pools),
        "words": tuple(pool.shape[3] for pool in pools),
    }
    overlap = early_start(pools[0].device)
    commit_kernel[(pairs, sum(shape["layers"]))](
        pools,
        sources,
        targets,
        tuple(pool.stride()[:3] for pool in pools),
        **shape,
        block=WORDS,
        overlap=bool(overlap),
        num_warps=2,
        **overlap,
    )
