"""The memory plan: from bytes to numbers of pages and slots, and to how much one step may hold.

On a CPU the state has a budget, and steps take what they take. On a GPU everything has to fit into what the weights
leave: the state, what a step makes on its way, decode graphs, and a reserve for libraries and the driver.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.table import Table

from leadline.config import CSA_RATIO, PAGE_TOKENS, EngineConfig, ModelConfig
from leadline.engine.graphs import PAGE_CLASSES, row_classes
from leadline.engine.runner import LOGPROB_ROWS
from leadline.engine.scheduler import SCORED_TOKENS
from leadline.kernels.select import TOKENS_PER_TILE
from leadline.model.rows import EXPANDED_ROWS
from leadline.model.state import StateSize, page_bytes, pages_for, scratch_bytes, slot_bytes

MOST_SLOT_SHARE = 0.5
CPU_STATE_BYTES = 1 << 30
FEWEST_TOKENS = 256
"""A step on a GPU is not made smaller than this unless it is asked for."""
STEP_SHARE = 0.25
"""A step's scratch and results take at most this share of what the weights have left, or the step gets smaller."""
SLACK = 0.25
"""What the allocator loses on the pieces of a step's results, as a share of them."""
RESERVE_BYTES = 768 << 20
"""For libraries' workspaces, compiled kernels and whatever else takes memory without asking PyTorch."""
GRAPH_BYTES = 4 << 20
"""What the driver keeps of one graph, an estimate: about a thousand launches."""
SCORED_ON_GPU = 1 << 25
"""Index scores that `leadline.kernels.gpu.select` makes at a time, if there are as many."""
LOGPROB_BYTES = 36
"""Bytes per logit while log-probabilities are made, most of them for the order of equal logits."""


@dataclass(frozen=True)
class StepLimits:
    """The most requests that run, the most tokens of a step, and the most of one prompt in it."""

    running: int
    step_tokens: int
    chunk_tokens: int


ON_CPU = StepLimits(64, 2048, 512)
ON_GPU = StepLimits(256, 8192, 8192)


@dataclass(frozen=True)
class MemoryPlan:
    """What memory is spent on, and what follows for a step."""

    size: StateSize
    running: int
    chunk_tokens: int
    max_context: int
    page_bytes: int
    slot_bytes: int
    scratch_bytes: int
    step_bytes: int
    """What a step's intermediate results may take beside the state, at most (an estimate)."""
    other_bytes: int = 0
    """On a GPU: decode graphs, penalties' counts, and what is left for libraries and the driver (an estimate)."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all pools together."""
        return self.size.pages * self.page_bytes + self.size.slots * self.slot_bytes + self.scratch_bytes

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, how many, bytes) lines that a person can check."""
        size = self.size
        rows = [
            ("history pages", f"{size.pages:,} x {self.page_bytes:,} B", f"{size.pages * self.page_bytes:,}"),
            ("frontier slots", f"{size.slots:,} x {self.slot_bytes:,} B", f"{size.slots * self.slot_bytes:,}"),
            ("step scratch", f"{size.step_tokens:,} tokens", f"{self.scratch_bytes:,}"),
            ("together", f"{size.pages * PAGE_TOKENS:,} tokens of history", f"{self.total_bytes:,}"),
            ("beside them, a step", f"up to {self.max_context:,} tokens of context", f"{self.step_bytes:,}"),
        ]
        if self.other_bytes:
            rows.append(("graphs and reserve", f"{self.running:,} requests at once", f"{self.other_bytes:,}"))
        return rows


def memory_table(plan: MemoryPlan) -> Table:
    """The plan as a table for the terminal; bytes in the last column."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for what, count, size in plan.rows():
        table.add_row(what, count, f"{size} B")
    return table


