"""The memory plan: from a budget in bytes to numbers of pages and slots."""

from dataclasses import dataclass

import torch
from rich.table import Table

from leadline.config import CSA_RATIO, PAGE_TOKENS, EngineConfig, ModelConfig
from leadline.kernels.select import TOKENS_PER_TILE
from leadline.model.state import StateSize, page_bytes, pages_for, scratch_bytes, slot_bytes

MOST_SLOT_SHARE = 0.5


@dataclass(frozen=True)
class MemoryPlan:
    """What the state's memory is spent on."""

    size: StateSize
    running: int
    max_context: int
    page_bytes: int
    slot_bytes: int
    scratch_bytes: int
    step_bytes: int
    """What a step's intermediate results may take beside the state, at most (an estimate)."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together."""
        return self.size.pages * self.page_bytes + self.size.slots * self.slot_bytes + self.scratch_bytes

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, how many, bytes) lines that a person can check."""
        size = self.size
        return [
            ("history pages", f"{size.pages:,} x {self.page_bytes:,} B", f"{size.pages * self.page_bytes:,}"),
            ("frontier slots", f"{size.slots:,} x {self.slot_bytes:,} B", f"{size.slots * self.slot_bytes:,}"),
            ("step scratch", f"{size.step_tokens:,} tokens", f"{self.scratch_bytes:,}"),
            ("together", f"{size.pages * PAGE_TOKENS:,} tokens of history", f"{self.total_bytes:,}"),
            ("beside them, a step", f"up to {self.max_context:,} tokens of context", f"{self.step_bytes:,}"),
        ]


def memory_table(plan: MemoryPlan) -> Table:
    """The plan as a table for the terminal; bytes in the last column."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for what, count, size in plan.rows():
        table.add_row(what, count, f"{size} B")
    return table


def plan_memory(model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, packed: bool = False) -> MemoryPlan:
    """Divide `engine.state_bytes`: scratch, a slot per running request and as many for snapshots, pages of the rest.

    `packed` says that rows are kept packed (see `leadline.model.state`).
    Fewer requests run where their slots would take more than half of it. Raises ValueError, with the numbers, if
    not even one request of one page fits.
    """
    per_page, per_slot = page_bytes(model, dtype, packed), slot_bytes(model, dtype, packed)
    running = engine.max_running
    scratch = scratch_bytes(model, dtype, StateSize(0, 0, engine.step_tokens, running), packed)
    room = engine.state_bytes - scratch
    running = max(1, min(running, int(room * MOST_SLOT_SHARE) // (2 * per_slot)))
    slots = 2 * running
    longest = min(engine.max_context or model.max_position_embeddings, model.max_position_embeddings)
    pages = (room - slots * per_slot) // max(1, per_page)
    if pages < 1:
        needed = scratch + slots * per_slot + per_page
        raise ValueError(
            f"state_bytes is {engine.state_bytes:,}: scratch for {engine.step_tokens:,} tokens takes {scratch:,}, "
            f"a request {2 * per_slot + per_page:,}; at least {needed:,} are needed (a smaller step_tokens helps)"
        )
    pages = min(pages, running * pages_for(longest) + slots * 64)
    size = StateSize(pages, slots, engine.step_tokens, running)
    context = min(longest, pages * PAGE_TOKENS)
    scratch = scratch_bytes(model, dtype, size, packed)
    return MemoryPlan(size, running, context, per_page, per_slot, scratch, step_bytes(model, size, context))


def step_bytes(model: ModelConfig, size: StateSize, context: int) -> int:
    """Bytes of intermediate results of the largest step, in fp32: streams, queries, expert rows, logits, scores.

    Index scores are made for `select.TOKENS_PER_TILE` tokens at a time: score, order and two copies of each entry.
    """
    m = model
    streams = 4 * m.hc_mult * m.hidden_size
    queries = 4 * m.num_attention_heads * m.head_dim
    experts = m.num_experts_per_tok * (2 * m.hidden_size + 3 * m.moe_intermediate_size)
    logits = size.step_chunks * m.vocab_size * 4
    scores = TOKENS_PER_TILE * (context // CSA_RATIO) * (4 + 8 + 8) if m.csa_layers else 0
    return size.step_tokens * (streams + queries + experts) * 4 + logits * 4 + scores
