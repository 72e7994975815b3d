"""The number formats against values written down from the specifications, and properties over random draws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leadline import formats as f

SHAPES = [(1, 128), (3, 64), (2, 5, 130), (7, 33), (1, 1)]
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
TIES_TO_EVEN = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def draw(shape: tuple[int, ...], seed: int, spread: float = 8.0) -> Tensor:
    """Normal values times random powers of two, some of them exactly zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-int(spread), int(spread) + 1, shape, generator=generator).float())
    return x * (torch.rand(shape, generator=generator) > 0.1)


def ceil_power(value: float) -> float:
    """2 ** ceil(log2(value)) in exact Python arithmetic."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def e2m1_nearest(value: float) -> float:
    """The nearest of the e2m1 values by search; of two equally near ones that with the even code."""
    code = min(range(8), key=lambda c: (abs(f.E2M1_VALUES[c] - abs(value)), c % 2))
    return math.copysign(f.E2M1_VALUES[code], value)


# ------------------------------------------------------------------------------------------------ scales


def test_e8m0_decode_of_every_byte() -> None:
    decoded = f.e8m0_decode(torch.arange(256).to(torch.uint8))
    for byte in range(255):
        assert decoded[byte].item() == 2.0 ** (byte - 127)
    assert decoded[255].isnan()
    assert torch.equal(
        f.e8m0_decode(torch.tensor([119, 120, 127, 130]).to(torch.uint8)), torch.tensor([2**-8, 2**-7, 1, 8])
    )


def test_e8m0_decode_refuses_fp32() -> None:
    with pytest.raises(TypeError, match="float32"):
        f.e8m0_decode(torch.ones(2))


def test_e8m0_encode_gives_the_byte_back() -> None:
    byte = torch.arange(1, 255).to(torch.uint8)
    encoded = f.e8m0_encode(f.e8m0_decode(byte))
    assert encoded.dtype == torch.float8_e8m0fnu
    assert torch.equal(encoded.view(torch.uint8), byte)


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=2.0**-126, max_value=2.0**126, width=32))
def test_power_of_two_ceil_is_exact(value: float) -> None:
    assert f.power_of_two_ceil(torch.tensor(value)).item() == ceil_power(value)


@pytest.mark.parametrize("exponent", [-126, -22, -1, 0, 1, 100])
def test_power_of_two_ceil_next_to_a_power(exponent: int) -> None:
    power = torch.tensor(2.0**exponent)
    assert f.power_of_two_ceil(power) == power
    assert f.power_of_two_ceil(power.nextafter(torch.tensor(math.inf))) == 2 * power
    if exponent > -126:
        assert f.power_of_two_ceil(power.nextafter(torch.tensor(0.0))) == power


def test_power_of_two_ceil_at_the_ends() -> None:
    values = torch.tensor([0.0, 2.0**-140, math.inf, math.nan])
    assert f.power_of_two_ceil(values).tolist() == [0.0, 2.0**-126, math.inf, math.inf]


# ------------------------------------------------------------------------------------------------ e2m1


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_e2m1_ties_go_to_even_codes(sign: int) -> None:
    ties = sign * torch.tensor([*TIES, 7.0])
    codes = f.e2m1_encode(ties)
    got = torch.tensor([*f.E2M1_VALUES])[(codes & 7).long()]
    assert got.tolist() == [*TIES_TO_EVEN, 6.0]
    assert ((codes >> 3) == (sign < 0)).all()


def test_e2m1_next_to_the_ties() -> None:
    for tie in TIES:
        for value in (torch.tensor(tie).nextafter(torch.tensor(edge)) for edge in (0.0, 9.0)):
            code = f.e2m1_encode(value[None])
            assert f.E2M1_VALUES[int(code)] == e2m1_nearest(value.item()), value.item()


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=-7, max_value=7, width=32))
def test_e2m1_is_the_nearest_value(value: float) -> None:
    code = int(f.e2m1_encode(torch.tensor([value])).item())
    got = (-1 if code & 8 else 1) * f.E2M1_VALUES[code & 7]
    assert abs(got) == abs(e2m1_nearest(value))
    assert bool(code & 8) == (math.copysign(1, value) < 0)


def test_e2m1_low_half_of_a_byte_comes_first() -> None:
    assert f.e2m1_decode(torch.tensor([0x21, 0x7A], dtype=torch.uint8)).tolist() == [0.5, 1.0, -1.0, 6.0]
    packed, _ = f.fp4_quantize_rows(torch.tensor([[0.5, 6.0, -1.0, 3.0]]))
    assert packed.tolist() == [[0x71, 0x5A]]
    assert packed.dtype == torch.uint8


def test_e2m1_decode_of_every_byte() -> None:
    bytes_ = torch.arange(256).to(torch.uint8)
    values = [*f.E2M1_VALUES, *(-v for v in f.E2M1_VALUES)]
    want = [v for byte in range(256) for v in (values[byte & 15], values[byte >> 4])]
    for packed in (bytes_, bytes_.view(torch.int8)):
        got = f.e2m1_decode(packed)
        assert got.tolist() == want
        assert torch.equal(got.signbit(), torch.tensor(want).signbit())


# ------------------------------------------------------------------------------------------------ rows


def fp8_by_hand(row: list[float], block: int, floor: float) -> list[float]:
    """One row through blockwise fp8, block after block, in Python."""
    out: list[float] = []
    for start in range(0, len(row), block):
        part = row[start : start + block]
        scale = ceil_power(max(max(map(abs, part)), floor) / 448)
        codes = torch.tensor(part, dtype=torch.float64).div(scale).float().to(torch.float8_e4m3fn)
        out += (codes.double() * scale).tolist()
    return out


def fp4_by_hand(row: list[float], block: int) -> list[float]:
    """One row through blockwise fp4, value after value, in Python."""
    out: list[float] = []
    for start in range(0, len(row), block):
        part = row[start : start + block]
        scale = ceil_power(max(max(map(abs, part)), 6 * 2.0**-126) / 6)
        out += [e2m1_nearest(value / scale) * scale for value in part]
    return out


@pytest.mark.parametrize("block", [128, 64, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_round_trip_by_hand(shape: tuple[int, ...], block: int) -> None:
    x = draw(shape, seed=1)
    got = f.fp8_round_trip(x, block).reshape(-1, shape[-1])
    for row, values in zip(got, x.reshape(-1, shape[-1]), strict=True):
        assert row.tolist() == fp8_by_hand(values.tolist(), block, 1e-4)


@pytest.mark.parametrize("shape", [(1, 128), (3, 64), (2, 5, 34), (1, 2)], ids=str)
def test_fp4_round_trip_by_hand(shape: tuple[int, ...]) -> None:
    x = draw(shape, seed=2, spread=2)
    got = f.fp4_round_trip(x).reshape(-1, shape[-1])
    for row, values in zip(got, x.reshape(-1, shape[-1]), strict=True):
        assert row.tolist() == fp4_by_hand(values.tolist(), 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("round_trip", [f.fp8_round_trip, f.fp4_round_trip], ids=["fp8", "fp4"])
def test_round_trip_keeps_shape_and_dtype_and_repeats_itself(round_trip: object, dtype: torch.dtype) -> None:
    assert callable(round_trip)
    x = draw((3, 5, 192), seed=3).to(dtype)
    once = round_trip(x)
    assert once.dtype == dtype and once.shape == x.shape
    assert torch.equal(round_trip(once), once)
    assert not torch.equal(once, x)


def test_fp8_floor_is_for_activations() -> None:
    small = torch.full((1, 128), 1e-10)
    assert f.fp8_round_trip(small).count_nonzero() == 0
    assert f.fp8_round_trip(small, floor=1e-30).count_nonzero() == 128


def test_scales_never_clip() -> None:
    edge = torch.tensor([448.0, 449.0, 447.9, 1.0]).reshape(4, 1)
    _, scale = f.fp8_quantize_rows(edge)
    assert scale.flatten().tolist() == [1.0, 2.0, 1.0, 2.0**-8]
    _, scale = f.fp4_quantize_rows(torch.tensor([[6.0, 0.0], [6.1, 0.0], [3.0, 0.0]]))
    assert scale.flatten().tolist() == [1.0, 2.0, 0.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("round_trip", [f.fp8_round_trip, f.fp4_round_trip], ids=["fp8", "fp4"])
def test_non_finite_values_stay_visible(round_trip: object, bad: float) -> None:
    assert callable(round_trip)
    x = torch.ones(2, 64)
    x[0, 5] = bad
    got = round_trip(x)
    assert not got[0, 5].isfinite() and torch.equal(got[1], x[1])


def test_fp4_refuses_an_odd_width() -> None:
    with pytest.raises(ValueError, match="33"):
        f.fp4_quantize_rows(torch.ones(1, 33))


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 200), (1, 5), (300, 128)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32], ids=["e8m0", "fp32"])
def test_fp8_weight_tile_by_tile(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    w = draw(shape, seed=4)
    w[:128, :128] = 0
    codes, scale = f.fp8_quantize_weight(w, scale_dtype)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == w.shape
    assert scale.dtype == scale_dtype and scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    dense = f.fp8_dequantize(codes, scale, torch.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            amax = w[tile].abs().max().item()
            s = scale.float()[i, j].item()
            if scale_dtype == torch.float32:
                assert s == (pytest.approx(amax / 448) if amax else 1.0)
            else:
                assert s == (ceil_power(amax / 448) if amax else 1.0)
            assert torch.equal(dense[tile], codes[tile].float() * s)
            assert torch.equal(codes[tile].float(), (w[tile] / s).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_fp8_weight_comes_back_byte_for_byte() -> None:
    codes, scale = f.fp8_quantize_weight(draw((300, 200), seed=5))
    for dtype in (torch.float32, torch.bfloat16):
        again = f.fp8_quantize_weight(f.fp8_dequantize(codes, scale, dtype))
        assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))


def test_fp4_weight_comes_back_value_for_value() -> None:
    generator = torch.Generator().manual_seed(6)
    packed = torch.randint(-128, 128, (33, 48), generator=generator, dtype=torch.int8)
    scale = torch.randint(100, 140, (33, 3), generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    dense = f.fp4_dequantize(packed, scale, torch.float32)
    again = f.fp4_dequantize(*f.fp4_quantize_weight(dense.to(torch.bfloat16)), torch.float32)
    assert torch.equal(again, dense)


def test_fp4_weight_element_by_element() -> None:
    w = draw((5, 96), seed=7, spread=2)
    packed, scale = f.fp4_quantize_weight(w)
    assert packed.dtype == torch.int8 and packed.shape == (5, 48)
    assert scale.dtype == torch.float8_e8m0fnu and scale.shape == (5, 3)
    dense = f.fp4_dequantize(packed, scale, torch.bfloat16)
    assert dense.dtype == torch.bfloat16
    for row, values in zip(dense, w, strict=True):
        assert row.tolist() == fp4_by_hand(values.tolist(), 32)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_stacked_weights_dequantise_like_single_ones(kind: str) -> None:
    quantize, dequantize = getattr(f, f"{kind}_quantize_weight"), getattr(f, f"{kind}_dequantize")
    parts = [quantize(draw((130, 160), seed=seed)) for seed in range(3)]
    stack = dequantize(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), torch.float32)
    for one, part in zip(stack, parts, strict=True):
        assert torch.equal(one, dequantize(*part, torch.float32))


def test_transposed_scales_are_refused() -> None:
    codes, scale = f.fp8_quantize_weight(torch.ones(128, 256))
    with pytest.raises(ValueError, match=r"\[1, 2\], not \[2, 1\]"):
        f.fp8_dequantize(codes, scale.T, torch.float32)
    packed, scale = f.fp4_quantize_weight(torch.ones(2, 128))
    with pytest.raises(ValueError, match=r"\[2, 4\], not \[4, 2\]"):
        f.fp4_dequantize(packed, scale.T, torch.float32)


# ------------------------------------------------------------------------------------------------ rotation


@pytest.mark.parametrize("size", [1, 2, 8, 128])
def test_hadamard_is_sylvesters_matrix(size: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = draw((3, 2, size), seed=8).double()
    got = f.hadamard(x)
    torch.testing.assert_close(got, x @ matrix / math.sqrt(size))
    torch.testing.assert_close(f.hadamard(got), x)
    assert f.hadamard(x.bfloat16()).dtype == torch.bfloat16


def test_hadamard_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match="96"):
        f.hadamard(torch.ones(96))
