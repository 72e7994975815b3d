"""The scheduler: which tokens of which requests the next step computes, and who holds pages and slots for it.

Decode tokens come first, one per running request; prompts share what is left of the token budget in chunks, oldest
first. A request waits until its grammar is compiled, and lets newer ones by. Pages are reserved in the order of age, so
that the oldest request always gets on: it may preempt the newest. A preempted request gives everything up. Its pages
and snapshots stay in the prefix index while there is room, and it comes back through the same admission as a new
request, finding what is still there.
"""

import bisect
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leadline.cache.pages import Pool
from leadline.cache.prefix import Match, Node, PrefixIndex
from leadline.config import PAGE_TOKENS
from leadline.engine.grammar import Matcher
from leadline.engine.plan import Chunk, FrontierWrite, Preparation
from leadline.engine.request import Request
from leadline.model.state import pages_for

SCORED_TOKENS = 512
"""The most tokens of prompts in a step whose log-probabilities are wanted: each takes a row of logits."""


@dataclass(frozen=True)
class Limits:
    """What one step may hold, and how many requests run and wait."""

    running: int
    waiting: int
    step_tokens: int
    chunk_tokens: int
    snapshot_stride: int


@dataclass(slots=True)
class Item(Chunk):
    """One chunk of a step, whose it is, and whether a token is sampled after it."""

    request: Request
    samples: bool
    life: int
    """`request.preemptions` at the time: results of an earlier life only bring a token."""
    forks: list[Request] = field(default_factory=list)
    """Other choices that sample from the same logits and go on from the same state."""

    @property
    def end(self) -> int:
        """Tokens of the request that are computed after the step."""
        return self.start + self.count


@dataclass(slots=True)
class PlannedSnapshot:
    """A snapshot that the step writes into `slot`, for the node that ends at token `position` of `request`."""

    request: Request
    life: int
    position: int
    slot: int
    trailing: bool


@dataclass
class Step:
    """What the scheduler decided; `items` are never empty."""

    items: list[Item]
    snapshots: list[PlannedSnapshot]
    writes: list[FrontierWrite]
    preparation: Preparation
    scored: int = 0
    """Tokens of prompts whose log-probabilities are wanted."""


class QueueFull(RuntimeError):
    """Too many requests wait already; the message says how many are allowed."""


