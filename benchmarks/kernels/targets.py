"""Every operation against its target on one H200, ours beside the best existing kernel in one run.

    python -m benchmarks.kernels.targets

Times are medians over graph replays, inputs rotated past the L2, V4-Flash's geometry. Peers that are not installed
leave their column empty (see `peers.py`); what other engines' fused kernels take stands in the kernels' own tables.
"""

import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels import attend, experts, experts_prompt, mix, peers, project, route, sample, select, state
from benchmarks.kernels.timing import attempt, copies_of, relative_error, table, time_us
from leadline.bench.floors import Machine
from leadline.kernels.gpu import mix as gpu_mix
from leadline.kernels.gpu import sample as gpu_sample
from leadline.kernels.rope import Angles

DEVICE = torch.device("cuda")
COPY_OF_READ = 4.27 / 4.42
"""Bytes read and written per second by a copy, over those read by a sum, on an H200."""
LARGE_WEIGHT = 16 << 20


@dataclass(frozen=True)
class Row:
    """A line of the table: microseconds of ours and of the best peer, and the most that ours may take."""

    operation: str
    size: str
    ours: float
    peer: float | None = None
    name: str = ""
    most: float | None = None
    floor: float | None = None

    def cells(self) -> list[object]:
        """As printed."""
        ratio = None if self.peer is None else self.ours / self.peer
        verdict = "-"
        if self.most is not None:
            verdict = "yes" if self.ours <= self.most else f"no, {self.ours / self.most:.2f} x"
        return [self.operation, self.size, self.ours, self.peer, self.name, ratio, self.floor, self.most, verdict]


def attend_rows(read: float) -> Iterator[Row]:
    """Decode over packed rows, prompts over bf16 rows; FlashMLA undoes no rotation."""
    for batch, entries in attend.DECODE:
        keys = attend.WINDOW + entries
        problems = [attend.decode(batch, entries) for _ in range(copies_of(batch * keys * 584))]
        us = time_us(lambda i, p=problems: p[i].run(), len(problems))
        calls = [peers.flash_mla_decode(problem) for problem in problems]
        theirs = _timed(calls)
        most = None if theirs is None else theirs * (1 if batch <= 16 else 1.15)
        yield Row(
            "attend, decode", f"{batch} x {keys:,}", us, theirs, "FlashMLA", most, batch * keys * 584 / read * 1e6
        )
    for entries in attend.PREFILL:
        problem = attend.prefill(4096, entries)
        us = time_us(lambda i, p=problem: p.run(), launches=3, replays=5)
        theirs = _timed([peers.flash_mla_prefill(problem)], launches=3)
        size = f"4,096 x {attend.WINDOW + entries:,}"
        yield Row("attend, prompt", size, us, theirs, "FlashMLA", None if theirs is None else 1.3 * theirs)


def project_rows(read: float) -> Iterator[Row]:
    """Linear layers; ours round their input, the peers find it rounded."""
    for layer, (out, columns, groups) in project.SHAPES.items():
        weights = [project.weight_of(layer) for _ in range(copies_of(project.weight_bytes(layer)))]
        for tokens in (1, 16, 64, 128, 4096):
            if layer in project.PLAIN and tokens > 128:
                continue
            launches, used = (20, weights) if tokens < 1024 else (3, weights[:2])
            x = project.input_of(layer, tokens)
            us = time_us(lambda i, n=layer, x=x, w=used: project.ours(n, x, w[i]), len(used), launches)
            blas, lt = project.peers(layer, x, used, launches)
            deep = None
            if groups == 1 and layer not in project.PLAIN:
                deep = _timed([peers.deep_gemm_product(x, weight) for weight in used], launches)
            found = {"cuBLAS bf16": blas, "cuBLASLt": lt, "DeepGEMM": deep}
            times = {name: value for name, value in found.items() if isinstance(value, float)}
            best = min(times, key=lambda name: times[name]) if times else ""
            floor = (project.weight_bytes(layer) + tokens * (columns * groups + out) * 2) / read * 1e6
            yield Row(
                layer, str(tokens), us, times.get(best), best, _most_of_project(layer, tokens, times, floor), floor
            )


