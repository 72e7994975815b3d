"""`leadline eval`: the task suite on any model and settings, greedily, as a table by task and context length."""

import json as json_format
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from leadline.chat import ChatFormat, ChatPrompt
from leadline.cli import options
from leadline.engine.llm import LLM, Result
from leadline.engine.sampling import SamplingParams
from leadline.tasks import suite
from leadline.tasks.task import Answer, Measure, Task, mark, read_answer

ROOM = 32
"""Tokens that an answer may have beyond twice those of the right one."""
CALL_ROOM = 128
"""The same for the spelling of a tool call, where one is expected."""


@dataclass(frozen=True)
class Question:
    """A task as it is put to one model: its prompt, and the most tokens of its answer."""

    task: Task
    prompt: ChatPrompt
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What a model said to a task, and whether it is right."""

    task: Task
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    answer: Answer
    right: bool


@dataclass(frozen=True)
class Cell:
    """One line of the table: all tasks of a kind at a length (0: as long as it takes), run together."""

    kind: str
    length: int
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def right(self) -> int:
        """How many were right."""
        return sum(outcome.right for outcome in self.outcomes)

    @property
    def percent(self) -> float:
        """How many of a hundred were right."""
        return 100 * self.right / len(self.outcomes)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, reused ones included."""
        return sum(outcome.prompt_tokens for outcome in self.outcomes)

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens whose computation was reused."""
        return sum(outcome.cached_tokens for outcome in self.outcomes) / self.prompt_tokens

    @property
    def rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + sum(outcome.output_tokens for outcome in self.outcomes)) / self.seconds

    def report(self) -> dict[str, Any]:
        """As a JSON object, with every outcome."""
        figures = {"kind": self.kind, "length": self.length, "right": self.right, "total": len(self.outcomes)}
        figures |= {"seconds": self.seconds, "tokens_per_second": self.rate, "cached_share": self.cached_share}
        return figures | {
            "outcomes": [
                {
                    "right": outcome.right,
                    "prompt_tokens": outcome.prompt_tokens,
                    "output_tokens": outcome.output_tokens,
                    "expected": asdict(outcome.task.expected),
                    "answer": asdict(outcome.answer),
                }
                for outcome in self.outcomes
            ]
        }


def eval(
    tasks: Annotated[str, typer.Option("--tasks", help="Kinds of tasks, with commas between.")] = ",".join(suite.KINDS),
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Prompt lengths in tokens, with commas between, of recall and system tasks."),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Tasks of each kind and length.")] = 20,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=suite.EVALUATION_SEEDS.start, max=suite.EVALUATION_SEEDS.stop - 1, help="Which tasks."
        ),
    ] = 0,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="The most tokens of an answer. Default: twice the right one's and some."),
    ] = None,
    at_least: Annotated[
        float | None, typer.Option("--at-least", help="Exit with 1 if less than this percentage is right anywhere.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every answer to a JSON file.")] = None,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = None,
    device: options.Device = "auto",
    max_context: options.MaxContext = None,
    state_memory: options.StateMemory = None,
    deterministic: options.Deterministic = False,
    max_running: Annotated[
        int | None, typer.Option("--max-running", help="The most requests in a step. Default: by device.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", help="The most of one prompt in a step. Default: by device.")
    ] = None,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse prefixes.")] = True,
) -> None:
    """Mark a model's answers to tasks with known answers."""
    cells = suite.plan(tasks.split(","), None if lengths is None else whole_numbers(lengths))
    llm = LLM(
        model,
        dtype=dtype,
        numerics=numerics,
        device=device,
        max_context=max_context,
        state_bytes=state_memory,
        deterministic=deterministic,
        max_running=max_running,
        chunk_tokens=chunk_tokens,
        prefix_cache=prefix_cache,
    )
    format = ChatFormat(llm.tokenizer, llm.engine.model.eos_token_ids)
    questions = {cell: ask(llm, format, *cell, seed, count, max_tokens) for cell in cells}
    check(llm, questions)
    with _bar(llm.progress) as bar:
        task = bar.add_task("", total=count * len(cells))
        found = []
        for kind, length in cells:
            bar.update(task, description=f"{kind} {length or ''}")
            found.append(run(llm, format, questions[kind, length]))
            bar.advance(task, count)
    llm.close()
    show(found, Console())
    if json is not None:
        report = {"model": llm.config.model, "seed": seed, "cells": [cell.report() for cell in found]}
        json.write_text(json_format.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if at_least is not None:
        require(found, at_least)


def whole_numbers(text: str) -> list[int]:
    """ "64,1000" as numbers. Raises typer.BadParameter naming every part that is none."""
    parts = [part.strip() for part in text.split(",")]
    if wrong := [repr(part) for part in parts if not (part.isascii() and part.isdigit())]:
        raise typer.BadParameter(f"--lengths holds {', '.join(wrong)}; allowed are whole numbers with commas between")
    return [int(part) for part in parts]


def ask(
    llm: LLM, format: ChatFormat, kind: str, length: int, seed: int, count: int, max_tokens: int | None
) -> list[Question]:
    """The questions of one cell. `max_tokens` None: by the right answer's length."""
    measure = token_measure(llm)
    found = []
    for task in suite.tasks(kind, seed, count, length, measure):
        limit = answer_room(task.expected, measure) if max_tokens is None else max_tokens
        found.append(Question(task, format.prompt(task.body), limit))
    return found


def token_measure(llm: LLM) -> Measure:
    """Counts tokens with a model's tokenizer, of which it must have one."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "ChatFormat checks it"

    def measure(texts: Sequence[str]) -> list[int]:
        return [len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    return measure


def answer_room(expected: Answer, measure: Measure) -> int:
    """The most tokens to generate where `expected` is right."""
    calls = expected.tool_calls
    texts = [expected.content, expected.thinking, *(call.name + call.arguments for call in calls)]
    return 2 * sum(measure(texts)) + ROOM + (CALL_ROOM if calls else 0)


def params_of(question: Question) -> SamplingParams:
    """Greedy, without a limit but the question's."""
    return SamplingParams(temperature=0, max_tokens=question.max_tokens)


def check(llm: LLM, questions: dict[tuple[str, int], list[Question]]) -> None:
    """Raise ValueError naming every cell that holds a question which the engine would refuse."""
    culprits = []
    for (kind, length), asked in questions.items():
        for question in asked:
            try:
                llm.engine.check(question.prompt.token_ids, params_of(question))
            except ValueError as error:
                culprits.append(f"{kind} {length or ''}: {error}")
                break
    if culprits:
        raise ValueError("\n".join(culprits))


def run(llm: LLM, format: ChatFormat, questions: Sequence[Question]) -> Cell:
    """Put all questions of one cell to the model together, and mark the answers."""
    begun = time.perf_counter()
    params = [params_of(question) for question in questions]
    results = llm.generate([question.prompt.token_ids for question in questions], params)
    seconds = time.perf_counter() - begun
    outcomes = tuple(outcome(format, *pair) for pair in zip(questions, results, strict=True))
    return Cell(questions[0].task.kind, questions[0].task.length, outcomes, seconds)


def outcome(format: ChatFormat, question: Question, result: Result) -> Outcome:
    """Mark what came back for a question."""
    answer = read_answer(format, question.prompt, result.token_ids, str(result.finish_reason))
    return Outcome(
        question.task,
        result.prompt_tokens,
        result.cached_tokens,
        result.completion_tokens,
        answer,
        mark(question.task, answer),
    )


def require(cells: Sequence[Cell], percent: float) -> None:
    """Raise ValueError naming every cell with less than `percent` right answers of a hundred."""
    below = [cell for cell in cells if cell.percent < percent]
    if below:
        names = ", ".join(f"{cell.kind} {cell.length or ''}".strip() + f" {cell.percent:.1f} %" for cell in below)
        raise ValueError(f"less than {percent:g} % right: {names}")


# ------------------------------------------------------------------------------------------------- the figures


def _bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown)


def show(cells: Sequence[Cell], console: Console) -> None:
    """Print the table."""
    table = Table("task", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("length", "prompt tokens", "cached", "right", "total", "%", "tokens/s"):
        table.add_column(column, justify="right")
    for cell in cells:
        mean = cell.prompt_tokens / len(cell.outcomes)
        table.add_row(
            cell.kind,
            str(cell.length or "-"),
            f"{mean:,.0f}",
            f"{cell.cached_share:.0%}",
            str(cell.right),
            str(len(cell.outcomes)),
            f"{cell.percent:.1f}",
            f"{cell.rate:,.1f}",
        )
    console.print(table)
