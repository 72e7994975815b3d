"""Copying, reversing and counting: what must be said is plain, and so is where to stop."""

import string
from random import Random

from leadline.tasks.task import FRAME_TOKENS, Answer, Dialogue, Measure, Turn
from leadline.tasks.words import ANIMALS, NOUNS

ITEMS = (*string.ascii_lowercase, *string.digits, *ANIMALS, *NOUNS)
LONGEST_COUNT = 12


def copy(rng: Random, length: int, turns: int, measure: Measure) -> Dialogue:
    """Say the same items again."""
    questions = [items(rng, "Repeat exactly: ", length, measure) for _ in range(turns)]
    return Dialogue("copy", length, tuple(Turn("Repeat exactly: " + text, Answer(text)) for text in questions))


def reverse(rng: Random, length: int, turns: int, measure: Measure) -> Dialogue:
    """Say the items from the last to the first."""
    questions = [items(rng, "Say backwards: ", length, measure) for _ in range(turns)]
    said = (Turn("Say backwards: " + text, Answer(" ".join(reversed(text.split())))) for text in questions)
    return Dialogue("reverse", length, tuple(said))


def items(rng: Random, order: str, length: int, measure: Measure) -> str:
    """Items with spaces between them that fill a prompt of `length` tokens, but two at least."""
    drawn = [rng.choice(ITEMS) for _ in range(max(2, length))]
    left = length - FRAME_TOKENS - measure([order])[0]
    count = 0
    for tokens in measure([" " + item for item in drawn]):
        left -= tokens
        if left < 0:
            break
        count += 1
    return " ".join(drawn[: max(2, count)])


def stop(rng: Random, length: int, turns: int, measure: Measure) -> Dialogue:
    """Count from one number to another, or say a word so many times, and then stop."""
    return Dialogue(
        "stop", length, tuple(counting(rng) if rng.random() < 0.5 else repeating(rng) for _ in range(turns))
    )


def counting(rng: Random) -> Turn:
    """As "Count from 8 to 11."."""
    first, count = rng.randint(0, 90), rng.randint(2, LONGEST_COUNT)
    numbers = " ".join(str(number) for number in range(first, first + count))
    return Turn(f"Count from {first} to {first + count - 1}. Say the numbers alone.", Answer(numbers))


def repeating(rng: Random) -> Turn:
    """As "Say fox 3 times."."""
    word, count = rng.choice(ANIMALS), rng.randint(2, LONGEST_COUNT)
    return Turn(f"Say {word} {count} times. Say nothing else.", Answer(" ".join([word] * count)))
