"""The number formats of DeepSeek-V4: e4m3 and e2m1 values in blocks that share a power-of-two scale.

Pure functions on tensors. "Rows" means blocks along the last dimension (activations, fp4 weights); a "weight" in
fp8 has tiles of 128 x 128. A quantised value stands for `code * scale`. Sources: the OCP Microscaling formats
specification (e4m3, e2m1, e8m0) and the quantisers of DeepSeek-V4's published `inference/kernel.py`.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_BLOCK = 128
FP4_BLOCK = 32
E4M3_MAX = 448.0
E2M1_MAX = 6.0

FP8_FLOOR = 1e-4
"""Activations: a block whose largest magnitude is below this is scaled as if it were this."""
FP4_FLOOR = 6 * 2.0**-126

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitude of codes 0..7; codes 8..15 are the negatives, 8 being -0."""


def power_of_two_ceil(x: Tensor) -> Tensor:
    """`2 ** ceil(log2(x))` for non-negative fp32 `x`, by exact bit work: carry any mantissa bit into the exponent.

    Zero gives zero, positive values below 2^-126 give 2^-126, and infinity and NaN give infinity.
    """
    bits = x.view(torch.int32).clamp(max=0x7F800000)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def e8m0_decode(scale: Tensor) -> Tensor:
    """Exponent bytes (float8_e8m0fnu or uint8) -> fp32: byte b means 2^(b - 127), byte 255 means NaN."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"e8m0 scales are float8_e8m0fnu or uint8, not {scale.dtype}")
    return scale.to(torch.float32)


def e8m0_encode(power_of_two: Tensor) -> Tensor:
    """Normal powers of two in fp32 -> float8_e8m0fnu: the exponent field is the byte. Infinity and NaN give byte 255.

    Never rounds: other values are the caller's bug (see `power_of_two_ceil`).
    """
    bits = power_of_two.view(torch.int32)
    return (bits >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


# ------------------------------------------------------------------------------------------------ rows


def fp8_quantize_rows(x: Tensor, block: int = FP8_BLOCK, floor: float = FP8_FLOOR) -> tuple[Tensor, Tensor]:
    """`x` [..., c] -> (e4m3 codes [..., c], fp32 scales [..., ceil(c / block)]), computed in fp32.

    `scale = 2^ceil(log2(max(amax, floor) / 448))`, `code = e4m3(x / scale)`, to nearest, ties to even.
    """
    blocks = _blocks(x, block)
    scale = power_of_two_ceil(blocks.abs().amax(-1).clamp(min=floor) * (1 / E4M3_MAX))
    codes = (blocks / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., : x.shape[-1]], scale


def fp8_round_trip(x: Tensor, block: int = FP8_BLOCK, floor: float = FP8_FLOOR) -> Tensor:
    """`x` [..., c] as fp8 keeps it, in the shape and dtype of `x`: quantised by `fp8_quantize_rows` and expanded."""
    codes, scale = fp8_quantize_rows(x, block, floor)
    return (_blocks(codes, block) * scale[..., None]).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def fp4_quantize_rows(x: Tensor, block: int = FP4_BLOCK) -> tuple[Tensor, Tensor]:
    """`x` [..., c], c even -> (packed codes uint8 [..., c / 2], fp32 scales [..., ceil(c / block)]).

    `scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))`, `code = e2m1(x / scale)`, to nearest, ties to the even code;
    a byte holds element 2j in its low half and 2j + 1 in its high half. Raises ValueError for odd c.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"fp4 packs two values in a byte, so the last dimension must be even, not {x.shape[-1]}")
    blocks = _blocks(x, block)
    scale = power_of_two_ceil(blocks.abs().amax(-1).clamp(min=FP4_FLOOR) * (1 / E2M1_MAX))
    codes = e2m1_encode(blocks / scale[..., None]).flatten(-2)[..., : x.shape[-1]]
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def fp4_round_trip(x: Tensor, block: int = FP4_BLOCK) -> Tensor:
    """`x` [..., c] as fp4 keeps it, in the shape and dtype of `x`: quantised by `fp4_quantize_rows` and expanded."""
    packed, scale = fp4_quantize_rows(x, block)
    return (_blocks(e2m1_decode(packed), block) * scale[..., None]).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _blocks(x: Tensor, block: int) -> Tensor:
    """[..., c] -> fp32 [..., ceil(c / block), block], the last block filled up with zeros."""
    missing = -x.shape[-1] % block
    x = x.to(torch.float32)
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, block))


# ------------------------------------------------------------------------------------------------ e2m1


