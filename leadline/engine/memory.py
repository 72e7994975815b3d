"""The memory plan: from a budget in bytes to numbers of pages and slots."""

from dataclasses import dataclass

import torch

from leadline.config import PAGE_TOKENS, EngineConfig, ModelConfig
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
            ("total", f"{size.pages * PAGE_TOKENS:,} tokens of history", f"{self.total_bytes:,}"),
        ]


def plan_memory(model: ModelConfig, engine: EngineConfig, dtype: torch.dtype) -> MemoryPlan:
    """Divide `engine.state_bytes`: scratch, a slot per running request and as many for snapshots, pages of the rest.

    Fewer requests run where their slots would take more than half of it. Raises ValueError, with the numbers, if
    not even one request of one page fits.
    """
    per_page, per_slot = page_bytes(model, dtype), slot_bytes(model, dtype)
    running = engine.max_running
    scratch = scratch_bytes(model, dtype, StateSize(0, 0, engine.step_tokens, running))
    room = engine.state_bytes - scratch
    running = max(1, min(running, int(room * MOST_SLOT_SHARE) // (2 * per_slot)))
    slots = 2 * running
    longest = min(engine.max_context or model.max_position_embeddings, model.max_position_embeddings)
    pages = (room - slots * per_slot) // max(1, per_page)
    if pages < 1:
        needed = scratch + slots * per_slot + per_page
        raise ValueError(
            f"state_bytes is {engine.state_bytes:,}: scratch for {engine.step_tokens:,} tokens takes {scratch:,} bytes "
            f"and a request {2 * per_slot + per_page:,}, so at least {needed:,} are needed (a smaller step_tokens helps)"
        )
    pages = min(pages, running * pages_for(longest) + slots * 64)
    size = StateSize(pages, slots, engine.step_tokens, running)
    return MemoryPlan(size, running, min(longest, pages * PAGE_TOKENS), per_page, per_slot, scratch)
