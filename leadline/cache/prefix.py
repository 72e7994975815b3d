"""The prefix index: which token sequences have their pages, and at which page boundaries a snapshot, in memory.

A tree with one node per page of 128 tokens; a node's path from the root spells the tokens before and in it, so that
content alone decides a match. Each salt has a root of its own.

    a prefix can be reused up to the deepest node that is ready and has a snapshot

A node is *promised*, not ready, while the request that made it still has to compute it. Another request that needs
it waits, and marks the node where their prompts part as `wanted`, so that a snapshot is taken there.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leadline.cache.pages import Pool
from leadline.config import PAGE_TOKENS

Tokens = NDArray[np.int32]


@dataclass(eq=False, slots=True)
class Node:
    """One page of some token sequence.

    `users` counts running requests whose path it lies on; they keep it, and so its parents, from being evicted.
    """

    parent: "Node | None"
    key: bytes
    depth: int
    page: int = -1
    snapshot: int = -1
    ready: bool = False
    wanted: bool = False
    users: int = 0
    children: dict[bytes, "Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """What the index knows of a token sequence: the nodes it shares, and how many of them can be reused."""

    path: list[Node]
    reusable: int

    @property
    def promised(self) -> bool:
        """Whether another request is still computing a part of the path."""
        return any(not node.ready for node in self.path)


class PrefixIndex:
    """The tree and its eviction. `pages` and `slots` are shared with running requests."""

    def __init__(self, pages: Pool, slots: Pool) -> None:
        self.pages, self.slots = pages, slots
        self.roots: dict[str, Node] = {}
        self.idle_pages = 0
        """Ready nodes that no running request uses: pages that eviction could free."""
        self._leaves: OrderedDict[Node, None] = OrderedDict()
        self._snapshots: OrderedDict[Node, None] = OrderedDict()

    # ------------------------------------------------------------------------------------------- look-up

    def match(self, tokens: Tokens, salt: str) -> Match:
        """Walk `tokens` (1-D) as far as the tree knows them, leaving at least one token to run."""
        node: Node | None = self.roots.get(salt)
        path: list[Node] = []
        reusable = 0
        for key in page_keys(tokens[: max(0, len(tokens) - 1)]):
            node = node.children.get(key) if node else None
            if node is None:
                break
            path.append(node)
            if node.ready and node.snapshot >= 0:
                reusable = len(path)
        return Match(path, reusable)

    def extend(self, path: list[Node], tokens: Tokens, salt: str) -> None:
        """Make `path` cover every full page of `tokens`, with promised nodes where there are none, and use them.

        The caller uses the nodes already in `path`; those added are used on its behalf.
        """
        node = path[-1] if path else self.roots.setdefault(salt, Node(None, b"", 0, ready=True))
        start = len(path) * PAGE_TOKENS
        for key in page_keys(tokens[start:]):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, node.depth + 1)
                self._leaves.pop(node, None)
            self.use(child)
            path.append(child)
            node = child

    # ----------------------------------------------------------------------------------------- ownership

    def use(self, node: Node) -> None:
        """A running request has `node` on its path."""
        if node.ready and node.users == 0:
            self.idle_pages -= 1
        node.users += 1
        self._leaves.pop(node, None)
        if node in self._snapshots:
            self._snapshots.move_to_end(node)

    def release(self, path: list[Node]) -> None:
        """A running request is done with its path: promised nodes that nobody else uses are forgotten."""
        for node in reversed(path):
            node.users -= 1
            if node.users:
                continue
            if node.ready:
                self.idle_pages += 1
                self._note_leaf(node)
            elif not node.children:
                self._forget(node)

    def fulfil(self, node: Node, page: int) -> None:
        """The tokens of `node` are computed in `page`: others may use it. The index holds the page from now on."""
        if not node.ready:
            node.ready, node.page = True, page
            self.pages.hold(page)
            if node.users == 0:
                self.idle_pages += 1
                self._note_leaf(node)

    def give_snapshot(self, node: Node, slot: int) -> bool:
        """Attach a snapshot that the caller holds; the hold passes to the index. False if it was not needed."""
        node.wanted = False
        if node.snapshot >= 0 or not node.ready:
            self.slots.drop(slot)
            return False
        node.snapshot = slot
        self._snapshots[node] = None
        return True

    def take_snapshot(self, node: Node) -> int:
        """Detach a node's snapshot; the hold passes to the caller. -1 if there is none."""
        slot, node.snapshot = node.snapshot, -1
        self._snapshots.pop(node, None)
        return slot

    # ------------------------------------------------------------------------------------------ eviction

    def evict_page(self) -> bool:
        """Free the least recently used page that no running request uses. False if there is none."""
        if not self._leaves:
            return False
        self._evict(next(iter(self._leaves)))
        return True

    def forget_pages(self, path: list[Node], held: set[int]) -> None:
        """Forget the idle nodes of a path whose pages are among `held`, and what hangs below them.

        Their pages have another holder, so that eviction would not free them: they must not count as idle.
        """
        first = next((node for node in path if node.users == 0 and node.page in held), None)
        if first is not None:
            for node in reversed(_below(first)):
                self._evict(node)

    def _evict(self, node: Node) -> None:
        """Drop the page and the snapshot of an idle node without children."""
        del self._leaves[node]
        if node.snapshot >= 0:
            self.slots.drop(self.take_snapshot(node))
        self.idle_pages -= 1
        self.pages.drop(node.page)
        self._forget(node)

    def evict_snapshot(self, keep: Node | None = None) -> bool:
        """Free the least recently used snapshot other than that of `keep`. False if there is none."""
        node = next((node for node in self._snapshots if node is not keep), None)
        if node is None:
            return False
        self.slots.drop(self.take_snapshot(node))
        return True

    def clear(self) -> None:
        """Forget everything that no running request uses."""
        while self.evict_page():
            pass
        while self.evict_snapshot():
            pass

    def _forget(self, node: Node) -> None:
        """Cut a node without children off the tree; its parent, last used no later, may go next."""
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[node.key]
        if parent.parent is not None:
            self._note_leaf(parent)
            if parent in self._leaves:
                self._leaves.move_to_end(parent, last=False)

    def _note_leaf(self, node: Node) -> None:
        if node.ready and node.users == 0 and not node.children:
            self._leaves[node] = None

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def problems(self) -> list[str]:
        """Whatever contradicts itself in the tree's own bookkeeping."""
        nodes = list(self.nodes())
        idle = [n for n in nodes if n.ready and n.users == 0]
        found = []
        if len(idle) != self.idle_pages:
            found.append(f"{len(idle)} idle pages, counted {self.idle_pages}")
        if {n for n in idle if not n.children} != set(self._leaves):
            found.append("the list of evictable pages does not match the tree")
        if {n for n in nodes if n.snapshot >= 0} != set(self._snapshots):
            found.append("the list of snapshots does not match the tree")
        lost = [n for n in nodes if not n.ready and not n.users]
        found += [f"a prefix of {n.depth} pages is promised but used by nobody" for n in lost]
        return found


def _below(node: Node) -> list[Node]:
    """The node and every node below it, parents first."""
    found = [node]
    for other in found:
        found.extend(other.children.values())
    return found


def page_keys(tokens: Tokens) -> Iterator[bytes]:
    """The bytes of each full page of `tokens`."""
    for start in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        yield tokens[start : start + PAGE_TOKENS].tobytes()
