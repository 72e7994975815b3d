"""Checks and times route and the row norm on a GPU: `python -m benchmarks.kernels.route [--sweep]`."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.kernels.timing import READ_BANDWIDTH, attempt, check, copies_of, table, time_us
from leadline.kernels import route as definition
from leadline.kernels import rowwise
from leadline.kernels.gpu import norm, route

FLASH, PRO = (256, 4096, 6, 1.5), (384, 7168, 6, 2.5)
"""Experts, hidden size, active experts, scale."""


class Inputs:
    """Rows and gates of one layer; gates hold bf16 values, in `dtype`."""

    def __init__(self, rows: int, sizes: tuple[int, int, int, float], dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        experts, d, self.active, self.scale = sizes

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.x, self.bias = draw(rows, d).bfloat16(), draw(experts) / 8
        self.gate = (draw(experts, d) / d**0.5).bfloat16().to(dtype)
        self.ids = torch.randint(0, 1000, (rows,), generator=generator, device="cuda")
        table = torch.rand(1000, experts, generator=generator, device="cuda").argsort(1)
        self.by_token = table[:, : self.active].contiguous()

    def routed(self, hashed: bool = False) -> tuple[Tensor, Tensor]:
        bias, by_token = (None, self.by_token) if hashed else (self.bias, None)
        return route.route(self.x, self.gate, bias, by_token, self.ids, self.active, self.scale)


def check_route(rows: int, sizes: tuple[int, int, int, float], dtype: torch.dtype) -> None:
    """Choice and weights against the definition in fp64; where scores nearly tie, the chosen scores are compared."""
    i = Inputs(rows, sizes, dtype)
    name = f"route {rows} x {sizes[:2]} {str(dtype)[6:]}"
    for hashed in (False, True):
        bias, by_token = (None, i.by_token) if hashed else (i.bias.double(), None)
        chosen, weights = i.routed(hashed)
        want, want_weights = definition.route(i.x.double(), i.gate.double(), bias, by_token, i.ids, i.active, i.scale)
        differ = int((chosen != want).any(1).sum())
        print(f"{'OK ' if differ <= rows / 1000 else 'BAD'} {name} hash {hashed}: {differ} rows choose otherwise")
        same = (chosen == want).all(1)
        check(f"{name} weights", weights[same], want_weights[same], 1e-6)


def check_norm() -> None:
    """Rows of every width that the model norms, and a slice of columns."""
    for shape in ((3, 4096), (130, 7168), (257, 1024), (64, 3, 512), (1000, 128)):
        x, weight = torch.randn(shape, device="cuda").bfloat16(), torch.randn(shape[-1], device="cuda")
        check(
            f"norm {shape}", norm.rms_norm(x, weight, 1e-6), rowwise.rms_norm(x.double(), weight.double(), 1e-6), 3e-3
        )
    x = torch.randn(100, 1536, device="cuda").bfloat16()[:, :1024]
    check("norm slice", norm.rms_norm(x, None, 1e-6), rowwise.rms_norm(x.double(), None, 1e-6), 3e-3)


def check_batches(dtype: torch.dtype) -> None:
    """A row's scores, in batches that are cut differently."""
    whole = Inputs(2100, FLASH, dtype)
    chosen, weights = whole.routed()
    for rows in (1, 16, 17, 128, 512, 513, 1500):
        part = Inputs.__new__(Inputs)
        part.__dict__ = dict(whole.__dict__)
        part.x, part.ids = whole.x[:rows], whole.ids[:rows]
        got = part.routed()
        if not (torch.equal(got[0], chosen[:rows]) and torch.equal(got[1], weights[:rows])):
            worst = float((got[1] - weights[:rows]).abs().max())
            print(f"BAD {rows} rows alone differ from the same rows of 2100: {worst:.1e} {dtype}")
    print("checked batches")


