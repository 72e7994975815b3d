"""How a product is cut into programs: pure functions of the layer, the number of tokens and the chip."""

from dataclasses import dataclass

import triton
import triton.language as tl

from leadline.formats import FP8_BLOCK
from leadline.kernels.gpu.chips import Chip

FEW_TOKENS = 32
"""Up to so many tokens every program rounds its input for itself: cheaper than a launch that does it once."""
MOST_TOKENS = 128
"""Up to so many the kernels here run; more are a library's work."""
FEWEST_COLUMNS = 512
"""A split has at least so many columns, unless there would be fewer programs than processors."""
MOST_SPLITS = 16
HOPPER_TOKENS = 8
HOPPER_ROWS = 128


@dataclass(frozen=True)
class Product:
    """What is multiplied: `groups` weights [rows, columns], each with its part of the input.

    `input` is "plain", "round" (to fp8 inside the kernel) or "codes" (fp8 with scales); `weight` "plain", "fp8", "fp4".
    """

    tokens: int
    rows: int
    columns: int
    groups: int
    input: str
    weight: str


@dataclass(frozen=True)
class Plan:
    """Tiles of rows, tokens and columns; `splits` programs of `steps` blocks of columns share a tile's columns."""

    block_rows: int
    block_tokens: int
    block_in: int
    splits: int
    steps: int
    warps: int
    stages: int


def plan_product(product: Product, chip: Chip, processors: int) -> Plan:
    """The tiles of a product on a chip with that many processors.

    Up to FEW_TOKENS, and from there to MOST_TOKENS, how columns are split depends on the layer and the GPU but not on
    the number of tokens, so that a token's sums run in the same order in every batch. Measured on an H200: for few
    tokens 128 rows a program and two programs a processor were within 5% of the best of a sweep in every layer of
    V4-Flash; for more, 64 x 64 tiles and one program a processor before tokens are counted (one choice of splits for
    all numbers of tokens would have cost up to 1.6 times).
    """
    small = chip.shared_bytes < 100 * 1024
    few = product.tokens <= FEW_TOKENS
    many_rows = product.groups * product.rows > (4 if few else 2) * processors * 64
    wide = not small and many_rows != few
    block_rows = min(128 if wide else 64, max(16, triton.next_power_of_2(product.rows)))
    most_tokens = FEW_TOKENS if few else 128 if wide else 64
    block_tokens = min(most_tokens, max(16, triton.next_power_of_2(product.tokens)))
    block_in = 64 if product.weight == "plain" and product.input != "round" else FP8_BLOCK
    splits = splits_of(product, block_rows, 2 if few else 1, processors)
    return fill(product, chip, processors, (block_rows, block_tokens, block_in), splits, 8 if wide else 4)


def splits_of(product: Product, block_rows: int, beside: int, processors: int) -> int:
    """Programs that share a tile's columns: enough for `beside` programs a processor if their columns are not few."""
    tiles = product.groups * triton.cdiv(product.rows, block_rows)
    splits = beside * processors // tiles
    if splits * FEWEST_COLUMNS > product.columns:
        splits = processors // tiles
    return max(1, min(splits, MOST_SPLITS))


def fill(product: Product, chip: Chip, processors: int, tile: tuple[int, int, int], splits: int, warps: int) -> Plan:
    """The plan with this tile (rows, tokens, columns), about so many splits, and as many stages as memory holds."""
    block_rows, block_tokens, block_in = tile
    blocks = triton.cdiv(product.columns, block_in)
    steps = triton.cdiv(blocks, min(splits, blocks))
    splits = triton.cdiv(blocks, steps)
    programs = product.groups * triton.cdiv(product.rows, block_rows) * splits
    programs *= triton.cdiv(product.tokens, block_tokens)
    beside = max(1, min(4, triton.cdiv(programs, processors)))
    weight_bytes = block_in * block_rows * {"plain": 2, "fp8": 1, "fp4": 2}[product.weight]
    input_bytes = block_in * block_tokens * (1 if product.input == "codes" else 2)
    room = chip.shared_bytes // beside - 2048 - input_bytes // 2
    stages = max(2, min(7, steps + 1, room // (weight_bytes + input_bytes)))
    return Plan(block_rows, block_tokens, block_in, splits, steps, warps, stages)


def plan_hopper(product: Product, chip: Chip, processors: int) -> Plan | None:
    """The plan of `leadline.kernels.gpu.product_hopper`, or None where it does not run. Splits are as above."""
    whole = product.groups * product.rows % HOPPER_ROWS == 0 and product.columns % FP8_BLOCK == 0
    whole = whole and product.rows % HOPPER_ROWS == 0
    if chip.name != "sm90" or product.weight != "fp8" or product.tokens > HOPPER_TOKENS or not whole:
        return None
    tiles = product.groups * product.rows // HOPPER_ROWS
    blocks = product.columns // FP8_BLOCK
    steps = triton.cdiv(blocks, min(blocks, splits_of(product, HOPPER_ROWS, 2, processors)))
    splits = triton.cdiv(blocks, steps)
    beside = max(1, min(2, triton.cdiv(tiles * splits, processors)))
    input_bytes = steps * HOPPER_TOKENS * (FP8_BLOCK * (4 if product.input == "plain" else 3) + 4)
    slots = min(6, (chip.shared_bytes // beside - 1024 - input_bytes) // (HOPPER_ROWS * FP8_BLOCK))
    return Plan(HOPPER_ROWS, HOPPER_TOKENS, FP8_BLOCK, splits, steps, 8, slots) if slots >= 3 else None


def starts_early(chip: Chip) -> bool:
    """Whether kernels on the chip can start before the one before them has ended (`leadline.kernels.gpu.overlap`)."""
    return chip.backend == "cuda" and int(chip.arch) >= 90


def constants(product: Product, plan: Plan, chip: Chip, e8m0: bool, interpreted: bool) -> dict[str, object]:
    """The kernel's compile-time arguments. Triton's interpreter knows neither bf16 products nor assembly."""
    operand, unpack = tl.bfloat16, "type"
    if product.weight == "fp8":
        if chip.fp8_type and (product.input != "plain" or product.tokens <= FEW_TOKENS):
            operand = tl.float8e4nv if product.input in ("round", "codes") and chip.fp8_dot else tl.float16
        else:
            unpack = "asm" if chip.backend == "cuda" and not interpreted and product.columns % 2 == 0 else "bits"
    return {
        "input": product.input,
        "weight": product.weight,
        "operand": tl.float32 if interpreted else operand,
        "unpack": unpack,
        "e8m0": e8m0,
        "one_scale": FP8_BLOCK % plan.block_rows == 0 and (product.groups == 1 or product.rows % FP8_BLOCK == 0),
        "even": product.columns % plan.block_in == 0,
        "block_rows": plan.block_rows,
        "block_tokens": plan.block_tokens,
        "block_in": plan.block_in,
        "groups": product.groups,
        "splits": plan.splits,
        "early": starts_early(chip) and not interpreted,
    }
