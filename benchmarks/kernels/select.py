"""select on a GPU: checks at official sizes, and times. `--sweep` also times other configurations of the scores."""

import subprocess
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.kernels.timing import READ_BANDWIDTH, attempt, copies_of, table, time_us
from leadline.kernels.gpu import select as gpu
from leadline.kernels.packed import IndexRows, index_rows

HEADS, CHANNELS = 64, 128
DECODE = [
    gpu.ScoreConfig(1, keys, warps, stages, programs)
    for keys, warps, stages, programs in (
        (128, 4, 5, 2), (128, 4, 5, 3), (128, 4, 4, 3), (64, 4, 5, 3), (64, 4, 6, 4), (128, 8, 5, 1), (128, 8, 5, 2),
    )
]  # fmt: skip
PROMPT = [
    gpu.ScoreConfig(queries, keys, warps, stages, programs)
    for queries, keys, warps, stages, programs in (
        (4, 64, 4, 3, 2), (4, 64, 4, 5, 2), (4, 64, 4, 5, 1), (4, 128, 8, 4, 1), (2, 128, 4, 5, 2),
    )
]  # fmt: skip


@dataclass(frozen=True)
class Load:
    """`queries` of `requests` requests that see `seen` entries, in tables with room for `room`."""

    name: str
    requests: int
    queries: int
    seen: int
    room: int
    topk: int = 512


LOADS = [
    Load("decode 1 x 262144", 1, 1, 262144, 262144),
    Load("decode 16 x 16384", 16, 16, 16384, 16384),
    Load("decode 64 x 1024", 64, 64, 1024, 1024),
    Load("decode 64 x 1024, room 262144", 64, 64, 1024, 262144),
    Load("decode 128 x 8192", 128, 128, 8192, 8192),
    Load("decode 1 x 262144, Pro", 1, 1, 262144, 262144, 1024),
    Load("prompt 4096 x 2048", 1, 4096, 2048, 2048),
    Load("prompt 4096 x 16384", 1, 4096, 16384, 16384),
    Load("verify 32 x 8 x 8192", 32, 256, 8192, 8192),
    Load("decode 64 x 20000, room 262144", 64, 64, 20000, 262144),
]


