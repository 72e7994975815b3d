"""`leadline bench --mode latency` and `prefill`, and its models of random weights."""

import importlib
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from leadline.bench.breakdown import Kernel
from leadline.bench.figures import profile_lines
from leadline.bench.latency import NoRoom, decode_row, lengths, needs, profiled, start, timed
from leadline.bench.prefill import prefill_row
from leadline.bench.subject import Subject, random_subject
from leadline.cli.main import app
from leadline.config import EngineConfig
from leadline.engine.pretend import fill_state
from leadline.engine.random_weights import geometry
from leadline.model.batch import Batch
from leadline.model.state import State

SMALL = EngineConfig(state_bytes=24 << 20, max_running=4, step_tokens=256, chunk_tokens=256, device="cpu")
OPTIONS = ("bench", "--random-weights", "tiny", "--layers", "3", "--device", "cpu", "--state-memory", "48M")


@pytest.fixture(autouse=True)
def experts_are_counted_over_few_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes long for the steps that an exact number wants."""
    if "exact" not in request.fixturenames:
        for module in ("subject", "latency"):
            monkeypatch.setattr(f"leadline.bench.{module}.hit_steps", lambda batch: 6)


@pytest.fixture
def exact() -> None:
    """Wanted by tests of that number."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def subject(config: EngineConfig = SMALL, stacks: int = 3) -> Subject:
    made = random_subject(config, geometry("tiny", 3), "tiny", stacks, progress=False)
    fill_state(made.engine.runner.state, 0)
    return made


def numbers(line: str) -> list[str]:
    return line.replace(",", "").split()


# --------------------------------------------------------------------------------------------------- command


def test_latency_prints_a_row_for_each_batch_and_context_and_writes_all_of_it(tmp_path: Path) -> None:
    told, drawn = tmp_path / "figures.json", tmp_path / "figures.png"
    words = ["--mode", "latency", "--batches", "1,3", "--contexts", "200,1K", "--steps", "4", "--share-experts", "2"]
    result = run(*OPTIONS, *words, "--json", str(told), "--plot", str(drawn))
    assert result.exit_code == 0, result.output
    name, machine, head, *lines = result.stdout.splitlines()
    assert name.startswith("tiny, 3 layers, random weights of") and "share 2 distinct stacks of experts" in name
    assert "TB/s" in machine and head.split()[:2] == ["batch", "context"]
    figures = json.loads(told.read_text())
    assert figures["mode"] == "latency" and figures["model"] == name
    assert [(row["batch"], row["context"]) for row in figures["rows"]] == [(1, 200), (3, 200), (1, 1024), (3, 1024)]
    for row, line in zip(figures["rows"], lines, strict=True):
        assert numbers(line)[:2] == [str(row["batch"]), str(row["context"])]
        assert row["steps"] == 4 and row["p99_ms"] >= row["median_ms"] > 0
        assert row["ratio"] == pytest.approx(row["median_ms"] / row["floor_ms"])
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["median_ms"] * 1e3)
        assert row["gpu_ms"] is row["idle_share"] is None and row["operations"] == []
        assert 2 - 1e-9 <= row["experts_hit"] <= min(8, 2 * row["batch"])
    assert figures["rows"][0]["experts_hit"] == pytest.approx(2)
    assert drawn.read_bytes()[:4] == b"\x89PNG"


def test_prefill_prints_a_row_for_each_length(tmp_path: Path) -> None:
    told, drawn = tmp_path / "figures.json", tmp_path / "figures.png"
    words = ["--mode", "prefill", "--contexts", "300,1000,1M", "--chunk-tokens", "128"]
    result = run(*OPTIONS, *words, "--json", str(told), "--plot", str(drawn))
    assert result.exit_code == 0, result.output
    assert "1,048,576    left out: needs a context of 1,048,577 tokens; there is room for" in result.stdout
    first, second = json.loads(told.read_text())["rows"]
    assert (first["tokens"], first["chunk"], second["tokens"]) == (300, 128, 1000)
    for row in (first, second):
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
    assert drawn.read_bytes()[:4] == b"\x89PNG"


