"""From nothing to the first token, with the checkpoint's files in memory: `python benchmarks/start.py --layers 20`.

Writes a checkpoint of V4-Flash's geometry with so many layers in official formats (3.7 GB each) to a folder in memory,
then starts two processes on it, one after the other, that load it and generate one token: the first may find no
compiled kernel, the second finds them. Layers hold the same numbers, which costs the same to read.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from leadline.checkpoint.names import stored_tensors
from leadline.checkpoint.reader import Checkpoint
from leadline.checkpoint.stream import TORCH_DTYPES
from leadline.config import ModelConfig
from leadline.engine.random_weights import official_format
from leadline.presets import preset_dict

WRITERS = 8
TARGET_SECONDS = 60
CHILD = """
import sys, time
begun = time.perf_counter()
from leadline import LLM, SamplingParams
imported = time.perf_counter()
llm = LLM(sys.argv[1], progress=True)
ready = time.perf_counter()
[result] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
ended = time.perf_counter()
assert len(result.token_ids) == 1
print(f"imports {imported - begun:.1f} s, engine {ready - imported:.1f} s, first token {ended - ready:.2f} s")
llm.close()
"""


def config_of(layers: int) -> dict[str, Any]:
    """`config.json` of V4-Flash cut to its first `layers` layers, without draft blocks."""
    raw = preset_dict("flash")
    ratios = raw["compress_ratios"][:layers]
    depth = {"num_hidden_layers": layers, "num_hash_layers": min(layers, raw["num_hash_layers"])}
    return raw | depth | {"num_nextn_predict_layers": 0, "compress_ratios": ratios}


def shards(model: ModelConfig) -> dict[str, dict[str, Tensor]]:
    """File name -> what it holds, a layer each; the tensors have no memory."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, (dtype, shape) in stored_tensors(model, official_format(model)).items():
        part = name.split(".")[1] if name.startswith("layers.") else "rest"
        files.setdefault(f"model-{part}.safetensors", {})[name] = torch.empty(
            shape, dtype=TORCH_DTYPES[dtype], device="meta"
        )
    return files


@functools.cache
def drawn(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Numbers as a checkpoint might hold them: small, finite, scales near 2^-9."""
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, dtype=dtype)
    if dtype == torch.float8_e8m0fnu:
        return torch.randint(117, 120, shape, dtype=torch.uint8).view(dtype)
    if dtype == torch.int64:
        return torch.arange(shape[0])[:, None] * 7 % 250 + torch.arange(shape[1])
    return (torch.randn(shape) * 0.02).to(dtype)


def write_shard(folder: Path, name: str, tensors: dict[str, Tensor]) -> None:
    """Write one file. Tensors of one shape would share memory, which `save_file` refuses: each is a copy."""
    torch.set_num_threads(1)
    save_file({key: drawn(each.dtype, tuple(each.shape)).clone() for key, each in tensors.items()}, folder / name)


def write(folder: Path, raw: dict[str, Any]) -> int:
    """A whole checkpoint of the config `raw`; returns its bytes. Raises CheckpointError if it is not a sound one."""
    files = shards(ModelConfig.from_dict(raw))
    with ProcessPoolExecutor(WRITERS, get_context("fork")) as pool:
        list(pool.map(functools.partial(write_shard, folder), files, files.values()))
    named = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}))
    (folder / "config.json").write_text(json.dumps(raw))
    checkpoint = Checkpoint(folder)
    checkpoint.validate(ModelConfig.from_folder(folder))
    return checkpoint.total_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--memory", default="/dev/shm", help="a folder in memory with room for the checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.memory) as name:
        begun = perf_counter()
        size = write(Path(name), config_of(options.layers))
        print(f"{size / 1e9:.1f} GB written in {perf_counter() - begun:.0f} s", flush=True)
        for number in ("first", "second"):
            begun = perf_counter()
            done = subprocess.run([sys.executable, "-c", CHILD, name], check=False)
            took = perf_counter() - begun
            verdict = "reached" if took <= TARGET_SECONDS else "missed"
            print(f"{number} process: {took:.1f} s in all; {TARGET_SECONDS} s: {verdict}", flush=True)
            if done.returncode:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
