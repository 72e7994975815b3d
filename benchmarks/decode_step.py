"""V4-Flash on one GPU with random weights: decode steps, prompts and memory, beside SGLang's figures and the floors.

    python benchmarks/decode_step.py                  8 layers, then all 43
    python benchmarks/decode_step.py --layers 8 --breakdown

Each depth runs in a process of its own, and each row by itself: what fails says why and the rest goes on. Lines come as
they are measured. `leadline bench --mode latency` measures the same for any model.
"""

import argparse
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from leadline.bench import figures
from leadline.bench.latency import DecodeRow, NoRoom, decode_row, profiled
from leadline.bench.prefill import prefill_row
from leadline.bench.subject import Subject, random_subject
from leadline.config import EngineConfig
from leadline.engine.random_weights import TINY, geometry

SHARED_STACKS = 8
"""Distinct stacks of experts at full depth: 27 GB instead of 147, which no single GPU of 139 GiB holds."""
MOST_BATCH = 128
CHUNK = 8192
STATE_BYTES = 12 << 30


@dataclass(frozen=True)
class Decode:
    """A row of the table, and what SGLang 0.5.14 takes for its captured step alone on one H200, in milliseconds: the
    better of fp8 and fp4 experts; at 43 layers extrapolated from 8.

    Ours to reach, by layers too: `target_ms`, or a multiple of the floor, `target_ratio`.
    """

    batch: int
    context: int
    sglang_ms: dict[int, float]
    target_ms: dict[int, float] = field(default_factory=dict)
    target_ratio: dict[int, float] = field(default_factory=dict)


DECODE = (
    Decode(1, 4096, {8: 2.08, 43: 9.3}, {8: 1.3}, {43: 2.0}),
    Decode(16, 4096, {8: 5.30, 43: 26.7}, {8: 3.4}, {43: 1.35}),
    Decode(64, 4096, {8: 10.36, 43: 53.0}, {8: 6.8}, {43: 1.25}),
    Decode(128, 4096, {8: 12.65, 43: 67.0}, {8: 8.2}, {43: 1.25}),
    Decode(16, 32768, {8: 5.34}),
    Decode(64, 32768, {8: 10.45}),
    Decode(1, 262144, {8: 2.12}, {8: 1.5}),
    Decode(1, 1 << 20, {}),
)
LONG, SHORT, LONG_TO_SHORT = (1, 1 << 20), (1, 4096), {43: 1.35}
"""By layers: how many times as long as the (batch, context) SHORT the row LONG may take."""


@dataclass(frozen=True)
class Prefill:
    """A prompt's row: SGLang's tokens/s by layers with fp8 experts, and the least that ours is to reach.

    `most_growth` is how many times as long as at its start a token may take at the end of the prompt.
    """

    tokens: int
    sglang: dict[int, float] = field(default_factory=dict)
    target: dict[int, float] = field(default_factory=dict)
    most_growth: float | None = None


PREFILL = (
    Prefill(8192, {8: 96_400, 43: 19_000}, {8: 100_000, 43: 20_000}),
    Prefill(32768, {8: 104_900}, {43: 20_000}),
    Prefill(262144, most_growth=2.0),
)
COLUMNS = (*figures.DECODE_HEAD, "SGLang ms", "target", "reached")


def decode_rows(subject: Subject, options: argparse.Namespace, until: float) -> list[DecodeRow]:
    """Measure and print every decode row for which there is time."""
    layers = subject.engine.model.num_hidden_layers
    figures.say([figures.line(COLUMNS)])
    rows: list[DecodeRow] = []
    for case in DECODE:
        name = figures.line([str(case.batch), f"{case.context:,}"])
        if time.monotonic() > until:
            figures.say([f"{name}    left out: the time is up"])
            continue
        try:
            row = decode_row(subject, case.batch, case.context, options.steps, 0)
        except Exception as error:  # whatever one row raises, the others are wanted
            _failed(name, error)
            continue
        rows.append(row)
        short = next((row.median_ms for row in rows if (row.batch, row.context) == SHORT), None)
        target = target_of(case, layers, row.floor_ms, short)
        beside = [_figure(case.sglang_ms.get(layers), 2), *_reached(row.median_ms, target, 2, most=True)]
        figures.say([figures.decode_line(row) + figures.line(beside)])
    return rows


def profiles(subject: Subject, rows: list[DecodeRow], breakdown: bool, until: float) -> None:
    """Print what the GPU did in the steps of every row for which there is time."""
    figures.say([figures.line(figures.PROFILE_HEAD)])
    for row in rows:
        name = figures.line([str(row.batch), f"{row.context:,}"])
        if time.monotonic() > until:
            figures.say([f"{name}    left out: the time is up"])
            continue
        try:
            figures.say(figures.profile_lines(profiled(subject, row, 0, breakdown)))
        except Exception as error:  # see above
            _failed(name, error)


