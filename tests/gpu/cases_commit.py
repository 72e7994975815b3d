"""Compile cases of a decode step's commit: packed pools of official sizes, plain ones of the built-in model's."""

from leadline.kernels.gpu.chips import Chip
from leadline.kernels.gpu.commit import WORDS, commit_kernel
from tests.gpu.compiling import Case


def cases(chip: Chip) -> list[Case]:
    """All chips compile the same code, but for the early start."""
    overlap = chip.backend == "cuda" and int(chip.arch) >= 90
    flash = (("*i64", "*i64", "*i64", "*i64"), (43, 43, 21, 20), (64, 64, 131264, 4416), (72, 1, 1280, 768))
    tiny = (("*i32", "*i32"), (6, 3), (5000, 600), (32, 256))
    return [_case("flash", overlap, *flash), _case("tiny", overlap, *tiny)]


def _case(name: str, overlap: bool, pools: tuple, layers: tuple, per_block: tuple, words: tuple) -> Case:
    lists = ("*i64",) * len(pools)
    signature = {"p_pools": pools, "p_sources": lists, "p_targets": lists, "strides": (("i32",) * 3,) * len(pools)}
    constants = {"layers": layers, "per_block": per_block, "words": words, "block": WORDS, "overlap": overlap}
    options = {"num_warps": 2, **({"launch_pdl": True} if overlap else {})}
    return Case(name, commit_kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants, options)
