"""`leadline inspect`: what a model is made of, what it weighs and where it fits, without reading a weight."""

import json as json_format
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from leadline.checkpoint.names import Shape, WeightFormat, stored_tensors, weight_specs
from leadline.checkpoint.reader import Checkpoint
from leadline.cli.options import parse_size
from leadline.config import PAGE_TOKENS, ModelConfig, Ratio
from leadline.engine.loading import BUILT_IN
from leadline.model.state import CSA_PER_PAGE, PENDING_RING, pages_for
from leadline.presets import PRESETS, preset
from leadline.reference import KV_BLOCK

CONTEXTS = (4 << 10, 128 << 10, 1 << 20)
GPU_CONTEXT = 128 << 10
"""Tokens of the one request that must fit beside the weights."""

GPU_MIB = {
    "L40S 48 GB": 46068,
    "A100 80 GB": 81920,
    "H100 80 GB": 81559,
    "RTX PRO 6000 96 GB": 97887,
    "DGX Spark 128 GB": 122570,
    "H200 141 GB": 143771,
    "B200 180 GB": 183359,
}
"""Memory as the driver reports it."""
USABLE = 0.9
"""Share of a GPU's memory for weights and state; activations, workspaces and the driver need the rest."""

PARTS = (
    ("mtp.", "draft block"),
    ("embed.", "embedding"),
    (".attn.indexer.", "indexer"),
    (".attn.compressor.", "compressors"),
    (".attn.", "attention"),
    ("hc_", "hyper-connections"),
    (".ffn.gate.", "router"),
    (".ffn.experts.", "routed experts"),
    (".ffn.shared_experts.", "shared experts"),
    ("norm.", "norms"),
    ("head.", "head"),
)
"""The part of a tensor is that of the first piece of text that its native name contains."""

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}
"""safetensors dtype -> bytes per item; the others, fp8 and packed fp4, take one."""


Tensors = Mapping[str, tuple[str, Shape]]
"""Native name -> (safetensors dtype, shape)."""


@dataclass(frozen=True)
class Stored:
    """The tensors of one dtype."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class StateBytes:
    """A request's state: history pages that grow with its tokens, and one frontier slot of fixed size.

    `row` is a window row's or an entry's bytes in one layer and `index_key` an index key's; `history_per_token` and
    `frontier` are sums over the main layers; `request` maps a context in tokens to the bytes of both together.
    """

    row: int
    index_key: int
    history_per_token: float
    frontier: int
    request: dict[int, int]


@dataclass(frozen=True)
class GpuFit:
    """How a kind of GPU holds the model with weights split evenly and each request's state on every GPU.

    `needed` GPUs hold the weights and one request of 128K tokens; None if as many as the model can be split over do
    not. For the number of GPUs that was asked about, `free` is the bytes left on each (negative: missing) and
    `requests` maps a context in tokens to how many requests fit there; without one they are None and empty.
    """

    usable: int
    needed: int | None
    free: int | None
    requests: dict[int, int]


@dataclass(frozen=True)
class Report:
    """Everything that `leadline inspect` shows. Parameters are counts, all else bytes."""

    model: str
    config: ModelConfig
    schedule: str
    parameters: dict[str, int]
    total_parameters: int
    active_parameters: int
    files: dict[str, Stored]
    memory: dict[str, int]
    state: dict[str, StateBytes]
    gpus: dict[str, GpuFit]


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help=f"A preset ({', '.join(PRESETS)}), a folder or a hub id. Default: the built-in model."),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context", parser=parse_size, metavar="SIZE", help="Tokens of a request, such as 128K; may be repeated."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Show what fits on this many GPUs.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a model is made of, its bytes, and which GPUs hold it."""
    config, tensors = find_model(model)
    report = examine(model or "built-in model", config, tensors, context, gpus)
    if json:
        print(json_format.dumps(asdict(report), indent=2))
    else:
        show(report, gpus, Console())


# ------------------------------------------------------------------------------------------------ the model


