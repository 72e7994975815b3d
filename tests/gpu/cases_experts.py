"""The experts' kernels as they are launched on each chip, for `tests.gpu.compiling`."""

import json
import math
from typing import Any

import torch
import triton.language as tl

from leadline.kernels.gpu import experts_arrange, experts_prepare, experts_products, experts_rows, experts_tiles
from leadline.kernels.gpu.chips import CHIPS, Chip
from leadline.kernels.gpu.experts_fp4 import MOST_SHARED_TOKENS, shape_for
from tests.gpu.compiling import Case, compile_case, printed_by

FLASH = (4096, 2048, 256, 6)
"""Hidden size, width, experts, active experts."""
TRITON_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def product_cases(chip: Chip, dtype: torch.dtype, form: str, tokens: int) -> list[Case]:
    """Both products of V4-Flash in a weight format."""
    _, _, experts, active = FLASH
    b = experts_products.blocks_for(chip, dtype, tokens * active, experts)
    x = "*" + TRITON_TYPES[dtype]
    weight = x if form == "plain" else "*u8"
    constants = {
        "form": form, "fp8_type": chip.fp8_type, "dot_type": tl.bfloat16 if dtype == torch.bfloat16 else tl.float32,
        "b_rows": b.rows, "b_tokens": b.tokens, "b_columns": b.columns,
    }  # fmt: skip
    flags = dict.fromkeys(constants, "constexpr")
    scale = {"p_scale": "*u8"}
    if form == "plain":
        constants["p_scale"], scale = None, {"p_scale": "constexpr"}
    lists = {"p_order": "*i32", "p_records": "*i32", "most": "i32"}
    options = {"num_warps": b.warps, "num_stages": b.stages}
    gate_up = {"p_x": x, "p_weights": "*fp32", "p_w": weight, **scale, "p_hidden": x, **lists, "active": "i32",
               "width": "i32", "columns": "i32", "limit": "fp32", **flags}  # fmt: skip
    down = {"p_hidden": x, "p_w": weight, **scale, "p_out": x, **lists, "rows": "i32", "columns": "i32", **flags}
    aligned = ("p_x", "p_w", "p_hidden", "p_out", "width", "columns", "rows")
    kernels = (("gate_up", experts_products._gate_up, gate_up), ("down", experts_products._down, down))
    return [
        Case(
            f"{name} {form} {dtype} {tokens}",
            kernel,
            signature,
            constants,
            options,
            tuple(set(aligned) & set(signature)),
        )
        for name, kernel, signature in kernels
    ]


def row_cases(chip: Chip) -> list[Case]:
    """Rounding and summing."""
    rounding = {"p_x": "*bf16", "p_out": "*bf16", "columns": "i32"}
    flags = {"rounds": True, "halves": True, "b_blocks": 8}
    early = chip.backend == "cuda" and int(chip.arch) >= 90
    hidden = {"p_gate_up": "*bf16", "p_out": "*bf16", "width": "i32", "limit": "fp32"}
    summing = {"p_outputs": "*bf16", "p_chosen": "*i64", "p_shared": "*bf16", "p_out": "*bf16", "columns": "i32"}
    sums = {"active": 6, "b_columns": 512, "early": early}
    alone = summing | {"p_out": "*fp32", "p_shared": "constexpr"}
    return [
        case("product_input", experts_rows._product_input, rounding, flags),
        case("hidden_rows", experts_rows._hidden_rows, hidden, {"b_columns": 1024, "early": early}),
        case("summed", experts_rows._summed_pairs, summing, sums),
        case("summed alone", experts_rows._summed_pairs, alone, {"p_shared": None, **sums}),
    ]


def tile_cases(chip: Chip) -> list[Case]:
    """Tiles of few and of many pairs, and beside the rounding of the input where the kernels after it run."""
    types = {"p_chosen": "*i64", "p_x": "*bf16", "p_codes": "*fp8e4nv", "p_scales": "*fp32"}
    types |= dict.fromkeys(("p_counts", "p_order", "p_records", "p_counters"), "*i32")
    many = {"b_pairs": experts_tiles.PAIRS_PER_PROGRAM, "b_experts": 512}
    few = {"b_pairs": experts_tiles.FEW_PER_PROGRAM, "b_experts": 256, "b_all": 1024}
    rounding = {"block": 128, "per_program": 16, "fp8_type": True, "early": True}
    kernels = [("count", experts_tiles._count, many)]
    for name, fixed in (("few", few), ("many", {**many, "b_all": 0})):
        fixed["width"] = 16
        kernels.append((f"place {name}", experts_tiles._place, {**fixed, "multiple": 4}))
        if chip.name == "sm90":
            kernels.append((f"prepare {name}", experts_prepare._prepare, fixed | rounding))
    return [
        case(name, kernel, {argument: types.get(argument, "i32") for argument in kernel.arg_names}, fixed)
        for name, kernel, fixed in kernels
    ]


