"""The task suite: every kind by its name, each task derived from (kind, seed, number, length) and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as counter
from random import Random

from leadline.tasks.arithmetic import arithmetic
from leadline.tasks.recall import recall
from leadline.tasks.strings import copy, reverse, stop
from leadline.tasks.system import system
from leadline.tasks.task import Dialogue, Measure, Task
from leadline.tasks.tools import tool

EVALUATION_SEEDS = range(1000)
"""Seeds for evaluation; whatever is trained on is drawn with other seeds, from 1000 up. The draws are independent,
so that a short task (a sum of two digits, say) may still come up in both."""

SHORTEST, LONGEST = 32, 1_000_000
"""Tokens that a prompt may be asked to have."""


@dataclass(frozen=True)
class Kind:
    """`write(rng, length, turns, measure)` makes a dialogue.

    `lengths` are the prompt lengths in tokens that are evaluated if nothing else is asked for; if not `any_length`,
    they are what there is. 0 stands for as long as it takes. `turns` of a dialogue are asked in an evaluation, which
    so also reads one text several times.
    """

    write: Callable[[Random, int, int, Measure], Dialogue]
    lengths: tuple[int, ...]
    turns: int = 1
    any_length: bool = False


KINDS = {
    "recall": Kind(recall, (64, 128, 256, 512, 1000, 2000, 4000), turns=4, any_length=True),
    "system": Kind(system, (64, 512), any_length=True),
    "copy": Kind(copy, (32, 128)),
    "reverse": Kind(reverse, (32, 64)),
    "arithmetic": Kind(arithmetic, (0,)),
    "stop": Kind(stop, (0,)),
    "tool": Kind(tool, (0,), turns=2),
}


def dialogue(kind: str, seed: int, number: int, length: int, measure: Measure, turns: int | None = None) -> Dialogue:
    """Dialogue `number` of a kind; `turns`: how many questions, those of an evaluation if None.

    Raises ValueError for a kind that is not in KINDS.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of task; the kinds are {', '.join(KINDS)}")
    rng = Random(f"{kind}-{seed}-{number}-{length}")
    return KINDS[kind].write(rng, length, KINDS[kind].turns if turns is None else turns, measure)


def tasks(kind: str, seed: int, count: int, length: int, measure: Measure) -> list[Task]:
    """The first `count` tasks of a kind at a length: the turns of dialogue 0, then of dialogue 1, and so on.

    Raises ValueError for a kind that is not in KINDS.
    """
    found: list[Task] = []
    for number in counter():
        if len(found) >= count:
            break
        found += dialogue(kind, seed, number, length, measure).tasks()
    return found[:count]


def plan(kinds: list[str], lengths: list[int] | None) -> list[tuple[str, int]]:
    """The (kind, length) pairs to evaluate. `lengths` None: each kind's own; they are also those of kinds that have
    no others.

    Raises ValueError naming every kind that is not in KINDS and every length that is out of range.
    """
    found = []
    if unknown := [repr(kind) for kind in kinds if kind not in KINDS]:
        found.append(f"{', '.join(unknown)}: no such kind of task; the kinds are {', '.join(KINDS)}")
    if beyond := [str(length) for length in lengths or () if not SHORTEST <= length <= LONGEST]:
        found.append(f"lengths {', '.join(beyond)}: allowed are {SHORTEST} to {LONGEST} tokens")
    if found:
        raise ValueError("; ".join(found))
    return [
        (kind, length)
        for kind in kinds
        for length in (lengths if lengths is not None and KINDS[kind].any_length else KINDS[kind].lengths)
    ]