def prefill_rows(subject: Subject, until: float) -> None:
    """Print every prompt's row for which there is time."""
    layers = subject.engine.model.num_hidden_layers
    figures.say([figures.line([*figures.PREFILL_HEAD, "SGLang /s", "target", "reached"])])
    for case in PREFILL:
        name = figures.line([f"{case.tokens:,}"])
        if time.monotonic() > until:
            figures.say([f"{name}    left out: the time is up"])
            continue
        try:
            row = prefill_row(subject, case.tokens, 0)
        except Exception as error:  # see above
            _failed(name, error)
            continue
        target = case.target.get(layers)
        beside = [_figure(case.sglang.get(layers), 0), *_reached(row.tokens_per_second, target, 0, most=False)]
        figures.say([figures.prefill_line(row) + figures.line(beside)])
        if case.most_growth is not None:
            growth = row.end_us / row.start_us
            allowed, reached = _reached(growth, case.most_growth, 2, most=True)
            figures.say([f"    a token at the end takes {growth:.2f} x one at the start; target {allowed}: {reached}"])


def target_of(case: Decode, layers: int, floor_ms: float, short_ms: float | None) -> float | None:
    """The milliseconds that a row may take, None if there is no target; `short_ms` is what SHORT took, if measured."""
    if (case.batch, case.context) == LONG and layers in LONG_TO_SHORT:
        return None if short_ms is None else LONG_TO_SHORT[layers] * short_ms
    if layers in case.target_ratio:
        return case.target_ratio[layers] * floor_ms
    return case.target_ms.get(layers)


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _reached(value: float, target: float | None, digits: int, most: bool) -> tuple[str, str]:
    """Cells: a target, which is the most or the least that a figure may be, and whether it is reached."""
    if target is None:
        return "-", "-"
    return _figure(target, digits), "yes" if (value <= target if most else value >= target) else "no"


def _failed(name: str, error: Exception) -> None:
    text = " ".join(str(error).split())
    if isinstance(error, NoRoom):
        figures.say([f"{name}    left out: {text}"])
        return
    figures.say([f"{name}    failed: {type(error).__name__}: {text[:400]}"])
    traceback.print_exception(error, limit=-3)


def measure(layers: int, options: argparse.Namespace, until: float) -> None:
    """Everything of one depth."""
    begun = time.monotonic()
    model = geometry(options.model, min(layers, geometry(options.model).num_hidden_layers))
    layers = model.num_hidden_layers
    config = EngineConfig(
        max_running=options.most_batch,
        step_tokens=options.chunk,
        chunk_tokens=options.chunk,
        state_bytes=options.state_bytes,
        device="auto",
    )
    stacks = layers if layers <= SHARED_STACKS else SHARED_STACKS
    subject = random_subject(config, model, options.model, stacks, progress=False)
    subject.prepare(0)
    loaded = time.monotonic()
    figures.say([subject.name, figures.machine_line(subject.floors.machine)])
    figures.say([f"ready after {loaded - begun:.1f} s: weights drawn, kernels compiled, state filled"])
    rows = decode_rows(subject, options, until)
    prefill_rows(subject, until)
    figures.say(figures.memory_lines(subject.memory()))
    if subject.device.type == "cuda":  # once PyTorch's profiler has run, launches cost the host more
        profiles(subject, rows, options.breakdown, until)
    problems = subject.engine.problems()
    figures.say([f"{time.monotonic() - begun:.1f} s in all; problems: {problems or 'none'}", ""])
    subject.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", default="8,43", help="depths, one after another")
    parser.add_argument("--model", default="flash", help=f"a preset, or {TINY}")
    parser.add_argument("--steps", type=int, default=48, help="measured steps of a row")
    parser.add_argument("--breakdown", action="store_true", help="each step by operation")
    parser.add_argument("--seconds", type=float, default=220, help="no row begins later than this")
    parser.add_argument("--most-batch", type=int, default=MOST_BATCH)
    parser.add_argument("--chunk", type=int, default=CHUNK)
    parser.add_argument("--state-bytes", type=int, default=STATE_BYTES)
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    depths = [int(layers) for layers in options.layers.split(",")]
    if len(depths) == 1:
        measure(depths[0], options, until)
        return
    for number, layers in enumerate(depths):
        left = (until - time.monotonic()) / (len(depths) - number)
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--layers", str(layers), "--seconds", str(left)]
        if subprocess.run(command, check=False).returncode:
            figures.say([f"{layers} layers failed"])


if __name__ == "__main__":
    main()
