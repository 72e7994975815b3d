"""The experts' kernels against their definition, over weight formats, dtypes and awkward numbers of tokens."""

import pytest
import torch

from leadline.formats import fp4_dequantize, fp4_quantize_weight, fp8_quantize_weight
from leadline.kernels import experts as definition
from leadline.kernels.gpu import experts
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.experts_arrange import arrange, restore
from leadline.kernels.gpu.experts_rows import product_input, summed_pairs
from leadline.kernels.gpu.experts_tiles import tiles_by_expert
from leadline.kernels.project import Weight, round_input
from tests.gpu.cases_experts import hopper_failures
from tests.gpu.compiling import failures

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stack(experts_count, rows, columns, form, scales, dtype, rounds):
    """A random stack of matrices in a format, with values of about 1 / sqrt(columns), and outliers in some blocks."""
    w = torch.randn(experts_count, rows, columns) / columns**0.5
    w[:, :: max(rows // 3, 1)] *= 4
    if form == "plain":
        return Weight(w.to(dtype).to(DEVICE), None, rounds)
    quantize = fp8_quantize_weight if form == "fp8" else fp4_quantize_weight
    parts = [quantize(matrix, scales) for matrix in w]
    data = torch.stack([part[0].view(torch.uint8) for part in parts]).view(parts[0][0].dtype)
    size = parts[0][1].element_size()
    scale = torch.stack([part[1].view(torch.uint8 if size == 1 else scales) for part in parts]).view(scales)
    return Weight(data.to(DEVICE), scale.to(DEVICE), rounds)


def wide(weight):
    """The same values in fp64."""
    return Weight(weight.dense(torch.float64), None, weight.round_input)


def routing(tokens, count, active):
    """Distinct experts a token, crowded so that some experts take many tokens and some none."""
    scores = torch.randn(tokens, count) + torch.linspace(2, -2, count)
    weights = torch.rand(tokens, active)
    return scores.topk(active).indices.to(DEVICE), (weights / weights.sum(1, keepdim=True) * 1.5).to(DEVICE)


def assert_close(name, got, want, bound):
    """The relative error over all elements, which a rounding of every element to a format bounds by half its step."""
    error = ((got.double() - want).norm() / want.norm().clamp(min=1e-300)).item()
    assert error <= bound, f"{name}: relative error {error:.2e} is above {bound:.1e}"


CASES = [
    ("fp4", torch.float8_e8m0fnu, torch.bfloat16, True),
    ("fp4", torch.float32, torch.bfloat16, False),
    ("fp4", torch.float8_e8m0fnu, torch.float32, False),
    ("fp8", torch.float8_e8m0fnu, torch.bfloat16, True),
    ("fp8", torch.float32, torch.float32, True),
    ("plain", None, torch.bfloat16, False),
    ("plain", None, torch.float32, False),
]


def bound_for(dtype, rounds):
    """bf16 rounds gate, up, hidden rows and outputs, each by up to 2^-8 (Triton's interpreter truncates). Few hidden
    values near the middle of two fp8 values fall to the other side, a relative step of up to 2^-3."""
    if dtype == torch.float32:
        return 3e-6 if not rounds else 5e-3
    return 0.01 if not rounds else 0.04


@pytest.mark.parametrize(("form", "scales", "dtype", "rounds"), CASES)
@pytest.mark.parametrize("tokens", [1, 23])
def test_routed_experts(form, scales, dtype, rounds, tokens):
    torch.manual_seed(tokens)
    count, active, hidden, width = 3, 2, 128, 32
    w13 = stack(count, 2 * width, hidden, form, scales, dtype, rounds)
    w2 = stack(count, hidden, width, form, scales, dtype, rounds)
    x = torch.randn(tokens, hidden).to(dtype).to(DEVICE) * 2
    chosen, weights = routing(tokens, count, active)
    got = experts.routed_experts(x, chosen, weights, w13, w2, 1.0)
    assert got.dtype == torch.float32
    want = definition.routed_experts(x.double(), chosen, weights.double(), wide(w13), wide(w2), 1.0)
    assert_close("routed", got, want, bound_for(dtype, rounds))


@pytest.mark.parametrize(("form", "scales", "dtype", "rounds"), CASES)
def test_shared_expert(form, scales, dtype, rounds):
    torch.manual_seed(0)
    w13 = stack(1, 256, 256, form, scales, dtype, rounds).expert(0)
    w2 = stack(1, 256, 128, form, scales, dtype, rounds).expert(0)
    x = torch.randn(19, 256).to(dtype).to(DEVICE) * 2
    want = definition.shared_expert(x.double(), wide(w13), wide(w2), 1.0)
    assert_close("shared", experts.shared_expert(x, w13, w2, 1.0), want, bound_for(dtype, rounds))


def test_sizes_that_no_block_divides():
    torch.manual_seed(1)
    w13, w2 = (stack(3, *shape, "plain", None, torch.float32, False) for shape in ((72, 100), (100, 36)))
    x = torch.randn(7, 100).to(DEVICE)
    chosen, weights = routing(7, 3, 1)
    want = definition.routed_experts(x.double(), chosen, weights.double(), wide(w13), wide(w2), 10.0)
    assert_close("routed", experts.routed_experts(x, chosen, weights, w13, w2, 10.0), want, 3e-6)


def test_no_tokens():
    w13, w2 = (stack(2, *shape, "plain", None, torch.float32, False) for shape in ((64, 32), (32, 32)))
    x = torch.zeros(0, 32).to(DEVICE)
    chosen, weights = torch.zeros(0, 1, dtype=torch.int64).to(DEVICE), torch.zeros(0, 1).to(DEVICE)
    assert experts.routed_experts(x, chosen, weights, w13, w2, 10.0).shape == (0, 32)
    assert experts.shared_expert(x, w13.expert(0), w2.expert(0), 10.0).shape == (0, 32)


@pytest.mark.parametrize(
    ("tokens", "count", "active", "width"), [(1, 8, 2, 16), (40, 8, 2, 8), (90, 300, 6, 8), (300, 5, 1, 64)]
)
def test_tiles_hold_every_pair_once_with_its_expert(tokens, count, active, width):
    torch.manual_seed(2)
    chosen, _ = routing(tokens, count, active)
    tiles = tiles_by_expert(chosen, count, width)
    flat = chosen.flatten().cpu()
    assert torch.equal(tiles.order.cpu().long(), torch.sort(flat, stable=True).indices)
    covered = 0
    for expert, first, size in tiles.records.T.cpu().tolist():
        if size == 0:
            break
        assert first == covered and size <= width
        assert (flat[tiles.order[first : first + size].cpu().long()] == expert).all()
        covered += size
    assert covered == tokens * active
    sizes = tiles.records[2].cpu()
    assert (sizes[:-1] >= 0).all() and (sizes.nonzero().flatten() == torch.arange((sizes > 0).sum())).all()
    needed = sum(-(-n // width) for n in torch.bincount(flat, minlength=count).tolist())
    assert needed == (sizes > 0).sum() <= tiles.most


@pytest.mark.parametrize("columns", [128, 1408])
def test_product_input(columns):
    torch.manual_seed(3)
    x = (torch.randn(5, columns) * 3).bfloat16().to(DEVICE)
    want = round_input(x, Weight(x, None, True))
    assert torch.equal(product_input(x, True, False), want)
    assert torch.equal(product_input(x, True, True), torch.cat([want[:, 0::2], want[:, 1::2]], 1))
    assert torch.equal(product_input(x, False, True), torch.cat([x[:, 0::2], x[:, 1::2]], 1))


def test_summed_pairs():
    outputs = torch.randn(12, 1100).bfloat16().to(DEVICE)
    assert torch.equal(summed_pairs(outputs, 3), outputs.float().unflatten(0, (4, 3)).sum(1))


def unpacked(word, row_word, part):
    """What the Hopper kernel makes of a word and its row's word: eight values, front ones first (see its UNPACK)."""
    added = (row_word >> (8 + 4 * part)) & 15
    table = (0x14100800 + added * 0x08080800) | (0x24201C18 + added * 0x08080808) << 32
    magnitudes = [table >> 8 * (word >> 4 * place & 7) & 255 for place in range(8)]
    signs = [word >> (8 * (place % 4) + (7 if place < 4 else 3)) & 1 for place in range(8)]
    codes = [magnitude | sign << 7 for magnitude, sign in zip(magnitudes, signs, strict=True)]
    factor = 2.0 ** ((row_word & 255) - 122)
    return torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * factor


def test_each_arranged_word_holds_the_values_that_its_thread_multiplies():
    torch.manual_seed(4)
    rows, columns = 192, 256
    w = torch.randn(rows, columns) * torch.exp2(torch.randint(-4, 5, (rows, columns // 32)).repeat_interleave(32, 1))
    data, scale = fp4_quantize_weight(w)
    words, row_words = arrange(data, scale)
    dense = fp4_dequantize(data, scale, torch.float32)
    assert torch.equal(fp4_dequantize(*restore(words, row_words), torch.float32), dense)
    words = words.view(3, 2, 2, 4, 8, 4, 4)  # tile, unit, half, warp, row, thread, part
    row_words = row_words.view(3, 2, 2, 4, 8)
    for _ in range(400):
        at = [int(torch.randint(size, (1,))) for size in words.shape]
        tile, unit, half, warp, row, thread, part = at
        values = unpacked(int(words[tuple(at)]) & 0xFFFFFFFF, int(row_words[tuple(at[:5])]), part)
        first = 128 * unit + 32 * part + 4 * thread
        want = dense[half * rows // 2 + 32 * tile + 8 * warp + row]
        assert torch.equal(values, torch.cat([want[first : first + 4], want[first + 16 : first + 20]]))


def test_scales_too_far_apart_are_not_arranged():
    data = torch.full((64, 64), 0x11, dtype=torch.int8)
    scale = torch.full((64, 4), 120, dtype=torch.uint8)
    scale[5, 2] = 131
    assert arrange(data, scale.view(torch.float8_e8m0fnu)) is not None
    scale[5, 2] = 132
    assert arrange(data, scale.view(torch.float8_e8m0fnu)) is None
    data[5, 32:48] = 0  # a group of zeros has no scale
    words, row_words = arrange(data, scale.view(torch.float8_e8m0fnu))
    assert torch.equal(restore(words, row_words)[0], data)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 64, 300, 2000])
def test_arranged_experts_on_hopper(tokens):
    """Against the kernels for every chip, which the tests above hold to the definition."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's own kernel")
    torch.manual_seed(tokens)
    count, active, hidden, width = 16, 6, 1024, 512
    w13 = stack(count, 2 * width, hidden, "fp4", torch.float8_e8m0fnu, torch.bfloat16, True)
    w2 = stack(count, hidden, width, "fp4", torch.float8_e8m0fnu, torch.bfloat16, True)
    moved = []
    for weight in (w13, w2):
        parts = [arrange(data, scale) for data, scale in zip(weight.data, weight.scale, strict=True)]
        moved.append(Weight(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), True))
    x = torch.randn(tokens, hidden).bfloat16().to(DEVICE) * 2
    chosen, weights = routing(tokens, count, active)
    want = experts.routed_experts(x, chosen, weights, w13, w2, 1.0)
    torch.empty(1 << 24, device=DEVICE).fill_(float("nan"))
    assert_close("arranged", experts.routed_experts(x, chosen, weights, *moved, 1.0), want.double(), 0.02)


def test_hoppers_own_kernel_compiles():
    assert hopper_failures() == []


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip):
    assert failures("cases_experts", chip) == []