def plan_memory(
    model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, packed: bool = False, free: int | None = None
) -> MemoryPlan:
    """The plan for a CPU or, where `free` says how many bytes the weights leave, for a GPU.

    `packed` says that rows are kept packed (see `leadline.model.state`). Settings that are None follow from the device
    and, on a GPU, from `free`: steps, and with them what runs at once, are halved until they take a modest share, and
    the state gets all that is left. Fewer requests run where their slots would take more than half of the state.
    Raises ValueError, with the numbers and what to lower, if not even one request of one page fits, or if what was
    asked for does not.
    """
    if free is None:
        budget = CPU_STATE_BYTES if engine.state_bytes is None else engine.state_bytes
        return _divide(model, engine, dtype, packed, step_limits(engine, ON_CPU), budget, on_gpu=False)
    limits = next(each for each in _smaller(engine) if _modest(model, engine, dtype, packed, each, free))
    longest = _longest(model, engine, dtype, packed, free)
    size = StateSize(0, 0, limits.step_tokens, limits.running)
    beside = step_bytes(model, size, longest, dtype, True) + other_bytes(model, size, longest)
    if engine.state_bytes is None and free <= beside:
        raise ValueError(
            f"the weights leave {free:,} bytes of the GPU free; a step of {limits.step_tokens:,} tokens, decode graphs "
            f"and a reserve need {beside:,} beside the state: lower step_tokens, max_running or max_context"
        )
    budget = free - beside if engine.state_bytes is None else engine.state_bytes
    plan = _divide(model, engine, dtype, packed, limits, budget, on_gpu=True)
    needed = plan.total_bytes + plan.step_bytes + plan.other_bytes
    if needed > free:
        raise ValueError(
            f"state_bytes is {budget:,}: with it the GPU needs {needed:,} bytes beside the weights, which leave "
            f"{free:,} free; lower state_bytes to {max(0, budget - (needed - free)):,}, or step_tokens "
            f"({limits.step_tokens:,}) or max_running ({limits.running:,})"
        )
    return plan


def step_limits(engine: EngineConfig, default: StepLimits) -> StepLimits:
    """The settings, with defaults that fit those that are given."""
    running = engine.max_running or min(default.running, engine.step_tokens or default.running)
    step = engine.step_tokens or max(default.step_tokens, running)
    return StepLimits(running, step, engine.chunk_tokens or min(default.chunk_tokens, step))


def _smaller(engine: EngineConfig) -> Iterator[StepLimits]:
    """What a step on a GPU may hold, in falling order; one choice where it is given."""
    tokens = ON_GPU.step_tokens
    while tokens >= FEWEST_TOKENS:
        running = ON_GPU.running * tokens // ON_GPU.step_tokens
        yield step_limits(engine, StepLimits(running, tokens, tokens))
        tokens = tokens // 2 if engine.step_tokens is None else 0


def _modest(
    model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, packed: bool, limits: StepLimits, free: int
) -> bool:
    """Whether such a step leaves enough for the state, or cannot be smaller."""
    least = engine.max_running or FEWEST_TOKENS
    if engine.step_tokens is not None or limits.step_tokens <= max(FEWEST_TOKENS, least):
        return True
    size = StateSize(0, 0, limits.step_tokens, limits.running)
    scratch = scratch_bytes(model, dtype, size, packed)
    beside = step_bytes(model, size, _longest(model, engine, dtype, packed, free), dtype, True)
    room = free if engine.state_bytes is None else engine.state_bytes
    return scratch + beside <= STEP_SHARE * free and scratch <= STEP_SHARE * room


