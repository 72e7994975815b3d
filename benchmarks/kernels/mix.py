"""Checks and times mix and the row norm on a GPU: `python -m benchmarks.kernels.mix [--sweep]`."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.kernels.timing import READ_BANDWIDTH, attempt, check, copies_of, table, time_us
from leadline.kernels import mix as definition
from leadline.kernels.gpu import mix
from leadline.kernels.mix import Mixing, Reading

N, ROUNDS, EPS = 4, 20, 1e-6
PEERS = {1: 7.4, 16: 10.9, 64: 12.3, 128: 12.9, 4096: 162.0}
"""SGLang 0.5.14's fused post + pre + norm on an H200, microseconds."""
BF16, FP32 = 3e-3, 3e-6
"""Relative bounds: rounding to bf16 gives 1.7e-3, sums of 16384 products in fp32 below 1e-6."""


class Inputs:
    """A sublayer boundary of Flash or Pro with random values of realistic size."""

    def __init__(self, rows: int, d: int, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.streams, self.output = draw(rows, N, d).bfloat16(), draw(rows, d).bfloat16()
        self.norm = draw(d)
        self.weights = Mixing(draw(24, N * d) / 64, draw(24), torch.rand(3, device="cuda") + 0.5)
        self.head = Mixing(self.weights.fn[:4].clone(), self.weights.base[:4], self.weights.scale[:1])
        comb = definition.sinkhorn(draw(rows, N, N), ROUNDS, EPS)
        self.reading = Reading(self.output, 2 * torch.rand(rows, N, device="cuda"), comb)

    def boundary(self) -> tuple[Tensor, Reading]:
        return mix.close_and_open(self.streams, self.output, self.reading, self.weights, self.norm, ROUNDS, EPS, EPS)


def wide(weights: Mixing) -> Mixing:
    return Mixing(weights.fn.double(), weights.base.double(), weights.scale.double())


def check_rows(rows: int, d: int) -> None:
    """All functions against the definition in fp64, on rounded streams where the definition rounds."""
    i = Inputs(rows, d)
    name = f"{rows} x {d}"
    closed, reading = i.boundary()
    want = definition.close_sublayer(
        i.streams.double(),
        i.output.double(),
        Reading(i.output, i.reading.post.double(), i.reading.comb.double()),
    )
    check(f"{name} streams", closed, want, BF16)
    want_reading = definition.open_sublayer(closed.double(), wide(i.weights), i.norm.double(), ROUNDS, EPS, EPS)
    check(f"{name} x", reading.x, want_reading.x, BF16)
    check(f"{name} post", reading.post, want_reading.post, FP32)
    check(f"{name} comb", reading.comb, want_reading.comb, FP32)
    head = mix.final_collapse(closed, i.head, i.norm, EPS, EPS)
    check(
        f"{name} head", head, definition.final_collapse(closed.double(), wide(i.head), i.norm.double(), EPS, EPS), BF16
    )
    check(f"{name} close alone", mix.close_sublayer(i.streams, i.output, i.reading), closed, 0)


def check_batches(d: int) -> None:
    """A row's result, alone and in batches that are cut differently."""
    i = Inputs(4100, d)
    whole = i.boundary()
    for rows in (1, 3, 16, 17, 128, 1000, 2048, 2049):
        part = Inputs.__new__(Inputs)
        part.__dict__ = dict(i.__dict__)
        part.streams, part.output = i.streams[:rows], i.output[:rows]
        part.reading = Reading(part.output, i.reading.post[:rows], i.reading.comb[:rows])
        closed, reading = part.boundary()
        same = all(
            torch.equal(got, want[:rows])
            for got, want in zip(
                (closed, reading.x, reading.post, reading.comb),
                (whole[0], whole[1].x, whole[1].post, whole[1].comb),
                strict=True,
            )
        )
        if not same:
            errors = [
                float((got - want[:rows]).abs().max())
                for got, want in zip(
                    (closed, reading.x, reading.post, reading.comb),
                    (whole[0], whole[1].x, whole[1].post, whole[1].comb),
                    strict=True,
                )
            ]
            print(f"BAD {rows} rows alone differ from the same rows of 4100 ({d}): {errors}", flush=True)
    print("checked batches")


def times(d: int, sizes: tuple[int, ...]) -> Iterator[list[object]]:
    """Microseconds of each function, the bytes that a boundary must move, and what SGLang needs for it."""
    for rows in sizes:
        moved = rows * d * (2 * (N + 1) + 2 * (N + 1)) + 24 * N * d * 4
        sets = [Inputs(rows, d, seed) for seed in range(copies_of(moved))]
        many = len(sets)
        floor = moved / READ_BANDWIDTH * 1e6

        def timed(function: Callable[[Inputs], object], sets: list[Inputs] = sets, many: int = many) -> float:
            return time_us(lambda k: function(sets[k % many]), many, 20 if many > 1 else 10)

        both = timed(lambda i: i.boundary())
        opened = timed(lambda i: mix.open_sublayer(i.streams, i.weights, i.norm, ROUNDS, EPS, EPS))
        close = timed(lambda i: mix.close_sublayer(i.streams, i.output, i.reading))
        head = timed(lambda i: mix.final_collapse(i.streams, i.head, i.norm, EPS, EPS))
        first = timed(lambda i: mix._first(i.streams, (i.output, i.reading), i.weights, cut_of(i)))
        yield [rows, both, floor, floor / both, PEERS.get(rows), opened, close, head, first]


def cut_of(i: Inputs) -> mix.Config:
    return mix.config(mix.chip_of(i.streams.device), len(i.streams))


def sweep(d: int) -> None:
    """Other cuts of the same boundary."""
    found: list[list[object]] = []
    candidates = {
        1: [(16, 1, 4, 64, 4), (16, 1, 4, 64, 8), (16, 1, 4, 32, 8), (16, 1, 8, 64, 8)],
        64: [(16, 1, 4, 64, 8), (32, 1, 4, 64, 4), (32, 1, 8, 64, 8), (64, 1, 8, 64, 8)],
        128: [(16, 1, 4, 64, 8), (32, 1, 4, 64, 8), (64, 1, 4, 64, 8)],
        4096: [
            (32, 1, 4, 64, 8),
            (32, 8, 4, 64, 4),
            (32, 8, 4, 64, 8),
            (32, 8, 8, 64, 8),
            (64, 1, 8, 64, 8),
            (64, 8, 8, 64, 8),
        ],
    }
    jobs = [(rows, mix.Config(*cut)) for rows, cuts in candidates.items() for cut in cuts]

    def boundary(i: Inputs, cut: mix.Config) -> Reading:
        closed, parts = mix._first(i.streams, (i.output, i.reading), i.weights, cut)
        return mix._second(closed, parts, i.weights, i.norm, ROUNDS, EPS, EPS, cut)

    def compiled(job: tuple[int, mix.Config]) -> bool:
        return attempt(f"{job}", lambda: boundary(Inputs(job[0], d), job[1])) is not None

    with ThreadPoolExecutor(16) as pool:
        works = list(pool.map(compiled, jobs))
    for (rows, cut), fine in zip(jobs, works, strict=True):
        if not fine:
            continue
        i = Inputs(rows, d)
        both = time_us(lambda k, i=i, cut=cut: boundary(i, cut))
        first = time_us(lambda k, i=i, cut=cut: mix._first(i.streams, (i.output, i.reading), i.weights, cut))
        parts = (cut.rows, cut.slices, cut.warps, cut.outputs, cut.reading_warps)
        found.append([rows, str(parts), both, first])
    table(
        "sweep, hot: rows, slices, warps, outputs, reading warps",
        ["rows", "cut", "us", "first us"],
        found,
    )


def stages(d: int) -> None:
    """The second launch alone, with and without Sinkhorn's rounds, and everything without early starts."""
    found: list[list[object]] = []
    early = mix.early_start
    for rows in (1, 16, 128):
        i = Inputs(rows, d)
        cut = cut_of(i)
        closed, parts = mix._first(i.streams, (i.output, i.reading), i.weights, cut)

        def second(rounds: int, i: Inputs = i, cut: mix.Config = cut, c: Tensor = closed, p: Tensor = parts) -> float:
            return time_us(lambda k: mix._second(c, p, i.weights, i.norm, rounds, EPS, EPS, cut))

        row: list[object] = [rows, second(20), second(1), second(0), time_us(lambda k, i=i: i.boundary())]
        mix.early_start = lambda device: {}
        row += [second(20), time_us(lambda k, i=i: i.boundary())]
        mix.early_start = early
        found.append(row)
    table("stages, hot", ["rows", "second", "1 round", "none", "both", "late second", "late both"], found)


def main() -> None:
    """Check, time, and with --sweep try other cuts."""
    with ThreadPoolExecutor(16) as pool:  # compile side by side
        list(pool.map(lambda rows: attempt(f"{rows} rows", lambda: Inputs(rows, 4096).boundary()), (1, 128, 4096)))
    for rows, d in ((1, 4096), (16, 4096), (129, 4096), (4099, 4096), (3, 7168), (2100, 7168)):
        attempt(f"check {rows} x {d}", lambda rows=rows, d=d: check_rows(rows, d))
    attempt("batches", lambda: check_batches(4096))
    columns = ["rows", "us", "floor", "share", "SGLang", "open", "close", "head", "first"]
    table("mix, Flash", columns, attempt("times", lambda: list(times(4096, (1, 16, 64, 128, 1024, 4096)))) or [])
    if "--sweep" in sys.argv:
        attempt("stages", lambda: stages(4096))
        attempt("sweep", lambda: sweep(4096))


if __name__ == "__main__":
    main()
