"""Options that several commands share, and the engine or sampling settings that they make."""

import random
import re
from typing import Annotated

import typer

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """A number of bytes or tokens: "512M", "2G", "1.5g", "128K", "1000". Units are powers of 1024.

    Raises typer.BadParameter for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; allowed: a number with K, M, G or T after it, or none")
    return int(float(match[1]) * UNITS[match[2].upper()])


def fresh_seed() -> int:
    """A seed that nobody asked for: another one each time."""
    return random.SystemRandom().getrandbits(63)


_ENGINE = "Engine"
_SAMPLING = "Sampling"

Model = Annotated[
    str | None,
    typer.Option("--model", help="A folder or a hub id. Default: the built-in model.", rich_help_panel=_ENGINE),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="auto, checkpoint, bfloat16, float32 or float64.", rich_help_panel=_ENGINE)
]
Numerics = Annotated[
    str | None,
    typer.Option("--numerics", help="exact or native. Default: native on a GPU.", rich_help_panel=_ENGINE),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        parser=parse_size,
        metavar="SIZE",
        help="The most tokens of prompt and output together. Default: what the model and the memory allow.",
        rich_help_panel=_ENGINE,
    ),
]
StateMemory = Annotated[
    int | None,
    typer.Option(
        "--state-memory",
        parser=parse_size,
        metavar="SIZE",
        help="Memory for the requests' state, such as 512M or 2G. Default: 1G on a CPU, what is left on a GPU.",
        rich_help_panel=_ENGINE,
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="On a GPU: the same bits whatever else is in the batch; slower.",
        rich_help_panel=_ENGINE,
    ),
]

Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopK = Annotated[
    int, typer.Option("--top-k", help="Only the K most probable tokens; 0: all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Only the most probable tokens that sum to P.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float,
    typer.Option("--min-p", help="Only tokens of at least this share of the best one.", rich_help_panel=_SAMPLING),
]
RepetitionPenalty = Annotated[float, typer.Option("--repetition-penalty", rich_help_panel=_SAMPLING)]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", rich_help_panel=_SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", rich_help_panel=_SAMPLING)]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Same seed, same text. Default: a new one.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text to stop at; may be repeated.", rich_help_panel=_SAMPLING)
]