def _longest(model: ModelConfig, engine: EngineConfig, dtype: torch.dtype, packed: bool, room: int) -> int:
    """The most tokens of a request for which there could be pages in `room` bytes, and the model has positions."""
    pages = max(1, room // max(1, page_bytes(model, dtype, packed)))
    return min(engine.max_context or model.max_position_embeddings, model.max_position_embeddings, pages * PAGE_TOKENS)


def _divide(
    model: ModelConfig,
    engine: EngineConfig,
    dtype: torch.dtype,
    packed: bool,
    limits: StepLimits,
    budget: int,
    on_gpu: bool,
) -> MemoryPlan:
    """Divide `budget`: scratch, a slot per running request and as many for snapshots, pages of the rest."""
    per_page, per_slot = page_bytes(model, dtype, packed), slot_bytes(model, dtype, packed)
    scratch = scratch_bytes(model, dtype, StateSize(0, 0, limits.step_tokens, limits.running), packed)
    room = budget - scratch
    running = max(1, min(limits.running, int(room * MOST_SLOT_SHARE) // (2 * per_slot)))
    slots = 2 * running
    longest = min(engine.max_context or model.max_position_embeddings, model.max_position_embeddings)
    pages = (room - slots * per_slot) // max(1, per_page)
    if pages < 1:
        needed = scratch + slots * per_slot + per_page
        what = "state_bytes is" if engine.state_bytes is not None or not on_gpu else "what is left for the state is"
        raise ValueError(
            f"{what} {budget:,}: scratch for {limits.step_tokens:,} tokens takes {scratch:,}, "
            f"a request {2 * per_slot + per_page:,}; at least {needed:,} are needed (a smaller step_tokens helps)"
        )
    pages = min(pages, running * pages_for(longest) + slots * 64)
    size = StateSize(pages, slots, limits.step_tokens, running)
    context = min(longest, pages * PAGE_TOKENS)
    return MemoryPlan(
        size,
        running,
        limits.chunk_tokens,
        context,
        per_page,
        per_slot,
        scratch_bytes(model, dtype, size, packed),
        step_bytes(model, size, context, dtype, on_gpu),
        other_bytes(model, size, context) if on_gpu else 0,
    )


def step_bytes(model: ModelConfig, size: StateSize, context: int, dtype: torch.dtype, on_gpu: bool) -> int:
    """Bytes of intermediate results of the largest step while most of them live: in attention or in the experts.

    In both, streams and the sublayers' input and output are there twice, before and after the last mix. Attention has
    queries and heads, then heads, what the output's first factor makes of them, and its rounded input; each token lists
    window rows, pages, HCA entries and chosen entries (twice). Experts have hidden rows and outputs of each pair, and
    two sums in fp32. Behind the layers there are logits, with a copy, of `size.step_chunks` rows and of prompt tokens
    to be scored. A GPU expands the largest fp8 matrix to bf16, and the packed rows that a prompt's attention reads, and
    its allocator loses some memory between the pieces.
    """
    m, pages = model, pages_for(context)
    held = 2 * m.hc_mult * m.hidden_size + 3 * m.hidden_size
    heads = m.num_attention_heads * m.head_dim
    attention = heads + max(heads, m.o_groups * m.o_lora_rank + 2 * m.hidden_size) + m.q_lora_rank + m.head_dim
    experts = m.num_experts_per_tok * (m.hidden_size + m.moe_intermediate_size)
    listed = 8 * (m.sliding_window + pages + 2 * (m.index_topk if m.csa_layers else 0))
    listed += (4 if on_gpu else 8) * pages
    per_token = dtype.itemsize * (held + max(attention, experts)) + 8 * m.hidden_size + listed
    logits = m.vocab_size * ((size.step_chunks + SCORED_TOKENS) * (4 + 4) + LOGPROB_ROWS * LOGPROB_BYTES)
    total = size.step_tokens * per_token + logits + _score_bytes(model, size, context, on_gpu)
    if not on_gpu:
        return total
    expanded = 2 * heads * max(m.q_lora_rank, m.o_lora_rank)
    expanded += 2 * m.head_dim * size.step_tokens * (1 + EXPANDED_ROWS)
    return int((total + expanded) * (1 + SLACK))


def _score_bytes(model: ModelConfig, size: StateSize, context: int, on_gpu: bool) -> int:
    """Index scores of as many tokens as are scored at a time: score, order and two copies of each entry on a CPU; on
    a GPU the score, the largest of each few, and the candidates.
    """
    entries = context // CSA_RATIO if model.csa_layers else 0
    if on_gpu:
        return min(size.step_tokens * entries, SCORED_ON_GPU) * (4 + 1 + 4)
    return TOKENS_PER_TILE * entries * (4 + 8 + 8)


def other_bytes(model: ModelConfig, size: StateSize, context: int) -> int:
    """Bytes on a GPU that belong to no step: decode graphs, penalties' counts, and the reserve.

    All graphs share the results of the largest of them, streams, queries and partial sums in fp32 and sampling's lists
    at most, and a row of logits a request; each is also something that the driver keeps. Each size has two graphs,
    for tokens that are drawn and for the most probable ones.
    """
    rows = size.step_chunks
    lengths = 1 + sum(pages < pages_for(context) for pages in PAGE_CLASSES)
    m, pages = model, pages_for(context)
    wide = 3 * m.hc_mult * m.hidden_size + 3 * m.num_attention_heads * m.head_dim
    results = rows * (4 * (wide + m.vocab_size) + 16 * pages) + _score_bytes(model, size, context, True)
    graphs = 2 * len(row_classes(rows)) * lengths * GRAPH_BYTES + rows * model.vocab_size * 4 + results
    return graphs + rows * model.vocab_size * 5 + RESERVE_BYTES
