"""Which operation a step's time on the GPU goes to, told from the kernels that ran, in their order.

Most kernels' names tell their operation. A product's does not: the same kernel multiplies by many weights. It belongs
to what a layer does at that point, which the kernels around it tell.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from leadline.bench.floors import OPERATIONS, wait
from leadline.engine.engine import Engine

MARKS = (
    ("_close_and_project", "mix"),
    ("_mix_and_read", "mix"),
    ("rms_norm", "query/store"),
    ("index_query_kernel", "select"),
    ("query_kernel", "query/store"),
    ("store_kernel", "query/store"),
    ("close_csa_kernel", "compress"),
    ("hca_fold_kernel", "compress"),
    ("sample_", "sample"),
    ("_score_kernel", "select"),
    ("_sift_kernel", "select"),
    ("_choose_kernel", "select"),
    ("_choose_of_many", "select"),
    ("_entry_rows_kernel", "select"),
    ("attend", "attend"),
    ("_join", "attend"),
    ("_multiply", "route"),
    ("_choose", "route"),
    ("_prepare", "experts"),
    ("up_product", "experts"),
    ("down_product", "experts"),
    ("prompt_product", "experts"),
    ("_gather_rounded", "experts"),
    ("_gate_up", "experts"),
    ("_down", "experts"),
    ("_summed_pairs", "experts"),
    ("_hidden_rows", "experts"),
    ("_product_input", "experts"),
    ("_count", "experts"),
    ("_place", "experts"),
)
"""What a kernel's name contains, in the order of looking, and its operation."""
PRODUCTS = ("product_kernel", "few_product", "quantize", "expand_kernel", "gemm", "gemv", "nvjet", "cutlass", "splitk")
"""Kernels that multiply by a weight or prepare its input; in lower case."""
SAMPLING = ("sample", "sampl", "penal", "sort", "scan", "softmax", "reduce", "gather", "random")
"""Behind the head, in lower case."""


@dataclass(frozen=True)
class Kernel:
    """A kernel (or copy) that ran on the GPU; times in microseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class Share:
    """One operation's share of a step: kernels launched and their time."""

    launches: float
    seconds: float


def watched(engine: Engine, steps: int) -> list[Kernel]:
    """Run `steps` steps and list what the GPU did in them, in the order of its beginning."""
    device = engine.runner.device
    wait(device)
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(steps):
            for update in engine.step():
                if update.error:
                    raise update.error
        wait(device)
    found = [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in record.events() or ()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """The time in which at least one of them ran; `kernels` in the order of their beginning."""
    busy = end = 0.0
    for kernel in kernels:
        last = kernel.start + kernel.duration
        busy += max(0.0, last - max(end, kernel.start))
        end = max(end, last)
    return busy * 1e-6


def shares(kernels: Sequence[Kernel], steps: int) -> dict[str, Share]:
    """Launches and seconds of each operation in one of `steps` steps."""
    found = {operation: [0, 0.0] for operation in OPERATIONS}
    for kernel, operation in zip(kernels, operations([kernel.name for kernel in kernels]), strict=True):
        found[operation][0] += 1
        found[operation][1] += kernel.duration * 1e-6
    return {name: Share(launches / steps, seconds / steps) for name, (launches, seconds) in found.items() if launches}


def operations(names: Sequence[str]) -> list[str]:
    """The operation of each kernel of some steps."""
    marks = [_mark(name) for name in names]
    found: list[str] = []
    last, product_before = "other", False
    for place, (name, mark) in enumerate(zip(names, marks, strict=True)):
        if mark is not None:
            last, product_before = mark, False
            found.append(mark)
            continue
        if _is_product(name):
            last, operation = _product(last, product_before, marks[place + 1 :])
            product_before = True
        else:
            operation = _between(last, name)
        found.append(operation)
    return found


def _mark(name: str) -> str | None:
    if _is_product(name):
        return None
    return next((operation for part, operation in MARKS if part in name), None)


def _is_product(name: str) -> bool:
    return any(part in name.lower() for part in PRODUCTS)


def _product(last: str, product_before: bool, marks: Sequence[str | None]) -> tuple[str, str]:
    """(what the layer does from here on, the operation) of a product behind an operation `last`."""
    following = next((mark for mark in marks if mark is not None), "head")
    if last == "mix":
        inside = following in ("query/store", "route")
        return (last, {"query/store": "project", "route": "route"}[following]) if inside else ("head", "head")
    if last == "query/store":
        return last, "project" if following == "query/store" else _compressing(following, product_before)
    if last == "compress":
        return ("select", "select") if following == "select" else ("compress", "compress")
    if last == "attend":
        return last, "project" if product_before else "output"
    if last == "route":
        return "experts", "experts"
    return last, last


def _compressing(following: str, product_before: bool) -> str:
    """Behind the stored rows come the compressor's gates; where no window closes, the indexer's projection follows."""
    return "select" if product_before and following == "select" else "compress"


def _between(last: str, name: str) -> str:
    """The operation of a kernel of PyTorch's own, or a copy."""
    if last in ("head", "sample"):
        return "sample" if any(part in name.lower() for part in SAMPLING) else "other"
    return last if last in ("experts", "select", "compress") else "other"
