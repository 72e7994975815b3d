"""Compile cases of query, store and compress: official sizes and the built-in model's, into plain and packed pools."""

import triton
import triton.language as tl

from leadline.kernels.gpu import compress, query, store
from leadline.kernels.gpu.chips import Chip
from leadline.kernels.gpu.rows import padded
from tests.gpu.compiling import Case

FLASH = {"heads": 64, "width": 512, "turned": 64, "index_heads": 64, "index_width": 128}
TINY = {"heads": 8, "width": 128, "turned": 32, "index_heads": 16, "index_width": 128}


def cases(chip: Chip) -> list[Case]:
    """Pro differs from Flash in the number of heads alone."""
    overlap = chip.backend == "cuda" and int(chip.arch) >= 90
    tiny = _cases("tiny plain fp32", TINY, "fp32", "plain", overlap)
    return [*_cases("flash packed", FLASH, "bf16", "packed", overlap), tiny[0], tiny[2]]


def _cases(name: str, size: dict[str, int], dtype: str, form: str, overlap: bool) -> list[Case]:
    pool = "*u8" if form == "packed" else f"*{dtype}"
    names = {
        "eps": "fp32",
        **dict.fromkeys(
            ("p_cos", "p_sin", "p_norm", "p_index_norm", "p_pending", "p_ape", "p_raw", "p_folds"), "*fp32"
        ),
        **dict.fromkeys(("p_q", "p_kv", "p_out", "p_halves"), f"*{dtype}"),
        **dict.fromkeys(("p_pool", "p_entries", "p_keys"), pool),
        **dict.fromkeys(("p_rows", "p_targets", "p_positions", "p_first", "p_count", "p_before", "p_full"), "*i64"),
    }
    width, index_width = size["width"], size["index_width"]
    activation = tl.bfloat16 if dtype == "bf16" else tl.float32
    shared = {
        "width": width,
        "turned": size["turned"],
        "block": padded(width),
        "heads": size["heads"],
        "form": form,
        "entries_form": form,
        "keys_form": form,
        "entries_dtype": activation,
        "keys_dtype": activation,
        "dtype": activation,
        "index_width": index_width,
        "size": 32,
        "stages": index_width.bit_length() - 1,
        "tile_rows": store.QUERY_ROWS,
        "ratio": 128,
        "native": form != "plain",
        "overlap": overlap,
    }
    index = {**shared, "width": index_width, "heads": size["index_heads"], "tile_rows": query.INDEX_ROWS}
    return [
        _case(f"{name} store", store.store_kernel, names, shared, store.QUERY_WARPS),
        _case(f"{name} index query", query.index_query_kernel, names, index, query.INDEX_WARPS),
        _case(f"{name} close", compress.close_csa_kernel, names, shared, compress.CLOSE_WARPS),
        _case(
            f"{name} fold",
            compress.hca_fold_kernel,
            names,
            {**shared, "batch": compress.FOLD_ROWS},
            compress.FOLD_WARPS,
        ),
    ]


def _case(name: str, kernel: triton.JITFunction, names: dict[str, str], constants: dict, warps: int) -> Case:
    arguments = kernel.arg_names
    held = {key: constants[key] for key in arguments if key in constants}
    signature = {key: "constexpr" if key in held else names.get(key, "i32") for key in arguments}
    aligned = tuple(key for key in arguments if str(signature[key]).startswith("*") or key.endswith("stride"))
    return Case(name, kernel, signature, held, {"num_warps": warps}, aligned)