def test_rows_without_room_say_what_they_would_need_and_the_others_run() -> None:
    words = ["--mode", "latency", "--batches", "6", "--contexts", "60K,128K,200", "--steps", "2"]
    result = run(*OPTIONS[:-1], "16M", *words, "--step-tokens", "64", "--max-running", "2")
    assert result.exit_code == 0, result.output
    *_, large, beyond, small = result.stdout.splitlines()
    assert "left out: needs 2,886 pages, there are" in large and "GiB are missing" in large
    assert "left out: the model has contexts up to 65,536 tokens" in beyond
    assert numbers(small)[:2] == ["6", "200"]


def test_throughput_of_random_weights() -> None:
    result = run(*OPTIONS, "--requests", "3", "--input-len", "9", "--output-len", "2")
    assert result.exit_code == 0, result.output
    assert "3 in" in result.stdout and result.stdout.startswith("tiny, 3 layers, random weights of")


def test_random_weights_have_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "text"}\n{"prompt": [1, 2]}\n')
    result = run(*OPTIONS, "--dataset", str(tmp_path / "jobs.jsonl"))
    assert result.exit_code == 1
    assert "line 1: random weights have no tokenizer" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--random-weights", "flush"], ["no random weights of 'flush'", "tiny, flash"]),
        (["--random-weights", "flash", "--layers", "99"], ["flash has 43 layers; 99"]),
        (["--random-weights", "flash", "--layers", "-2"], ["flash has 43 layers; -2"]),
        (["--random-weights", "flash", "--layers", "0,4,3"], ["layers of ratio [3]"]),
        (["--layers", "4", "--mode", "prefill"], ["--layers and --share-experts", "not given"]),
        (["--share-experts", "4"], ["--layers and --share-experts", "not given"]),
        (["--random-weights", "tiny", "--model", "x"], ["--random-weights tiny needs no --model, but x is given"]),
        (["--breakdown"], ["--breakdown is of --mode latency, not throughput"]),
        (["--breakdown", "--mode", "latency", "--device", "cpu"], ["--breakdown tells kernels on a GPU apart"]),
        (["--mode", "latency", "--no-prefix-cache"], ["not with --no-prefix-cache"]),
        (
            ["--mode", "latency", "--plot", "x.png", "--share-experts", "1", "--no-prefix-cache"],
            ["given; ", "--no-pref"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together_are_sentences(arguments: list[str], words: list[str]) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == 1
    assert result.stdout == "" and result.stderr.startswith("leadline: ")
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "speed"],
        ["--layers", "all", "--random-weights", "tiny"],
        ["--layers", "0,,4", "--random-weights", "tiny"],
        ["--share-experts", "0", "--random-weights", "tiny"],
        ["--batches", "1,0"],
        ["--batches", "1,two"],
        ["--contexts", "-4", "--mode", "prefill"],
        ["--steps", "0"],
    ],
    ids=" ".join,
)
def test_values_that_are_none_give_status_2(arguments: list[str]) -> None:
    result = run("bench", *arguments)
    assert result.exit_code == 2, result.output
    assert "Error" in result.stderr


# ---------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(("batch", "context"), [(1, 1), (4, 60), (3, 128), (4, 1000), (2, 4096)])
def test_requests_stand_where_the_row_says_when_its_steps_begin(batch: int, context: int) -> None:
    measured = subject()
    requests = start(measured, batch, context, 4, 0)
    assert [request.prompt_length for request in requests] == [context + 1 + i % 4 for i in range(batch)]
    assert all(request.known > request.prompt_length and request.slot >= 0 for request in requests)
    assert {request.reused for request in requests} <= {context // 128 * 128, (context + 3) // 128 * 128}
    assert measured.engine.problems() == []
    measured.empty()
    stats = measured.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.slots_used) == (0, 0, 0, 0)


