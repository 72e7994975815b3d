"""The experts' kernels for a prompt."""

import importlib

import pytest
import torch

from leadline.formats import fp4_quantize_weight
from leadline.kernels import experts as definition
from leadline.kernels.gpu import experts
from leadline.kernels.gpu.experts_arrange import arrange_stacks
from leadline.kernels.gpu.experts_fp4 import arranged_outputs
from leadline.kernels.gpu.experts_prompt import gathered, prompt_outputs
from leadline.kernels.gpu.experts_rows import summed
from leadline.kernels.gpu.experts_tiles import tiles_by_expert
from leadline.kernels.gpu.quantize import quantize_rows
from leadline.kernels.project import Weight
from tests.gpu.cases_experts_prompt import prompt_failures

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def routing(tokens, count, active, absent):
    """Distinct experts a token, crowded so that some experts take many tokens and some none; some rows have none."""
    scores = torch.randn(tokens, count) + torch.linspace(2, -2, count)
    chosen = scores.topk(active).indices
    chosen[torch.rand(tokens) < absent] = -1
    return chosen.to(DEVICE)


@pytest.mark.parametrize("absent", [0.0, 0.4])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 128), (37, 384), (90, 4096)])
def test_gathered_rows_are_the_rounded_rows_of_their_tokens(tokens, columns, absent):
    torch.manual_seed(tokens)
    x = (torch.randn(tokens, columns) * 3).bfloat16().to(DEVICE)
    chosen = routing(tokens, 8, 2, absent)
    tiles = tiles_by_expert(chosen, 8, 16, 4)
    filled = torch.zeros(tiles.places, dtype=torch.bool, device=DEVICE)
    for _, first, size in tiles.records.T.tolist():
        filled[first : first + size] = size > 0
    tiles.order[~filled] = 2**31 - 1  # what a place without a pair may hold
    codes, scales = gathered(x, tiles, 2)
    want_codes, want_scales = quantize_rows(x)
    token = tiles.order[filled].long() // 2
    assert torch.equal(codes[filled].view(torch.uint8), want_codes[token].view(torch.uint8))
    assert torch.equal(scales[filled], want_scales[token])
    assert scales.stride(0) == 1 and scales.stride(1) % 4 == 0


@pytest.mark.parametrize(
    ("tokens", "hidden", "width", "taken"),
    [(64, 384, 256, True), (63, 384, 256, False), (900, 384, 192, False), (900, 320, 256, False)],
)
def test_many_pairs_of_an_expert_take_the_kernel_for_prompts(tokens, hidden, width, taken, monkeypatch):
    for name in ("prompt_outputs", "arranged_outputs"):
        monkeypatch.setattr(experts, name, lambda *arguments, name=name: name)
    shapes = [(4, 2 * width, hidden), (4, hidden, width)]
    w13, w2 = (Weight(torch.empty(*s[:-1], s[-1] // 8, dtype=torch.int32), torch.empty(0), True) for s in shapes)
    x, chosen = torch.empty(tokens, hidden), torch.zeros(tokens, 4, dtype=torch.int64)
    monkeypatch.setattr(experts, "summed", lambda outputs, *rest: outputs)
    got = experts.routed_experts(x, chosen, torch.empty(tokens, 4), w13, w2, 1.0)
    assert got == ("prompt_outputs" if taken else "arranged_outputs")


def test_compiles_without_waits_between_matrix_instructions():
    assert prompt_failures() == []


def stack(count, rows, columns):
    """A random packed stack, with outliers in some rows."""
    w = torch.randn(count, rows, columns) / columns**0.5
    w[:, :: max(rows // 3, 1)] *= 4
    parts = [fp4_quantize_weight(matrix, torch.float8_e8m0fnu) for matrix in w]
    data = torch.stack([part[0].view(torch.int8) for part in parts])
    scale = torch.stack([part[1].view(torch.uint8) for part in parts]).view(torch.float8_e8m0fnu)
    return Weight(data.to(DEVICE), scale.to(DEVICE), True)


@pytest.mark.skipif(DEVICE == "cpu", reason="a Gluon kernel for Hopper")
@pytest.mark.parametrize("absent", [0.0, 0.3])
@pytest.mark.parametrize("tokens", [3, 100, 700])
def test_prompt_outputs_are_the_definition(tokens, absent):
    torch.manual_seed(tokens)
    count, active, hidden, width = 5, 2, 384, 256
    w13, w2 = stack(count, 2 * width, hidden), stack(count, hidden, width)
    wide = [Weight(w.dense(torch.float64), None, True) for w in (w13, w2)]
    x = torch.randn(tokens, hidden).bfloat16().to(DEVICE) * 2
    chosen, weights = routing(tokens, count, active, absent), torch.rand(tokens, active).to(DEVICE)
    arrange_stacks((w13, w2))
    assert w13.form == w2.form == "arranged"
    outputs = prompt_outputs(x, chosen, weights, w13, w2, 1.0)
    few = arranged_outputs(x, chosen, weights, w13, w2, 1.0, None)
    got, same = (summed(each, chosen, None, torch.float32) for each in (outputs, few))
    want = definition.routed_experts(x.double(), chosen, weights.double(), *wide, 1.0)
    assert ((got.double() - want).norm() / want.norm()).item() <= 0.04
    assert torch.equal(got, same) and (got[chosen[:, 0] < 0] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [512, 4096, 8192])
def test_experts_of_a_prompt_at_the_size_of_flash(tokens):
    """All of it against the kernels for few tokens, bit by bit, and 48 tokens against the definition."""
    torch.manual_seed(tokens)
    benchmark = importlib.import_module("benchmarks.kernels.experts_prompt")
    stacks = benchmark.stack(4096, 4096), benchmark.stack(4096, 2048)
    x, chosen, weights = benchmark.batch(tokens, 0.2)
    chosen[::7] = -1
    some = torch.randperm(tokens, device=DEVICE)[:48]
    want = benchmark.exact(x[some], chosen[some], weights[some], *stacks)
    arrange_stacks(stacks)
    got = benchmark.routed(prompt_outputs, x, chosen, weights, *stacks)
    assert ((got[some].double() - want).norm() / want.norm()).item() <= 6e-3
    assert torch.equal(got, benchmark.routed(benchmark.few_outputs, x, chosen, weights, *stacks))
    for _ in range(5):
        assert torch.equal(got, benchmark.routed(prompt_outputs, x, chosen, weights, *stacks))
