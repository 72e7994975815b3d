"""The experts' kernels at V4-Flash size: correctness against the definition in fp64, and times against floors."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.kernels.timing import READ_BANDWIDTH, attempt, check, table, time_us
from leadline.kernels import experts as definition
from leadline.kernels.arrange import arrange_experts, restore_experts
from leadline.kernels.gpu import experts_fp4
from leadline.kernels.gpu.experts import experts, routed_experts, shared_expert
from leadline.kernels.gpu.experts_fp4 import Shape, arranged_outputs
from leadline.kernels.gpu.experts_prepare import prepared
from leadline.kernels.gpu.experts_rows import summed
from leadline.kernels.project import Weight

HIDDEN, WIDTH, EXPERTS, ACTIVE, LIMIT = 4096, 2048, 256, 6, 10.0
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 17 / 32


def stack(rows: int, columns: int) -> Weight:
    """A random packed stack in checkpoint order."""
    data = torch.randint(-128, 128, (EXPERTS, rows, columns // 2), dtype=torch.int8, device="cuda")
    # products of about unit size: e2m1 codes have a standard deviation of about 3
    middle = 127 - round(0.5 * torch.tensor(columns * 9.0).log2().item())
    scale = torch.randint(middle - 1, middle + 2, (EXPERTS, rows, columns // 32), dtype=torch.uint8, device="cuda")
    return Weight(data, scale.view(torch.float8_e8m0fnu), True)


def arranged(*stacks: Weight) -> tuple[Weight, Weight]:
    """Copies of both stacks of a layer, arranged; prints what that took."""
    w13, w2 = (Weight(w.data.clone(), None if w.scale is None else w.scale.clone(), True) for w in stacks)
    steps = {"arrange": lambda: arrange_experts((w13, w2), torch.bfloat16)}
    steps["restore"] = lambda: restore_experts((w13, w2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for name in ("arrange", "restore", "arrange", "restore", "arrange"):
        start = time.perf_counter()
        steps[name]()
        torch.cuda.synchronize()
        print(f"{name} a layer: {1000 * (time.perf_counter() - start):.2f} ms", flush=True)
    print(f"memory besides: {(torch.cuda.max_memory_allocated() - before) / 1e6:.0f} MB")
    for moved, weight in zip((w13, w2), stacks, strict=True):
        same = all(torch.equal(moved.expert(i).dense(torch.bfloat16), weight.expert(i).dense(torch.bfloat16))
                   for i in (0, 7, 100, EXPERTS - 1))  # fmt: skip
        print("OK " if same and moved.form == "arranged" else "BAD", "arranged experts hold the same values")
    return w13, w2


def batch(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, chosen experts (uniform) and their weights."""
    torch.manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(ACTIVE).indices
    weights = torch.rand(tokens, ACTIVE, device="cuda")
    return x, chosen, weights / weights.sum(1, keepdim=True) * 1.5


def exact(x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight) -> Tensor:
    """The definition in fp64, but with the rounding of hidden rows to bf16 and fp8 as native numerics do it."""
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    x = definition.round_input(x, w13).double()
    for expert in chosen[chosen >= 0].unique().tolist():
        token, rank = (chosen == expert).nonzero(as_tuple=True)
        both = (x[token] @ w13.expert(expert).dense(torch.float64).T).bfloat16()
        hidden = (definition.clamped_swiglu(both, LIMIT) * weights[token, rank, None]).bfloat16()
        hidden = definition.round_input(hidden, w2).double()
        out[token] += hidden @ w2.expert(expert).dense(torch.float64).T
    return out


def shaped(x: Tensor, chosen: Tensor, weights: Tensor, a13: Weight, a2: Weight, shape: Shape | None) -> Tensor:
    """The routed experts alone, by arranged weights."""
    return summed(arranged_outputs(x, chosen, weights, a13, a2, LIMIT, None, shape), chosen, None, torch.float32)


