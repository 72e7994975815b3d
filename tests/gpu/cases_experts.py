"""The experts' kernels as they are launched on each chip, for `tests.gpu.compiling`."""

import json

import torch
import triton.language as tl

from leadline.kernels.gpu import experts_arrange, experts_products, experts_rows, experts_tiles
from leadline.kernels.gpu.chips import CHIPS, Chip
from leadline.kernels.gpu.experts_fp4 import shape_for
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
    """Rounding and summing, and the tiles of a large batch."""
    rounding = {"p_x": "*bf16", "p_out": "*bf16", "columns": "i32"}
    flags = {"rounds": True, "halves": True, "b_blocks": 8}
    early = chip.backend == "cuda" and int(chip.arch) >= 90
    hidden = {"p_gate_up": "*bf16", "p_out": "*bf16", "width": "i32", "limit": "fp32"}
    summing = {"p_outputs": "*bf16", "p_chosen": "*i64", "p_out": "*fp32", "columns": "i32", "active": "i32"}
    b = {"b_pairs": experts_tiles.PAIRS_PER_PROGRAM, "b_experts": 512}
    place = {"p_chosen": "*i64", "p_counts": "*i32", "p_order": "*i32", "p_records": "*i32", "pairs": "i32",
             "blocks": "i32", "most": "i32"}  # fmt: skip
    count = {"p_chosen": "*i64", "p_counts": "*i32", "pairs": "i32"}

    def case(name, kernel, signature, constants):
        return Case(name, kernel, signature | dict.fromkeys(constants, "constexpr"), constants, {"num_warps": 4})

    return [
        case("product_input", experts_rows._product_input, rounding, flags),
        case("hidden_rows", experts_rows._hidden_rows, hidden, {"b_columns": 1024, "early": early}),
        case("summed_pairs", experts_rows._summed_pairs, summing, {"b_columns": 1024}),
        case("count", experts_tiles._count, count, b),
        case("place", experts_tiles._place, place, {"width": 16, **b}),
    ]


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
    return row_cases(chip) + arranging_cases() + [case for kind in kinds for case in product_cases(chip, *kind)]


def hopper_failures() -> list[str]:
    """What does not compile, or spills, of Hopper's own kernel, which is Gluon: V4-Flash and V4-Pro, few and many."""
    return printed_by("cases_experts")


def _main() -> None:
    from leadline.kernels.gpu.experts_hopper import fp4_product

    found = []
    names = fp4_product.arg_names
    for gate_up, pairs in ((True, 6), (False, 24576)):
        shape = shape_for(pairs, 256, 4096)
        fixed = {"gate_up": gate_up, "width": shape.width, "groups": shape.groups, "units": shape.units}
        fixed |= {"slots": shape.slots}
        types = {"p_x": "*fp8e4nv", "p_x_scale": "*fp32", "p_weights": "*fp32", "p_out": "*bf16", "limit": "fp32"}
        types |= dict.fromkeys(("p_words", "p_row_words", "p_order", "p_records"), "*i32")
        types |= dict.fromkeys(fixed, "constexpr")
        aligned = tuple(name for name in names if name.startswith("p_") or name in ("rows", "columns"))
        signature = {name: types.get(name, "i32") for name in names}
        case = Case("hopper", fp4_product, signature, fixed, {"num_warps": 4 * shape.groups}, aligned)
        compiled = compile_case(case, CHIPS["sm90"])
        if 2 * compiled.metadata.shared > CHIPS["sm90"].shared_bytes:
            found.append(f"{shape}: {compiled.metadata.shared} bytes of shared memory: no two programs fit")
        if "wgmma.mma_async" not in compiled.asm["ptx"] or ".local" in compiled.asm["ptx"]:
            found.append(f"{shape}: no matrix instruction, or local memory")
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
