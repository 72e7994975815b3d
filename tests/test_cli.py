"""`leadline generate`, `chat` and `bench` as a person meets them: text, figures, errors, signals and exit statuses."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from folders import byte_tokenizer, write_model
from typer.testing import CliRunner, Result

from leadline.bench.throughput import Lengths, Record, measure, summarise, synthetic_jobs
from leadline.cli.main import app
from leadline.cli.options import parse_size
from leadline.engine.llm import LLM
from leadline.engine.sampling import SamplingParams

ROOT = Path(__file__).parent.parent
SUMMARY = re.compile(
    r"(\d+) prompt tokens \((\d+) cached\), (\d+) generated; first after [\d.]+ s, prompt [\d.]+ tokens/s, "
    r"decode [\d.]+ tokens/s; ended by (\w+)\n"
)
SMALL = ("--state-memory", "32M", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def no_engine_left_behind() -> Iterator[None]:
    yield
    assert "leadline-engine" not in {thread.name for thread in threading.enumerate()}


def run(*arguments: str, input: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input, env={"COLUMNS": "200"})


def accept_ctrl_c() -> None:
    """In a child before it runs: SIGINT works, even if these tests run in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def process(*arguments: str, **settings: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """The command in a process of its own, killed at the end if it still runs."""
    command = [sys.executable, "-m", "leadline", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=accept_ctrl_c, **settings) as running:
        try:
            yield running
        finally:
            running.kill()


# --------------------------------------------------------------------------------------------------- generate


def test_generate_prints_the_text_and_one_line_of_figures(model: str) -> None:
    params = SamplingParams(max_tokens=20, seed=5, temperature=0.8, ignore_eos=True)
    expected = LLM(model, state_bytes=32 << 20, device="cpu").generate("hello", params)[0]
    result = run("generate", "hello", "--model", model, *SMALL, "--max-tokens", "20", "--seed", "5", "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert result.stdout.removesuffix("\n") == expected.text.removesuffix("\n")
    figures = SUMMARY.fullmatch(result.stderr)
    assert figures, result.stderr
    assert figures.groups() == ("2", "0", "20", "length")


def test_generate_as_json(model: str) -> None:
    arguments = ["generate", "hello", "--model", model, *SMALL, "--max-tokens", "9", "--temperature", "0", "--json"]
    result = run(*arguments, "--ignore-eos", "--stop", "never there")
    told = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert len(told["token_ids"]) == told["generated_tokens"] == 9
    assert (told["prompt_tokens"], told["cached_tokens"], told["finish_reason"]) == (2, 0, "length")
    assert 0 < told["ttft"] < 60
    assert told["prompt_rate"] == pytest.approx(2 / told["ttft"])


def test_without_a_seed_two_texts_differ_and_with_one_they_do_not(model: str) -> None:
    def text(*more: str) -> str:
        return run("generate", "a", "--model", model, *SMALL, "--max-tokens", "12", "--ignore-eos", *more).stdout

    assert text("--seed", "1") == text("--seed", "1")
    assert text() != text()


def test_a_stop_string_ends_the_text(model: str) -> None:
    arguments = ["generate", "hello", "--model", model, *SMALL, "--temperature", "0", "--json", "--ignore-eos"]
    whole = json.loads(run(*arguments, "--max-tokens", "30").stdout)["text"]
    stop = whole[5:7]
    told = json.loads(run(*arguments, "--stop", "never there", "--stop", stop).stdout)
    assert told["text"] == whole[: whole.index(stop)]
    assert (told["finish_reason"], told["stop_reason"]) == ("stop", stop)


def test_the_prompt_may_come_from_a_file_or_standard_input(model: str, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("héllo\n\n", encoding="utf-8")
    arguments = ["--model", model, *SMALL, "--max-tokens", "5", "--seed", "1", "--json"]
    given = json.loads(run("generate", "héllo\n", *arguments).stdout)
    for result in (
        run("generate", "--file", str(tmp_path / "prompt"), *arguments),
        run("generate", "-", *arguments, input="héllo\n\n"),
    ):
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["token_ids"] == given["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "input", "words"),
    [
        (["generate", ""], None, ["the prompt is empty"]),
        (["generate", "-"], "", ["the prompt is empty"]),
        (["generate", "-"], b"ab\xff", ["standard input", "byte 2", "0xff"]),
        (["generate", "--file", "/nowhere/to/be/found"], None, ["/nowhere/to/be/found"]),
        (["generate", "a", "--temperature", "7", "--top-p", "0"], None, ["temperature is 7.0", "top_p is 0.0"]),
        (["generate", "a", "--dtype", "int3", "--numerics", "wild"], None, ["dtype is 'int3'", "numerics is 'wild'"]),
        (["generate", "a", "--model", "/nowhere/at/all"], None, ["/nowhere/at/all"]),
        (["chat", "--model", "/nowhere/at/all"], None, ["/nowhere/at/all"]),
        (["bench", "--model", "/nowhere/at/all"], None, ["/nowhere/at/all"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_errors_are_sentences_that_name_every_culprit(
    arguments: list[str], input: str | bytes | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run(*arguments, input=input)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("leadline: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "a", "--file", "b"],
        ["generate", "a", "--state-memory", "12Q"],
        ["bench", "--requests", "0"],
        ["bench", "--rate", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_gives_status_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Error" in result.stderr


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(model: str) -> None:
    result = run("generate", "x" * 300, "--model", model, *SMALL, "--max-context", "256", "--max-tokens", "5")
    assert result.exit_code == 1
    assert "301 tokens" in result.stderr
    assert "the context is 256" in result.stderr


def test_ctrl_c_ends_a_generation_with_status_130(model: str) -> None:
    arguments = ["generate", "hello", "--model", model, *SMALL, "--max-tokens", "3900", "--ignore-eos"]
    with process(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.read(3), "it streams"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert b"Traceback" not in errors


def test_a_reader_who_leaves_ends_a_generation_quietly(model: str) -> None:
    arguments = ["generate", "hello", "--model", model, *SMALL, "--max-tokens", "3900", "--ignore-eos"]
    with process(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.read(3), "it streams"
        running.stdout.close()
        assert running.wait(60) == 1
        assert running.stderr.read() == b""


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 << 20), ("2G", 2 << 30), ("1.5g", 3 << 29), ("0.5 GiB", 1 << 29), ("12kb", 12288), ("1000", 1000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


# ------------------------------------------------------------------------------------------------------- chat


class Terminal:
    """`leadline chat` at the other end of a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.seen = ""
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            accept_ctrl_c()
            environment = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
            os.execve(sys.executable, [sys.executable, "-m", "leadline", "chat", *arguments], environment)

    def expect(self, pattern: str, seconds: float = 60) -> str:
        """Read until what is new matches; returns and forgets everything up to there."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; there is {self.seen!r}"
            assert self._read(), f"it ended before {pattern!r}; there is {self.seen!r}"
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def end(self, press: str = "") -> int:
        """Its exit status. `press` is typed every 10 s until then: readline misses what comes with its prompt."""
        for _ in range(6):
            self.type(press)
            pause = time.monotonic() + 10
            while time.monotonic() < pause:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.pid = 0
                    return os.waitstatus_to_exitcode(status)
                self._read()
        raise AssertionError(f"it does not end; there is {self.seen!r}")

    def _read(self) -> bool:
        """Take what has come, or wait a little for it; False if the other end is closed."""
        if select.select([self.file], [], [], 0.05)[0]:
            try:
                self.seen += os.read(self.file, 4096).decode("utf-8", "replace")
            except OSError:
                time.sleep(0.05)
                return False
        return True

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened = []

    def open_one(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def test_ctrl_c_stops_the_answer_and_then_the_program(model: str, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--model", model, *SMALL, "--no-thinking", "--temperature", "0")
    chat.expect("> ")
    chat.type("hello\r")
    chat.expect("hello.{40}")  # the line as typed, and an answer that has no end
    chat.type("\x03")
    chat.expect("Ctrl-C once more.*> ")
    chat.type("/help\r")
    chat.expect("/reset.*> ")
    chat.type("hello\r")
    chat.expect("hello.{40}")
    chat.type("\x03")
    chat.expect("Ctrl-C once more.*> ")
    assert chat.end(press="\x03") == 0
    assert "Traceback" not in chat.seen


def test_ctrl_d_leaves(model: str, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("--model", model, *SMALL)
    chat.expect("> ")
    assert chat.end(press="\x04") == 0


def figures(output: str) -> list[tuple[int, int, int]]:
    """(prompt tokens, cached, generated) of every answer of a chat."""
    found = re.findall(r"\[(\d+) prompt tokens, (\d+) cached; (\d+) generated", output)
    return [(int(prompt), int(cached), int(generated)) for prompt, cached, generated in found]


def test_a_chat_keeps_its_history_and_reuses_its_prefix(model: str) -> None:
    lines = ["/system " + "be kind. " * 15, "hello", "and then?", "/reset", "hello", "/exit", "never read"]
    arguments = ["chat", "--model", model, *SMALL, "--no-thinking", "--max-tokens", "8", "--seed", "1"]
    result = run(*arguments, input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    first, second, anew = figures(result.stdout)
    assert second[0] > first[0] + 8
    assert second[1] == 128, "the first page is the same"
    assert anew[:2] == (first[0], 128)
    assert "never read" not in result.stdout


def test_chat_commands_speak_up(model: str) -> None:
    lines = ["/system Be kind.", "", "hi", "/system", "/reset", "hi", "/frobnicate", "/help"]
    result = run("chat", "--model", model, *SMALL, "--max-tokens", "3", input="\n".join(lines))
    first, second = figures(result.stdout)
    assert first[0] == second[0] + len("Be kind."), "without merges, a token a character"
    for words in (
        "(system message set)",
        "(no system message)",
        "(a new conversation)",
        "/frobnicate is not a command",
    ):
        assert words in result.stdout
    assert result.stdout.count("/reset  ") == 1


def test_a_conversation_beyond_the_context_can_go_on_anew(model: str) -> None:
    lines = ["x" * 300, "hi"]
    result = run("chat", "--model", model, *SMALL, "--max-context", "256", "--max-tokens", "3", input="\n".join(lines))
    assert result.exit_code == 0
    assert "the context is 256; /reset starts anew" in result.stdout
    assert len(figures(result.stdout)) == 1


def test_a_chat_needs_the_tokens_of_its_format(tmp_path: Path) -> None:
    result = run("chat", "--model", str(write_model(tmp_path, byte_tokenizer(["<｜User｜>"]))), *SMALL)
    assert result.exit_code == 1
    assert "<｜Assistant｜>, <think>, </think>" in result.stderr


# ------------------------------------------------------------------------------------------------------ bench


def test_bench_reports_what_it_ran(model: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--requests", "5", "--input-len", "10", "--output-len", "4", "--prefix-len", "130"]
    result = run("bench", "--model", model, *SMALL, *arguments, "--concurrency", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text())
    assert (told["requests"], told["prompt_tokens"], told["output_tokens"]) == (5, 700, 20)
    assert told["prefix_hit_share"] == pytest.approx(4 * 128 / 700)
    assert told["steps"] == 5 * 4
    assert told["output_rate"] == pytest.approx(20 / told["duration"])
    assert set(told["latency"]) == {"TTFT", "TPOT", "ITL", "E2E"}
    for name, summary in told["latency"].items():
        assert summary["p99"] >= summary["p90"] >= summary["median"] > 0, name
    for words in ("TTFT", "median", "p99", "5 in", "73.1% from the prefix cache"):
        assert words in result.stdout


def test_latency_is_counted_from_the_moments() -> None:
    records = [Record(10, 1.0, [1.5, 1.6, 1.6, 2.0]), Record(30, 0.0, [4.0], cached_tokens=20)]
    before, after = (SimpleNamespace(steps=steps, preemptions=steps // 5) for steps in (5, 20))
    report = summarise("m", records, before, after)  # type: ignore[arg-type]
    assert (report.steps, report.preemptions) == (15, 3)
    assert report.duration == 4.0
    assert report.prefix_hit_share == 0.5
    assert (report.output_rate, report.total_rate) == (5 / 4, 45 / 4)
    assert report.latency["TTFT"].mean == pytest.approx(2250)
    assert report.latency["E2E"].median == pytest.approx(2500)
    assert report.latency["TPOT"].mean == pytest.approx(500 / 3)
    assert report.latency["ITL"].median == pytest.approx(100)


def test_synthetic_lengths_are_drawn_from_the_range_and_the_seed() -> None:
    def draw(seed: int, spread: float) -> Any:
        return synthetic_jobs(Lengths(200, 50, 10, 7, spread), 97, np.random.default_rng(seed), seed)

    jobs = draw(1, 0.2)
    inputs, outputs = {len(job.prompt) - 7 for job in jobs}, {job.params.max_tokens for job in jobs}
    assert (min(inputs), max(inputs)) == (40, 60)
    assert outputs == {8, 9, 10, 11, 12}
    assert len({tuple(job.prompt[:7]) for job in jobs}) == 1
    assert len({tuple(job.prompt[7:20]) for job in jobs}) == 200
    assert {len(job.prompt) for job in draw(1, 0)} == {57}
    assert all((a.prompt == b.prompt).all() for a, b in zip(jobs, draw(1, 0.2), strict=True))


def test_requests_are_sent_when_due_and_under_the_limit(model: str) -> None:
    engine = LLM(model, state_bytes=32 << 20, device="cpu").engine
    jobs = synthetic_jobs(Lengths(6, 5, 8, 0, 0), 97, np.random.default_rng(0), 0)
    most = 0
    original = engine.step

    def watched() -> Any:
        nonlocal most
        updates = original()
        most = max(most, engine.stats().running + engine.stats().waiting)
        return updates

    engine.step = watched  # type: ignore[method-assign]
    advanced: list[int] = []
    records = measure(engine, jobs, [0.0] * 6, 2, advanced.append)
    assert most == 2
    assert sum(advanced) == 48
    assert [len(record.arrivals) for record in records] == [8] * 6
    records = measure(engine, jobs, [0.0, 0.0, 0.0, 0.5, 0.5, 0.6], None, advanced.append)
    assert [record.sent for record in records] == [0.0, 0.0, 0.0, 0.5, 0.5, 0.6]
    assert min(record.arrivals[0] for record in records[3:]) > 0.5


def test_bench_runs_a_dataset(model: str, tmp_path: Path) -> None:
    lines = [{"prompt": "hello", "max_tokens": 3}, {"prompt": [5, 6, 7]}, {"prompt": "a", "max_tokens": 1}]
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    path = tmp_path / "figures.json"
    arguments = ["--dataset", str(tmp_path / "jobs.jsonl"), "--output-len", "2", "--rate", "50", "--json", str(path)]
    result = run("bench", "--model", model, *SMALL, *arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(path.read_text())
    assert (told["requests"], told["prompt_tokens"]) == (3, 2 + 3 + 2)
    assert 3 <= told["output_tokens"] <= 6


def test_a_bad_dataset_names_every_bad_line(model: str, tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', '{"text": "a"}', "nonsense", "[]", '{"prompt": "a", "max_tokens": 0}', '{"prompt": 5}']
    (tmp_path / "jobs.jsonl").write_text("\n".join(lines))
    result = run("bench", "--model", model, *SMALL, "--dataset", str(tmp_path / "jobs.jsonl"))
    assert result.exit_code == 1
    for number in range(2, 7):
        assert f"line {number}" in result.stderr
    assert "line 1:" not in result.stderr


def test_requests_that_cannot_fit_are_counted_before_anything_runs(model: str) -> None:
    arguments = ["--requests", "9", "--input-len", "250", "--output-len", "20", "--max-context", "256"]
    result = run("bench", "--model", model, *SMALL, *arguments)
    assert result.exit_code == 1
    assert "request 5: " in result.stderr
    assert "and 4 more" in result.stderr


def test_a_plot_without_matplotlib_is_refused_at_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("bench", "--model", model, "--plot", "x.png")
    assert result.exit_code == 1
    assert "pip install 'leadline[plot]'" in result.stderr
