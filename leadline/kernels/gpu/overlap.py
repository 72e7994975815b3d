"""Launches that overlap: a kernel may start while the one before it on the stream still runs (Hopper and later)."""

import functools

import torch

from leadline.kernels.gpu.chips import chip_of


@functools.cache
def early_start(device: torch.device) -> dict[str, bool]:
    """Options of a launch that need not wait for the end of the kernel before it; none where a chip cannot.

    A kernel launched so must call `tl.extra.cuda.gdc_wait()` before it touches anything that another kernel wrote,
    or writes anything itself, and every one of its programs must call it.
    """
    chip = chip_of(device)
    able = device.type == "cuda" and chip.backend == "cuda" and int(chip.arch) >= 90
    return {"launch_pdl": True} if able else {}