def _most_of_project(layer: str, tokens: int, peers_us: dict[str, float], floor: float) -> float | None:
    if tokens > 128:
        return 1.15 * peers_us["DeepGEMM"] if "DeepGEMM" in peers_us else None
    most = min(peers_us.values(), default=float("inf"))
    return min(most, floor / 0.75) if project.weight_bytes(layer) >= LARGE_WEIGHT else most


def expert_rows(read: float) -> Iterator[Row]:
    """The whole routed MLP, and with the shared expert; DeepGEMM's two grouped products over fp8 weights."""
    w13, w2 = experts.stack(2 * experts.WIDTH, experts.HIDDEN), experts.stack(experts.HIDDEN, experts.WIDTH)
    a13, a2 = experts_prompt.arranged(w13), experts_prompt.arranged(w2)
    for tokens in (1, 16, 64, 128):
        sets = [experts.batch(tokens, seed) for seed in range(8 if tokens < 16 else 2)]
        hit = sum(len(chosen.unique()) for _, chosen, _ in sets) / len(sets)
        us = time_us(lambda i, s=sets: experts.shaped(*s[i], a13, a2, None), len(sets), 16)
        floor = hit * experts.EXPERT_BYTES / read * 1e6
        yield Row("experts, fp4", str(tokens), us, None, "", floor / 0.8, floor)
    for tokens in (4096, 8192):
        x, chosen, weights = experts_prompt.batch(tokens)
        call = functools.partial(experts_prompt.routed, experts_prompt.prompt_outputs, x, chosen, weights, a13, a2)
        us = time_us(lambda i, call=call: call(), 1, 4, 9)
        theirs = _grouped_us(chosen)
        yield Row("experts, fp4", f"{tokens:,}", us, theirs, "DeepGEMM fp8", None if theirs is None else 1.1 * theirs)


def _grouped_us(chosen: Tensor) -> float | None:
    """Gate and up, then down."""
    times = []
    for rows, columns in ((2 * experts.WIDTH, experts.HIDDEN), (experts.HIDDEN, experts.WIDTH)):
        times.append(_timed([peers.deep_gemm_grouped(chosen, experts.EXPERTS, rows, columns)], launches=4))
    return None if None in times else sum(each for each in times if each is not None)


def mix_rows(read: float) -> Iterator[Row]:
    """Closing, opening and norm; the final collapse."""
    for rows, most in ((1, 7), (16, 9), (64, 10), (128, 10), (4096, None)):
        moved = rows * 4096 * 20 + 24 * 4 * 4096 * 4
        sets = [mix.Inputs(rows, 4096, seed) for seed in range(copies_of(moved))]
        us = time_us(lambda i, s=sets: s[i].boundary(), len(sets), 20 if len(sets) > 1 else 10)
        yield Row("mix", str(rows), us, None, "", most or moved / (0.8 * read * COPY_OF_READ) * 1e6, moved / read * 1e6)
        if rows == 1:
            head = time_us(
                lambda i, s=sets: gpu_mix.final_collapse(s[i].streams, s[i].head, s[i].norm, mix.EPS, mix.EPS),
                len(sets),
            )
            yield Row("mix, final collapse", "1", head, None, "", 5)


def small_rows(read: float) -> Iterator[Row]:
    """query, store, compress, route, select and sample."""
    for tokens in (1, 16, 64, 128):
        for name, (moved, make) in state.launches(tokens).items():
            copies = min(20, copies_of(moved))
            us = time_us(make(copies), copies)
            yield Row(name, str(tokens), us, None, "", 6, moved / read * 1e6)
        moved = 256 * 4096 * 2 + tokens * 4096 * 2
        sets = [route.Inputs(tokens, route.FLASH, torch.bfloat16, seed) for seed in range(copies_of(moved))]
        yield Row("route", str(tokens), time_us(lambda i, s=sets: s[i].routed(), len(sets)), None, "", 6)
    for load in select.LOADS[:3]:
        size = load.requests * load.seen * 68
        cases = [select.inputs(load, seed) for seed in range(copies_of(size, 8))]
        us, floor = time_us(lambda i, c=cases: c[i].run(), len(cases)), size / read * 1e6
        yield Row("select", load.name.removeprefix("decode "), us, None, "", max(12.0, floor / 0.7), floor)
    for shape in ("peaked", "flat"):
        logits = [sample.logits_like(shape, 128, seed) for seed in range(3)]
        tensors = sample.how(sample.KINDS["mixed"], 128)
        us = time_us(lambda i, x=logits, t=tensors: gpu_sample.sample(x[i], t), len(logits), 10, 9)
        yield Row("sample, mixed", f"128, {shape}", us, None, "", 60, logits[0].nbytes / read * 1e6)


