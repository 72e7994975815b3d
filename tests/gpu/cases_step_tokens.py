"""Compile cases of a step's tokens: the same for every model."""

from leadline.kernels.gpu.chips import Chip
from leadline.kernels.gpu.step_tokens import ROWS, leave_kernel, take_kernel
from tests.gpu.compiling import Case


def cases(chip: Chip) -> list[Case]:
    """All chips compile the same code, but for the early start."""
    overlap = chip.backend == "cuda" and int(chip.arch) >= 90
    options = {"num_warps": 4, **({"launch_pdl": True} if overlap else {})}
    constants = {"block": ROWS, "overlap": overlap}
    made = []
    for name, kernel in (("take", take_kernel), ("leave", leave_kernel)):
        signature = {argument: "*i64" if argument.startswith("p_") else "i32" for argument in kernel.arg_names}
        made.append(Case(name, kernel, signature | dict.fromkeys(constants, "constexpr"), constants, options))
    return made