@dataclass(frozen=True)
class Inputs:
    """What `select` takes."""

    q: Tensor
    weights: Tensor
    pool: IndexRows
    pages: Tensor
    visible: Tensor
    room: int
    topk: int

    def run(self) -> Tensor:
        """The operation."""
        return gpu.select(self.q, self.weights, self.pool, self.pages, self.visible, self.room, self.topk)

    def scores(self) -> tuple[Tensor, Tensor]:
        """Scores and group maxima alone, of as many queries as one tile holds."""
        count = max(1, min(len(self.q), gpu.MOST_QUERIES, gpu.SCRATCH // self.room))
        scores = torch.empty(count, self.room, device="cuda")
        maxima = torch.empty(count, self.room // gpu.GROUP, device="cuda")
        part = slice(0, count)
        gpu._score(
            self.q[part], self.weights[part], self.pool, self.pages[part], self.visible[part], self.topk, scores, maxima
        )
        return scores, maxima


def inputs(load: Load, seed: int) -> Inputs:
    """Random inputs; pages lie in random order, and the queries of a request see fewer entries one by one."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = -(-load.seen // 32)
    pool = index_rows(load.requests * pages * 32, CHANNELS, torch.device("cuda"))
    pool.blocks.copy_(torch.randint(0, 256, pool.blocks.shape, generator=generator, device="cuda"))
    pool.scales.copy_(torch.randint(122, 130, pool.scales.shape, generator=generator, device="cuda"))
    each = load.queries // load.requests
    room = torch.zeros(load.queries, -(-load.room // 32), dtype=torch.int64, device="cuda")
    own = torch.randperm(load.requests * pages, generator=generator, device="cuda").view(load.requests, pages)
    room[:, :pages] = own.repeat_interleave(each, 0)
    back = torch.arange(each - 1, -1, -1, device="cuda").repeat(load.requests) // 4
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    q = codes[torch.randint(0, 8, (load.queries, HEADS, CHANNELS), generator=generator, device="cuda")]
    q *= torch.randint(0, 2, q.shape, generator=generator, device="cuda") * 2 - 1
    weights = torch.randn(load.queries, HEADS, generator=generator, device="cuda")
    return Inputs(q.bfloat16(), weights, pool, room, (load.seen - back).clamp(min=1), load.room, load.topk)


def check(load: Load) -> None:
    """Scores of some queries against float64, and the choice against a stable sort of the scores themselves."""
    case = inputs(load, 1)
    torch.full((1 << 26,), float("nan"), device="cuda")  # memory that scratch will reuse
    chosen = case.run()
    scores, _ = case.scores()
    worst, wrong = 0.0, []
    for i in range(0, len(scores), max(1, len(scores) // 8)):
        seen = int(case.visible[i])
        rows = (case.pages[i, : -(-seen // 32), None] * 32 + torch.arange(32, device="cuda")).flatten()[:seen]
        dots = (case.q[i].double() @ case.pool.read(rows).double().T).relu()
        want = (case.weights[i].double() * (HEADS * CHANNELS) ** -0.5) @ dots
        size = (case.weights[i].double().abs() * (HEADS * CHANNELS) ** -0.5) @ dots
        if seen > load.topk:
            worst = max(worst, float(((scores[i, :seen].double() - want).abs() / size.clamp(min=1e-9)).max()))
            order = torch.sort(scores[i, :seen] + 0.0, descending=True, stable=True).indices[: load.topk]
            want_ids = order.sort().values
        else:
            want_ids = torch.arange(seen, device="cuda")
        got = chosen[i]
        right = bool((got[: len(want_ids)] == want_ids).all() and (got[len(want_ids) :] == -1).all())
        wrong += [] if right else [i]
    good = worst < 2e-6 and not wrong
    print(f"{'OK ' if good else 'BAD'} {load.name}: scores {worst:.1e} of 2.0e-06, wrong choices {wrong}", flush=True)


def measure(load: Load) -> list[object]:
    """A row of the table: microseconds of all and of the scores alone, and their floor."""
    size = load.requests * load.seen * 68
    cases = [inputs(load, seed) for seed in range(copies_of(size, 8))]
    few = load.queries > 1024
    launches = 2 if few else 20
    whole = time_us(lambda i: cases[i].run(), len(cases), launches)
    scores = time_us(lambda i: cases[i].scores(), len(cases), launches)
    count = max(1, min(load.queries, gpu.MOST_QUERIES, gpu.SCRATCH // load.room))
    flops = 2 * HEADS * CHANNELS * count * load.seen
    return [load.name, whole, scores, size / READ_BANDWIDTH * 1e6, size / whole * 1e-6, flops / scores * 1e-6]


def check_ties() -> None:
    """Scores with few distinct values, so that the k-th is one of many equals, at lengths of every path."""
    for seen in (600, 2048, 5000, 40000, 262144):
        case = replace(inputs(Load("ties", 1, 1, seen, 262144), 3), q=torch.ones(1, HEADS, CHANNELS).cuda().bfloat16())
        case.pool.blocks.zero_()
        case.pool.scales.fill_(127)
        few = torch.randint(0, 8, (case.pool.data.shape[0], 64), device="cuda", dtype=torch.uint8) // 7
        case.pool.data[:, :, 0] = few
        chosen, (scores, _) = case.run(), case.scores()
        order = torch.sort(scores[0, :seen], descending=True, stable=True).indices[:512].sort().values
        print(f"{'OK ' if torch.equal(chosen[0], order) else 'BAD'} ties among {seen}", flush=True)


def sweep(load: Load, configs: list[gpu.ScoreConfig]) -> None:
    """Times of the scores of `load` under each configuration, compiled side by side beforehand."""
    original, rows = gpu.score_config, []
    case = inputs(load, 0)
    for config in configs:
        gpu.score_config = lambda chip, dtype, queries, config=config: config
        time = attempt(str(config), lambda: time_us(lambda i: case.scores(), 1, 10, 7))
        rows.append([*vars(config).values(), time])
    gpu.score_config = original
    table(f"scores, {load.name}", ["queries", "keys", "warps", "stages", "programs", "us"], rows)


def compile_ahead() -> None:
    """Fill Triton's cache: a process for each configuration."""
    command = [sys.executable, "-m", "benchmarks.kernels.select", "--compile"]
    jobs = [subprocess.Popen([*command, str(i)]) for i in range(len(DECODE) + len(PROMPT))]
    for job in jobs:
        job.wait()


def compile_one(index: int) -> None:
    """Compile one configuration by running it on a small load."""
    config = [*DECODE, *PROMPT][index]
    load = LOADS[0] if index < len(DECODE) else LOADS[7]
    gpu.score_config = lambda chip, dtype, queries: config
    attempt(str(config), lambda: inputs(replace(load, queries=min(load.queries, 1024)), 0).scores())
    torch.cuda.synchronize()


def main() -> None:
    """Checks, then times, then other configurations if asked for."""
    if "--compile" in sys.argv:
        compile_one(int(sys.argv[-1]))
        return
    if "--sweep" in sys.argv:
        compile_ahead()
    for load in LOADS:
        attempt(f"check {load.name}", lambda load=load: check(load))
    attempt("ties", check_ties)
    rows = [row for load in LOADS if (row := attempt(load.name, lambda load=load: measure(load)))]
    table("select", ["load", "us", "scores us", "floor us", "TB/s", "TFLOP/s of scores"], rows)
    if "--sweep" in sys.argv:
        attempt("sweep", lambda: sweep(LOADS[0], DECODE))
        attempt("sweep", lambda: sweep(LOADS[1], DECODE))
        attempt("sweep", lambda: sweep(LOADS[7], PROMPT))


if __name__ == "__main__":
    main()