def find_model(model: str | None) -> tuple[ModelConfig, Tensors]:
    """The config and stored tensors of a preset, folder or hub id, or of the built-in model for None.

    A folder's safetensors headers are read and checked against its config; without such files, as for a preset or a
    hub id, of which only config.json is fetched, the tensors are those that the config calls for.
    Raises ConfigError or CheckpointError for bad contents, FileNotFoundError if there is no such model.
    """
    if model in PRESETS:
        config = preset(model)
        return config, stored_tensors(config, released_format(config))
    folder = BUILT_IN if model is None else Path(model)
    if not folder.is_dir():
        folder = _fetch_config(str(model))
    config = ModelConfig.from_folder(folder)
    if not any(folder.glob("*.safetensors*")):
        return config, stored_tensors(config, released_format(config))
    checkpoint = Checkpoint(folder)
    checkpoint.validate(config)
    return config, {name: (header.dtype, header.shape) for name, header in checkpoint.headers.items()}


def _fetch_config(model: str) -> Path:
    """The folder of the hub's config.json for `model`, from the local cache or downloaded."""
    if model.count("/") != 1:
        raise FileNotFoundError(
            f"{model!r} is neither a preset ({', '.join(PRESETS)}), nor a folder, nor a hub id (owner/name)"
        )
    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except (HfHubHTTPError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"{model!r} is not a folder, and its config.json cannot be had from the hub: {reason}"
        ) from error


def released_format(config: ModelConfig) -> WeightFormat:
    """How the released checkpoint of `config` stores it: fp8 experts come with fp32 scales, fp4 ones with e8m0."""
    if not config.quantized:
        return WeightFormat("bf16", "bf16")
    if config.expert_dtype == "fp8":
        return WeightFormat("fp8", "fp8", "f32")
    return WeightFormat("fp8", "fp4")


# ------------------------------------------------------------------------------------------------ the report


def examine(
    name: str, config: ModelConfig, tensors: Tensors, contexts: Sequence[int] | None, gpus: int | None
) -> Report:
    """Count everything. `contexts` are tokens per request, by default 4K, 128K and 1M as far as the model goes.

    Raises ValueError for contexts that the model does not allow and for `gpus` that it cannot be split over evenly.
    """
    longest = config.max_position_embeddings
    outside = [str(n) for n in contexts or () if not 1 <= n <= longest]
    if outside:
        raise ValueError(f"the context is {', '.join(outside)}; {name} allows 1 to {longest} tokens")
    contexts = sorted(set(contexts)) if contexts else sorted({min(n, longest) for n in CONTEXTS})
    split = math.gcd(config.num_attention_heads, config.n_routed_experts)
    if gpus is not None and split % gpus:
        raise ValueError(f"{name} cannot be split evenly over {gpus} GPUs; the number must divide {split}")
    parameters = count_parameters(config, tensors)
    files = count_files(tensors)
    weights = sum(part.bytes for part in files.values())
    states = {kind: state_bytes(config, kind, contexts) for kind in ("native", "bfloat16", "float32")}
    request = state_bytes(config, "native", [min(GPU_CONTEXT, longest)]).request.popitem()[1]
    return Report(
        name,
        config,
        describe_schedule([ratio.name for ratio in config.compress_ratios]),
        parameters,
        sum(parameters.values()) - parameters.get("draft block", 0),
        active_parameters(config, parameters),
        files,
        {"as stored": weights, "bf16": _expanded(config, tensors, "bf16"), "fp32": _expanded(config, tensors, "fp32")},
        states,
        {gpu: fit(mib, weights, request, states["native"], split, gpus) for gpu, mib in GPU_MIB.items()},
    )


def describe_schedule(kinds: Sequence[str]) -> str:
    """The layers' order with repeats folded: SWA SWA CSA HCA CSA HCA -> "2 SWA, 2 x (CSA, HCA)"."""
    pieces = []
    while kinds:
        single, pair = _repeats(kinds, 1), _repeats(kinds, 2)
        if single == 1 and pair > 1:
            pieces.append(f"{pair} x ({kinds[0]}, {kinds[1]})")
            kinds = kinds[2 * pair :]
        else:
            pieces.append(f"{single} {kinds[0]}")
            kinds = kinds[single:]
    return ", ".join(pieces)


def _repeats(kinds: Sequence[str], length: int) -> int:
    """How often the first `length` kinds follow one another from the start."""
    count = 1
    while kinds[count * length : (count + 1) * length] == kinds[:length]:
        count += 1
    return count


