"""Model folders on disk for tests: a small random model and a byte-level tokenizer with V4's special tokens."""

import random
from pathlib import Path
from typing import Any

from models import native_weights, random_config, random_reference
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from leadline.checkpoint.names import WeightFormat
from leadline.checkpoint.writer import write_native
from leadline.engine.detokenize import BYTE_OF

SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
MARKS = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜"]


def byte_tokenizer(marks: list[str] = MARKS) -> Tokenizer:
    """BOS 0, EOS 1, padding 2, then `marks`, then one token per byte, and "he", "hel", "hell", "hello"."""
    names = [*SPECIAL, *marks, *BYTE_OF, "he", "hel", "hell", "hello"]
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o")]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in marks])
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer | None = None, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint folder in fp32 of a random model with every layer kind; three ids have no token.

    EOS has a logit of 0, so that greedy output never ends by itself. `changes` are keys of config.json.
    """
    tokenizer = tokenizer or byte_tokenizer()
    kinds = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1, "sliding_window": 24}
    raw = random_config(random.Random(seed), vocab_size=tokenizer.get_vocab_size() + 3, **kinds | changes)
    weights = native_weights(random_reference(raw, seed))
    weights["head.weight"][raw["eos_token_id"]] = 0
    write_native(folder, raw, weights.items(), WeightFormat("fp32", "fp32"))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
