"""Compile cases of a step's lists: official sizes and the built-in model's."""

from leadline.kernels.gpu.chips import Chip
from leadline.kernels.gpu.rows import padded
from leadline.kernels.gpu.step_rows import COLUMNS, step_rows_kernel
from tests.gpu.compiling import Case


def cases(chip: Chip) -> list[Case]:
    """All chips compile the same code."""
    return [_case("official", 128, 32), _case("tiny", 16, 16)]


def _case(name: str, ring: int, half: int) -> Case:
    lists = ("position", "chunk", "start", "first", "slot", "table", "closing", "full")
    lists += ("window", "visible", "hca")
    constants = {"ring": ring, "ring_block": padded(ring), "half": half, "half_block": padded(half)}
    constants |= {"csa": 4, "hca": 128, "block": COLUMNS}
    signature = {}
    for argument in step_rows_kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.startswith("p_"):
            signature[argument] = "*i64" if argument[2:] in lists else "*i32" if argument == "p_pages" else "*fp32"
        else:
            signature[argument] = "i32"
    return Case(name, step_rows_kernel, signature, constants, {"num_warps": 4})