class Scheduler:
    """Waiting and running requests, and the pools they draw on."""

    def __init__(self, limits: Limits, pages: Pool, slots: Pool, columns: int) -> None:
        """`columns`: pages that the longest request may have."""
        self.limits, self.pages, self.slots = limits, pages, slots
        self.index = PrefixIndex(pages, slots)
        self.page_table: NDArray[np.int32] = np.full((slots.size, columns), -1, np.int32)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.compiling: list[Matcher] = []
        """Those of the waiting requests that the last `schedule` passed over, since their grammars were not ready."""
        self.preemptions = 0
        self.tokens_run = 0
        self.tokens_reused = 0
        self._forked_pages: list[tuple[int, int]] = []

    # ------------------------------------------------------------------------------------------- requests

    def add(self, requests: list[Request]) -> None:
        """Queue the choices of one prompt. Raises ValueError if they can never fit, QueueFull if the queue is full."""
        request = requests[0]
        most = pages_for(request.last_position)
        if most > self.pages.size:
            raise ValueError(
                f"the request may reach {request.last_position} tokens ({request.prompt_length} of prompt), which need "
                f"{most} pages of {PAGE_TOKENS}; the engine has {self.pages.size}"
            )
        if len(self.waiting) + len(requests) > self.limits.waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting; at most {self.limits.waiting} may")
        for request in requests:
            self._enqueue(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in whatever state it is; what it held is free at once, since steps run in order."""
        request.finish_reason = reason
        for follower in request.followers:
            follower.leader = None
        if request.leader is not None:
            request.leader.followers.remove(request)
        if request.slot >= 0:
            self.running.remove(request)
            self._give_up(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _enqueue(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_order)

    def _give_up(self, request: Request) -> None:
        """Drop the slot, the pages and the path of a running request."""
        self.slots.drop(request.slot)
        for page in request.pages:
            self.pages.drop(page)
        self.index.release(request.path)
        request.slot, request.pages, request.path = -1, [], []
        request.computed, request.fulfilled, request.trailing = 0, 0, None

    # ----------------------------------------------------------------------------------------------- step

    def schedule(self) -> Step | None:
        """Decide the next step, or None if no request can go on now."""
        step = Step([], [], [], Preparation([], [], self._forked_pages))
        self._forked_pages = []
        ready = [
            (request, remaining)
            for request in self.running
            if (remaining := request.remaining) > (request.complete and request.output_length > 0)
            and not (request.in_flight and request.sequential)
        ]
        budget = self.limits.step_tokens - sum(remaining == 1 for _, remaining in ready)
        for request, remaining in ready:
            if request.slot < 0:  # preempted for an older one just now
                continue
            count = 1 if remaining == 1 else self._chunk(step, request, budget)
            end = request.computed + count
            if count and (end <= len(request.pages) * PAGE_TOKENS or self._reserve(step, request, end)):
                budget -= count if remaining > 1 else 0
                self._plan(step, request, count)
        self._admit(step, budget)
        if not step.items:
            self._forked_pages = step.preparation.page_copies
            return None
        return step

    def _chunk(self, step: Step, request: Request, budget: int) -> int:
        """The most tokens of `request` that the step has room for."""
        count = min(request.remaining, budget, self.limits.chunk_tokens)
        return count if request.params.prompt_logprobs is None else max(0, min(count, SCORED_TOKENS - step.scored))

    def _reserve(self, step: Step, request: Request, tokens: int) -> bool:
        """Give the request pages for `tokens` tokens, preempting newer ones that are not in the step yet if need be."""
        while len(request.pages) < pages_for(tokens):
            if self._add_page(step, request):
                continue
            taken = {id(other) for item in step.items for other in (item.request, *item.forks)}
            newer = reversed(self.running[self.running.index(request) + 1 :])
            victim = next((other for other in newer if id(other) not in taken), None)
            if victim is not None:
                self._preempt(victim)
            elif request is self.running[0] and request.shares:
                self._stop_sharing(request)
            else:
                return False
        return True

    def _stop_sharing(self, request: Request) -> None:
        """The oldest request must get on: let go of prefixes that it keeps from eviction but does not read itself."""
        self.index.release(request.path)
        self.index.forget_pages(request.path, set(request.pages))
        request.path, request.trailing, request.shares = [], None, False

    def _add_page(self, step: Step, request: Request) -> bool:
        if self.pages.free == 0 and not self.index.evict_page():
            return False
        self._set_page(step, request, self.pages.take())
        return True

    def _set_page(self, step: Step, request: Request, page: int) -> None:
        column = len(request.pages)
        request.pages.append(page)
        self.page_table[request.slot, column] = page
        step.preparation.table.append((request.slot, column, page))

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._give_up(request)
        request.preemptions += 1
        self.preemptions += 1
        self._enqueue(request)

    def _plan(self, step: Step, request: Request, count: int) -> None:
        """Put the next `count` tokens of a running request, whose pages are reserved, into the step."""
        start, end = request.computed, request.computed + count
        samples = end == request.known + request.in_flight and not request.complete
        item = Item(request.slot, start, count, request, samples, request.preemptions)
        step.items.append(item)
        request.computed = end
        self.tokens_run += count
        if request.params.prompt_logprobs is not None and start < request.prompt_length:
            step.scored += count
        if request.shares and end // PAGE_TOKENS > start // PAGE_TOKENS:
            self._plan_snapshots(step, request, start, end)
        if samples:
            if request.followers:
                self._fork(step, item)
            request.in_flight += 1

    def _plan_snapshots(self, step: Step, request: Request, start: int, end: int) -> None:
        """Snapshots at the page boundaries that the chunk crosses: where the prompt ends, where others wait, at a
        stride, and behind the output so far."""
        prompt = request.prompt_length
        ends = {prompt // PAGE_TOKENS, (prompt - 1) // PAGE_TOKENS}
        stride = self.limits.snapshot_stride // PAGE_TOKENS
        for depth in range(start // PAGE_TOKENS + 1, end // PAGE_TOKENS + 1):
            if depth > len(request.path):
                self._plan_snapshot(step, request, depth, trailing=True)
                continue
            node = request.path[depth - 1]
            if node.snapshot < 0 and (node.wanted or depth in ends or depth % stride == 0):
                self._plan_snapshot(step, request, depth, trailing=False)

    def _plan_snapshot(self, step: Step, request: Request, depth: int, trailing: bool) -> None:
        slot = -1
        if trailing and request.trailing is not None:
            slot = self.index.take_snapshot(request.trailing)
        if slot < 0:
            slot = self._take_slot()
        if slot >= 0:
            position = depth * PAGE_TOKENS
            step.writes.append(FrontierWrite(len(step.items) - 1, position, slot))
            step.snapshots.append(PlannedSnapshot(request, request.preemptions, position, slot, trailing))

    def _take_slot(self, keep: Node | None = None) -> int:
        """A slot, if need be that of the least recently used snapshot other than `keep`'s; -1 if there is none."""
        if self.slots.free == 0 and not self.index.evict_snapshot(keep):
            return -1
        return self.slots.take()

    # ------------------------------------------------------------------------------------------ admission

    def _admit(self, step: Step, budget: int) -> None:
        """Start waiting requests in order while there is room.

        One that waits for another's pages, or for its turn to have its prompt scored, lets others by.
        """
        for request in self._next():
            if budget <= 0 or len(self.running) >= self.limits.running:
                return
            if request.in_flight or request.leader is not None:
                continue
            tokens = request.tokens[: request.known]
            match = self.index.match(tokens, request.salt) if request.reuse else None
            if match is not None and len(match.path) > match.reusable:
                match.path[-1].wanted = True  # prompts part here: whoever passes next leaves a snapshot
            if match is not None and match.promised:
                continue
            if request.params.prompt_logprobs is not None and step.scored >= SCORED_TOKENS:
                continue
            if not self._start(step, request, match or Match([], 0)):
                return
            count = self._chunk(step, request, budget)
            while len(request.pages) < pages_for(request.computed + count):
                added = self._add_page(step, request)
                assert added, "admission counted the pages before"
            self._plan(step, request, count)
            budget -= count

    def _next(self) -> list[Request]:
        """The waiting requests to start next: as many as may run, past those whose grammars are not ready."""
        found: list[Request] = []
        self.compiling = []
        for request in self.waiting:
            if len(found) == self.limits.running:
                break
            if request.matcher is None or request.matcher.ready:
                found.append(request)
            else:
                self.compiling.append(request.matcher)
        return found

    def _start(self, step: Step, request: Request, match: Match) -> bool:
        """Make `request` run from the last snapshot of `match`; False if there is no room for its tokens."""
        request.shares = request.reuse
        idle = sum(node.users == 0 for node in match.path)
        if pages_for(request.known) - match.reusable > self.pages.free + self.index.idle_pages - idle:
            if self.running:
                return False
            request.shares, match = False, Match([], 0)  # alone, it may have every page there is
        slot = self._first_slot(step, match)
        if slot < 0:
            return False
        path = match.path
        for node in path:
            self.index.use(node)
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_order)
        request.slot, request.path = slot, path
        for node in path[: match.reusable]:
            self.pages.hold(node.page)
            self._set_page(step, request, node.page)
        request.computed, request.fulfilled = match.reusable * PAGE_TOKENS, match.reusable
        if request.shares:
            # Not the last token: it runs in any case, so that a page which it fills is not part of the match either.
            self.index.extend(path, request.tokens[: request.known - 1], request.salt)
        if request.reused < 0:
            request.reused = request.computed
        self.tokens_reused += request.computed
        return True

    def _first_slot(self, step: Step, match: Match) -> int:
        """A slot to start in, with the snapshot of `match` in it by the time the step runs; -1 if there is none."""
        if match.reusable == 0:
            return self._take_slot()
        source = match.path[match.reusable - 1]
        slot = self._take_slot(keep=source)
        if slot < 0:
            return self.index.take_snapshot(source)  # the last slot there is: go on in the snapshot itself
        step.preparation.slot_copies.append((source.snapshot, slot))
        return slot

    def _fork(self, step: Step, item: Item) -> None:
        """Start the other choices of a prompt whose last chunk this is: share full pages, copy the rest."""
        leader = item.request
        for follower in leader.followers:
            follower.leader = None
            if len(self.running) >= self.limits.running or not self._start_fork(step, item, follower):
                continue  # it stays in the queue, as a request of its own
            item.forks.append(follower)
        leader.followers = []

    def _start_fork(self, step: Step, item: Item, follower: Request) -> bool:
        leader, end = item.request, item.end
        partial = end % PAGE_TOKENS != 0
        if partial and self.pages.free == 0 and not self.index.evict_page():
            return False
        slot = self._take_slot()
        if slot < 0:
            return False
        self.waiting.remove(follower)
        bisect.insort(self.running, follower, key=_order)
        follower.slot, follower.path, follower.shares = slot, list(leader.path), leader.shares
        for node in follower.path:
            self.index.use(node)
        for page in leader.pages[: end // PAGE_TOKENS]:
            self.pages.hold(page)
            self._set_page(step, follower, page)
        if partial:
            page = self.pages.take()
            self._set_page(step, follower, page)
            self._forked_pages.append((leader.pages[end // PAGE_TOKENS], page))
        step.writes.append(FrontierWrite(len(step.items) - 1, end, slot))
        follower.computed, follower.in_flight, follower.reused = end, 1, leader.reused
        return True

    # --------------------------------------------------------------------------------------------- results

    def absorb(self, step: Step) -> None:
        """A step has run: what it computed can be reused from now on."""
        for item in step.items:
            for request in (item.request, *item.forks):
                life = item.life if request is item.request else 0
                alive = request.slot >= 0 and request.preemptions == life
                if alive and request.shares and item.end // PAGE_TOKENS > request.fulfilled:
                    self._fulfil(request, item.end // PAGE_TOKENS)
        for planned in step.snapshots:
            request, depth = planned.request, planned.position // PAGE_TOKENS
            alive = request.slot >= 0 and request.preemptions == planned.life
            if not alive or depth > len(request.path):
                self.slots.drop(planned.slot)
            elif self.index.give_snapshot(request.path[depth - 1], planned.slot) and planned.trailing:
                request.trailing = request.path[depth - 1]

    def _fulfil(self, request: Request, depth: int) -> None:
        if depth > len(request.path):
            self.index.extend(request.path, request.tokens[: depth * PAGE_TOKENS], request.salt)
        new = slice(request.fulfilled, depth)
        for node, page in zip(request.path[new], request.pages[new], strict=True):
            self.index.fulfil(node, page)
        request.fulfilled = depth

    # ------------------------------------------------------------------------------------------- integrity

    def problems(self, in_flight: list[Step]) -> list[str]:
        """Walk every page, slot and count and name each contradiction; `in_flight` are steps not absorbed yet."""
        pages: dict[int, list[str]] = {}
        slots: dict[int, list[str]] = {}
        for request in self.running:
            slots.setdefault(request.slot, []).append(f"request {request.number}")
            for page in request.pages:
                pages.setdefault(page, []).append(f"request {request.number}")
        for node in self.index.nodes():
            if node.ready:
                pages.setdefault(node.page, []).append(f"prefix of depth {node.depth}")
            if node.snapshot >= 0:
                slots.setdefault(node.snapshot, []).append(f"snapshot of depth {node.depth}")
        for step in in_flight:
            for planned in step.snapshots:
                slots.setdefault(planned.slot, []).append(f"planned snapshot of request {planned.request.number}")
        return [
            *self.pages.problems("page", pages),
            *self.slots.problems("slot", slots),
            *self.index.problems(),
            *self._request_problems(),
        ]

    def _request_problems(self) -> list[str]:
        found = []
        users: dict[Node, int] = {}
        for request in self.running:
            for node in request.path:
                users[node] = users.get(node, 0) + 1
            table = self.page_table[request.slot, : len(request.pages)].tolist()
            if table != request.pages:
                found.append(f"request {request.number} has pages {request.pages}, its table says {table}")
            if request.computed > request.known + request.in_flight:
                found.append(f"request {request.number} has computed more tokens than it has")
        for node in self.index.nodes():
            if node.users != users.get(node, 0):
                found.append(f"prefix of depth {node.depth} counts {node.users} users, {users.get(node, 0)} are known")
        for request in self.waiting:
            if request.slot >= 0 or request.pages or request.path:
                found.append(f"request {request.number} waits but holds pages or a slot")
        return found


def _order(request: Request) -> tuple[int, int]:
    """Lower priority values go first, then older requests."""
    return (request.priority, request.number)
