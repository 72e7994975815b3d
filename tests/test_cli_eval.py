"""`leadline eval`: its table, its file and its errors, and that no setting of the engine changes an answer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from folders import byte_tokenizer, write_model
from test_tasks import said
from typer.testing import CliRunner, Result

from leadline.chat import ChatFormat
from leadline.cli import eval as eval_module
from leadline.cli.eval import Cell, Outcome, answer_room, ask, require, run, token_measure, whole_numbers
from leadline.cli.main import app
from leadline.engine.llm import LLM, Choice
from leadline.engine.llm import Result as Generated
from leadline.tasks.suite import KINDS, plan
from leadline.tasks.task import Answer, Task

SMALL = {"device": "cpu", "state_bytes": 64 << 20}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 17": {"chunk_tokens": 17},
    "one at a time": {"max_running": 1},
    "no prefix cache": {"prefix_cache": False},
    "chunks of 50 in pairs, no prefix cache": {"chunk_tokens": 50, "max_running": 2, "prefix_cache": False},
}


def evaluate(*arguments: str) -> Result:
    words = ["eval", "--device", "cpu", "--state-memory", "64M", *arguments]
    return CliRunner().invoke(app, words, env={"COLUMNS": "120"})


def answers(**settings: Any) -> dict[tuple[str, int], list[Outcome]]:
    """What the built-in model says to a few tasks of each kind."""
    llm = LLM(**SMALL, **settings)
    format = ChatFormat(llm.tokenizer, llm.engine.model.eos_token_ids)
    cells = [("recall", 300), *plan([kind for kind in KINDS if kind != "recall"], [64])]
    found = {}
    for kind, length in cells:
        cell = run(llm, format, ask(llm, format, kind, length, 0, 4 if kind == "recall" else 1, 16))
        found[kind, length] = list(cell.outcomes)
    assert not llm.engine.problems()
    llm.close()
    return found


@pytest.fixture(scope="module")
def usual() -> dict[tuple[str, int], list[Outcome]]:
    return answers()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_answers_do_not_depend_on(settings: dict[str, Any], usual: dict[tuple[str, int], list[Outcome]]) -> None:
    """Answers, and not only scores: the built-in model may know none of the right ones."""
    others = answers(**settings)
    reused = {cell: sum(outcome.cached_tokens for outcome in found) for cell, found in others.items()}
    for cell, found in others.items():
        assert [outcome.answer for outcome in found] == [outcome.answer for outcome in usual[cell]], cell
    assert any(reused.values()) is settings.get("prefix_cache", True)
    assert len({outcome.answer.content for found in usual.values() for outcome in found}) > 5


class RightHalf:
    """In place of `LLM.generate`: every second prompt gets the right answer, the others half of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tasks: dict[tuple[int, ...], Task] = {}
        self.asked = eval_module.ask
        monkeypatch.setattr(eval_module, "ask", self.ask)
        monkeypatch.setattr(LLM, "generate", self.generate)

    def ask(self, *arguments: Any) -> Any:
        questions = self.asked(*arguments)
        self.tasks |= {tuple(question.prompt.token_ids.tolist()): question.task for question in questions}
        return questions

    def generate(self, prompts: Sequence[Any], params: Any) -> list[Generated]:
        found = []
        for number, prompt in enumerate(prompts):
            ids = tuple(prompt.tolist())
            tokens = said(self.tasks[ids])
            choice = Choice(tokens, "", "stop") if number % 2 == 0 else Choice(tokens[:-1], "", "length")
            assert len(tokens) <= params[number].max_tokens and params[number].greedy
            found.append(Generated(list(ids), [choice], cached_tokens=len(ids) // 2))
        return found


def test_right_answers_are_counted_in_the_table_and_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    RightHalf(monkeypatch)
    path = tmp_path / "report.json"
    result = evaluate("--lengths", "64,200", "--count", "5", "--seed", "3", "--json", str(path))
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith(tuple(KINDS))]
    cells = plan(list(KINDS), [64, 200])
    assert [(row[0], row[1]) for row in rows] == [(kind, str(length or "-")) for kind, length in cells]
    assert {(row[4], row[5], row[6]) for row in rows} == {("3", "5", "60.0")}
    assert {row[3] for row in rows} <= {"47%", "48%", "49%", "50%"}
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["seed"] == 3 and [cell["kind"] for cell in report["cells"]] == [kind for kind, _ in cells]
    for cell in report["cells"]:
        assert (cell["right"], cell["total"], len(cell["outcomes"])) == (3, 5, 5)
        for outcome in cell["outcomes"]:
            same = {**outcome["answer"], "thinking": ""} == {**outcome["expected"], "thinking": ""}
            assert same is outcome["right"]


def test_a_score_below_the_one_demanded_is_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    RightHalf(monkeypatch)
    arguments = ["--tasks", "copy,stop,recall", "--lengths", "64", "--count", "4"]
    assert evaluate(*arguments, "--at-least", "50").exit_code == 0
    result = evaluate(*arguments, "--at-least", "50.1")
    assert result.exit_code == 1 and " stop " in result.stdout
    assert result.stderr == (
        "leadline: less than 50.1 % right: copy 32 50.0 %, copy 128 50.0 %, stop 50.0 %, recall 64 50.0 %\n"
    )


def test_a_few_real_answers_and_their_rates(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    common = ["--tasks", "recall", "--lengths", "200", "--count", "4", "--max-tokens", "3", "--json", str(path)]
    result = evaluate(*common)
    assert result.exit_code == 0, result.output
    (cell,) = json.loads(path.read_text())["cells"]
    assert cell["seconds"] > 0 and 0 < cell["cached_share"] < 1
    assert {outcome["output_tokens"] for outcome in cell["outcomes"]} <= {1, 2, 3}
    tokens = sum(outcome["prompt_tokens"] + outcome["output_tokens"] for outcome in cell["outcomes"])
    assert cell["tokens_per_second"] == pytest.approx(tokens / cell["seconds"])
    assert evaluate(*common, "--no-prefix-cache").exit_code == 0
    (other,) = json.loads(path.read_text())["cells"]
    assert other["cached_share"] == 0 and other["outcomes"] == cell["outcomes"]


def test_the_engine_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Recording(LLM):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            made.append(self.config)

    monkeypatch.setattr(eval_module, "LLM", Recording)
    arguments = ["--max-running", "3", "--chunk-tokens", "19", "--dtype", "bfloat16", "--numerics", "native"]
    assert evaluate("--tasks", "stop", "--count", "1", "--max-context", "2K", *arguments).exit_code == 0
    (config,) = made
    assert (config.max_running, config.chunk_tokens, config.max_context) == (3, 19, 2048)
    assert (config.dtype, config.numerics, config.device, config.state_bytes) == ("bfloat16", "native", "cpu", 64 << 20)


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["--tasks", "recall,frob", "--lengths", "5"], 1, "'frob': no such kind of task; the kinds are recall, "),
        (["--lengths", "64,x,-5"], 2, "--lengths holds 'x', '-5'"),
        (["--count", "0"], 2, "--count"),
        (["--seed", "1000"], 2, "--seed"),
        (["--tasks", "copy,recall", "--lengths", "64,3000,2000", "--max-context", "1K"], 1, "recall 2000: the prompt"),
        (["--tasks", "copy", "--max-tokens", "0"], 1, "max_tokens is 0"),
    ],
    ids=["tasks", "lengths", "count", "seed", "context", "max-tokens"],
)
def test_mistakes_are_sentences(arguments: list[str], status: int, sentence: str) -> None:
    result = evaluate(*arguments)
    told = " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == status and sentence in told and "Traceback" not in told, told
    if "--max-context" in arguments:
        assert "recall 3000: the prompt" in told and "copy" not in told, "every culprit and no other"