def e2m1_encode(x: Tensor) -> Tensor:
    """fp32 -> uint8 codes 0..15 of the nearest e2m1 values, ties to the even code; magnitudes above 6 give 6."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for tie in (0.25, 1.25, 2.5, 5.0):  # between an even code and the odd one above it
        code += magnitude > tie
    for tie in (0.75, 1.75, 3.5):  # between an odd code and the even one above it
        code += magnitude >= tie
    return code


def e2m1_decode(packed: Tensor) -> Tensor:
    """Packed codes (uint8 or int8) [..., n] -> fp32 [..., 2n], low half of each byte first."""
    pairs = _byte_pairs(packed.device)[packed.view(torch.uint8).to(torch.int32)]
    return pairs.view(torch.float32)


@functools.lru_cache
def _byte_pairs(device: torch.device) -> Tensor:
    """int64 [256]: the two fp32 values of each byte, as one word, so that a look-up moves both."""
    values = torch.tensor(E2M1_VALUES)
    values = torch.cat([values, -values])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], -1).view(torch.int64).squeeze(-1).to(device)


# ------------------------------------------------------------------------------------------------ weights


def fp8_scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of an fp8 weight [..., out, in]: [..., ceil(out / 128), ceil(in / 128)]."""
    return (*shape[:-2], -(-shape[-2] // FP8_BLOCK), -(-shape[-1] // FP8_BLOCK))


def fp8_quantize_weight(w: Tensor, scale_dtype: torch.dtype = torch.float8_e8m0fnu) -> tuple[Tensor, Tensor]:
    """`w` [out, in] -> (e4m3 [out, in], scales [ceil(out / 128), ceil(in / 128)]), computed in fp32.

    e8m0 scales are `2^ceil(log2(amax / 448))` of their tile, fp32 ones `amax / 448`; a tile of zeros has scale 1.
    """
    rows, columns = fp8_scale_shape(tuple(w.shape))
    padded = F.pad(w.to(torch.float32), (0, columns * FP8_BLOCK - w.shape[1], 0, rows * FP8_BLOCK - w.shape[0]))
    tiles = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    amax = tiles.abs().amax((1, 3))
    scale = amax / E4M3_MAX
    if scale_dtype == torch.float8_e8m0fnu:
        scale = power_of_two_ceil(scale)
    scale = torch.where(amax == 0, 1.0, scale)
    codes = (tiles / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes = codes.view(padded.shape)[: w.shape[0], : w.shape[1]].contiguous()
    return codes, _as_scale(scale, scale_dtype)


def fp8_dequantize(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 [..., out, in] and scales (e8m0 or fp32) [..., ceil(out / 128), ceil(in / 128)] -> `dtype` [..., out, in].

    The product is taken in fp32 and cast once. Raises ValueError for scales of another shape.
    """
    if tuple(scale.shape) != fp8_scale_shape(tuple(w.shape)):
        raise ValueError(
            f"fp8 weight {list(w.shape)} needs scales {list(fp8_scale_shape(tuple(w.shape)))}, not {list(scale.shape)}"
        )
    columns = _scale_values(scale).repeat_interleave(FP8_BLOCK, -1)[..., : w.shape[-1]]
    out = torch.empty(w.shape, dtype=dtype, device=w.device)
    for index in range(scale.shape[-2]):
        rows = slice(index * FP8_BLOCK, (index + 1) * FP8_BLOCK)
        out[..., rows, :] = w[..., rows, :].to(torch.float32) * columns[..., index : index + 1, :]
    return out


def fp4_quantize_weight(w: Tensor, scale_dtype: torch.dtype = torch.float8_e8m0fnu) -> tuple[Tensor, Tensor]:
    """`w` [out, in], in a multiple of 32 -> (packed e2m1, int8 [out, in / 2], scales [out, in / 32])."""
    if w.shape[-1] % FP4_BLOCK:
        raise ValueError(f"fp4 weights need a multiple of {FP4_BLOCK} columns, not {w.shape[-1]}")
    packed, scale = fp4_quantize_rows(w)
    return packed.view(torch.int8), _as_scale(scale, scale_dtype)


def fp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed e2m1 (int8 or uint8) [..., out, in / 2] and scales (e8m0 or fp32) [..., out, in / 32] -> [..., out, in].

    The product is taken in fp32 and cast once to `dtype`. Raises ValueError for scales of another shape.
    """
    wanted = (*packed.shape[:-1], packed.shape[-1] * 2 // FP4_BLOCK)
    if tuple(scale.shape) != wanted:
        raise ValueError(f"packed fp4 weight {list(packed.shape)} needs scales {list(wanted)}, not {list(scale.shape)}")
    return (_blocks(e2m1_decode(packed), FP4_BLOCK) * _scale_values(scale)[..., None]).flatten(-2).to(dtype)


def _as_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return e8m0_encode(scale) if dtype == torch.float8_e8m0fnu else scale.to(dtype)


def _scale_values(scale: Tensor) -> Tensor:
    return scale if scale.dtype == torch.float32 else e8m0_decode(scale)


# ------------------------------------------------------------------------------------------------ rotation


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dimension (a power of two), divided by the root of its size.

    Sylvester's order, so it is its own inverse. Butterflies in fp32 (fp64 for fp64), cast once to the dtype of `x`;
    being elementwise, a row's result depends on no other row. Raises ValueError for other sizes.
    """
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, not {size} elements")
    y = x if x.dtype == torch.float64 else x.to(torch.float32)
    half = 1
    while half < size:
        low, high = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return (y * size**-0.5).to(x.dtype)
