"""What each GPU kind can do, as far as kernels must know: the one place that decides between paths."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chip:
    """A kind of GPU. `shared_bytes` is the most shared memory that one program may use.

    `fp8_type`: Triton has the e4m3 type there; where not, kernels read and write bytes and convert by integer work.
    `fp8_dot`: matrix instructions take e4m3; where not, operands are converted to bf16 first, which is exact.
    """

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    fp8_type: bool
    fp8_dot: bool

    @property
    def ordered(self) -> bool:
        """Whether a product's sums run in one order in tiles of every size.

        AMD's matrix instructions take 4, 8 or 16 columns at a time, by the size of the tile.
        """
        return self.backend == "cuda"


KB = 1024
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm80", "cuda", 80, 32, 163 * KB, fp8_type=False, fp8_dot=False),
        Chip("sm86", "cuda", 86, 32, 99 * KB, fp8_type=False, fp8_dot=False),
        Chip("sm89", "cuda", 89, 32, 99 * KB, fp8_type=True, fp8_dot=True),
        Chip("sm90", "cuda", 90, 32, 227 * KB, fp8_type=True, fp8_dot=True),
        Chip("sm100", "cuda", 100, 32, 227 * KB, fp8_type=True, fp8_dot=True),
        Chip("sm120", "cuda", 120, 32, 99 * KB, fp8_type=True, fp8_dot=True),
        Chip("gfx942", "hip", "gfx942", 64, 64 * KB, fp8_type=False, fp8_dot=False),
        Chip("gfx950", "hip", "gfx950", 64, 160 * KB, fp8_type=False, fp8_dot=False),
    )
}
"""gfx942 multiplies another e4m3 (fnuz) than checkpoints hold; both AMD chips take the path that upcasts."""


def chip_named(name: str) -> Chip:
    """The chip called `name`, or for an unlisted one the nearest older chip of its maker.

    Raises ValueError for a chip that is older than all listed ones.
    """
    if name in CHIPS:
        return CHIPS[name]
    family = name.rstrip("0123456789abcdef") if name.startswith("sm") else "gfx"
    number = name[len(family) :]
    older = [c for c in CHIPS.values() if c.name.startswith(family) and _order(c.name[len(family) :]) <= _order(number)]
    if not older:
        raise ValueError(f"{name} is too old; the oldest GPUs that Leadline runs on are {', '.join(CHIPS)}")
    return max(older, key=lambda c: _order(c.name[len(family) :]))


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a PyTorch device; for a CPU (Triton's interpreter) the one with the fewest abilities.

    Raises ValueError for a chip that is older than all of CHIPS.
    """
    if device.type == "cpu":
        return CHIPS["sm80"]
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return chip_named(properties.gcnArchName.split(":")[0])
    return chip_named(f"sm{properties.major}{properties.minor}")


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device: how many programs run side by side. 4 in Triton's interpreter, to split work too."""
    return 4 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def _order(number: str) -> int:
    """Chip numbers in order of age: "90" < "100", and AMD's are hexadecimal."""
    return int(number, 16) if not number.isdigit() else int(number)
