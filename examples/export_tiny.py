"""Turn the weights that `train_tiny.py` wrote into a model folder in DeepSeek's own format, and measure the files.

    python examples/export_tiny.py --weights build/tiny --data build/tiny-data --out leadline/tiny

Dense matrices are stored in fp8 and routed experts in fp4, as in the released checkpoints. The report compares the
files as an engine would read them, and the same with nothing but the window to read.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import load_file
from tiny_eval import Data, evaluate
from torch import Tensor
from train_tiny import CONFIG

from leadline.checkpoint.loader import Slot, load
from leadline.checkpoint.names import WeightFormat
from leadline.checkpoint.reader import Checkpoint
from leadline.checkpoint.writer import write_native
from leadline.config import ModelConfig
from leadline.reference import Reference

GENERATION = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.7, "top_p": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder written by train_tiny.py")
    parser.add_argument("--data", type=Path, required=True, help="folder written by tiny_data.py")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--held-out", type=int, default=20, help="documents of each kind to measure; 0 for none")
    arguments = parser.parse_args()
    write_native(arguments.out, CONFIG, read_weights(arguments.weights), WeightFormat(dense="fp8", experts="fp4"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(arguments.data / name, arguments.out / name)
    (arguments.out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    size = sum(path.stat().st_size for path in arguments.out.iterdir() if path.is_file())
    print(f"{arguments.out}: {size / 1e6:.2f} MB")
    if arguments.held_out:
        model, data = read_model(arguments.out), Data(arguments.data / "data.npz", "cpu")
        for name, alone in (("shipped", False), ("window only", True)):
            print(name, json.dumps(evaluate(model, data, window_only=alone, most=arguments.held_out), indent=1))


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(native name, unrounded tensor) pairs; the reference's stacked experts come one by one."""
    files = sorted(folder.glob("weights-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights-*.safetensors: run train_tiny.py first")
    for file in files:
        for name, value in load_file(file).items():
            if ".ffn.experts." in name:
                prefix, matrix = name.rsplit(".", 1)
                yield from ((f"{prefix}.{expert}.{matrix}.weight", one) for expert, one in enumerate(value))
            else:
                yield name, value


def read_model(folder: Path) -> Reference:
    """The model of a checkpoint folder as the reference computes it, in fp32 with official rounding."""
    config = ModelConfig.from_folder(folder)
    model = Reference(config, native=True).requires_grad_(False)
    slots: dict[str, Slot] = {}
    for name, value in model.state_dict().items():
        if ".ffn.experts." in name:
            prefix, matrix = name.rsplit(".", 1)
            slots |= {f"{prefix}.{expert}.{matrix}.weight": Slot(one) for expert, one in enumerate(value)}
        else:
            slots[name] = Slot(value)
    load(config, slots, Checkpoint(folder))
    return model


if __name__ == "__main__":
    main()