def test_a_model_without_a_tokenizer_cannot_be_asked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    result = evaluate("--model", str(folder), "--tasks", "stop", "--count", "1")
    assert result.exit_code == 1 and "needs a tokenizer" in result.stderr


def test_another_models_tokens_are_counted_with_its_tokenizer(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path / "model", byte_tokenizer())), **SMALL)
    measure = token_measure(llm)
    assert measure(["é", "kite"]) == [2, 4]
    answer = Answer("kite", "hmm", ())
    assert answer_room(answer, measure) == 2 * 7 + eval_module.ROOM
    format = ChatFormat(llm.tokenizer, [1])
    (question,) = ask(llm, format, "recall", 400, 0, 1, None)
    assert 320 < len(question.prompt.token_ids) <= 402
    llm.close()


def test_whole_numbers_and_what_is_demanded() -> None:
    assert whole_numbers("64, 1000") == [64, 1000]
    task = Task("recall", 64, {}, Answer("x"))
    outcomes = tuple(Outcome(task, 10, 5, 2, Answer("x"), right) for right in (True, False))
    cell = Cell("recall", 64, outcomes, 4.0)
    assert (cell.right, cell.percent, cell.cached_share, cell.rate) == (1, 50.0, 0.5, 6.0)
    require([cell], 50.0)
    with pytest.raises(ValueError, match=r"^less than 51 % right: recall 64 50\.0 %$"):
        require([cell], 51)
