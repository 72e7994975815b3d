"""How a product is cut into programs: pure functions of the layer, the number of tokens and the chip."""

from dataclasses import dataclass, replace

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
    `deterministic`: a token's sums run in the same order whatever the number of tokens.
    """

    tokens: int
    rows: int
    columns: int
    groups: int
    input: str
    weight: str
    deterministic: bool = False


@dataclass(frozen=True)
class Plan:
    """Tiles of rows, tokens and columns. A tile's columns are split into `splits` sums of `steps` blocks of columns.

    Each sum is a program's own, or, `alone`, one program makes them one after another. They are added in their order.
    """

    block_rows: int
    block_tokens: int
    block_in: int
    splits: int
    steps: int
    warps: int
    stages: int
    alone: bool = False


def plan_product(product: Product, chip: Chip, processors: int) -> Plan:
    """The tiles of a product on a chip with that many processors.

    Up to FEW_TOKENS, and from there to MOST_TOKENS, how columns are split depends on the layer and the GPU but not on
    the number of tokens, so that a token's sums run in the same order in every batch. Measured on an H200: for few
    tokens 128 rows a program and two programs a processor were within 5% of the best of a sweep in every layer of
    V4-Flash; for more, 64 x 64 tiles and one program a processor before tokens are counted (one choice of splits for
    all numbers of tokens would have cost up to 1.6 times).
    """
    if product.deterministic:
        return plan_deterministic(product, chip, processors)
    few = product.tokens <= FEW_TOKENS
    block_rows, block_tokens, warps = tile_of(product, chip, processors)
    block_in = 64 if product.weight == "plain" and product.input != "round" else FP8_BLOCK
    splits = splits_of(product, block_rows, 2 if few else 1, processors)
    return fill(product, chip, processors, (block_rows, block_tokens, block_in), splits, warps)


def plan_deterministic(product: Product, chip: Chip, processors: int) -> Plan:
    """For any number of tokens the splits and blocks of columns of few; only the tile follows from their number.

    Where tiles alone occupy the GPU a program makes all splits of its tile, so that no sums travel through memory.
    """
    block_rows, _, _ = tile_of(replace(product, tokens=1), chip, processors)
    splits = splits_of(product, block_rows, 2, processors)
    block_rows, block_tokens, warps = tile_of(product, chip, processors)
    tiles = product.groups * triton.cdiv(product.rows, block_rows) * triton.cdiv(product.tokens, block_tokens)
    alone = splits > 1 and tiles >= processors
    return fill(product, chip, processors, (block_rows, block_tokens, FP8_BLOCK), splits, warps, alone)


def tile_of(product: Product, chip: Chip, processors: int) -> tuple[int, int, int]:
    """(rows and tokens of a program's tile, warps).

    For more than MOST_TOKENS the fastest on an H200, at 8192: codes 510-590 TFLOP/s (in 128 x 128 tiles 410-540), bf16
    weights 435, and bf16 inputs of fp8 weights, which every program turns into fp16, 246 (128 x 128: 186).
    """
    small = chip.shared_bytes < 100 * 1024
    if product.tokens > MOST_TOKENS:
        plain, converted = product.weight == "plain", product.weight == "fp8" and product.input == "plain"
        block_rows, block_tokens = (64, 64) if small or converted else (128, 128 if plain else 64)
        block_rows = min(block_rows, max(16, triton.next_power_of_2(product.rows)))
        return block_rows, block_tokens, 8 if block_tokens == 128 else 4
    few = product.tokens <= FEW_TOKENS
    many_rows = product.groups * product.rows > (4 if few else 2) * processors * 64
    wide = not small and many_rows != few
    block_rows = min(128 if wide else 64, max(16, triton.next_power_of_2(product.rows)))
    most_tokens = FEW_TOKENS if few else 128 if wide else 64
    block_tokens = min(most_tokens, max(16, triton.next_power_of_2(product.tokens)))
    return block_rows, block_tokens, 8 if wide else 4


def splits_of(product: Product, block_rows: int, beside: int, processors: int) -> int:
    """Programs that share a tile's columns: enough for `beside` programs a processor if their columns are not few."""
    tiles = product.groups * triton.cdiv(product.rows, block_rows)
    splits = beside * processors // tiles
    if splits * FEWEST_COLUMNS > product.columns:
        splits = processors // tiles
    return max(1, min(splits, MOST_SPLITS))


def fill(
    product: Product,
    chip: Chip,
    processors: int,
    tile: tuple[int, int, int],
    splits: int,
    warps: int,
    alone: bool = False,
) -> Plan:
    """The plan with this tile (rows, tokens, columns), about so many splits, and as many stages as memory holds."""
    block_rows, block_tokens, block_in = tile
    blocks = triton.cdiv(product.columns, block_in)
    steps = triton.cdiv(blocks, min(splits, blocks))
    splits = triton.cdiv(blocks, steps)
    programs = product.groups * triton.cdiv(product.rows, block_rows) * (1 if alone else splits)
    programs *= triton.cdiv(product.tokens, block_tokens)
    most = 4 if product.tokens <= MOST_TOKENS else 8 // warps  # with large tiles sums fill the registers
    beside = max(1, min(most, triton.cdiv(programs, processors)))
    weight_bytes = block_in * block_rows * {"plain": 2, "fp8": 1, "fp4": 2}[product.weight]
    input_bytes = block_in * block_tokens * (1 if product.input == "codes" else 2)
    room = chip.shared_bytes // beside - 2048 - input_bytes // 2
    stages = max(2, min(7, steps + 1, room // (weight_bytes + input_bytes)))
    return Plan(block_rows, block_tokens, block_in, splits, steps, warps, stages, alone)


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
        few = product.tokens <= FEW_TOKENS or product.deterministic
        if chip.fp8_type and (product.input != "plain" or few):
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
        "alone": plan.alone,
        "early": starts_early(chip) and not interpreted,
    }
