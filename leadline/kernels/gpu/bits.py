"""Number formats inside kernels, by integer work on bits where a chip has no type for them."""

import triton
import triton.language as tl


@triton.jit
def e4m3_to_float(byte):
    """e4m3 bytes (any integer type) -> fp32, exactly; NaN bytes give 480."""
    byte = byte.to(tl.int32)
    # the seven bits at fp32's exponent and mantissa make a number that is 2^120 too small, subnormals included
    magnitude = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    return tl.where((byte & 0x80) != 0, -magnitude, magnitude)


@triton.jit
def float_to_e4m3(x):
    """fp32 of magnitude 448 at most -> uint8 e4m3, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    # adding 2^14 leaves an fp32 whose last bit is worth 2^-9, the subnormal step: the sum rounds as e4m3 must
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (sign | tl.where(magnitude < (121 << 23), small, normal)).to(tl.uint8)


@triton.jit
def round_e4m3(x):
    """fp32 of magnitude 448 at most -> the nearest e4m3 value, in fp32."""
    return e4m3_to_float(float_to_e4m3(x))


@triton.jit
def e2m1_to_float(code):
    """e2m1 codes 0..15 (any integer type) -> fp32."""
    code = code.to(tl.int32)
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0  # 2^126
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def float_to_e2m1(x):
    """fp32 -> int32 codes 0..15 of the nearest e2m1 values, ties to the even code; magnitudes above 6 give 6."""
    magnitude = tl.abs(x)
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32) + (magnitude > 1.25).to(tl.int32)
    code += (magnitude >= 1.75).to(tl.int32) + (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def power_of_two_ceil(x):
    """`2 ** ceil(log2(x))` for normal positive fp32, exactly (see `leadline.formats.power_of_two_ceil`)."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_to_float(byte):
    """e8m0 bytes 1..254 -> the power of two in fp32: the byte is the exponent field."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float_to_e8m0(power_of_two):
    """Normal powers of two in fp32 -> their exponent byte, uint8."""
    return (power_of_two.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def fp8_scale(amax):
    """The power-of-two scale of a block whose largest magnitude is `amax` (`leadline.formats.fp8_quantize_rows`)."""
    return power_of_two_ceil(tl.maximum(amax, 1e-4) * (1 / 448))


@triton.jit
def fp4_scale(amax):
    """The same for e2m1 (`leadline.formats.fp4_quantize_rows`)."""
    return power_of_two_ceil(tl.maximum(amax, 7.052966104933725e-38) * (1 / 6))
