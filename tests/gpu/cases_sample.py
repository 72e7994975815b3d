"""Compile cases of `leadline.kernels.gpu.sample`, at V4's vocabulary."""

from typing import Any

from leadline.kernels.gpu import sample as gpu
from leadline.kernels.gpu.chips import Chip
from leadline.kernels.gpu.sample_choose import sample_choose_kernel
from leadline.kernels.gpu.sample_draw import sample_draw_kernel, sample_pick_kernel, sample_weigh_kernel
from leadline.kernels.gpu.sample_tops import sample_tops_kernel
from tests.gpu.compiling import Case

VOCAB = 129_280
TYPES = {
    "p_id": "*i32",
    "p_drawn": "*i32",
    "p_list": "*i32",
    "p_count": "*i32",
    "p_mass": "*i64",
    "p_output": "*i32",
    "p_prompt": "*i1",
    "p_bits": "*i32",
    **dict.fromkeys(("p_slot", "p_drafted_row", "p_drafted_token", "p_bias_row", "p_bias_token"), "*i64"),
    **dict.fromkeys(("p_mask_row", "p_top_k", "p_seed", "p_position", "p_token"), "*i64"),
}


def cases(chip: Chip) -> list[Case]:
    """All five launches, with everything that a request can ask for."""
    constants = gpu.constants(VOCAB)
    everything = {"penalised": True, "biased": True, "constrained": True, "any_random": True}
    return [
        _case(sample_tops_kernel, constants["tops"] | everything, 4),
        _case(sample_choose_kernel, constants["choose"] | {"any_random": True}, 16),
        _case(sample_weigh_kernel, constants["weigh"], 4),
        _case(sample_draw_kernel, constants["draw"], 4),
        _case(sample_pick_kernel, constants["pick"], 8),
    ]


def _case(kernel: Any, constants: dict[str, Any], warps: int) -> Case:
    types = {name: TYPES.get(name, "*fp32" if name.startswith("p_") else "i32") for name in kernel.arg_names}
    aligned = tuple(name for name in types if name.startswith("p_") or name == "vocab")
    signature = {name: "constexpr" if name in constants else kind for name, kind in types.items()}
    return Case(kernel.__name__, kernel, signature, constants, {"num_warps": warps}, aligned)