def times(dtype: torch.dtype) -> Iterator[list[object]]:
    """Microseconds of route, its first launch and the norm of the rows, and the floor of the bytes of route."""
    for rows in (1, 16, 64, 128, 1024, 4096):
        moved = rows * 4096 * 2 + 256 * 4096 * (4 if dtype == torch.float32 else 2)
        sets = [Inputs(rows, FLASH, dtype, seed) for seed in range(copies_of(moved))]
        many = len(sets)

        def timed(function: Callable[[Inputs], object], sets: list[Inputs] = sets, many: int = many) -> float:
            return time_us(lambda k: function(sets[k % many]), many)

        first = timed(lambda i: route._scores(i.x, i.gate, route.config(route.chip_of(i.x.device), *i.x.shape)))
        row = [rows, timed(lambda i: i.routed()), moved / READ_BANDWIDTH * 1e6, first]
        yield [*row, timed(lambda i: i.routed(True)), timed(lambda i: norm.rms_norm(i.x, i.gate[0], 1e-6))]


def sweep() -> None:
    """Other cuts."""
    found = []
    real = route.config
    cuts = {
        1: [(16, 0, 4, 1), (16, 0, 4, 2), (16, 0, 4, 4), (16, 1, 4, 2)],
        128: [(16, 1, 4, 2), (32, 1, 4, 1), (32, 1, 4, 4), (64, 1, 4, 2), (32, 2, 4, 2), (32, 0, 4, 2)],
        4096: [(64, 8, 4, 1), (64, 8, 4, 2), (64, 2, 4, 2), (128, 4, 4, 2), (128, 8, 4, 2), (128, 8, 8, 4)],
    }
    jobs = [(rows, route.Config(*option)) for rows, options in cuts.items() for option in options]

    def scores(job: tuple[int, route.Config]) -> object:
        i = Inputs(job[0], FLASH, torch.bfloat16)
        return attempt(f"{job}", lambda: route._scores(i.x, i.gate, job[1]))

    def routed(job: tuple[int, route.Config], i: Inputs) -> Tensor:
        route.config = lambda chip, rows, d: job[1]
        return i.routed()[0]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(scores, jobs))
    for job in jobs:
        i = Inputs(job[0], FLASH, torch.bfloat16)
        us = attempt(f"{job}", lambda i=i, job=job: time_us(lambda k: routed(job, i)))
        first = attempt(f"{job}", lambda i=i, job=job: time_us(lambda k: route._scores(i.x, i.gate, job[1])))
        cut = job[1]
        found.append([job[0], str((cut.rows, cut.groups, cut.warps, cut.choosing_warps)), us, first])
    route.config = real
    table("sweep, hot, bf16 gate: rows, groups, warps, choosing warps", ["rows", "cut", "us", "first"], found)


def main() -> None:
    """Check, time, and with --sweep try other cuts."""
    kinds = [(rows, dtype) for rows in (1, 128, 4096) for dtype in (torch.float32, torch.bfloat16)]
    with ThreadPoolExecutor(16) as pool:  # compile side by side
        list(pool.map(lambda kind: attempt("compile", lambda: Inputs(kind[0], FLASH, kind[1]).routed()), kinds))
    for rows, sizes in ((1, FLASH), (16, FLASH), (129, FLASH), (4099, FLASH), (3, PRO), (2100, PRO)):
        for dtype in (torch.float32, torch.bfloat16):
            attempt(f"check {rows} {sizes}", lambda r=rows, s=sizes, t=dtype: check_route(r, s, t))
    attempt("norm", check_norm)
    columns = ["rows", "us", "floor", "first", "hashed", "norm"]
    for dtype in (torch.float32, torch.bfloat16):
        attempt("batches", lambda dtype=dtype: check_batches(dtype))
        table(f"route, Flash, {dtype}", columns, attempt("times", lambda dtype=dtype: list(times(dtype))) or [])
    if "--sweep" in sys.argv:
        attempt("sweep", sweep)


if __name__ == "__main__":
    main()