def count_parameters(config: ModelConfig, tensors: Tensors) -> dict[str, int]:
    """Parameters by part, in the order of `PARTS`. The hash layers' expert tables are no parameters.

    `tensors` tells whether the draft block is there.
    """
    counts = dict.fromkeys((part for _, part in PARTS), 0)
    for name, spec in weight_specs(config).items():
        if name in tensors and spec.kind != "int64":
            counts[_part(name)] += math.prod(spec.shape)
    return {part: count for part, count in counts.items() if count}


def _part(name: str) -> str:
    return next(part for text, part in PARTS if text in name)


def active_parameters(config: ModelConfig, parameters: dict[str, int]) -> int:
    """Parameters of the main model that one token uses: one row of the embedding, its experts, all the rest."""
    total = sum(parameters.values()) - parameters.get("draft block", 0)
    idle_experts = config.n_routed_experts - config.num_experts_per_tok
    idle = parameters["routed experts"] // config.n_routed_experts * idle_experts
    return total - idle - parameters["embedding"] + config.hidden_size


def count_files(tensors: Tensors) -> dict[str, Stored]:
    """Tensors and bytes by safetensors dtype, the largest first; I8 is packed fp4, F8_E8M0 its and fp8's scales."""
    counts: dict[str, Stored] = {}
    for dtype, shape in tensors.values():
        old = counts.get(dtype, Stored(0, 0))
        counts[dtype] = Stored(old.tensors + 1, old.bytes + math.prod(shape) * ITEM_BYTES.get(dtype, 1))
    return dict(sorted(counts.items(), key=lambda item: -item[1].bytes))


def _expanded(config: ModelConfig, tensors: Tensors, format: Literal["bf16", "fp32"]) -> int:
    """Bytes of the weights among `tensors` when none is kept in fp8 or fp4."""
    expanded = stored_tensors(config, WeightFormat(format, format))
    files = count_files({name: stored for name, stored in expanded.items() if name in tensors})
    return sum(part.bytes for part in files.values())


