"""Key-value recall: which value had this key, in a text that is mostly beyond every window.

A text holds many facts, about six tokens each, among sentences of the same words. So a single HCA entry of 128
tokens cannot carry its facts for later, and a value comes back only through the right CSA entry. Facts and sentences
of five tokens and more, odd and even ones mixed, put keys at every alignment to the layers' compression windows.
"""

from random import Random

from leadline.tasks.task import FRAME_TOKENS, Answer, Dialogue, Measure, Turn
from leadline.tasks.words import ADJECTIVES, ANIMALS, COLOURS, FEWEST_LINE_TOKENS, NOUNS, fitting, sentence

HEADER = "Here is a list. Answer each question with the value alone.\n\n"
FACT_SHARE = 0.75
"""Of all lines, as long as there are enough keys."""
MOST_FACTS = len(ADJECTIVES) * len(NOUNS) // 2
FEWEST_FACTS = 2
"""However short the text is meant to be. So many lines at the start are always facts."""


def recall(rng: Random, length: int, turns: int, measure: Measure) -> Dialogue:
    """Questions about `turns` keys anywhere in a text that fills a prompt of `length` tokens; keys do not repeat.

    Where the text has fewer facts than `turns`, each is asked for once.
    """
    count = length // FEWEST_LINE_TOKENS + FEWEST_FACTS
    facts = dict(zip(fact_lines(rng, count), keys(rng), strict=False))
    values = {key: value(rng) for key in facts.values()}
    lines = [f"- {facts[i]} = {values[facts[i]]}" if i in facts else sentence(rng) for i in range(count)]
    scaffold = sum(measure([HEADER, "\n" + question(facts[0])]))
    told = max(FEWEST_FACTS, fitting(lines, length - FRAME_TOKENS - scaffold, measure))
    text = HEADER + "".join(line + "\n" for line in lines[:told]) + "\n"
    present = [key for i, key in facts.items() if i < told]
    asked = rng.sample(present, min(turns, len(present)))
    questions = [question(key) for key in asked]
    questions[0] = text + questions[0]
    answers = [Answer(values[key]) for key in asked]
    return Dialogue("recall", length, tuple(map(Turn, questions, answers)))


def question(key: str) -> str:
    """What asks for a key's value."""
    return f"What is the value of {key}?"


def fact_lines(rng: Random, count: int) -> list[int]:
    """Which of `count` lines are facts, in order."""
    wanted = min(MOST_FACTS, round(count * FACT_SHARE)) - FEWEST_FACTS
    return [*range(FEWEST_FACTS), *sorted(rng.sample(range(FEWEST_FACTS, count), wanted))]


def keys(rng: Random) -> list[str]:
    """Different keys of two words, of which neither alone tells a key from others."""
    chosen = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), MOST_FACTS)
    return [f"{ADJECTIVES[i // len(NOUNS)]} {NOUNS[i % len(NOUNS)]}" for i in chosen]


def value(rng: Random) -> str:
    """One word or two."""
    animal = rng.choice(ANIMALS)
    return animal if rng.random() < 0.3 else f"{rng.choice(COLOURS)} {animal}"
