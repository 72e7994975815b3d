"""The experts' kernels against their definition, over weight formats, dtypes and awkward numbers of tokens."""

import pytest
import torch

from leadline.formats import fp4_dequantize, fp4_quantize_weight, fp8_quantize_rows, fp8_quantize_weight
from leadline.kernels import experts as definition
from leadline.kernels.arrange import arrange_experts
from leadline.kernels.gpu import experts, experts_arrange
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.experts_arrange import arrange, arrange_stacks, restore, restore_stacks
from leadline.kernels.gpu.experts_fp4 import fits_beside
from leadline.kernels.gpu.experts_prepare import prepared
from leadline.kernels.gpu.experts_rows import product_input, summed
from leadline.kernels.gpu.experts_tiles import Tiles, tiles_by_expert
from leadline.kernels.project import Weight, round_input
from tests.gpu.cases_experts import hopper_failures
from tests.gpu.compiling import failures
from tests.gpu.rows import poison_new_tensors

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
@pytest.mark.parametrize("tokens", [3, 17])
def test_routed_and_shared_experts_are_summed_and_cast(form, scales, dtype, rounds, tokens):
    torch.manual_seed(tokens)
    count, active, hidden, width = 3, 2, 128, 32
    stacks = [stack(count, *shape, form, scales, dtype, rounds) for shape in ((2 * width, hidden), (hidden, width))]
    shared_form, shared_scales = ("plain", None) if form == "plain" else ("fp8", scales)
    shapes = ((2 * width, hidden), (hidden, width))
    shared = [stack(1, *shape, shared_form, shared_scales, dtype, rounds).expert(0) for shape in shapes]
    x = torch.randn(tokens, hidden).to(dtype).to(DEVICE) * 2
    chosen, weights = routing(tokens, count, active)
    got = experts.experts(x, chosen, weights, *stacks, *shared, 1.0)
    assert got.dtype == dtype
    want = definition.experts(x.double(), chosen, weights.double(), *map(wide, stacks), *map(wide, shared), 1.0)
    assert_close("both", got, want, bound_for(dtype, rounds))


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
    shared = w13.expert(0), w2.expert(0)
    assert experts.shared_expert(x, *shared, 10.0).shape == (0, 32)
    assert experts.experts(x, chosen, weights, w13, w2, *shared, 10.0).shape == (0, 32)


def without_some(chosen):
    """Some rows are no tokens, as in a CUDA graph for more rows than there are: no experts."""
    absent = torch.rand(len(chosen), device=chosen.device) < 0.4
    return chosen.masked_fill(absent[:, None], -1), absent


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("form", "dtype"), [("fp4", torch.bfloat16), ("fp8", torch.bfloat16), ("plain", torch.float32)]
)
@pytest.mark.parametrize("module", [definition, experts], ids=["definition", "kernel"])
def test_rows_without_experts_are_zero_and_change_no_other(module, form, dtype, seed, monkeypatch):
    if module is definition and DEVICE == "cuda":
        pytest.skip("the definition calls the kernel")
    torch.manual_seed(seed)
    count, hidden, width, tokens = 3, 128, 32, 1 + 5 * seed
    w13 = stack(count, 2 * width, hidden, form, torch.float8_e8m0fnu, dtype, form != "plain")
    w2 = stack(count, hidden, width, form, torch.float8_e8m0fnu, dtype, form != "plain")
    x = torch.randn(tokens, hidden).to(dtype).to(DEVICE)
    chosen, weights = routing(tokens, count, 2)
    poison_new_tensors(monkeypatch)
    shared = w13.expert(0), w2.expert(1)
    want = module.routed_experts(x, chosen, weights, w13, w2, 1.0)
    both = module.experts(x, chosen, weights, w13, w2, *shared, 1.0)
    chosen, absent = without_some(chosen)
    if seed == 0:
        chosen, absent = chosen.fill_(-1), absent.fill_(True)
    x[absent], weights[absent] = float("nan"), 0
    got = module.routed_experts(x, chosen, weights, w13, w2, 1.0)
    assert (got[absent] == 0).all() and torch.equal(got[~absent], want[~absent])
    got = module.experts(x, chosen, weights, w13, w2, *shared, 1.0)
    assert torch.equal(got[~absent], both[~absent])


