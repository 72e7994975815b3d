# ruff: noqa: B023 - the functions timed here are called before their loop goes on
"""Linear layers and the grouped output product at V4-Flash sizes: `python -m benchmarks.kernels.project [--sweep]`.

Times are of one layer with its weights out of cache, the rounding of its input included for ours and not for peers.
"""

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import READ_BANDWIDTH, attempt, copies_of, relative_error, table, time_us
from leadline.kernels.gpu.chips import CHIPS, processors
from leadline.kernels.gpu.output import grouped_output
from leadline.kernels.gpu.product_plan import FEW_TOKENS, Plan, Product, fill
from leadline.kernels.gpu.project import Input, multiply, project, taken, wide_product
from leadline.kernels.gpu.quantize import quantize_rows
from leadline.kernels.project import Weight, round_input

LAYERS = {
    "wq_a+wkv": (1536, 4096, 1),
    "wq_b": (32768, 1024, 1),
    "wo_a": (8192, 4096, 8),
    "wo_b": (4096, 8192, 1),
    "gate+up": (4096, 4096, 1),
    "index wq_b": (8192, 1024, 1),
}
"""Rows, columns, groups of fp8 weights."""
PLAIN = {"head": (129280, 4096, 1), "csa gates": (2560, 4096, 1), "hca gates": (1024, 4096, 1)}
"""Layers in bf16, whose results are wanted in fp32."""
SHAPES = LAYERS | PLAIN
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 4096)
SWEPT = (16, 64, 128)
TENSOR_RATE = 1.25e15
"""Operations per second of an 8192^3 fp8 product on an H200."""


