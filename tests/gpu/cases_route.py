"""What the launchers of `leadline.kernels.gpu.route` compile, for every chip."""

from collections.abc import Iterator

import triton
import triton.language as tl

from leadline.kernels.gpu import route
from leadline.kernels.gpu.chips import Chip
from tests.gpu.compiling import Case


def cases(chip: Chip) -> list[Case]:
    """Decode and prompt sizes of Flash and Pro with fp32 gates and a bf16 one, hash routing, and a small fp32 model."""
    return [
        *_pair(chip, "flash-1", 256, 4096, 1, 6, "bf16", "fp32", False),
        *_pair(chip, "flash-128", 256, 4096, 128, 6, "bf16", "fp32", True),
        *_pair(chip, "flash-4096", 256, 4096, 4096, 6, "bf16", "fp32", False),
        *_pair(chip, "pro-1", 384, 7168, 1, 6, "bf16", "bf16", False),
        *_pair(chip, "small", 8, 48, 3, 2, "fp32", "fp32", False),
    ]


def _pair(
    chip: Chip, name: str, experts: int, d: int, rows: int, active: int, x: str, gate: str, hashed: bool
) -> Iterator[Case]:
    cut = route.config(chip, rows, d)
    overlap = chip.backend == "cuda" and int(chip.arch) >= 90
    options = {"launch_pdl": True} if overlap else {}
    constants = {
        "D": d,
        "EXPERTS": experts,
        "B_EXPERTS": min(64, max(16, triton.next_power_of_2(experts))),
        "B_ROWS": cut.rows,
        "B_CHANNELS": route.UNIT // 2,
        "GROUPS": max(1, cut.groups),
        "UNITS": route.GROUP if cut.groups else 1,
        "MULTIPLY": tl.bfloat16 if x == "bf16" else tl.float32,
        "OVERLAP": overlap,
    }
    pointers = {"p_x": f"*{x}", "p_weight": f"*{gate}", "p_parts": "*fp32"}
    signature = {**pointers, "rows": "i32", "s_row": "i32", **dict.fromkeys(constants, "constexpr")}
    yield Case(
        f"multiply {name}",
        route._multiply,
        signature,
        constants,
        {"num_warps": cut.warps, **options},
        (*pointers, "s_row"),
    )
    none = {"p_bias": None} if hashed else {"p_by_token": None}
    constants = none | {
        "EXPERTS": experts,
        "B_EXPERTS": triton.next_power_of_2(experts),
        "ACTIVE": active,
        "PARTS": triton.cdiv(d, route.UNIT * max(1, cut.groups * route.GROUP)),
        "GROUP_PARTS": 1 if cut.groups else route.GROUP,
        "OVERLAP": overlap,
    }
    pointers = {"p_parts": "*fp32", "p_bias": "*fp32", "p_by_token": "*i64", "p_ids": "*i64", "p_chosen": "*i64"}
    pointers["p_weights"] = "*fp32"
    numbers = {"rows": "i32", "tokens": "i32", "scale": "fp32"}
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    aligned = tuple(pointer for pointer in pointers if pointer not in none)
    yield Case(
        f"choose {name}", route._choose, signature, constants, {"num_warps": cut.choosing_warps, **options}, aligned
    )
