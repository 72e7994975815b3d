"""`leadline bench`: a workload's throughput, the latency of decode steps, or the speed of long prompts."""

import importlib.util
import json as json_format
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from leadline.bench import figures, throughput
from leadline.bench.latency import NoRoom, decode_row, profiled
from leadline.bench.prefill import prefill_row
from leadline.bench.subject import Subject, loaded_subject, random_subject
from leadline.cli import options
from leadline.config import EngineConfig
from leadline.engine.llm import LLM
from leadline.engine.loading import resolve_device
from leadline.engine.memory import memory_table
from leadline.engine.random_weights import geometry


class Mode(StrEnum):
    """What is measured."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    PREFILL = "prefill"


_WORKLOAD, _STEPS, _WEIGHTS = "Throughput", "Latency and prefill", "Model without a checkpoint"
DEFAULT_BATCHES = "1,4,16,64,128"
DEFAULT_CONTEXTS = {Mode.LATENCY: "1K,4K,32K,128K,1M", Mode.PREFILL: "8K,32K,256K"}


def bench(
    mode: Annotated[Mode, typer.Option("--mode", help="A workload, single decode steps, or single prompts.")] = (
        Mode.THROUGHPUT
    ),
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="How many, of a synthetic workload.", rich_help_panel=_WORKLOAD)
    ] = 64,
    input_len: Annotated[
        int, typer.Option("--input-len", min=1, help="Tokens of a prompt.", rich_help_panel=_WORKLOAD)
    ] = 256,
    output_len: Annotated[
        int, typer.Option("--output-len", min=1, help="Tokens to generate for each.", rich_help_panel=_WORKLOAD)
    ] = 64,
    prefix_len: Annotated[
        int,
        typer.Option(
            "--prefix-len",
            min=0,
            help="Tokens that all prompts share, before those of --input-len.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 0,
    random_range: Annotated[
        float,
        typer.Option(
            "--random-range",
            min=0,
            max=1,
            help="Lengths vary evenly by this share, up and down.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 0.0,
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            help='Take requests from lines of {"prompt": text or ids, "max_tokens": number}.',
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", min=1, help="Requests under way at once. Default: all.", rich_help_panel=_WORKLOAD
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=0,
            help="Requests sent per second, at random. Default: no wait.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    batches: Annotated[
        str, typer.Option("--batches", help="Requests in a decode step, one row each.", rich_help_panel=_STEPS)
    ] = DEFAULT_BATCHES,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts",
            help=f"Tokens before a decode step [{DEFAULT_CONTEXTS[Mode.LATENCY]}], or of a prompt "
            f"[{DEFAULT_CONTEXTS[Mode.PREFILL]}].",
            rich_help_panel=_STEPS,
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of each decode row.", rich_help_panel=_STEPS)] = 64,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="A decode step by operation, on a GPU.", rich_help_panel=_STEPS)
    ] = False,
    random_weights: Annotated[
        str | None,
        typer.Option(
            "--random-weights",
            help="Random weights in a preset's geometry: tiny, flash, pro ...",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="How many of its layers, or their ratios: 0,0,4,128.", rich_help_panel=_WEIGHTS),
    ] = None,
    share_experts: Annotated[
        int | None,
        typer.Option(
            "--share-experts",
            min=1,
            help="Distinct stacks of experts, which layers use in turn. Default: one a layer.",
            rich_help_panel=_WEIGHTS,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Of weights, token ids, lengths, moments and sampling.")
    ] = 0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures to a file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw them into a PNG file.")] = None,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    numerics: options.Numerics = None,
    device: options.Device = "auto",
    max_context: options.MaxContext = None,
    state_memory: options.StateMemory = None,
    deterministic: options.Deterministic = False,
    max_running: Annotated[
        int | None, typer.Option("--max-running", help="The most requests in a step. Default: by device.")
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option("--step-tokens", help="The most tokens in a step. Default: by device.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", help="The most of one prompt in a step. Default: by device.")
    ] = None,
    prefix_cache: Annotated[bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse prefixes.")] = True,
) -> None:
    """Measure throughput and latency."""
    if rate == 0:
        raise typer.BadParameter("--rate is 0; it must be above 0")
    sizes = [options.parse_size(size) for size in (contexts or DEFAULT_CONTEXTS.get(mode, "1")).split(",")]
    numbers = [options.parse_size(number) for number in batches.split(",")]
    if min(sizes + numbers) < 1:
        raise typer.BadParameter("--batches and --contexts must all be at least 1")
    chosen_layers = _layers(layers)
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'leadline[plot]'")
    settings: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "numerics": numerics,
        "device": device,
        "max_context": max_context,
        "state_bytes": state_memory,
        "deterministic": deterministic,
        "max_running": max(max_running or 1, *numbers) if mode == Mode.LATENCY else max_running,
        "step_tokens": step_tokens,
        "chunk_tokens": chunk_tokens,
        "prefix_cache": prefix_cache,
    }
    _check(mode, random_weights, settings, layers, share_experts, breakdown)
    subject = _subject(settings, random_weights, chosen_layers, share_experts, seed)
    Console(stderr=True, soft_wrap=True).print(memory_table(subject.engine.memory))
    if mode == Mode.THROUGHPUT:
        lengths = throughput.Lengths(requests, input_len, output_len, prefix_len, random_range)
        source = dataset if dataset is not None else lengths
        told, drawing = throughput.run(subject, source, output_len, rate, concurrency, seed)
    elif mode == Mode.LATENCY:
        told, drawing = _latency(subject, numbers, sizes, steps, seed, breakdown)
    else:
        told, drawing = _prefill(subject, sizes, seed)
    subject.engine.close()
    if json is not None:
        json.write_text(json_format.dumps(told, indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        drawing(plot)


def _layers(text: str | None) -> int | list[int] | None:
    """`--layers`: a number of layers, or the ratio of each. Raises typer.BadParameter for anything else."""
    if text is None:
        return None
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--layers is {text!r}; allowed: a number, or ratios such as 0,0,4,128") from error
    return values if "," in text else values[0]


def _check(
    mode: Mode, random_weights: str | None, settings: dict[str, Any], layers: str | None, share: int | None, parts: bool
) -> None:
    """Raise ValueError naming every pair of options that do not go together."""
    found = []
    if random_weights is None and (layers is not None or share is not None):
        found.append("--layers and --share-experts shape a model of --random-weights, which is not given")
    if random_weights is not None and settings["model"] is not None:
        found.append(f"--random-weights {random_weights} needs no --model, but {settings['model']} is given")
    if parts and mode != Mode.LATENCY:
        found.append(f"--breakdown is of --mode latency, not {mode}")
    elif parts and resolve_device(settings["device"]) == "cpu":
        found.append("--breakdown tells kernels on a GPU apart; this runs on the CPU")
    if mode == Mode.LATENCY and not settings["prefix_cache"]:
        found.append("--mode latency takes prompts as run by way of the prefix cache: not with --no-prefix-cache")
    if found:
        raise ValueError("; ".join(found))


def _subject(
    settings: dict[str, Any], random_weights: str | None, layers: int | list[int] | None, share: int | None, seed: int
) -> Subject:
    if random_weights is None:
        return loaded_subject(LLM(**settings))
    shape = geometry(random_weights, layers)
    stacks = min(share or shape.num_hidden_layers, shape.num_hidden_layers)
    return random_subject(EngineConfig(**settings, seed=seed), shape, random_weights, stacks, sys.stderr.isatty())


def _latency(
    subject: Subject, batches: list[int], contexts: list[int], steps: int, seed: int, breakdown: bool
) -> tuple[dict[str, Any], Callable[[Path], None]]:
    subject.prepare(seed)
    rows = []
    figures.say(figures.head(subject, figures.DECODE_HEAD))
    for context in contexts:
        for batch in batches:
            try:
                row = decode_row(subject, batch, context, steps, seed)
            except NoRoom as error:
                figures.say([f"{figures.line([str(batch), f'{context:,}'])}    left out: {error}"])
                continue
            rows.append(row)
            figures.say([figures.decode_line(row)])
    if subject.device.type == "cuda":
        figures.say(["", figures.line(figures.PROFILE_HEAD)])
        for number, row in enumerate(rows):
            rows[number] = profiled(subject, row, seed, breakdown)
            figures.say(figures.profile_lines(rows[number]))
    figures.say(figures.memory_lines(subject.memory()))
    return figures.told(subject, "latency", rows), lambda path: figures.draw_decode(rows, path)


def _prefill(subject: Subject, lengths: list[int], seed: int) -> tuple[dict[str, Any], Callable[[Path], None]]:
    subject.prepare(seed)
    rows = []
    figures.say(figures.head(subject, figures.PREFILL_HEAD))
    for length in lengths:
        try:
            rows.append(prefill_row(subject, length, seed))
            figures.say([figures.prefill_line(rows[-1])])
        except NoRoom as error:
            figures.say([f"{figures.line([f'{length:,}'])}    left out: {error}"])
    figures.say(figures.memory_lines(subject.memory()))
    return figures.told(subject, "prefill", rows), lambda path: figures.draw_prefill(rows, path)
