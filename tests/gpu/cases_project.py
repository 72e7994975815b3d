"""Products to compile for chips that are not here: official and awkward sizes, as the launcher would run them."""

import json

from leadline.kernels.gpu.chips import CHIPS, Chip
from leadline.kernels.gpu.expand import expand_kernel
from leadline.kernels.gpu.product import product_kernel
from leadline.kernels.gpu.product_plan import Product, constants, plan_hopper, plan_product, starts_early
from leadline.kernels.gpu.quantize import quantize_kernel
from tests.gpu.compiling import Case, compile_case, printed_by

PROCESSORS = 132
POINTERS = ("p_x", "p_x_scale", "p_w", "p_w_scale", "p_out", "p_sums", "p_arrived")


def products(chip: Chip) -> dict[str, Product]:
    """One of each kind that a serving engine on `chip` meets."""
    codes = "codes" if chip.fp8_dot else "plain"
    rounded = {"fp8 weights, 128 rows": Product(128, 4096, 8192, 1, "codes", "fp8")} if chip.fp8_dot else {}
    return rounded | {
        "deterministic, 8192 rows": Product(8192, 4096, 8192, 1, codes, "fp8", deterministic=True),
        "deterministic, grouped output, 8192 rows": Product(8192, 1024, 4096, 8, "plain", "fp8", deterministic=True),
        "deterministic, bf16 weights, 8192 rows": Product(8192, 2048, 4096, 1, "plain", "plain", deterministic=True),
        "deterministic, bf16 weights, 16 rows": Product(16, 129280, 4096, 1, "plain", "plain", deterministic=True),
        "fp8 weights, 16 rows": Product(16, 1536, 4096, 1, "round", "fp8"),
        "fp8 weights, bf16 input, 128 rows": Product(128, 32768, 1536, 1, "plain", "fp8"),
        "grouped output, 1 row": Product(1, 1024, 4096, 8, "plain", "fp8"),
        "small grouped output": Product(5, 48, 80, 2, "plain", "fp8"),
        "fp4 weights, 16 rows": Product(16, 4096, 4096, 1, "round", "fp4"),
        "bf16 weights, 16 rows": Product(16, 129280, 4096, 1, "plain", "plain"),
    }


def cases(chip: Chip) -> list[Case]:
    """Every kernel of linear layers on `chip`."""
    return [
        *(_case(name, product, chip) for name, product in products(chip).items()),
        _quantize_case(chip),
        _expand_case(),
    ]


def _case(name: str, product: Product, chip: Chip) -> Case:
    plan = plan_product(product, chip, PROCESSORS)
    fixed = constants(product, plan, chip, e8m0=product.rows != 1536, interpreted=False)
    kinds = {"type": "*fp8e4nv", "asm": "*i16", "bits": "*u8"}
    weight = {"plain": "*bf16", "fp4": "*i8", "fp8": kinds[fixed["unpack"]]}[product.weight]
    signature = {"p_x": "*fp8e4nv" if product.input == "codes" else "*bf16", "p_x_scale": "*fp32", "p_w": weight}
    signature |= {"p_w_scale": "*u8" if fixed["e8m0"] else "*fp32"}
    signature |= {"p_out": "*fp32" if product.weight == "plain" else "*bf16", "p_sums": "*fp32", "p_arrived": "*i32"}
    signature |= dict.fromkeys(
        ("tokens", "rows", "columns", "x_stride", "x_scale_stride", "w_scale_stride", "steps"), "i32"
    )
    signature |= dict.fromkeys(fixed, "constexpr")
    ordered = {argument: signature[argument] for argument in product_kernel.arg_names}
    aligned = (*POINTERS, "columns", "x_stride", "x_scale_stride", *(("rows",) if product.rows % 16 == 0 else ()))
    return Case(name, product_kernel, ordered, fixed, {"num_warps": plan.warps, "num_stages": plan.stages}, aligned)


def _quantize_case(chip: Chip) -> Case:
    signature = {"p_x": "*bf16", "p_codes": "*fp8e4nv" if chip.fp8_type else "*u8", "p_scales": "*fp32"}
    signature |= dict.fromkeys(("tokens", "columns", "blocks", "scale_stride"), "i32")
    fixed = {
        "round_only": False,
        "fp8_type": chip.fp8_type,
        "block": 128,
        "per_program": 16,
        "early": starts_early(chip),
    }
    signature |= dict.fromkeys(fixed, "constexpr")
    return Case("quantize", quantize_kernel, signature, fixed, {"num_warps": 4}, ("p_x", "p_codes", "columns"))


def _expand_case() -> Case:
    fixed = {"e8m0": True, "block_rows": 8, "block": 1024}
    signature = {"p_w": "*u8", "p_scale": "*u8", "p_out": "*bf16"} | dict.fromkeys(fixed, "constexpr")
    ordered = {argument: signature.get(argument, "i32") for argument in expand_kernel.arg_names}
    return Case("expand", expand_kernel, ordered, fixed, {"num_warps": 4}, ("p_w", "p_out", "columns"))


def hopper_failures() -> list[str]:
    """What does not compile of Hopper's own kernel, which is Gluon, within its shared memory."""
    return printed_by("cases_project")


def _main() -> None:
    from leadline.kernels.gpu.product_hopper import few_product

    found = []
    for product in (Product(8, 1536, 4096, 1, "round", "fp8"), Product(8, 1024, 4096, 8, "plain", "fp8")):
        plan = plan_hopper(product, CHIPS["sm90"], PROCESSORS)
        assert plan is not None
        fixed = {"e8m0": True, "block_rows": plan.block_rows, "block_tokens": plan.block_tokens, "warps": plan.warps}
        fixed |= {"slots": plan.stages, "most": plan.steps, "splits": plan.splits, "half": product.input == "plain"}
        signature = {"p_x": "*bf16", "p_w": "*fp8e4nv", "p_w_scale": "*u8", "p_out": "*bf16", "p_sums": "*fp32"}
        signature |= {"p_arrived": "*i32"} | dict.fromkeys(fixed, "constexpr")
        pointers = (name for name in signature if name not in fixed)
        aligned = (*pointers, "rows", "group_rows", "columns", "x_stride")
        ordered = {name: signature.get(name, "i32") for name in few_product.arg_names}
        case = Case("hopper", few_product, ordered, fixed, {"num_warps": plan.warps}, aligned)
        shared = compile_case(case, CHIPS["sm90"]).metadata.shared
        beside = -(-product.groups * product.rows // plan.block_rows * plan.splits // PROCESSORS)
        if shared * min(2, beside) > CHIPS["sm90"].shared_bytes:
            found.append(f"{product}: {shared} bytes of shared memory, {beside} programs a processor")
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