def case(name: str, kernel: Any, signature: dict, constants: dict) -> Case:
    return Case(name, kernel, signature | dict.fromkeys(constants, "constexpr"), constants, {"num_warps": 4})


def arranging_cases() -> list[Case]:
    """The other order of packed codes and scales, and back."""
    types = {"p_pairs": "*i16", "p_scales": "*u8", "rows": "i32", "columns": "i32"}
    kernels = ("_arrange_codes", "_restore_codes", "_arrange_scales", "_restore_scales")
    found = []
    for name in kernels:
        kernel = getattr(experts_arrange, name)
        signature = {argument: types.get(argument, "*i32") for argument in kernel.arg_names}
        found.append(Case(name, kernel, signature, {}, {"num_warps": 4}, tuple(signature)))
    return found


def cases(chip: Chip) -> list[Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    kinds = [(bf16, "fp4", 16), (bf16, "fp4", 8192), (bf16, "fp8", 64), (bf16, "plain", 2048), (fp32, "plain", 16)]
    return (
        row_cases(chip)
        + tile_cases(chip)
        + arranging_cases()
        + [case for kind in kinds for case in product_cases(chip, *kind)]
    )


def hopper_failures() -> list[str]:
    """What does not compile, or spills, of Hopper's own kernels, which are Gluon: V4-Flash, few tokens and many."""
    return printed_by("cases_experts")


def hopper_case(kernel: Any, tokens: int) -> Case:
    """One of the two kernels as V4-Flash launches it."""
    hidden, width, experts, active = FLASH
    shape = shape_for(tokens, active, experts, math.gcd(hidden, width))
    beside = tokens <= MOST_SHARED_TOKENS
    fixed = {"width": shape.width, "units": shape.units, "slots": shape.slots, "shared_slots": shape.shared_slots}
    fixed |= {"shared_width": shape.shared_width} if beside else {"shared_width": 0, "p_shared": None}
    fixed |= {} if beside else {"p_shared_scale": None}
    types = {"p_x": "*fp8e4nv", "p_x_scale": "*fp32", "p_weights": "*fp32", "p_shared": "*fp8e4nv", "limit": "fp32",
             "p_shared_scale": "*u8", "p_hidden": "*bf16", "p_codes": "*fp8e4nv", "p_code_scales": "*fp32",
             "p_out": "*bf16"}  # fmt: skip
    types |= dict.fromkeys(("p_words", "p_row_words", "p_order", "p_records", "p_arrived"), "*i32")
    types |= dict.fromkeys(fixed, "constexpr")
    names = kernel.arg_names
    constants = {name: value for name, value in fixed.items() if name in names}
    aligned = tuple(n for n in names if n not in constants and (n.startswith("p_") or n in ("rows", "columns")))
    signature = {name: types.get(name, "i32") for name in names}
    return Case(f"{kernel.__name__} {tokens}", kernel, signature, constants, {"num_warps": 4, "launch_pdl": 1}, aligned)


def _main() -> None:
    from leadline.kernels.gpu.experts_hopper import down_product, up_product

    found = []
    for kernel in (up_product, down_product):
        for tokens in (1, 16, 64, 300, 4096):
            compiled = compile_case(hopper_case(kernel, tokens), CHIPS["sm90"])
            memory, ptx = compiled.metadata.shared, compiled.asm["ptx"]
            if (5 if tokens <= 64 else 2) * memory > CHIPS["sm90"].shared_bytes:
                found.append(f"{kernel.__name__} {tokens}: {memory} bytes of shared memory: too few programs fit")
            if "wgmma.mma_async" not in ptx or ".local" in ptx:
                found.append(f"{kernel.__name__} {tokens}: no matrix instruction, or local memory")
            if "griddepcontrol.wait" not in ptx or "griddepcontrol.launch_dependents" not in ptx:
                found.append(f"{kernel.__name__} {tokens}: does not wait for the kernel before, or holds the next up")
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
