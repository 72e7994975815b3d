"""Compile cases of bringing packed rows into bf16: official rows and the tiny model's."""

from leadline.kernels.gpu.attend import widths
from leadline.kernels.gpu.chips import Chip
from leadline.kernels.gpu.read import ROWS, read_kernel
from tests.gpu.compiling import Case


def cases(chip: Chip) -> list[Case]:
    """By width, and how codes are converted."""
    return [_case("official", chip, 512, 64), _case("tiny", chip, 64, 16)]


def _case(name: str, chip: Chip, width: int, rotated: int) -> Case:
    constants = {**widths(width, rotated), "ROWS": ROWS, "ASSEMBLY": chip.backend == "cuda"}
    signature = {"p_blocks": "*u8", "p_row": "*i64", "p_out": "*bf16", "rows": "i32", "stride": "i32"}
    return Case(name, read_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, {"num_warps": 4})
