"""Linear layers as kernels, against the definitions in float64. Small here; official sizes where there is a GPU."""

import pytest
import torch

from leadline import formats
from leadline.kernels import project as definition
from leadline.kernels.gpu import output, project
from leadline.kernels.gpu.chips import CHIPS, chip_of
from leadline.kernels.gpu.expand import expanded
from leadline.kernels.gpu.product_plan import FEW_TOKENS, MOST_TOKENS, Product, fill, plan_hopper, plan_product
from leadline.kernels.gpu.project import Input, multiply, taken
from leadline.kernels.gpu.quantize import quantize_rows, round_rows
from leadline.kernels.project import Weight
from tests.gpu.cases_project import hopper_failures
from tests.gpu.compiling import failures

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SUM_ERROR = 2e-6
"""Sums in fp32 of up to 500 exact products, relative to the norm of the result; fp8 matrix instructions of Hopper
keep fewer bits between two scales, which the GPU's bound allows for."""
GPU_ERROR = 1e-3


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """New memory holds NaN, so that nothing passes for a result that no kernel wrote."""
    empty = torch.empty

    def filled(*size, **options):
        fresh = empty(*size, **options)
        if fresh.dtype == torch.float8_e4m3fn:
            fresh.view(torch.uint8).fill_(0x7F)
        elif fresh.is_floating_point():
            fresh.fill_(float("nan"))
        return fresh

    monkeypatch.setattr(torch, "empty", filled)


