"""Requests whose prompt is taken as run, for measuring what comes after it: random state, found as a prefix.

Nothing of the engine knows of it. The pools are filled with rows that are valid and random; the prefix index is told
that a prompt's pages are among them, with a snapshot behind the last one; a request with that prompt then finds them
as it would find a prefix that another request has left, and goes on from there.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leadline.cache.prefix import Node
from leadline.config import PAGE_TOKENS
from leadline.engine.engine import Engine
from leadline.kernels.packed import BLOCK_ROWS
from leadline.model.pools import Packed
from leadline.model.state import State

ROWS_AT_ONCE = 1 << 14
"""Packed rows that are drawn and rounded together."""


def fill_state(state: State, seed: int) -> None:
    """Fill every pool with rows such as tokens leave: of variance 1, rounded as the pool keeps them.

    No request may be running, and no prefix be known.
    """
    draw = torch.Generator(state.window.device).manual_seed(seed)
    for pool in (state.window, state.csa_entries, state.hca_entries, state.index_keys):
        _fill_rows(pool, draw)
    state.pending.normal_(generator=draw)
    top, total, weighted = state.folds.unbind(2)
    top.normal_(generator=draw)
    total.uniform_(1, PAGE_TOKENS, generator=draw)
    weighted.normal_(generator=draw).mul_(total.sqrt())


def _fill_rows(pool: Tensor | Packed, draw: torch.Generator) -> None:
    if isinstance(pool, Tensor):
        pool.normal_(generator=draw)
        return
    count = len(pool.whole.blocks) * BLOCK_ROWS
    for start in range(0, count, ROWS_AT_ONCE):
        rows = torch.arange(start, min(start + ROWS_AT_ONCE, count), device=pool.device)
        pool.whole.write(rows, torch.randn(len(rows), pool.whole.width, generator=draw, device=pool.device))


def pretend_prefilled(engine: Engine, prompt: NDArray[np.int32]) -> int:
    """Let the next request with `prompt` [P] find all full pages of its first P - 1 tokens; returns their tokens.

    What they hold is whatever lies in the pools. The pages are idle until such a request comes: admissions in between
    may evict them. Raises ValueError if there are too few free pages, or no slot, or prefixes are not reused.
    """
    scheduler = engine.scheduler
    pages = (len(prompt) - 1) // PAGE_TOKENS
    if not pages:
        return 0
    if not engine.config.prefix_cache:
        raise ValueError("a prompt can be taken as run only where prefixes are reused: prefix_cache is off")
    if scheduler.pages.free < pages or not scheduler.slots.free:
        raise ValueError(
            f"a prompt of {len(prompt):,} tokens needs {pages:,} pages and a slot; "
            f"free are {scheduler.pages.free:,} and {scheduler.slots.free:,}"
        )
    path: list[Node] = []
    scheduler.index.extend(path, prompt[: pages * PAGE_TOKENS], "")
    for node in path:
        page = scheduler.pages.take()
        scheduler.index.fulfil(node, page)  # holds the page for itself
        scheduler.pages.drop(page)
    scheduler.index.give_snapshot(path[-1], scheduler.slots.take())
    scheduler.index.release(path)
    return pages * PAGE_TOKENS
