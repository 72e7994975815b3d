"""The words that tasks are made of, few enough for a small vocabulary to have a token for each, and filling text."""

from collections.abc import Sequence
from random import Random

from leadline.tasks.task import Measure

ADJECTIVES = tuple(
    "bold brave bright calm clever cold curious dark deep dry eager early fair fast fine flat fresh gentle grand great "
    "happy hard heavy high hot huge kind large late lazy light little long loud lucky merry narrow neat new old".split()
)
NOUNS = tuple(
    "apple arrow ball barrel basket bell boat book bottle box bridge brush bucket button cake candle cart castle chair "
    "clock cloud coat coin cup door drum feather flag flute garden gate glass hammer hat house jar kettle key kite "
    "knife ladder lake lamp lantern letter map mill mirror needle nest paper pencil pillow plate pond ribbon ring "
    "river road rope shell ship shoe".split()
)
COLOURS = tuple("amber black blue brown golden green grey orange pink purple red silver violet white yellow".split())
ANIMALS = tuple(
    "badger bear beaver bird cat cow crow deer dog duck eagle fish fox frog goat goose hare hawk hen horse lamb lion "
    "mole mouse otter owl pig pony rabbit seal sheep snake squirrel swan tiger toad whale wolf".split()
)
CITIES = tuple("Athens Berlin Cairo Dublin Lima London Madrid Oslo Paris Prague Rome Tokyo Vienna Warsaw".split())
PEOPLE = tuple("Anna Ben Clara Emma Finn Hugo Ida Jack Leo Lily Max Mia Nora Oscar Rosa Sam Theo Tom".split())

SENTENCES = (
    "The {colour} {animal} ran to the {noun}.",
    "{person} saw a {adjective} {animal}.",
    "The {noun} was {adjective}, and so was the {animal}.",
    "In {city} {person} lost a {colour} {noun}.",
    '"Where is my {noun}?" asked {person}.',
    "It was a {adjective} day.",
    "A {animal} and a {adjective} {colour} {animal} slept beside the {noun}.",
)
POOLS = {
    "adjective": ADJECTIVES,
    "noun": NOUNS,
    "colour": COLOURS,
    "animal": ANIMALS,
    "city": CITIES,
    "person": PEOPLE,
}

FEWEST_LINE_TOKENS = 5
"""No line of a text is shorter in a vocabulary with a token a word."""


def fill(template: str, rng: Random) -> str:
    """`template` with each pool's name in braces replaced by one of its words."""
    return template.format(**{name: rng.choice(pool) for name, pool in POOLS.items()})


def sentence(rng: Random) -> str:
    """A sentence that says nothing which a task asks for."""
    return fill(rng.choice(SENTENCES), rng)


def phrase(rng: Random) -> str:
    """Two words, as "bold kite"."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def sentences(rng: Random, budget: int, measure: Measure) -> list[str]:
    """Lines of sentences, of `budget` tokens at most and hardly fewer."""
    lines = [sentence(rng) for _ in range(max(0, budget // FEWEST_LINE_TOKENS))]
    return lines[: fitting(lines, budget, measure)]


def fitting(lines: Sequence[str], budget: int, measure: Measure) -> int:
    """How many of the first lines have `budget` tokens at most together, line ends included."""
    total = 0
    for count, tokens in enumerate(measure([line + "\n" for line in lines])):
        total += tokens
        if total > budget:
            return count
    return len(lines)