def weight_of(layer: str) -> Weight:
    """A random weight of the layer, its input to be rounded if it is fp8 except in wo_a."""
    rows, columns, groups = SHAPES[layer]
    if layer in PLAIN:
        return Weight(torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda"))
    data = torch.randint(0, 254, (rows, columns), dtype=torch.uint8, device="cuda")
    data = torch.where(data & 0x7F == 0x7F, 0x3F, data).view(torch.float8_e4m3fn)
    scale = torch.randint(115, 119, (rows // 128, columns // 128), dtype=torch.uint8, device="cuda")
    return Weight(data, scale.view(torch.float8_e8m0fnu), groups == 1)


def weight_bytes(layer: str) -> int:
    """What a launch must read of the weight."""
    rows, columns, _ = SHAPES[layer]
    return rows * columns * (2 if layer in PLAIN else 1)


def input_of(layer: str, tokens: int) -> Tensor:
    """Random activations [T, groups * columns], one channel in 64 being large."""
    _, columns, groups = SHAPES[layer]
    x = torch.randn(tokens, groups * columns, device="cuda")
    return (x * torch.where(torch.rand(groups * columns, device="cuda") < 1 / 64, 20.0, 1.0)).bfloat16()


def ours(layer: str, x: Tensor, weight: Weight, plan: Plan | None = None) -> Tensor:
    """The layer as the engine runs it, or by `plan`."""
    groups = SHAPES[layer][2]
    if plan is not None:
        return multiply(taken(x, weight) if groups == 1 else Input(x, None, "plain"), weight, groups, x.dtype, plan)
    if layer in PLAIN:
        return wide_product(x, weight.data)
    return project(x, weight) if groups == 1 else grouped_output(x.unflatten(1, (groups, -1)), weight, groups)


def plans(layer: str, tokens: int) -> Iterator[tuple[str, Plan]]:
    """Candidates of a sweep, named."""
    rows, columns, groups = SHAPES[layer]
    form = "plain" if layer in PLAIN or groups > 1 else "round" if tokens <= FEW_TOKENS else "codes"
    product = Product(tokens, rows // groups, columns, groups, form, "plain" if layer in PLAIN else "fp8")
    seen = set()
    for block_rows, block_tokens, warps in ((64, 64, 4), (128, 64, 8), (64, 128, 4), (128, 128, 8)):
        tile = (block_rows, min(block_tokens, tokens), 64 if layer in PLAIN else 128)
        for programs in (66, 132, 264, 528):
            splits = min(16, max(1, programs * block_rows // rows))
            plan = fill(product, CHIPS["sm90"], 132, tile, splits, warps)
            if plan not in seen:
                seen.add(plan)
                yield f"{block_rows}x{tile[1]} s{plan.splits} w{warps} q{plan.stages}", plan


def compile_one(job: tuple[str, int, Plan | None]) -> str:
    """Compile a kernel in a process of its own by running it once."""
    layer, tokens, plan = job
    try:
        ours(layer, input_of(layer, tokens), weight_of(layer), plan)
        torch.cuda.synchronize()
    except Exception as error:
        return f"BAD {layer} {tokens} {plan}: {type(error).__name__} {str(error)[-200:]}"
    return ""


def compile_all(sweeps: bool) -> None:
    """Fill Triton's cache with all kernels that are to run, in parallel."""
    start = time.time()
    jobs: list[tuple[str, int, Plan | None]] = [(layer, n, None) for layer in SHAPES for n in (8, 16, 32, 64, 128, 512)]
    if sweeps:
        jobs += [(layer, n, plan) for layer in LAYERS for n in SWEPT for _, plan in plans(layer, n)]
    with multiprocessing.get_context("spawn").Pool(16) as pool:
        bad = [text for text in pool.map(compile_one, jobs, chunksize=1) if text]
    print(f"{len(jobs)} kernels compiled in {time.time() - start:.0f} s", *bad[:4], sep="\n", flush=True)


def sweep() -> None:
    """Time all candidates and print the best few of each layer and number of tokens."""
    for layer in LAYERS:
        weights = [weight_of(layer) for _ in range(copies_of(weight_bytes(layer)))]
        for tokens in SWEPT:
            x, found = input_of(layer, tokens), []
            for name, plan in plans(layer, tokens):
                us = attempt(name, lambda: time_us(lambda i: ours(layer, x, weights[i], plan), len(weights), replays=7))
                if us is not None:
                    found.append((us, name))
            print(f"{layer} {tokens}:", ", ".join(f"{us:.1f} {name}" for us, name in sorted(found)[:4]), flush=True)


def block_scaled(x: Tensor, weight: Weight) -> Callable[[], Tensor]:
    """cuBLASLt's product of fp8 codes with 1 x 128 and 128 x 128 scales, the rounding left out."""
    codes, scales = quantize_rows(x)
    assert weight.scale is not None
    kinds = F.ScalingType
    wide = weight.scale.float().contiguous().T
    return lambda: F.scaled_mm(
        codes, weight.data.T, scales, kinds.BlockWise1x128, wide, kinds.BlockWise128x128, output_dtype=torch.bfloat16
    )


def checks() -> None:
    """Every layer against the float64 product of what it is given: bf16 results are off by 1.7e-3, fp32 by less."""
    worst = 0.0
    for layer, (_, _, groups) in SHAPES.items():
        weight = weight_of(layer)
        dense = weight.dense(torch.float64).unflatten(0, (groups, -1))
        for tokens in (1, 7, 16, 31, 64, 128, 300):
            x = input_of(layer, tokens)
            value = round_input(x, weight).double() if groups == 1 else x.double()
            want = torch.einsum("tgi,goi->tgo", value.unflatten(1, (groups, -1)), dense).flatten(1)
            got = attempt(f"{layer} {tokens}", lambda: ours(layer, x, weight))
            error = relative_error(got, want) if isinstance(got, Tensor) else math.inf
            worst = max(worst, error)
            if error > 3e-3:
                print(f"BAD {layer} {tokens}: {error:.1e}")
    print(f"worst error relative to float64: {worst:.1e}")


def peers(layer: str, x: Tensor, weights: list[Weight], launches: int) -> tuple[object, object]:
    """Microseconds of cuBLAS in bf16 and of cuBLASLt's block-scaled product, None where there is none."""
    rows, columns, groups = SHAPES[layer]
    dense = [weight.dense(torch.bfloat16) for weight in weights[: copies_of(2 * rows * columns)]]
    if groups > 1:
        factors = [matrix.unflatten(0, (groups, -1)).transpose(1, 2) for matrix in dense]
        by_group = x.unflatten(1, (groups, -1)).transpose(0, 1)
        return attempt("bmm", lambda: time_us(lambda i: torch.bmm(by_group, factors[i]), len(factors), launches)), None
    wide = torch.float32 if layer in PLAIN else torch.bfloat16
    blas = attempt("cuBLAS", lambda: time_us(lambda i: torch.mm(x, dense[i].T, out_dtype=wide), len(dense), launches))
    if layer in PLAIN or len(x) < 16:
        return blas, None
    calls = [block_scaled(x, weight) for weight in weights]
    return blas, attempt("scaled_mm", lambda: time_us(lambda i: calls[i](), len(calls), launches))


def times() -> None:
    """The table of times, floors and peers."""
    rows: list[tuple[object, ...]] = []
    for layer, (out, columns, groups) in SHAPES.items():
        everything = [weight_of(layer) for _ in range(copies_of(weight_bytes(layer)))]
        for tokens in TOKENS:
            if layer == "head" and tokens > 128:
                continue
            weights, launches = (everything, 20) if tokens < 1024 else (everything[:2], 3)
            x = input_of(layer, tokens)
            us = attempt(
                f"{layer} {tokens}",
                lambda: time_us(lambda i: ours(layer, x, weights[i]), len(weights), launches),
            )
            moved = weight_bytes(layer) + tokens * (columns * groups + out) * 2
            floor = max(moved / READ_BANDWIDTH, 2 * tokens * out * columns / TENSOR_RATE) * 1e6
            ratio = us / floor if isinstance(us, float) else None
            rows.append((layer, tokens, us, floor, ratio, *peers(layer, x, weights, launches)))
    table("project, us", ("layer", "rows", "ours", "floor", "ratio", "cuBLAS bf16", "block fp8"), rows)


def main() -> None:
    """Check, time, and sweep if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time candidates for the choice of tiles")
    arguments = parser.parse_args()
    compile_all(arguments.sweep)
    torch.manual_seed(0)
    count = processors(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, {count} processors, torch {torch.__version__}")
    checks()
    times()
    if arguments.sweep:
        sweep()


if __name__ == "__main__":
    main()
