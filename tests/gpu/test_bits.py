"""Conversions of number formats inside kernels, against `leadline.formats` on every value that there is."""

import pytest
import torch
import triton
import triton.language as tl

from leadline import formats
from leadline.kernels.gpu import bits
from leadline.kernels.gpu.chips import CHIPS, chip_named
from leadline.kernels.packed import index_rows, kv_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def _apply(x, out, n, function: tl.constexpr, block: tl.constexpr):
    at = tl.arange(0, block)
    value = tl.load(x + at, at < n)
    tl.store(out + at, function(value), at < n)


def applied(function, x, dtype):
    out = torch.full_like(x, 77, dtype=dtype, device=DEVICE)
    _apply[(1,)](x.to(DEVICE), out, len(x), function, triton.next_power_of_2(len(x)))
    return out.cpu()


def test_e4m3_is_read_as_torch_reads_it():
    byte = torch.arange(256, dtype=torch.uint8)
    byte = byte[byte & 0x7F != 0x7F]
    assert torch.equal(applied(bits.e4m3_to_float, byte, torch.float32), byte.view(torch.float8_e4m3fn).float())


def test_e4m3_is_rounded_as_torch_rounds_it():
    values = torch.arange(256, dtype=torch.uint8)
    values = values[values & 0x7F != 0x7F].view(torch.float8_e4m3fn).float().sort().values
    between = (values[1:] + values[:-1]) / 2
    near = torch.cat([between, between * (1 + 2e-7), between * (1 - 2e-7), values])
    x = torch.cat([near, torch.randn(2000) * 100, torch.randn(1000) * 0.01]).clamp(-448, 448)
    assert torch.equal(applied(bits.float_to_e4m3, x, torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(applied(bits.round_e4m3, x, torch.float32), x.to(torch.float8_e4m3fn).float())


def test_e2m1_both_ways():
    code = torch.arange(16, dtype=torch.uint8)
    want = torch.tensor([*formats.E2M1_VALUES, *(-value for value in formats.E2M1_VALUES)])
    assert torch.equal(applied(bits.e2m1_to_float, code, torch.float32), want)
    x = torch.cat([want, torch.arange(-70, 71) / 10, torch.arange(-56, 57) / 8])
    assert torch.equal(applied(bits.float_to_e2m1, x, torch.uint8), formats.e2m1_encode(x))


def test_scales():
    amax = torch.cat([torch.tensor([0.0, 1e-9, 448, 448.1, 6, 6.1, 1e-4]), torch.rand(500) * 1000])
    rows = amax[:, None].repeat(1, 2)
    assert torch.equal(applied(bits.fp8_scale, amax, torch.float32), formats.fp8_quantize_rows(rows)[1][:, 0])
    assert torch.equal(applied(bits.fp4_scale, amax, torch.float32), formats.fp4_quantize_rows(rows)[1][:, 0])
    byte = torch.arange(1, 255, dtype=torch.uint8)
    powers = applied(bits.e8m0_to_float, byte, torch.float32)
    assert torch.equal(powers, formats.e8m0_decode(byte))
    assert torch.equal(applied(bits.float_to_e8m0, powers, torch.uint8), byte)
    assert torch.equal(applied(bits.power_of_two_ceil, amax[1:], torch.float32), formats.power_of_two_ceil(amax[1:]))


def test_packed_rows_hold_what_the_native_numerics_round_to():
    torch.manual_seed(0)
    for width, rotated in ((512, 64), (64, 16), (128, 32)):
        pool = kv_rows(200, width, rotated, torch.device("cpu"))
        rows = torch.randperm(200)[:90]
        values = (torch.randn(90, width) * 3).bfloat16()
        pool.write(rows, values)
        plain = formats.fp8_round_trip(values[:, :-rotated], 64)
        assert torch.equal(pool.read(rows), torch.cat([plain, values[:, -rotated:]], 1))
    assert kv_rows(64, 512, 64, torch.device("cpu")).blocks.shape == (1, 37440)
    keys = index_rows(200, 128, torch.device("cpu"))
    values = torch.randn(90, 128).bfloat16()
    keys.write(rows, values)
    assert torch.equal(keys.read(rows), formats.fp4_round_trip(values))


@pytest.mark.parametrize(
    ("name", "found"),
    [("sm90", "sm90"), ("sm87", "sm86"), ("sm103", "sm100"), ("sm121", "sm120"), ("gfx950", "gfx950")],
)
def test_an_unlisted_chip_counts_as_the_next_older_one(name, found):
    assert chip_named(name) is CHIPS[found]


@pytest.mark.parametrize("name", ["sm75", "gfx908"])
def test_a_chip_that_is_too_old_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        chip_named(name)
