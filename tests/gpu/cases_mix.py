"""What the launchers of `leadline.kernels.gpu.mix` compile, for every chip."""

from collections.abc import Iterator

import triton
import triton.language as tl

from leadline.kernels.gpu import mix
from leadline.kernels.gpu.chips import Chip
from tests.gpu.compiling import Case

FLASH, PRO = 4096, 7168


def cases(chip: Chip) -> list[Case]:
    """Both launches at decode and prompt sizes of Flash, the last one also of Pro; fp32 streams of a small model."""
    found = []
    for name, d, rows in (("flash-1", FLASH, 1), ("flash-128", FLASH, 128), ("flash-4096", FLASH, 4096)):
        found += list(_pair(chip, name, 4, d, rows, "bf16", True, 24))
    found += list(_pair(chip, "pro", 4, PRO, 4096, "bf16", True, 24))[1:]
    found += list(_pair(chip, "small", 2, 48, 5, "fp32", True, 8))
    found += list(_pair(chip, "head", 4, FLASH, 16, "bf16", False, 4))[1:]
    return found


def _pair(chip: Chip, name: str, n: int, d: int, rows: int, dtype: str, close: bool, outputs: int) -> Iterator[Case]:
    cut = mix.config(chip, rows)
    overlap = chip.backend == "cuda" and int(chip.arch) >= 90
    options = {"launch_pdl": True} if overlap else {}
    width = triton.next_power_of_2(outputs + 1)
    slices = triton.cdiv(d, mix.SLICE)
    floats = dict.fromkeys(("p_post", "p_comb", "p_fn"), "*fp32")
    pointers = {
        "p_streams": f"*{dtype}",
        "p_output": f"*{dtype}",
        **floats,
        "p_closed": f"*{dtype}",
        "p_parts": "*fp32",
    }
    numbers = dict.fromkeys(("rows", "s_row", "s_stream"), "i32")
    constants = {
        "N": n,
        "D": d,
        "OUTPUTS": outputs,
        "WIDTH": width,
        "CLOSE": close,
        "B_OUT": cut.outputs,
        "B_ROWS": cut.rows,
        "B_CHANNELS": mix.SLICE,
        "SLICES": cut.slices,
        "MULTIPLY": tl.bfloat16 if dtype == "bf16" else tl.float32,
        "OVERLAP": overlap,
    }
    aligned = (*pointers, "s_row", "s_stream") if d % 16 == 0 else tuple(pointers)
    yield _case(
        f"close_and_project {name}",
        mix._close_and_project,
        pointers,
        numbers,
        constants,
        cut.warps,
        {**options, "num_stages": 1},
        aligned,
    )
    floats = dict.fromkeys(("p_parts", "p_base", "p_scale", "p_norm"), "*fp32")
    pointers = {"p_streams": f"*{dtype}", **floats, "p_x": f"*{dtype}", "p_post": "*fp32", "p_comb": "*fp32"}
    numbers = dict.fromkeys(("rows", "s_row", "s_stream"), "i32") | {"hc_eps": "fp32", "norm_eps": "fp32"}
    per_group = triton.cdiv(mix.GROUP, cut.slices)
    parts = triton.cdiv(slices, cut.slices)
    constants = {
        "N": n,
        "D": d,
        "OUTPUTS": outputs,
        "WIDTH": width,
        "PARTS": parts,
        "PER_GROUP": per_group,
        "GROUPS": triton.next_power_of_2(triton.cdiv(parts, per_group)),
        "ROUNDS": 20 if outputs > n else 0,
        "B_D": triton.next_power_of_2(d),
        "OVERLAP": overlap,
    }
    aligned = (*pointers, "s_row", "s_stream") if d % 16 == 0 else tuple(pointers)
    yield _case(
        f"mix_and_read {name}", mix._mix_and_read, pointers, numbers, constants, cut.reading_warps, options, aligned
    )


def _case(name, kernel, pointers, numbers, constants, warps, options, aligned) -> Case:
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    return Case(name, kernel, signature, constants, {"num_warps": warps, **options}, aligned)