def _timed(calls: list[peers.Launch | None], launches: int = 20) -> float | None:
    """Microseconds of a peer's launch, None where it is missing or fails."""
    found = [call for call in calls if call is not None]
    if not found:
        return None
    us = attempt("peer", lambda: time_us(lambda i: found[i](), len(found), launches, 9))
    return us if isinstance(us, float) else None


def checks() -> None:
    """Each peer against the definition, so that what is timed is the same work."""
    for name, make, problem in (
        ("FlashMLA, decode", peers.flash_mla_decode, attend.decode(16, 512)),
        ("FlashMLA, prompt", peers.flash_mla_prefill, attend.prefill(300, 512)),
    ):
        cos = torch.ones_like(problem.by.cos)
        problem.by = Angles(cos, torch.zeros_like(cos))  # no rotation
        _check(name, lambda make=make, problem=problem: make(problem), problem.definition())
    x, weight = project.input_of("wo_b", 64), project.weight_of("wo_b")
    want = project.round_input(x, weight).double() @ weight.dense(torch.float64).T
    _check("DeepGEMM", lambda: peers.deep_gemm_product(x, weight), want)


def _check(name: str, make: Callable[[], object], want: Tensor) -> None:
    call = attempt(name, make)
    if not callable(call):
        print(f"--  {name}: not here", flush=True)
        return
    got = attempt(name, call)
    if isinstance(got, Tensor):
        error = relative_error(got, want)
        print(f"{'OK ' if error < 6e-3 else 'BAD'} {name}: error {error:.1e}", flush=True)


def compile_peer(job: tuple[str, int]) -> str:
    """DeepGEMM compiles a shape when it first runs: in a process of its own. Layer "" is the grouped products."""
    layer, tokens = job
    try:
        if layer:
            call = peers.deep_gemm_product(project.input_of(layer, tokens), project.weight_of(layer))
            if call is not None:
                call()
        else:
            _grouped_us(torch.rand(tokens, experts.EXPERTS, device=DEVICE).topk(experts.ACTIVE).indices)
        torch.cuda.synchronize()
    except Exception as error:
        return f"BAD {job}: {type(error).__name__} {str(error)[-200:]}"
    return ""


def compile_all() -> None:
    """Everything that would compile while it is timed, side by side."""
    begun = time.perf_counter()
    layers = [name for name in project.LAYERS if project.SHAPES[name][2] == 1]
    jobs = [(layer, tokens) for layer in layers for tokens in (1, 16, 64, 128, 4096)] + [("", 8192)]
    ours = [(layer, tokens, None) for layer in project.SHAPES for tokens in (1, 16, 64, 128)]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        bad = pool.map_async(compile_peer, jobs, chunksize=1)
        bad_ours = pool.map_async(project.compile_one, ours, chunksize=1)
        found = [text for text in (*bad.get(), *bad_ours.get()) if text]
    print(f"{len(jobs) + len(ours)} kernels compiled in {time.perf_counter() - begun:.0f} s", *found[:4], sep="\n")


def main() -> None:
    """Compile, check, time, print."""
    compile_all()
    torch.manual_seed(0)
    read = Machine.measured(DEVICE).bandwidth
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {read / 1e12:.2f} TB/s read", flush=True)
    checks()
    rows: list[Row] = []
    for part in (attend_rows, project_rows, expert_rows, mix_rows, small_rows):
        begun = time.perf_counter()
        attempt(part.__name__, lambda part=part: collect(part(read), rows))
        print(f"{part.__name__}: {time.perf_counter() - begun:.0f} s", flush=True)
    titles = ["operation", "size", "ours", "peer", "", "ratio", "floor", "target", "reached"]
    table("targets, us", titles, [row.cells() for row in rows])
    judged = [row for row in rows if row.most is not None]
    print(f"{sum(row.ours <= row.most for row in judged if row.most)} of {len(judged)} targets reached")


def collect(found: Iterator[Row], rows: list[Row]) -> None:
    """Put every row into `rows` as it comes, so that a failure loses the rest of its part alone."""
    for row in found:
        rows.append(row)


if __name__ == "__main__":
    main()
