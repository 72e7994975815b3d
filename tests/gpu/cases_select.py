"""Compile cases of `leadline.kernels.gpu.select`."""

from typing import Any

import torch
import triton.language as tl

from leadline.kernels.gpu import select as gpu
from leadline.kernels.gpu.chips import Chip
from tests.gpu.compiling import Case

FLASH, PRO, TINY = (64, 128, 512), (64, 128, 1024), (16, 128, 8)
"""Index heads, channels, top-k."""


def cases(chip: Chip) -> list[Case]:
    """Decode and prompts of Flash and Pro from packed pools, and the tiny model in fp32 from a plain one."""
    return [
        _score_case("decode", chip, FLASH, 16, "u8"),
        _score_case("prompt", chip, FLASH, 1024, "u8"),
        _score_case("plain", chip, FLASH, 1024, "bf16"),
        _score_case("tiny", chip, TINY, 64, "fp32"),
        _sift_case("pro", 262144, PRO[2]),
        _choose_case("pro", 262144, PRO[2]),
        _choose_case("short", 2048, FLASH[2]),
    ]


def _score_case(name: str, chip: Chip, sizes: tuple[int, int, int], queries: int, pool: str) -> Case:
    heads, channels, _ = sizes
    dtype = torch.float32 if pool == "fp32" else torch.bfloat16
    packed = pool == "u8"
    config = gpu.score_config(chip, dtype, queries)
    element = "fp32" if dtype == torch.float32 else "bf16"
    constants = gpu.score_constants(config, queries, heads, channels, packed, gpu.GROUP)
    constants |= {
        "operand": tl.float32 if dtype == torch.float32 else tl.bfloat16,
        "quick": packed and chip.backend == "cuda",
    }
    signature = {
        "p_q": f"*{element}",
        "p_weight": "*fp32",
        "p_pool": f"*{pool}",
        "p_page": "*i32",
        "p_visible": "*i64",
        "p_score": "*fp32",
        "p_largest": "*fp32",
        "count": "i32",
        "topk": "i32",
        "pool_stride": "i32",
        "page_stride": "i32",
        "width": "i32",
        "constant": "fp32",
    }
    aligned = ("p_q", "p_weight", "p_pool", "p_page", "p_visible", "p_score", "p_largest", "pool_stride", "width")
    options = {"num_warps": config.warps, "num_stages": config.stages}
    signature |= dict.fromkeys(constants, "constexpr")
    return Case(f"score {name}", gpu._score_kernel, signature, constants, options, aligned)


def _sift_case(name: str, width: int, topk: int) -> Case:
    made = gpu.choose_constants(width, topk, 1, 132)
    constants = gpu.sift_constants(width, made["held"], made["sections"])
    return _search_case(f"sift {name}", gpu._sift_kernel, constants, 8)


def _choose_case(name: str, width: int, topk: int) -> Case:
    constants = gpu.choose_constants(width, topk, 1, 132)
    return _search_case(f"choose {name}", gpu._choose_kernel, constants, gpu.chooser_warps(constants["held"]))


def _search_case(name: str, kernel: Any, constants: dict[str, int], warps: int) -> Case:
    types = dict.fromkeys(("p_score", "p_largest"), "*fp32") | dict.fromkeys(("p_found", "p_count"), "*i32")
    types |= {"p_visible": "*i64", "p_chosen": "*i64", "topk": "i32", "width": "i32"} | dict.fromkeys(
        constants, "constexpr"
    )
    signature = {argument: types[argument] for argument in kernel.arg_names}
    aligned = tuple(argument for argument in signature if argument.startswith("p_") or argument == "width")
    return Case(name, kernel, signature, constants, {"num_warps": warps}, aligned)
