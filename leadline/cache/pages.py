"""Allocation of history pages and frontier slots: who holds which number. No tensors here."""

import numpy as np


class Pool:
    """Numbers `0 .. size - 1`, each held by any number of owners and free when nobody holds it.

    Ownership of a page:   a running request holds each page of its table; the prefix index holds each page it knows.
    Ownership of a slot:   a running request holds the one it runs in; the prefix index holds one per snapshot.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.holders = np.zeros(size, np.int32)
        self._free = list(range(size - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many numbers nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free number, held once. There must be one."""
        number = self._free.pop()
        self.holders[number] = 1
        return number

    def hold(self, number: int) -> None:
        """One more owner of a number that has one already."""
        assert self.holders[number] > 0, f"number {number} has no owner"
        self.holders[number] += 1

    def drop(self, number: int) -> None:
        """One owner less; the last one frees the number."""
        assert self.holders[number] > 0, f"number {number} has no owner"
        self.holders[number] -= 1
        if self.holders[number] == 0:
            self._free.append(number)

    def problems(self, name: str, owners: dict[int, list[str]]) -> list[str]:
        """Every number whose count differs from the owners that are known; `owners` names them per number."""
        found = []
        for number in range(self.size):
            known = owners.get(number, [])
            if self.holders[number] != len(known):
                found.append(f"{name} {number} counts {self.holders[number]} owners, known are {known or 'none'}")
        free = set(self._free)
        if len(free) != len(self._free) or free != set(np.flatnonzero(self.holders == 0).tolist()):
            found.append(f"the free list of {name}s does not match their owner counts")
        return found
