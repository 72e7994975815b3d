"""What attend launches on each chip, to be compiled without it: official sizes, the tiny model's, and fp32."""

import json
from typing import Any

import triton.language as tl

from leadline.kernels.gpu import attend
from leadline.kernels.gpu.chips import CHIPS, Chip
from tests.gpu.compiling import Case, compile_case, printed_by

ALIGNED = (
    *("p_q", "p_sink", "p_window", "p_window_rows", "p_entries", "p_entry_rows", "p_cos", "p_sin", "p_out"),
    *("p_partial", "p_sums", "window_stride", "entries_stride"),
)
INTEGERS = (
    *("heads", "window_width", "entry_width", "window_stride", "entries_stride"),
    *("window_list_stride", "entry_list_stride", "parts", "each"),
)


def cases(chip: Chip) -> list[Case]:
    """Flash's and Pro's rows packed and split, and plain; the tiny model's; fp32 (slow to compile) on one chip."""
    wide = [_attend(chip, "plain fp32, 64 heads", "fp32", 64, 512, 64, packed=False, split=True)]
    return [
        *(wide if chip.name == "sm80" else []),
        _attend(chip, "packed bf16, 64 heads, split", "bf16", 64, 512, 64, packed=True, split=True),
        _attend(chip, "plain bf16, 128 heads", "bf16", 128, 512, 64, packed=False, split=False),
        _attend(chip, "packed bf16, 8 heads of 128", "bf16", 8, 128, 32, packed=True, split=True),
        _join("join", "bf16", 512, 64),
    ]


def _attend(
    chip: Chip, name: str, kind: str, heads: int, width: int, rotated: int, *, packed: bool, split: bool
) -> Case:
    bits = 16 if kind == "bf16" else 32
    tile = attend.tiling(chip, heads, width, bits)
    constants = {
        **attend.widths(width, rotated),
        "OPERAND": tl.bfloat16 if bits == 16 else tl.float32,
        "PACKED_WINDOW": packed,
        "PACKED_ENTRIES": packed,
        "SPLIT": split,
        "ASSEMBLY": chip.backend == "cuda",
        "HEADS": tile.heads,
        "KEYS": tile.keys,
    }
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Case(name, attend._attend, _signature(kind, packed, constants), constants, options, ALIGNED)


def _signature(kind: str, packed: bool, constants: dict[str, Any]) -> dict[str, str]:
    pool = "*u8" if packed else f"*{kind}"
    pointers = {
        **{"p_q": f"*{kind}", "p_sink": "*fp32", "p_window": pool, "p_window_rows": "*i64", "p_entries": pool},
        **{"p_entry_rows": "*i64", "p_cos": "*fp32", "p_sin": "*fp32", "p_out": f"*{kind}"},
        **{"p_partial": "*fp32", "p_sums": "*fp32"},
    }
    return {**pointers, **dict.fromkeys(INTEGERS, "i32"), **dict.fromkeys(constants, "constexpr")}


def _join(name: str, kind: str, width: int, rotated: int) -> Case:
    constants = {"D": width, "R": rotated, **attend.joining(1024, 16, width, deterministic=False), "OVERLAP": False}
    signature = {
        **{"p_partial": "*fp32", "p_sums": "*fp32", "p_cos": "*fp32", "p_sin": "*fp32", "p_out": f"*{kind}"},
        **{"heads": "i32", "parts": "i32"},
        **dict.fromkeys(constants, "constexpr"),
    }
    return Case(name, attend._join, signature, constants, {"num_warps": 4}, ("p_partial", "p_sums", "p_out"))


def hopper_failures() -> list[str]:
    """What does not compile of Hopper's own kernel, or would run slower than its source says."""
    return printed_by("cases_attend")


def _main() -> None:
    from leadline.kernels.gpu.attend_hopper import PACKED_BRINGERS, PLAIN_BRINGERS, attend_on_hopper

    found = []
    for packed, split in ((False, False), (True, True)):
        warps, registers = PACKED_BRINGERS if packed else PLAIN_BRINGERS
        constants = {"PACKED": packed, "SPLIT": split, "BRINGERS": warps, "BRINGER_REGISTERS": registers}
        signature = {**_signature("bf16", packed, {}), "shares": "i32", **dict.fromkeys(constants, "constexpr")}
        case = Case("hopper", attend_on_hopper, signature, constants, {"num_warps": 8}, ALIGNED)
        shared = compile_case(case, CHIPS["sm90"]).metadata.shared
        if shared > CHIPS["sm90"].shared_bytes:
            found.append(f"packed {packed}, split {split} uses {shared} bytes of shared memory")
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
