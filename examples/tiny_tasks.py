"""The task suite (`leadline.tasks`) as training text for the tiny model: whole dialogues with their right answers.

Evaluation asks the same kinds of tasks; seeds keep the two apart, see `EVALUATION_SEEDS`.
"""

from collections.abc import Iterator, Sequence
from random import Random

from deepseek_recipe import ChatCompletionRequest, ConversionOptions, DeepseekV4Encoding, ModelVersion
from tokenizers import Tokenizer

from leadline.tasks.suite import EVALUATION_SEEDS, dialogue
from leadline.tasks.task import Dialogue, Measure

SHARES = {
    "recall": 0.27,
    "copy": 0.30,
    "system": 0.14,
    "reverse": 0.09,
    "arithmetic": 0.08,
    "tool": 0.08,
    "stop": 0.04,
}
"""Of the documents; of the tokens recall has about half."""
LENGTHS = {
    "recall": ((0.25, 32, 160), (0.25, 160, 360), (0.24, 360, 800), (0.26, 800, 4000)),
    "system": ((0.6, 32, 360), (0.4, 360, 800)),
    "copy": ((0.25, 16, 60), (0.75, 60, 150)),
    "reverse": ((1.0, 16, 80),),
}
"""(share, least, most) tokens of the first turn's prompt; a kind that is not here is as long as it takes."""
TURNS = {"recall": (6, 60), "system": (1, 6), "copy": (1, 3), "reverse": (1, 3), "stop": (1, 6), "tool": (2, 8)}
"""(least, most) questions of a dialogue: many, since each one is learned from and a long text alone teaches little."""
LONGEST = 4096
"""Tokens of a document with all its questions, or little more."""
TURN_TOKENS = 20
"""Of a question about a value and its answer."""

END = "<｜end▁of▁sentence｜>"
THINK_END = "</think>"

_ENCODING = DeepseekV4Encoding()
_OPTIONS = ConversionOptions().with_model_alias("tiny", ModelVersion.DeepseekV4Pro)


def write_tasks(count: int, seed: int, measure: Measure) -> Iterator[tuple[str, str]]:
    """`count` documents as (kind, text with the special tokens spelled out), never of an evaluation's seeds.

    Raises ValueError for a seed below 0.
    """
    if seed < 0:
        raise ValueError(f"the seed is {seed}; allowed are 0 and above, for seeds below are those of evaluations")
    for number in range(count):
        rng = Random(f"{seed}-task-{number}")
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        turns = rng.randint(*TURNS.get(kind, (1, 1)))
        length = min(draw_length(rng, kind), LONGEST - turns * TURN_TOKENS)
        yield kind, document(dialogue(kind, EVALUATION_SEEDS.stop + seed, number, length, measure, turns))


def draw_length(rng: Random, kind: str) -> int:
    """Tokens of the first turn's prompt, 0 for as long as it takes."""
    bands = LENGTHS.get(kind, ((1.0, 0, 0),))
    _, least, most = rng.choices(bands, [share for share, _, _ in bands])[0]
    return rng.randint(least, most)


def document(dialogue: Dialogue) -> str:
    """The whole dialogue as the model is to have read and said it, up to the last answer's EOS."""
    last = len(dialogue.turns) - 1
    prompt = render(dialogue, last)
    answer = dialogue.turns[last].answer
    if dialogue.thinks:  # the format leaves thinking out of a conversation that goes on
        return prompt + answer.thinking + THINK_END + answer.content + END
    whole = render(dialogue, last, answered=True)
    if not whole.startswith(prompt):
        raise ValueError(f"an answered conversation does not go on from its prompt: {whole!r} and {prompt!r}")
    return whole[: whole.index(END, len(prompt)) + len(END)]


def render(dialogue: Dialogue, turn: int, answered: bool = False) -> str:
    """What the format makes of the dialogue up to a turn's question, or up to its answer."""
    body = dialogue.body(turn, answered) | {"model": "tiny", "reasoning_effort": "low"}
    return _ENCODING.render_conversation(ChatCompletionRequest(body).convert(_OPTIONS).conversation).prompt


def token_measure(tokenizer: Tokenizer) -> Measure:
    """Counts tokens."""

    def measure(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    return measure


def rough_measure(texts: Sequence[str]) -> list[int]:
    """Guesses the number of tokens where there is no tokenizer yet."""
    return [max(1, len(text) // 5) for text in texts]
