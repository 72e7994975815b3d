"""The experts of a prompt at V4-Flash size: correctness against the definition in fp64, and times."""

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.kernels.experts import ACTIVE, EXPERTS, HIDDEN, LIMIT, WIDTH, exact, stack
from benchmarks.kernels.timing import attempt, check, table, time_us
from leadline.kernels.gpu import experts_prompt_product
from leadline.kernels.gpu.experts_arrange import arrange_stacks
from leadline.kernels.gpu.experts_fp4 import arranged_outputs
from leadline.kernels.gpu.experts_prompt import ALIGNED, gathered, product, prompt_outputs
from leadline.kernels.gpu.experts_rows import summed
from leadline.kernels.gpu.experts_tiles import tiles_by_expert
from leadline.kernels.gpu.quantize import quantize_rows
from leadline.kernels.project import Weight

TILE = experts_prompt_product.WIDTH.value


def arranged(weight: Weight) -> Weight:
    """A copy in the kernel's order."""
    assert weight.scale is not None
    copy = Weight(weight.data.clone(), weight.scale.clone(), True)
    arrange_stacks([copy])
    return copy


def batch(tokens: int, skew: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Activations, chosen experts (uniform, or with `skew` some more often) and their weights."""
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    liking = skew * torch.randn(EXPERTS, device="cuda")
    chosen = (torch.rand(tokens, EXPERTS, device="cuda") + liking).topk(ACTIVE).indices
    weights = torch.rand(tokens, ACTIVE, device="cuda")
    return x, chosen, weights / weights.sum(1, keepdim=True) * 1.5


def few_outputs(x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """`prompt_outputs` by the kernels for few tokens."""
    return arranged_outputs(x, chosen, weights, w13, w2, limit, None)


def routed(
    outputs: Callable[..., Tensor], x: Tensor, chosen: Tensor, weights: Tensor, w13: Weight, w2: Weight
) -> Tensor:
    """A whole call, fp32 [T, d], of `prompt_outputs` or `few_outputs`."""
    return summed(outputs(x, chosen, weights, w13, w2, LIMIT), chosen, None, torch.float32)


def parts(tokens: int, w13: Weight, w2: Weight) -> list[object]:
    """Microseconds of a whole call and of each of its launches, and what the call reaches."""
    x, chosen, weights = batch(tokens)
    tiles = tiles_by_expert(chosen, EXPERTS, TILE, ALIGNED)
    codes, scales = gathered(x, tiles, ACTIVE)
    hidden = product(codes, scales, weights, w13, tiles, LIMIT, gate_up=True)
    hidden_codes, hidden_scales = quantize_rows(hidden)
    outputs = product(hidden_codes, hidden_scales, weights, w2, tiles, LIMIT, gate_up=False)
    calls = [
        lambda i: routed(prompt_outputs, x, chosen, weights, w13, w2),
        lambda i: routed(few_outputs, x, chosen, weights, w13, w2),
        lambda i: tiles_by_expert(chosen, EXPERTS, TILE, ALIGNED),
        lambda i: gathered(x, tiles, ACTIVE),
        lambda i: product(codes, scales, weights, w13, tiles, LIMIT, gate_up=True),
        lambda i: quantize_rows(hidden),
        lambda i: product(hidden_codes, hidden_scales, weights, w2, tiles, LIMIT, gate_up=False),
        lambda i: summed(outputs, chosen, None, torch.float32),
    ]
    times = [attempt("part", lambda call=call: time_us(call, 1, 4, 9)) for call in calls]
    rate = 6 * tokens * ACTIVE * HIDDEN * WIDTH / times[0] / 1e6 if isinstance(times[0], float) else None
    return [tokens, rate, *times]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="no times")
    parser.add_argument("--times", action="store_true", help="no checks")
    options = parser.parse_args()
    torch.manual_seed(0)
    w13, w2 = stack(2 * WIDTH, HIDDEN), stack(HIDDEN, WIDTH)
    a13, a2 = arranged(w13), arranged(w2)
    for tokens, skew in () if options.times else ((512, 0.0), (2000, 0.3), (4096, 0.0), (8192, 0.0)):
        x, chosen, weights = batch(tokens, skew)
        if tokens == 512:
            chosen[::7] = -1
        got = attempt("call", functools.partial(routed, prompt_outputs, x, chosen, weights, a13, a2))
        if isinstance(got, Tensor):
            check(f"{tokens} tokens", got, exact(x, chosen, weights, w13, w2), 6e-3)
            few = routed(few_outputs, x, chosen, weights, a13, a2)
            print("OK " if torch.equal(got, few) else "BAD", "the same bits as the kernel for few tokens")
    if options.check:
        return
    titles = ["tokens", "TFLOP/s", "call", "few tokens' kernel", "tiles", "gather", "up", "round", "down", "sum"]
    table("us", titles, [parts(tokens, a13, a2) for tokens in (8192, 4096, 2048, 1024)])


if __name__ == "__main__":
    main()