def state_bytes(config: ModelConfig, kind: str, contexts: Iterable[int]) -> StateBytes:
    """A request's state with window rows, entries and index keys kept as `kind` says.

    "bfloat16" and "float32" keep plain rows. "native" rows are fp8 with bf16 rotated channels and a scale byte per 64
    channels, filled up to 8 (FlashMLA's V4 layout), and its index keys fp4 with a scale byte per 32. Pending rows
    (window values and scores of CSA's compressor and the indexer's) and HCA's folds are fp32 always.
    """
    c = config
    if kind == "native":
        plain = c.head_dim - c.qk_rope_head_dim
        row = plain + 2 * c.qk_rope_head_dim + 8 * -(-plain // (8 * KV_BLOCK))
        key = c.index_head_dim // 2 + -(-c.index_head_dim // 32)
    else:
        size = {"bfloat16": 2, "float32": 4}[kind]
        row, key = c.head_dim * size, c.index_head_dim * size
    csa, hca = len(c.csa_layers), len(c.hca_layers)
    page = csa * CSA_PER_PAGE * (row + key) + hca * row
    pending = PENDING_RING * 4 * (c.head_dim + c.index_head_dim) * 4
    frontier = c.num_hidden_layers * c.sliding_window * row + csa * pending + hca * 3 * c.head_dim * 4
    return StateBytes(row, key, page / PAGE_TOKENS, frontier, {n: pages_for(n) * page + frontier for n in contexts})


def fit(mib: int, weights: int, request: int, state: StateBytes, split: int, gpus: int | None) -> GpuFit:
    """What GPUs of `mib` MiB hold: see `GpuFit`. `request` bytes must fit; numbers of GPUs divide `split`."""
    usable = int(mib * USABLE) << 20
    enough = (n for n in range(1, split + 1) if split % n == 0 and weights / n + request <= usable)
    if gpus is None:
        return GpuFit(usable, next(enough, None), None, {})
    free = usable - -(-weights // gpus)
    requests = {context: max(0, free // size) for context, size in state.request.items()}
    return GpuFit(usable, next(enough, None), free, requests)


# ------------------------------------------------------------------------------------------------ the tables


def show(report: Report, gpus: int | None, console: Console) -> None:
    """Print a report as tables."""
    total, active = _count(report.total_parameters), _count(report.active_parameters)
    console.print(f"[bold]{report.model}[/bold]: {total} parameters, {active} active per token")
    for table in (_shape(report), _parameters(report), _weights(report), _state(report), _gpus(report, gpus)):
        console.print()
        console.print(table)
    console.print(
        f"Weights split evenly, each request's native state on every GPU, {USABLE:.0%} of the memory used.", style="dim"
    )


def _table(title: str, *columns: str) -> Table:
    """A table whose first column holds names and the others numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _shape(report: Report) -> Table:
    c = report.config
    kinds = Counter(ratio.name for ratio in c.compress_ratios)
    experts, active, heads = c.n_routed_experts, c.num_experts_per_tok, c.num_attention_heads
    draft = "none"
    if "draft block" in report.parameters:
        draft = f"DSpark, {c.dspark.block_size} tokens a draft" if c.dspark else "MTP"
    rows = {
        "layers": f"{c.num_hidden_layers}: " + ", ".join(f"{kinds[ratio.name]} {ratio.name}" for ratio in Ratio),
        "order": report.schedule,
        "hidden size, streams": f"{c.hidden_size}, {c.hc_mult}",
        "attention": f"{heads} heads of {c.head_dim} channels, {c.qk_rope_head_dim} rotated; one KV head",
        "low ranks": f"query {c.q_lora_rank}, output {c.o_groups} x {c.o_lora_rank}",
        "window": f"{c.sliding_window} tokens",
        "indexer": f"{c.index_n_heads} heads of {c.index_head_dim} channels, the best {c.index_topk} entries",
        "experts": f"{experts} of width {c.moe_intermediate_size}, {active} a token; 1 shared",
        "routing": f"by token id in {c.num_hash_layers} layers, learned in {c.num_hidden_layers - c.num_hash_layers}",
        "draft": draft,
        "vocabulary": f"{c.vocab_size:,}",
        "context": f"{c.max_position_embeddings:,} tokens",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _parameters(report: Report) -> Table:
    table = _table("Parameters", "part", "count", "share")
    for part, count in report.parameters.items():
        if part != "draft block":
            table.add_row(part, _count(count), f"{count / report.total_parameters:.2%}")
    table.add_row("total", _count(report.total_parameters), "", style="bold")
    table.add_row("active per token", _count(report.active_parameters), "", style="bold")
    if "draft block" in report.parameters:
        table.add_row("draft block, besides", _count(report.parameters["draft block"]), "")
    return table


def _weights(report: Report) -> Table:
    table = _table("Weights", "format", "tensors", "bytes")
    for dtype, part in report.files.items():
        table.add_row(dtype, f"{part.tensors:,}", _bytes(part.bytes))
    for dtype, size in report.memory.items():
        tensors = f"{sum(part.tensors for part in report.files.values()):,}" if dtype == "as stored" else ""
        table.add_row(f"in memory {dtype}", tensors, _bytes(size), style="bold")
    return table


def _state(report: Report) -> Table:
    contexts = report.state["native"].request
    table = _table("State of a request", "rows kept as", "history per token", "frontier", *map(_tokens, contexts))
    for kind, state in report.state.items():
        sizes = [_bytes(size) for size in state.request.values()]
        table.add_row(kind, _bytes(state.history_per_token), _bytes(state.frontier), *sizes)
    return table


def _gpus(report: Report, gpus: int | None) -> Table:
    contexts = report.state["native"].request if gpus else {}
    requests = [f"requests of {_tokens(context)}" for context in contexts]
    asked = [f"free on each of {gpus}", *requests] if gpus else []
    table = _table("GPUs", "kind", "needed", *asked)
    for kind, gpu in report.gpus.items():
        row = [kind, "-" if gpu.needed is None else str(gpu.needed)]
        if gpu.free is not None:
            row += [_bytes(gpu.free) if gpu.free >= 0 else "too small", *(f"{n:,}" for n in gpu.requests.values())]
        table.add_row(*row)
    return table


def _count(number: int) -> str:
    """A count of parameters in millions, billions or trillions."""
    for factor, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:,}"


def _bytes(number: float) -> str:
    """Bytes in decimal units, as file sizes are given."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= factor:
            return f"{number / factor:.2f} {unit}"
    return f"{number:.0f} B"


def _tokens(number: int) -> str:
    """A context in binary K or M tokens where it is one."""
    for factor, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if number % factor == 0:
            return f"{number // factor}{unit}"
    return f"{number:,}"
