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
from dataclasses import dataclass
from pathlib import Path

from leadline.bench import figures
from leadline.bench.latency import NoRoom, decode_row
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
    better of fp8 and fp4 experts; at 43 layers extrapolated from 8. `target_ms` is ours, None where there is none."""

    batch: int
    context: int
    sglang_ms: dict[int, float]
    target_ms: dict[int, float]


DECODE = (
    Decode(1, 4096, {8: 2.08, 43: 9.3}, {}),
    Decode(16, 4096, {8: 5.30, 43: 26.7}, {}),
    Decode(64, 4096, {8: 10.36, 43: 53.0}, {}),
    Decode(128, 4096, {8: 12.65, 43: 67.0}, {}),
    Decode(16, 32768, {8: 5.34}, {}),
    Decode(64, 32768, {8: 10.45}, {}),
    Decode(1, 262144, {8: 2.12}, {}),
    Decode(1, 1 << 20, {}, {}),
)
PREFILL = ((8192, {8: 96_400, 43: 19_000}), (32768, {8: 104_900}))
"""(tokens of a prompt, SGLang's tokens/s by layers with fp8 experts)."""
COLUMNS = (*figures.DECODE_HEAD, "SGLang ms", "target")


def decode_rows(subject: Subject, options: argparse.Namespace, until: float) -> None:
    """Print every decode row for which there is time."""
    layers = subject.engine.model.num_hidden_layers
    figures.say([figures.line(COLUMNS)])
    for case in DECODE:
        name = figures.line([str(case.batch), f"{case.context:,}"])
        if time.monotonic() > until:
            figures.say([f"{name}    left out: the time is up"])
            continue
        try:
            row = decode_row(subject, case.batch, case.context, options.steps, 0, options.breakdown)
        except Exception as error:  # whatever one row raises, the others are wanted
            _failed(name, error)
            continue
        beside = [f"{value[layers]:,.2f}" if layers in value else "-" for value in (case.sglang_ms, case.target_ms)]
        parts = figures.operation_lines(row) if row.operations else []
        figures.say([figures.decode_line(row) + figures.line(beside), *parts])


def prefill_rows(subject: Subject, until: float) -> None:
    """Print every prompt's row for which there is time."""
    layers = subject.engine.model.num_hidden_layers
    figures.say([figures.line([*figures.PREFILL_HEAD, "SGLang /s"])])
    for tokens, sglang in PREFILL:
        if time.monotonic() > until:
            figures.say([f"{figures.line([f'{tokens:,}'])}    left out: the time is up"])
            continue
        try:
            beside = f"{sglang[layers]:,}" if layers in sglang else "-"
            figures.say([figures.prefill_line(prefill_row(subject, tokens, 0)) + figures.line([beside])])
        except Exception as error:  # see above
            _failed(figures.line([f"{tokens:,}"]), error)


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
    decode_rows(subject, options, until)
    prefill_rows(subject, until)
    figures.say(figures.memory_lines(subject.memory()))
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
