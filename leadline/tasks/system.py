"""Following a system prompt, however long the text is that stands between it and the question."""

from random import Random

from leadline.tasks.task import FRAME_TOKENS, Answer, Dialogue, Measure, Turn
from leadline.tasks.words import ANIMALS, NOUNS, phrase, sentences

RULES = (
    ("Begin every answer with the word {word}.", "{word} {said}"),
    ("End every answer with the word {word}.", "{said} {word}"),
    ("Begin and end every answer with the word {word}.", "{word} {said} {word}"),
    ("Give every answer twice.", "{said} {said}"),
    ("Whatever is asked, answer only {word}.", "{word}"),
)
"""(system prompt, what becomes of an answer)."""
ORDER = "Say this: {said}"


def system(rng: Random, length: int, turns: int, measure: Measure) -> Dialogue:
    """Orders to say two words, which a rule changes; a text that fills the prompt comes before the first order."""
    rule, form = rng.choice(RULES)
    word = rng.choice((*ANIMALS, *NOUNS))
    rule = rule.format(word=word)
    said = [phrase(rng) for _ in range(turns)]
    scaffold = sum(measure([rule, "\n" + ORDER.format(said=said[0])]))
    between = "".join(line + "\n" for line in sentences(rng, length - FRAME_TOKENS - scaffold, measure))
    orders = [ORDER.format(said=one) for one in said]
    orders[0] = f"{between}\n{orders[0]}" if between else orders[0]
    answers = [Answer(form.format(word=word, said=one)) for one in said]
    return Dialogue("system", length, tuple(map(Turn, orders, answers)), rule)