def weight_of(kind, rows, columns, rounds):
    w = torch.randn(rows, columns) * torch.exp(torch.randn(rows, columns))
    w[: rows // 2] *= 100  # tiles with scales that differ
    if kind == "bf16":
        made = w.bfloat16(), None
    elif kind == "fp4":
        made = formats.fp4_quantize_weight(w)
    else:
        made = formats.fp8_quantize_weight(w, torch.float32 if kind == "fp8, fp32 scales" else torch.float8_e8m0fnu)
    return Weight(made[0].to(DEVICE), None if made[1] is None else made[1].to(DEVICE), rounds)


def wanted(x, weight, groups=1):
    """The product in float64; inputs are rounded in their own dtype, which is exact for bf16."""
    x = definition.round_input(x.cpu(), weight).double().unflatten(1, (groups, -1))
    dense = Weight(weight.data.cpu(), None if weight.scale is None else weight.scale.cpu()).dense(torch.float64)
    return torch.einsum("tgi,goi->tgo", x, dense.unflatten(0, (groups, -1))).flatten(1)


def assert_close(name, got, want, bound):
    got = got.cpu().double()
    assert got.shape == want.shape, f"{name}: {list(got.shape)}, not {list(want.shape)}"
    error = (got - want).norm(dim=1) / want.norm(dim=1)
    assert bool((error <= bound).all()), (
        f"{name}: row {int(error.argmax())} is off by {float(error.max()):.1e} > {bound}"
    )


def error_bound(weight):
    return SUM_ERROR if DEVICE.type == "cpu" or not weight.round_input else GPU_ERROR


@pytest.mark.parametrize("kind", ["fp8", "fp8, fp32 scales", "fp4", "bf16"])
@pytest.mark.parametrize("rounds", [False, True], ids=["as is", "rounded"])
def test_product_of_any_shape(kind, rounds):
    draw = torch.Generator().manual_seed(len(kind) + rounds)
    torch.manual_seed(len(kind) + rounds)
    for tokens in (1, int(torch.randint(2, 33, (), generator=draw)), FEW_TOKENS + 5):
        rows, columns = (int(torch.randint(1, most, (), generator=draw)) for most in (300, 480))
        columns = 32 * (columns // 32 + 1) if kind == "fp4" else columns
        x = (torch.randn(tokens, columns) * torch.exp(2 * torch.randn(columns))).bfloat16().to(DEVICE)
        weight = weight_of(kind, rows, columns, rounds)
        want = wanted(x, weight)
        name = f"{kind} {tokens} x {columns} -> {rows}"
        assert_close(name, multiply(taken(x, weight), weight, 1, torch.float32), want, error_bound(weight))
        # Triton's interpreter cuts bf16 off instead of rounding: an error of up to 2^-7, not 2^-8
        assert_close(f"{name} in bf16", project.project(x, weight), want, 2**-7)


@pytest.mark.parametrize(("groups", "rank", "width"), [(2, 48, 80), (3, 100, 256), (4, 20, 33), (2, 128, 130)])
def test_grouped_output(groups, rank, width):
    torch.manual_seed(groups)
    heads = torch.randn(7, groups, width).bfloat16().to(DEVICE)
    weight = weight_of("fp8", groups * rank, width, True)
    got = output.grouped_output(heads, weight, groups)
    assert_close("grouped output", got, wanted(heads.flatten(1), Weight(weight.data, weight.scale), groups), 2**-7)


def test_the_last_program_of_a_tile_adds_up_the_splits_and_clears_its_counter():
    torch.manual_seed(3)
    x, weight = torch.randn(5, 900).bfloat16().to(DEVICE), weight_of("fp8", 130, 900, True)
    plan = fill(Product(5, 130, 900, 1, "round", "fp8"), chip_of(DEVICE), 4, (64, 16, 128), splits=4, warps=4)
    assert plan.splits == 4
    first = multiply(Input(x, None, "round"), weight, 1, torch.float32, plan)
    assert_close("split product", first, wanted(x, weight), error_bound(weight))
    assert torch.equal(first, multiply(Input(x, None, "round"), weight, 1, torch.float32, plan))
    assert not project.arrivals(DEVICE).any()


FLASH = {"wq_a, wkv": (1536, 4096, 1), "wq_b": (32768, 1024, 1), "wo_a": (1024, 4096, 8), "wo_b": (4096, 8192, 1)}


@pytest.mark.parametrize("chip", CHIPS)
def test_splits_of_the_columns_change_with_the_number_of_tokens_only_at_few_tokens(chip):
    for rows, columns, groups in (*FLASH.values(), (256, 256, 1), (16384, 7168, 1)):
        for tokens in ((1, 8, 9, 20, 32), (33, 64, 100, 128)):
            products = [Product(n, rows, columns, groups, "plain", "fp8") for n in tokens]
            plans = [plan_product(product, CHIPS[chip], 132) for product in products]
            plans += [p for product in products if (p := plan_hopper(product, CHIPS[chip], 132))]
            assert len({(plan.splits, plan.steps, plan.block_in) for plan in plans}) == 1
    assert any(plan_hopper(Product(8, *shape, "round", "fp8"), CHIPS["sm90"], 132) for shape in FLASH.values())


@pytest.mark.parametrize("kind", ["fp8", "fp4", "bf16"])
def test_more_tokens_than_the_kernels_take(kind):
    torch.manual_seed(5)
    for rounds in (False, True):
        x, weight = torch.randn(MOST_TOKENS + 2, 160).bfloat16().to(DEVICE), weight_of(kind, 40, 160, rounds)
        assert_close(kind, project.project(x, weight), wanted(x, weight), 2**-7)
    heads, factors = torch.randn(MOST_TOKENS + 2, 3, 160).bfloat16().to(DEVICE), weight_of("fp8", 60, 160, True)
    got = output.grouped_output(heads, factors, 3)
    assert_close("grouped", got, wanted(heads.flatten(1), Weight(factors.data, factors.scale), 3), 2**-7)


@pytest.mark.parametrize("scales", ["fp8", "fp8, fp32 scales"])
def test_weights_are_expanded_as_the_definition_expands_them(scales):
    weight = weight_of(scales, 150, 1100, True)
    dense = weight.dense(torch.float32)
    got = expanded(weight).float()
    # exact where scales are powers of two; Triton's interpreter cuts bf16 off instead of rounding
    assert torch.equal(got, dense) if scales == "fp8" else bool(((got - dense).abs() <= dense.abs() * 2**-7).all())


def test_rows_are_rounded_as_the_definition_rounds_them():
    torch.manual_seed(0)
    for tokens, columns in ((1, 128), (9, 300), (33, 64), (0, 128)):
        x = (torch.randn(tokens, columns) * torch.exp(4 * torch.randn(tokens, columns))).bfloat16().to(DEVICE)
        x[: tokens // 3] = 0
        codes, scales = quantize_rows(x)
        want_codes, want_scales = formats.fp8_quantize_rows(x)
        assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
        assert torch.equal(scales, want_scales)
        assert torch.equal(round_rows(x), formats.fp8_round_trip(x))


def test_no_tokens():
    weight = weight_of("fp8", 64, 128, True)
    assert project.project(torch.zeros(0, 128).bfloat16().to(DEVICE), weight).shape == (0, 64)


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles_for(chip):
    assert failures("cases_project", chip) == []


def test_hoppers_own_kernel_compiles():
    assert hopper_failures() == []


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 100, 128, 300, 2000, 2001, 2047])
def test_official_sizes(tokens):
    torch.manual_seed(tokens)
    for rows, columns in ((1536, 4096), (4096, 8192), (8192, 1024)):
        x = torch.randn(tokens, columns).bfloat16().to(DEVICE)
        weight = weight_of("fp8", rows, columns, True)
        assert_close(f"{rows} x {columns}", project.project(x, weight), wanted(x, weight), 3e-3)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    x, weight = torch.randn(128, 4096).bfloat16().to(DEVICE), weight_of("fp8", 1536, 4096, True)
    for most, parts in ((32, ((0, 1), (5, 21), (3, 11))), (128, ((30, 63), (3, 127)))):
        whole = project.project(x[:most], weight)
        for first, last in parts:
            assert torch.equal(project.project(x[first:last], weight), whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 40, 128, 300])
def test_official_grouped_output(tokens):
    torch.manual_seed(tokens)
    heads, weight = torch.randn(tokens, 64, 512).bfloat16().to(DEVICE), weight_of("fp8", 8192, 4096, True)
    got = output.grouped_output(heads, weight, 8)
    assert_close("wo_a", got, wanted(heads.flatten(1), Weight(weight.data, weight.scale), 8), 3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_a_captured_graph_computes_the_same(tokens):
    torch.manual_seed(tokens)
    x, weight = torch.randn(tokens, 4096).bfloat16().to(DEVICE), weight_of("fp8", 1536, 4096, True)
    want = project.project(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = project.project(x, weight)
    for _ in range(3):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)
