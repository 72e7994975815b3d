"""Rows of figures as lines that are printed as they come, as JSON, and as a plot."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leadline.bench.floors import Machine
from leadline.bench.latency import DecodeRow
from leadline.bench.prefill import PrefillRow
from leadline.bench.subject import Subject

DECODE_HEAD = (
    "batch",
    "context",
    "ms/step",
    "mean",
    "p99",
    "tokens/s",
    "experts",
    "floor ms",
    "ratio",
)
PROFILE_HEAD = ("batch", "context", "ms/step", "GPU ms", "idle")
PREFILL_HEAD = ("tokens", "chunk", "seconds", "tokens/s", "us first", "us last", "floor s", "ratio")
WIDTH = 10


def line(cells: Sequence[str]) -> str:
    """Cells in columns, to the right."""
    return "".join(f"{cell:>{WIDTH}}" for cell in cells).rstrip()


def decode_line(row: DecodeRow) -> str:
    """A row under `DECODE_HEAD`; experts are those read per layer."""
    times = [f"{value:,.3f}" for value in (row.median_ms, row.mean_ms, row.p99_ms)]
    tail = [f"{row.experts_hit:.1f}", f"{row.floor_ms:,.3f}", f"{row.ratio:,.2f}"]
    return line([str(row.batch), f"{row.context:,}", *times, f"{row.tokens_per_second:,.1f}", *tail])


def profile_lines(row: DecodeRow) -> list[str]:
    """A profiled row under `PROFILE_HEAD` and, if it has operations, one line for each, then their sum."""
    assert row.gpu_ms is not None and row.idle_share is not None
    times = (f"{row.median_ms:,.3f}", f"{row.gpu_ms:,.3f}", f"{row.idle_share:.1%}")
    whole = line([str(row.batch), f"{row.context:,}", *times])
    if not row.operations:
        return [whole]
    cells = [("operation", "launches", "us", "floor us", "ratio")]
    for part in row.operations:
        ratio = f"{part.ms / part.floor_ms:,.2f}" if part.floor_ms else "-"
        cells.append(
            (part.operation, f"{part.launches:,.0f}", f"{part.ms * 1e3:,.1f}", f"{part.floor_ms * 1e3:,.1f}", ratio)
        )
    total, floor = (sum(getattr(part, name) for part in row.operations) for name in ("ms", "floor_ms"))
    launches = sum(part.launches for part in row.operations)
    cells.append(
        ("together", f"{launches:,.0f}", f"{total * 1e3:,.1f}", f"{floor * 1e3:,.1f}", f"{total / floor:,.2f}")
    )
    return [whole, *(f"    {name:<12}" + line(others) for name, *others in cells)]


def prefill_line(row: PrefillRow) -> str:
    """A row under `PREFILL_HEAD`; microseconds are those of a token at the start and at the end."""
    rates = (f"{row.tokens_per_second:,.0f}", f"{row.start_us:,.1f}", f"{row.end_us:,.1f}")
    floor = (f"{row.floor_seconds:,.3f}", f"{row.ratio:,.2f}")
    return line([f"{row.tokens:,}", f"{row.chunk:,}", f"{row.seconds:,.3f}", *rates, *floor])


def machine_line(machine: Machine) -> str:
    """What floors are made of."""
    read, multiplied = f"{machine.bandwidth / 1e12:,.3f} TB/s read", f"{machine.rate / 1e12:,.1f} TFLOP/s multiplied"
    return f"measured here: {read}, {multiplied}"


def memory_lines(memory: dict[str, int]) -> list[str]:
    """Bytes on the GPU, where they are known (see `Subject.memory`)."""
    if not memory:
        return []
    sizes = {name: f"{size / 2**30:,.2f} GiB" for name, size in memory.items()}
    state, beyond = f"requests' state {sizes['state']}", f"beyond them at most {sizes['beyond']}"
    return [f"memory: weights {sizes['weights']}, {state}, {beyond}"]


def told(subject: Subject, mode: str, rows: Sequence[DecodeRow] | Sequence[PrefillRow]) -> dict[str, Any]:
    """Everything as JSON holds it, in the units that the rows' fields say."""
    found: dict[str, Any] = {"mode": mode, "model": subject.name, "machine": asdict(subject.floors.machine)}
    return found | {"memory": subject.memory(), "rows": [asdict(row) for row in rows]}


def head(subject: Subject, columns: Sequence[str]) -> list[str]:
    """What is measured, and the heads of the columns."""
    return [subject.name, machine_line(subject.floors.machine), line(columns)]


def say(lines: Sequence[str]) -> None:
    """Print lines at once, as a run that is cut short should leave them."""
    for text in lines:
        print(text, flush=True)


def draw_decode(rows: Sequence[DecodeRow], path: Path) -> None:
    """Write a PNG: the time of a step over the context, a line for each batch, its floor dashed."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, batch in enumerate(sorted({row.batch for row in rows})):
        of_batch = sorted((row for row in rows if row.batch == batch), key=lambda row: row.context)
        contexts, colour = [row.context for row in of_batch], f"C{number}"
        axes.plot(contexts, [row.median_ms for row in of_batch], "o-", color=colour, label=f"batch {batch}")
        axes.plot(contexts, [row.floor_ms for row in of_batch], "--", color=colour)
    axes.set(xlabel="context [tokens]", ylabel="decode step [ms]; dashed: floor", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def draw_prefill(rows: Sequence[PrefillRow], path: Path) -> None:
    """Write a PNG: prompt tokens per second over the prompt's length, and what the floor would allow, dashed."""
    from matplotlib.figure import Figure  # optional, and slow to import

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lengths = [row.tokens for row in rows]
    axes.plot(lengths, [row.tokens_per_second for row in rows], "o-", label="measured")
    axes.plot(lengths, [row.tokens / row.floor_seconds for row in rows], "--", label="floor")
    axes.set(xlabel="prompt [tokens]", ylabel="tokens/s", xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)