def test_a_row_leaves_nothing_behind_even_if_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = subject()
    row = decode_row(measured, 4, 500, 3, 0)
    assert (row.batch, row.context, row.steps) == (4, 500, 3)
    assert measured.engine.runner.expert_counts is None, "experts are counted where nobody asked for it"
    again = decode_row(measured, 4, 500, 3, 0)
    assert again.experts_hit == pytest.approx(row.experts_hit, rel=0.3)
    monkeypatch.setattr("leadline.bench.latency.timed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decode_row(measured, 4, 500, 3, 0)
    assert measured.engine.stats().slots_used == 0 and measured.engine.problems() == []


def test_no_request_ends_before_its_row_where_prompts_need_many_steps() -> None:
    """With 16 tokens a step the first request decodes 20 times while the last is still on its prompt."""
    measured = subject(replace(SMALL, step_tokens=16, chunk_tokens=16))
    row = decode_row(measured, 4, 100, 2, 0)
    assert row.experts_hit > 2


def test_the_whole_context_of_a_model_is_measured_from_a_little_below() -> None:
    config = replace(SMALL, max_context=2048)
    measured = subject(config)
    [length] = lengths(measured, 1, 2048, 8)
    assert 2048 - 256 < length < 2048
    row = decode_row(measured, 1, 2048, 8, 0)
    assert row.context == 2048
    with pytest.raises(NoRoom, match="contexts here go up to 2,048 tokens"):
        needs(measured, 1, 4096, 8)
    with pytest.raises(NoRoom, match=r"contexts here go up to 64 tokens, of which \d+ are for the steps"):
        needs(subject(replace(SMALL, max_context=64)), 1, 32, 50)


def test_more_requests_than_may_run_are_no_row() -> None:
    with pytest.raises(NoRoom, match="5 requests are more than the 4 that may run"):
        decode_row(subject(), 5, 100, 3, 0)


def test_each_step_is_timed_by_itself() -> None:
    pauses = iter([0.01, 0.05, 0.01])
    slow: Any = SimpleNamespace(step=lambda: time.sleep(next(pauses)))
    times = timed(slow, 3)
    assert times[0] < 0.04 < times[1] and times[2] < 0.04 and min(times) >= 0.01


def test_idle_share_and_breakdown_come_from_the_kernels_of_the_profiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stood in for a GPU: four profiled steps of a millisecond in all that steps of the run take."""
    kernels = [Kernel("_attend", start, 250.0) for start in (0.0, 500.0, 1000.0, 1500.0)]
    measured = subject()
    assert measured.floors.machine.bandwidth > 0  # measured while it is still a CPU
    monkeypatch.setattr("leadline.bench.latency.watched", lambda engine, steps: kernels)
    monkeypatch.setattr(Subject, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr("leadline.bench.subject.wait", lambda device: None)
    plain = decode_row(measured, 2, 300, 3, 0)
    assert plain.gpu_ms is None and plain.operations == []
    row = profiled(measured, plain, 0, breakdown=True)
    assert measured.engine.stats().slots_used == 0
    assert row.median_ms == plain.median_ms and row.gpu_ms == pytest.approx(0.25)
    assert row.idle_share == pytest.approx(1 - 0.25 / row.median_ms)
    [part] = row.operations
    assert (part.operation, part.launches, part.ms) == ("attend", 1, pytest.approx(0.25))
    assert 0 < part.floor_ms < row.floor_ms
    lines = profile_lines(row)
    assert lines[0].split()[-2:] == ["0.250", f"{row.idle_share:.1%}"]
    assert lines[2].split()[:3] == ["attend", "1", "250.0"] and lines[-1].split()[0] == "together"
    assert profile_lines(replace(row, operations=[])) == lines[:1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_s_steps_are_timed_one_by_one(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that takes so long for a token: half a millisecond at first, 1.5 from position 512 on."""
    measured = subject(replace(SMALL, overlap=overlap))
    vocabulary = measured.engine.model.vocab_size

    def slow(batch: Batch, state: State) -> torch.Tensor:
        time.sleep(len(batch.ids) * 5e-4 * (3 if int(batch.starts[0]) >= 512 else 1))
        return torch.zeros(len(batch.logit_rows), vocabulary)

    monkeypatch.setattr(measured.engine.runner, "forward", slow)
    row = prefill_row(measured, 1024 + 100, 0)
    assert row.chunk == 256
    assert row.seconds * 1e6 >= 500 * 512 + 1500 * 612
    assert 500 <= row.start_us < 1500 <= row.end_us
    assert measured.engine.stats().pages_used == 0
    measured.engine.close()


def test_experts_hit_of_a_batch_is_between_one_token_s_and_all(exact: None) -> None:
    measured = subject()
    start(measured, 4, 200, 40, 0)
    hit = measured.experts_hit(4) / 3
    assert 2 < hit < 8
    # Near-uniform routing: 8 experts, 2 a token, 4 tokens that choose independently.
    assert hit == pytest.approx(8 * (1 - (1 - 2 / 8) ** 4), rel=0.15)
    assert np.isfinite(hit)


# ------------------------------------------------------------------------------------------------ the table


def test_the_table_goes_on_after_rows_that_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`benchmarks/decode_step.py`: a row that fails, one without room, one out of time, and those that are measured."""
    table = importlib.import_module("benchmarks.decode_step")
    rows = [table.Decode(batch, 200, {3: 1.25}, {3: 9999.0}) for batch in (1, 2, 9)]
    monkeypatch.setattr(table, "DECODE", rows)
    monkeypatch.setattr(table, "PREFILL", (table.Prefill(300, {3: 4000}, {3: 9_999_999}), table.Prefill(100, {})))
    measured_row = table.decode_row

    def fails_once(subject: Subject, batch: int, *others: Any) -> Any:
        if batch == 2:
            raise RuntimeError("a\nbad row")
        return measured_row(subject, batch, *others)

    monkeypatch.setattr(table, "decode_row", fails_once)
    given = {"model": "tiny", "steps": 2, "breakdown": False, "most_batch": 4, "chunk": 256, "state_bytes": 24 << 20}
    table.measure(3, SimpleNamespace(**given), time.monotonic() + 100)
    lines = capsys.readouterr().out.splitlines()
    assert numbers(lines[4])[:2] == ["1", "200"] and lines[4].split()[-3:] == ["1.25", "9,999.00", "yes"]
    assert "2       200    failed: RuntimeError: a bad row" in lines[5]
    assert "9       200    left out: 9 requests are more than the 4" in lines[6]
    assert [numbers(line)[0] for line in lines[8:10]] == ["300", "100"]
    assert [line.split()[-3:] for line in lines[8:10]] == [["4,000", "9,999,999", "no"], ["-", "-", "-"]]
    assert lines[10].endswith("problems: none")
    table.measure(3, SimpleNamespace(**given), time.monotonic())
    assert capsys.readouterr().out.count("left out: the time is up") == 5


def test_the_targets_of_the_table() -> None:
    """In milliseconds at 8 layers, multiples of the floor at 43; a long context is held against a short one."""
    table = importlib.import_module("benchmarks.decode_step")
    rows = {(row.batch, row.context): row for row in table.DECODE}
    at_8 = {place: table.target_of(row, 8, 1.0, 3.0) for place, row in rows.items()}
    at_43 = {place: table.target_of(row, 43, 10.0, 3.0) for place, row in rows.items()}
    short = [(batch, 4096) for batch in (1, 16, 64, 128)]
    assert [at_8[place] for place in short] == [1.3, 3.4, 6.8, 8.2]
    assert [at_43[place] for place in short] == [20.0, 13.5, 12.5, 12.5]
    assert (at_8[1, 262144], at_43[1, 262144]) == (1.5, None)
    assert (at_8[table.LONG], at_43[table.LONG]) == (None, pytest.approx(1.35 * 3.0))
    assert table.target_of(rows[table.LONG], 43, 10.0, None) is None, "the short row failed"
