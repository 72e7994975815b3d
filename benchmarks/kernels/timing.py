"""What every kernel benchmark shares: timing by graph replay with inputs out of cache, checks, and a compact table."""

import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

READ_BANDWIDTH = 4.4e12
"""Bytes per second that a sum over 4 GiB reads on an H200: floors in tables are bytes over this."""
CACHE_BYTES = 60e6
"""L2 of an H200. Inputs rotate through at least twice as much, so that every launch reads memory."""


def copies_of(bytes_read: float, most: int = 20) -> int:
    """How many sets of inputs of `bytes_read` bytes each launch should rotate through: 1 to `most`."""
    return max(1, min(most, math.ceil(2 * CACHE_BYTES / max(bytes_read, 1))))


def time_us(launch: Callable[[int], object], copies: int = 1, launches: int = 20, replays: int = 15) -> float:
    """Microseconds of one `launch(i)`, `i` being the set of inputs, 0 .. copies - 1: the median of graph replays.

    A graph holds `launches` launches one after another, so the gap between two of them counts as part of one.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(min(2, copies)):
            launch(index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            launch(index % copies)
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return statistics.median(times)


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64 over all elements; infinity where `got` holds a NaN or is of another shape."""
    if got.shape != want.shape:
        return math.inf
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300)
    return math.inf if torch.isnan(error) else float(error)


def check(name: str, got: Tensor, want: Tensor, bound: float) -> bool:
    """Whether `got` is within the relative error `bound` of `want`; prints a line that begins with OK or BAD."""
    error = relative_error(got, want)
    print(f"{'OK ' if error <= bound else 'BAD'} {name}: error {error:.1e}, bound {bound:.1e}", flush=True)
    return error <= bound


def attempt(name: str, function: Callable[[], object]) -> object:
    """`function()`; an exception is printed as a BAD line and gives None, so that a benchmark goes on."""
    try:
        return function()
    except Exception as error:
        print(f"BAD {name}: {type(error).__name__}: {str(error)[-300:]}", flush=True)
        return None


def peer(name: str) -> ModuleType | None:
    """The package `name` (flash_mla, deep_gemm, ...) if it imports here, else None."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their columns, numbers with three significant digits."""
    texts = [list(columns), *([_text(value) for value in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(columns))]
    print(f"== {title}")
    for row in texts:
        print(" ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)), flush=True)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return str(value)