ROUTINGS = [(1, 8, 2, 16), (3, 256, 6, 8), (17, 8, 2, 8), (90, 300, 6, 8), (220, 300, 6, 16), (1100, 5, 1, 64)]
"""Tokens, experts, active experts and width of a tile; of up to 1,024 pairs each program counts all."""


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("padded", [False, True], ids=["tokens only", "padded"])
@pytest.mark.parametrize(("tokens", "count", "active", "width"), ROUTINGS)
def test_tiles_hold_every_pair_once_with_its_expert(tokens, count, active, width, padded, multiple, monkeypatch):
    torch.manual_seed(2)
    chosen, _ = routing(tokens, count, active)
    if padded:
        chosen, _ = without_some(chosen)
    poison_new_tensors(monkeypatch)
    assert_tiles(tiles_by_expert(chosen, count, width, multiple), chosen, count, width, multiple)


@pytest.mark.parametrize("padded", [False, True], ids=["tokens only", "padded"])
@pytest.mark.parametrize(("tokens", "count", "active", "width"), ROUTINGS)
def test_prepared(tokens, count, active, width, padded, monkeypatch):
    torch.manual_seed(5)
    chosen, _ = routing(tokens, count, active)
    if padded:
        chosen, _ = without_some(chosen)
    x = (torch.randn(tokens, 384) * torch.rand(tokens, 384).exp2()).bfloat16().to(DEVICE)
    codes, scales = fp8_quantize_rows(x.float())
    poison_new_tensors(monkeypatch)
    ready = prepared(x, chosen, count, width, 5)
    assert_tiles(ready.tiles, chosen, count, width)
    assert torch.equal(ready.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(ready.scales.T, scales.float().view(tokens, 3))
    assert ready.counters.shape == (5 * (ready.tiles.most + tokens),) and not ready.counters.any()


def assert_tiles(tiles: Tiles, chosen, count, width, multiple=1):
    """Whether these are the pairs in the order of their experts, cut into as few tiles of `width` as there can be."""
    flat = chosen.flatten().cpu()
    wanted = torch.sort(flat, stable=True).indices[int((flat < 0).sum()) :]
    placed, end = [flat[:0]], 0
    for expert, first, size in tiles.records.T.cpu().tolist():
        if size == 0:
            break
        assert first == -(-end // multiple) * multiple and size <= width
        placed.append(tiles.order[first : first + size].cpu().long())
        assert (flat[placed[-1]] == expert).all()
        end = first + size
    assert torch.equal(torch.cat(placed), wanted)
    assert end <= tiles.places and tiles.places % multiple == 0 and tiles.pairs == len(flat)
    sizes = tiles.records[2].cpu()
    assert (sizes[:-1] >= 0).all() and (sizes.nonzero().flatten() == torch.arange((sizes > 0).sum())).all()
    needed = sum(-(-n // width) for n in torch.bincount(flat[flat >= 0], minlength=count).tolist())
    assert needed == (sizes > 0).sum() <= tiles.most


@pytest.mark.parametrize("columns", [128, 1408])
def test_product_input(columns):
    torch.manual_seed(3)
    x = (torch.randn(5, columns) * 3).bfloat16().to(DEVICE)
    want = round_input(x, Weight(x, None, True))
    assert torch.equal(product_input(x, True, False), want)
    assert torch.equal(product_input(x, True, True), torch.cat([want[:, 0::2], want[:, 1::2]], 1))
    assert torch.equal(product_input(x, False, True), torch.cat([x[:, 0::2], x[:, 1::2]], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_summed(dtype):
    outputs, shared = torch.randn(12, 1100).to(dtype).to(DEVICE), torch.randn(4, 1100).to(dtype).to(DEVICE)
    chosen = torch.arange(12, device=DEVICE).view(4, 3)
    want = outputs.float().unflatten(0, (4, 3)).sum(1)
    assert torch.equal(summed(outputs, chosen, None, torch.float32), want)
    chosen[1], outputs[3:6], want[1] = -1, float("nan"), 0
    assert torch.equal(summed(outputs, chosen, None, torch.float32), want)
    both = summed(torch.cat([outputs, shared]), chosen, shared, dtype)
    assert both.dtype == dtype and summed(outputs[:0], chosen[:0], None, dtype).shape == (0, 1100)
    if dtype == torch.float32:
        assert torch.equal(both, want + shared)
    else:  # Triton's interpreter truncates
        assert_close("summed", both, (want + shared.float()).double(), 2**-7)


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
    assert arrange(data, torch.full_like(scale, 250).view(torch.float8_e8m0fnu)) is None


def random_stack(count, rows, columns):
    """Random bytes, with scales as far apart as can be arranged, and groups of zeros of either sign."""
    data = torch.randint(-128, 128, (count, rows, columns // 2), dtype=torch.int8, device=DEVICE)
    data.unflatten(-1, (-1, 16))[torch.rand(count, rows, columns // 32) < 0.2] &= -120  # the bits of signs
    scale = torch.randint(100, 112, (count, rows, columns // 32), dtype=torch.uint8, device=DEVICE)
    return Weight(data, scale.view(torch.float8_e8m0fnu), True)


def copied(weight):
    return Weight(weight.data.clone(), weight.scale.clone(), weight.round_input)


@pytest.mark.parametrize("seed", range(3))
def test_stacks_are_arranged_and_restored_in_place(seed, monkeypatch):
    """In parts of one or two experts, the last one smaller; each as if it were alone."""
    torch.manual_seed(seed)
    w13, w2 = random_stack(3, 128, 256), random_stack(3, 256, 128)
    monkeypatch.setattr(experts_arrange, "PART_BYTES", (1 + seed % 2) * w13.data[0].nbytes)
    old, places = (copied(w13), copied(w2)), [(w.data.data_ptr(), w.scale.data_ptr()) for w in (w13, w2)]
    arrange_stacks((w13, w2))
    for weight, before in zip((w13, w2), old, strict=True):
        assert weight.form == "arranged" and weight.expert(1).form == "arranged" and weight.round_input
        assert torch.equal(weight.dense(torch.float32), before.dense(torch.float32))
        for index in range(3):
            words, row_words = arrange(before.data[index], before.scale[index])
            assert torch.equal(weight.data[index], words) and torch.equal(weight.scale[index], row_words)
            dense = weight.expert(index).dense(torch.float32)
            assert torch.equal(dense, before.expert(index).dense(torch.float32))
    restore_stacks((w13, w2))
    for weight, before in zip((w13, w2), old, strict=True):
        assert weight.form == "fp4" and torch.equal(weight.data, before.data)
        assert torch.equal(weight.dense(torch.float32), before.dense(torch.float32))
    assert places == [(w.data.data_ptr(), w.scale.data_ptr()) for w in (w13, w2)]


@pytest.mark.parametrize("place", [(0, 0), (1, 1), (1, 2)], ids=str)
def test_stacks_are_arranged_both_or_neither(place, monkeypatch):
    stacks = random_stack(3, 64, 128), random_stack(3, 128, 128)
    monkeypatch.setattr(experts_arrange, "PART_BYTES", 1)
    which, expert = place
    stacks[which].data[expert, 7] = 0x11
    stacks[which].scale.view(torch.uint8)[expert, 7, 1:3] = torch.tensor([100, 112], dtype=torch.uint8)
    before = [copied(stack) for stack in stacks]
    arrange_stacks(stacks)
    for stack, old in zip(stacks, before, strict=True):
        assert stack.form == "fp4" and torch.equal(stack.data, old.data)
        assert torch.equal(stack.scale.view(torch.uint8), old.scale.view(torch.uint8))


@pytest.mark.parametrize(
    ("form", "shape", "scales", "rounds", "taken"),
    [
        ("fp4", (64, 128), torch.float8_e8m0fnu, True, True),
        ("fp4", (96, 128), torch.float8_e8m0fnu, True, False),
        ("fp4", (64, 192), torch.float8_e8m0fnu, True, False),
        ("fp4", (64, 128), torch.float32, True, False),
        ("fp4", (64, 128), torch.float8_e8m0fnu, False, False),
        ("fp8", (128, 128), torch.float8_e8m0fnu, True, False),
        ("plain", (64, 128), None, True, False),
    ],
)
def test_which_stacks_are_taken(form, shape, scales, rounds, taken):
    assert experts_arrange.takes(stack(2, *shape, form, scales, torch.bfloat16, rounds)) == taken


def layer_of(form, shared_form="fp8", scales=torch.float8_e8m0fnu, rounds=True, width=128):
    """w13 and w2 of three experts of width 128, and a shared expert of some width."""
    shapes = (256, 128), (128, 128)
    stacks = [stack(3, *shape, "fp4", torch.float8_e8m0fnu, torch.bfloat16, True) for shape in shapes]
    if form == "arranged":
        arrange_stacks(stacks)
    shapes = (2 * width, 128), (128, width)
    shared = (stack(1, *shape, shared_form, scales, torch.bfloat16, rounds).expert(0) for shape in shapes)
    return (*stacks, *shared)


@pytest.mark.parametrize(
    ("tokens", "other", "fits"),
    [
        (1, {}, True),
        (128, {}, True),
        (129, {}, False),
        (1, {"form": "fp4"}, False),
        (1, {"shared_form": "fp4"}, False),
        (1, {"shared_form": "plain", "scales": None}, False),
        (1, {"scales": torch.float32}, False),
        (1, {"rounds": False}, False),
        (1, {"width": 256}, False),
    ],
)
def test_which_shared_experts_go_beside_the_routed_ones(tokens, other, fits):
    assert fits_beside(tokens, *layer_of(**{"form": "arranged"} | other)) == fits


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "width", "count"), [(1024, 512, 16), (256, 128, 16), (384, 640, 200)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 128, 300, 2000])
def test_arranged_experts_on_hopper(tokens, hidden, width, count):
    """Against the kernels for every chip, which the tests above hold to the definition; a graph gives the same bits."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's own kernel")
    torch.manual_seed(tokens)
    e8m0, shapes = torch.float8_e8m0fnu, ((2 * width, hidden), (hidden, width))
    stacks = [stack(count, *shape, "fp4", e8m0, torch.bfloat16, True) for shape in shapes]
    shared = [stack(1, *shape, "fp8", e8m0, torch.bfloat16, True).expert(0) for shape in shapes]
    moved = [copied(weight) for weight in stacks]
    arrange_experts(moved, torch.bfloat16)
    assert [weight.form for weight in moved] == ["arranged", "arranged"]
    x = torch.randn(tokens, hidden).bfloat16().to(DEVICE) * 2
    chosen, weights = routing(tokens, count, 6)
    here = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    if tokens > 1:
        chosen, absent = without_some(chosen)
        x[absent], here = float("nan"), ~absent
    want = experts.routed_experts(x, chosen, weights, *stacks, 1.0)
    alone = experts.shared_expert(x, *shared, 1.0)
    torch.empty(1 << 24, device=DEVICE).fill_(float("nan"))
    assert_close("arranged", experts.routed_experts(x, chosen, weights, *moved, 1.0), want.double(), 0.02)

    def both():
        return experts.experts(x, chosen, weights, *moved, *shared, 1.0)

    first = both()
    assert_close("both", first[here], (want + alone)[here].double(), 0.02)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = both()
    for _ in range(5):
        again.fill_(float("nan"))
        graph.replay()
        assert torch.equal(again[here], first[here])


@pytest.mark.gpu
def test_arranged_experts_of_a_token_are_the_same_bits_in_any_step():
    """Up to 128 tokens with the shared expert; the routed ones alone whatever the number."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's own kernel")
    torch.manual_seed(0)
    stacks = random_stack(16, 512, 512), random_stack(16, 512, 256)
    arrange_stacks(stacks)
    e8m0, shapes = torch.float8_e8m0fnu, ((512, 512), (512, 256))
    shared = [stack(1, *shape, "fp8", e8m0, torch.bfloat16, True).expert(0) for shape in shapes]
    x, (chosen, weights) = torch.randn(700, 512).bfloat16().to(DEVICE), routing(700, 16, 6)
    routed = experts.routed_experts(x, chosen, weights, *stacks, 1.0)
    for tokens in (1, 2, 9, 16, 33, 128, 129, 300):
        some = x[:tokens], chosen[:tokens], weights[:tokens]
        assert torch.equal(experts.routed_experts(*some, *stacks, 1.0), routed[:tokens]), tokens
    whole = experts.experts(x[:128], chosen[:128], weights[:128], *stacks, *shared, 1.0)
    for tokens in (1, 2, 9, 16, 33, 127):
        some = x[:tokens], chosen[:tokens], weights[:tokens]
        assert torch.equal(experts.experts(*some, *stacks, *shared, 1.0), whole[:tokens]), tokens


def test_hoppers_own_kernel_compiles():
    assert hopper_failures() == []


@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip):
    assert failures("cases_experts", chip) == []
