"""The experts' kernel for a prompt as it is launched on Hopper, for `tests.gpu.compiling`."""

import json

from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.experts_prompt import OPTIONS, SLOTS, boxes
from leadline.kernels.gpu.experts_prompt_product import prompt_product
from tests.gpu.compiling import Case, compile_case, printed_by


def prompt_case(gate_up: bool) -> Case:
    """One of the two products."""
    types = {"p_out": "*bf16", "p_weights": "*fp32", "limit": "fp32"}
    types |= dict.fromkeys(("p_order", "p_records"), "*i32")
    elements = {"x_desc": "fp8e4nv", "scale_desc": "fp32", "word_desc": "i32", "row_word_desc": "i32"}
    for name, (shape, layout) in boxes().items():
        types[name] = f"tensordesc<{elements[name]}{shape},{layout!r}>"
    fixed = {"gate_up": gate_up, "slots": SLOTS, "registers": 240}
    types |= dict.fromkeys(fixed, "constexpr")
    names = prompt_product.arg_names
    aligned = tuple(name for name in names if name.startswith("p_") or name in ("rows", "columns"))
    signature = {name: types.get(name, "i32") for name in names}
    return Case("prompt", prompt_product, signature, fixed, OPTIONS, aligned)


def prompt_failures() -> list[str]:
    """What does not compile, does not fit, or waits for each matrix instruction before it starts the next."""
    return printed_by("cases_experts_prompt")


def _main() -> None:
    found = []
    for gate_up in (True, False):
        compiled = compile_case(prompt_case(gate_up), CHIPS["sm90"])
        ptx, sass = compiled.asm["ptx"], compiled.asm["sass"]
        if compiled.metadata.shared > CHIPS["sm90"].shared_bytes:
            found.append(f"{compiled.metadata.shared} bytes of shared memory")
        waits, meant = sass.count("WARPGROUP.DEPBAR"), ptx.count("wgmma.wait_group")
        if waits != meant or "QGMMA" not in sass:
            found.append(f"{waits} waits for the matrix instruction, not {meant}")
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
