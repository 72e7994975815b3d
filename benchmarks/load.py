"""How fast a checkpoint loads and how much memory that takes, beside a plain read of the same files.

    python benchmarks/load.py [--gigabytes 2] [--folder DIR] [--threads 1]

Writes synthetic checkpoints of about that size (deleted afterwards): one in the released fp8 + fp4 format, loaded
into slots that keep it, and one in bf16. Loads each in a fresh process and prints its peak resident memory, mapped
file pages included, minus what the process had before, as a multiple of the checkpoint's size.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leadline.checkpoint.loader import Slot, load
from leadline.checkpoint.names import WeightFormat, scale_name, stored_tensors, weight_specs
from leadline.checkpoint.reader import Checkpoint
from leadline.checkpoint.stream import TORCH_DTYPES
from leadline.checkpoint.writer import write_native
from leadline.config import ModelConfig
from leadline.presets import preset_dict

FORMATS = {"fp8 + fp4, kept": WeightFormat("fp8", "fp4"), "bf16": WeightFormat("bf16", "bf16")}
LAYERS = 8


def sized_config(size: float, format: WeightFormat) -> dict[str, Any]:
    """V4-Flash, half as wide, cut to `LAYERS` layers, a small vocabulary, and as many experts as fill `size` bytes."""
    raw = preset_dict("flash") | {
        "hidden_size": 2048,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": LAYERS,
        "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 4, 0],
        "vocab_size": 16_384,
        "num_nextn_predict_layers": 0,
        "num_experts_per_tok": 1,
    }
    raw["expert_dtype"] = format.experts if format.experts in ("fp4", "fp8") else None
    few, more = (_bytes(raw | {"n_routed_experts": count}, format) for count in (1, 2))
    return raw | {"n_routed_experts": max(1, round((size - few) / (more - few)) + 1)}


def _bytes(raw: dict[str, Any], format: WeightFormat) -> int:
    stored = stored_tensors(ModelConfig.from_dict(raw), format).values()
    return sum(torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize for dtype, shape in stored)


def synthetic(raw: dict[str, Any], format: WeightFormat) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint: random bytes that are valid for their dtype."""
    for name, (dtype, shape) in stored_tensors(ModelConfig.from_dict(raw), format).items():
        if dtype == "I64":
            yield name, torch.randint(raw["n_routed_experts"], shape)
        elif dtype in ("I8", "F8_E4M3", "F8_E8M0"):
            yield name, torch.randint(100, 126, shape, dtype=torch.uint8).view(TORCH_DTYPES[dtype])
        else:
            yield name, torch.randn(shape).to(TORCH_DTYPES[dtype])


def resident(field: str) -> int:
    """A memory figure of this process in bytes, from the kernel: "VmRSS" now, "VmHWM" at its peak."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def read_plainly(folder: Path, fresh: bool) -> float:
    """Bytes per second of reading the files into one reused buffer, or into memory that was not touched before."""
    step = 8 << 20
    paths = list(folder.glob("*.safetensors"))
    room = sum(path.stat().st_size + step for path in paths) if fresh else step
    memory = torch.empty(room, dtype=torch.uint8).numpy().data
    start, size = time.perf_counter(), 0
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(memory[size : size + step] if fresh else memory):
                size += count
    return size / (time.perf_counter() - start)


def load_once(folder: Path, format: WeightFormat) -> dict[str, float]:
    """Load into fresh slots, then once more into the same ones (a refit): figures for the report."""
    config = ModelConfig.from_folder(folder)
    before = resident("VmRSS")
    checkpoint = Checkpoint(folder)
    stored = stored_tensors(config, format)
    tensors = {name: torch.empty(shape, dtype=TORCH_DTYPES[dtype]) for name, (dtype, shape) in stored.items()}
    slots = {name: Slot(tensors[name], tensors.get(scale_name(name))) for name in weight_specs(config)}
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        load(config, slots, checkpoint)
        seconds.append(time.perf_counter() - start)
    size = checkpoint.total_bytes
    return {
        "size": size,
        "memory": (resident("VmHWM") - before) / size,
        "first": size / seconds[0],
        "again": size / seconds[1],
        "fresh": read_plainly(folder, fresh=True),
        "plain": read_plainly(folder, fresh=False),
    }


def main() -> None:
    """Write, load in a fresh process, report, delete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's; one copies as fast as a quiet core can")
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "FORMAT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.load:
        print(json.dumps(load_once(Path(arguments.load[0]), FORMATS[arguments.load[1]])))
        return
    print("                                          into fresh memory        into used memory")
    print("format              size     peak memory  load       plain read    load       plain read")
    for name, format in FORMATS.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            raw = sized_config(arguments.gigabytes * 1e9, format)
            write_native(folder, raw, synthetic(raw, format), format, max_shard_bytes=500_000_000)
            command = [sys.executable, __file__, "--threads", str(arguments.threads), "--load", folder, name]
            got = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rates = "  ".join(f"{got[key] / 1e9:5.2f} GB/s" for key in ("first", "fresh", "again", "plain"))
        print(f"{name:18}  {got['size'] / 1e9:.2f} GB  {got['memory']:.3f} x   {rates}")


if __name__ == "__main__":
    main()