def matrix(rows: int, columns: int) -> Weight:
    """One of the shared expert's, in fp8."""
    data = torch.randn(rows, columns, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.full((rows // 128, columns // 128), 121, dtype=torch.uint8, device="cuda")
    return Weight(data, scale.view(torch.float8_e8m0fnu), True)


def warm(calls: list) -> None:
    """Compile what `calls` launch, side by side."""
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda call: attempt("compile", call), calls))
    torch.cuda.synchronize()


def reached(tokens: int, us: float, hit: float) -> list[object]:
    """Tokens, us, and what was reached of bandwidth and of matrix rate."""
    floor = hit * EXPERT_BYTES / READ_BANDWIDTH * 1e6
    return [us, hit * EXPERT_BYTES / us / 1e6, floor / us, 6 * tokens * ACTIVE * HIDDEN * WIDTH / us / 1e6]


def correctness(w13: Weight, w2: Weight, a13: Weight, a2: Weight, shapes: dict) -> None:
    """Both kinds of kernel against the definition; fp8 sums of 128 products keep about 14 bits."""
    for tokens in (1, 16, 128, 512):
        one = batch(tokens, 99)
        if tokens > 1:  # some rows of a graph are no tokens
            one[0][::5], one[1][::5] = float("nan"), -1
        want = exact(*one, w13, w2)

        def compare(name: str, call, want: Tensor = want) -> None:
            attempt(name, lambda: check(name, call(), want, 0.02))

        compare(f"plain {tokens}", lambda one=one: routed_experts(*one, w13, w2, LIMIT))
        compare(f"fp4 {tokens}", lambda one=one: shaped(*one, a13, a2, None))
        for shape in dict.fromkeys(shapes[64 if tokens < 200 else 4096]):
            if shape and tokens in (16, 512):
                compare(f"fp4 {tokens} {shape}", lambda one=one, s=shape: shaped(*one, a13, a2, s))


def timed(tokens: int, sets: list, plain: tuple, arranged: tuple, copies: list, shapes: list) -> list[list[object]]:
    """Lines of the table for one number of tokens; the shared expert's bytes are not counted."""
    hit = sum(len(b[1].unique()) for b in sets) / len(sets)
    launches = 16 if tokens < 1000 else 2
    lines = []

    def measure(name: str, call) -> None:
        us = attempt(name, lambda: time_us(call, len(sets), launches))
        if us:
            lines.append([tokens, name, *reached(tokens, us, hit)])

    measure("plain", lambda i: routed_experts(*sets[i], *plain, LIMIT))
    for shape in shapes:
        name = f"{shape.width},{shape.units},{shape.slots}" if shape else "fp4"
        measure(name, lambda i, s=shape: shaped(*sets[i], *arranged, s))
    measure("with shared", lambda i: experts(*sets[i], *arranged, *copies[i % len(copies)], LIMIT))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true", help="no times")
    options = parser.parse_args()
    w13, w2 = stack(2 * WIDTH, HIDDEN), stack(HIDDEN, WIDTH)
    a13, a2 = arranged(w13, w2)
    sizes = (1, 4, 16, 64, 128, 4096)
    shapes = {tokens: [None] for tokens in sizes}
    if options.sweep:
        shapes |= {64: [None, Shape(8, 2, 3), Shape(8, 2, 5), Shape(16, 2, 4)],
                   4096: [None, Shape(32, 2, 4), Shape(64, 1, 3), Shape(128, 1, 3)]}  # fmt: skip
    batches = {tokens: [batch(tokens, seed) for seed in range(8 if tokens < 16 else 2)] for tokens in sizes}
    copies = [(matrix(2 * WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)) for _ in range(6)]
    warm([lambda s=s, b=batches[t][0]: shaped(*b, a13, a2, s) for t in sizes for s in shapes[t]]
         + [lambda b=batches[t][0]: experts(*b, a13, a2, *copies[0], LIMIT) for t in sizes]
         + [lambda b=batches[t][0]: routed_experts(*b, w13, w2, LIMIT) for t in sizes])  # fmt: skip
    correctness(w13, w2, a13, a2, shapes)
    if options.check:
        return
    rows = [
        line
        for tokens in sizes
        for line in timed(tokens, batches[tokens], (w13, w2), (a13, a2), copies, shapes[tokens])
    ]
    table("experts, Flash", ["tokens", "kernel", "us", "TB/s", "of floor", "TFLOP/s"], rows)
    parts(batches)
    shared(copies)


def parts(batches: dict) -> None:
    """Launches around the products."""
    lines = []
    for tokens in (1, 64, 4096):
        x, chosen, _ = batches[tokens][0]
        outputs = torch.randn(tokens * (ACTIVE + 1), HIDDEN, device="cuda").bfloat16()
        shape = experts_fp4.shape_for(tokens, ACTIVE, EXPERTS, WIDTH)
        calls = [
            lambda i, x=x, c=chosen, s=shape: prepared(x, c, EXPERTS, s.width, WIDTH // 128),
            lambda i, o=outputs, c=chosen: summed(o, c, o[c.numel() :], torch.bfloat16),
        ]
        lines.append([tokens, *(attempt("part", lambda call=call: time_us(call, 1, 8)) for call in calls)])
    table("parts, us", ["tokens", "prepare", "sum"], lines)


def shared(copies: list) -> None:
    """The shared expert alone, in fp8."""
    size, lines = 3 * HIDDEN * WIDTH, []
    for tokens in (1, 16, 64, 4096):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        us = attempt("shared", lambda x=x: time_us(lambda i: shared_expert(x, *copies[i], LIMIT), 6, 12))
        if us:
            lines.append([tokens, us, size / us / 1e6, 2 * tokens * size / us / 1e6])
    table("shared expert, fp8", ["tokens", "us", "TB/s", "TFLOP/s"], lines)


if __name__ == "__main__":
    main()
