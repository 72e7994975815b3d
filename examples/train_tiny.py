"""Train the tiny DeepSeek-V4 that ships with Leadline. The model is `leadline/reference.py`, unchanged.

    python examples/tiny_data.py --out build/tiny-data
    python examples/train_tiny.py --data build/tiny-data --out build/tiny --minutes 9
    python examples/export_tiny.py --weights build/tiny --data build/tiny-data --out leadline/tiny

Two stages share one set of parameters. The first learns in bf16, with every entry visible. The second rounds
activations, window rows, entries and index keys as official inference does (`native`), lets CSA layers read only the
best `index_topk` entries, and computes with weights rounded to their storage format, while the optimizer keeps the
unrounded ones: the straight-through estimator. So the shipped files behave as trained. Steps of short and long rows
take turns, each of documents that just fit into a row. `tiny_indexers.py` can give the second good indexers to begin
with: then run the first alone (`--native-from 1`), that script, and the second alone (`--init`, `--native-from 0`).

What an answer is made of counts more than other text (`ANSWER_WEIGHT`): it is a small share of all tokens, and most
others, such as a list's facts, cannot be foretold.

The training time, not a number of steps, sets the schedule. A run that was stopped goes on from `--out`.
"""

import argparse
import csv
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from banded import use_banded_attention
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tiny_eval import Data, evaluate
from torch import Tensor, nn

from leadline import reference
from leadline.checkpoint.names import weight_specs
from leadline.config import ModelConfig, Ratio
from leadline.formats import fp4_round_trip, fp8_dequantize, fp8_quantize_weight
from leadline.reference import Reference

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 3072,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 65536,
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

ANSWER_WEIGHT = 8.0
"""What a token of an answer counts in the loss; others count 1."""
DRAFT_WEIGHT = 0.2
"""Share of the MTP block's loss: it also trains the main model to look one token further."""
BALANCE_RATE = 1e-3
"""Change of an expert's bias per step, up when it got less than its share of tokens, else down (DeepSeek-V3)."""
PARTS = ("hyper_mix", "collapse", "expand", "rms_norm", "rotate", "clamped_swiglu", "fp8_round_trip")
"""Functions of the reference that gain most from `torch.compile`."""
EXPORT_BYTES = 15 * 2**20
"""Largest file of fp32 weights that is written."""


@dataclass(frozen=True)
class Stage:
    """A part of the run: until `until` of the training time, steps with rows of each of `lengths` tokens in turn."""

    until: float
    lengths: tuple[int, ...]
    native: bool


def main() -> None:
    arguments = read_arguments()
    start = time.monotonic()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # one graph per shape
    if arguments.compile:
        compile_parts()
    short, long = (arguments.length, 2 * arguments.length), (4 * arguments.length, 16 * arguments.length)
    stages = (Stage(arguments.native_from, short, native=False), Stage(1.0, (*short, *long), native=True))
    use_banded_attention()
    data = Data(arguments.data / "data.npz", arguments.device)
    rates = (arguments.learning_rate, arguments.index_learning_rate)
    run = Run(ModelConfig.from_dict(CONFIG), stages, arguments.tokens, arguments.device, rates)
    if arguments.init:
        run.set_weights(
            {
                name: value
                for file in sorted(arguments.init.glob("*.safetensors"))
                for name, value in load_file(file).items()
            }
        )
    run.resume(arguments.out)
    for stage, plan in enumerate(stages):
        for length in plan.lengths:
            if plan.until > (stages[stage - 1].until if stage else 0):
                run.warm_up(stage, length, data)
    print(f"ready after {time.monotonic() - start:.0f} s, {sum(p.numel() for p in run.weights.values()):,} parameters")
    if arguments.profile:
        profile(run, data)
    run.train(data, arguments.minutes * 60 - (time.monotonic() - start) - arguments.reserve, arguments.out)
    run.save(arguments.out)
    run.export(arguments.out)
    report = run.report(data, arguments.held_out)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    print(f"done after {time.monotonic() - start:.0f} s")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder written by tiny_data.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, state, curve and report")
    parser.add_argument("--minutes", type=float, default=9.0, help="wall time of the whole run")
    parser.add_argument("--reserve", type=float, default=30.0, help="seconds of it kept for saving and evaluation")
    parser.add_argument("--held-out", type=int, default=200, help="documents of each kind to measure")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens a step")
    parser.add_argument(
        "--length",
        type=int,
        default=256,
        help="tokens of the shortest rows; the others have 2, 4 and 16 times as many",
    )
    parser.add_argument("--native-from", type=float, default=0.45, help="share of the time after which rounding begins")
    parser.add_argument("--init", type=Path, help="folder with the weights of another run to begin with")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--index-learning-rate", type=float, default=3e-4, help="that of the indexers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", action="store_true", help="print where the time of some steps goes")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# ---------------------------------------------------------------------------------------------------- start


def initialise(model: Reference) -> None:
    """Start values: small embeddings and outputs, streams that keep apart, hash experts drawn at random."""
    config = model.config
    depth = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        model.embed.weight.mul_(0.3)
        model.head.weight.mul_(0.3)
        for layer in (*model.layers, *model.mtp):
            for weight in (layer.attn.wo_b.weight, layer.ffn.experts.w2, layer.ffn.shared_experts.w2.weight):
                weight.mul_(depth)
            for base in (layer.hc_attn_base, layer.hc_ffn_base):
                base[2 * config.hc_mult :] += 2 * torch.eye(config.hc_mult).flatten()
            if layer.ffn.gate.hashed:
                order = torch.rand(config.vocab_size, config.n_routed_experts).argsort(-1)
                layer.ffn.gate.tid2eid.copy_(order[:, : config.num_experts_per_tok])


def watch_load(model: Reference) -> None:
    """Make every gate with a bias count the tokens of each of its experts in `gate.load`."""

    def count(gate: nn.Module, _: tuple[Tensor, ...], weights: Tensor) -> None:
        gate.load.add_((weights.detach() > 0).sum((0, 1)))

    for layer in (*model.layers, *model.mtp):
        gate = layer.ffn.gate
        if not gate.hashed:
            gate.register_buffer("load", torch.zeros(gate.weight.shape[0], device=gate.weight.device), persistent=False)
            gate.register_forward_hook(count)


def detach_indexers(model: Reference) -> None:
    """Let the indexers' own loss train the indexers alone."""
    for layer in model.layers:
        if layer.attn.ratio == Ratio.CSA:
            layer.attn.indexer.register_forward_pre_hook(lambda _, inputs: tuple(x.detach() for x in inputs))


# ---------------------------------------------------------------------------------------------------- losses

LOSSES = ("text", "answer", "draft", "index")
"""Names of what is written to the curve, in nats a token: the model's loss outside and inside answers, the MTP block's
and the indexers'."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits [B, S, V] and token ids [B, S] -> [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean; 0 where no weight is."""
    return (losses * weights).sum() / weights.sum().clamp(min=1)


class IndexLoss:
    """Observes a forward pass and sums up how far each indexer's scores are from the attention they must predict.

    Top-k selection passes no gradient, so an indexer learns from this loss alone.
    """

    def __init__(self) -> None:
        self.scores: Tensor | None = None
        self.losses: list[Tensor] = []

    def __call__(self, name: str, value: Tensor) -> None:
        if name.endswith("index_scores"):
            self.scores = value
        elif name.endswith("attn.wanted") and self.scores is not None:
            self.losses.append(index_loss(self.scores, value))
            self.scores = None


def index_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    """Index scores [B, S, C] and the attention that entries would get if all could be read [B, S, C].

    The cross-entropy between the squares of that attention, made to sum to 1, and the softmax of the scores. Both the
    squares and the mean over queries, where each counts by its largest attention, look at what top-k must not miss:
    few queries want one entry out of a thousand, and most spread their attention over many of them.

    What the selection left out counts like the rest. If it counted as not wanted, an entry once missed would be scored
    down for ever.
    """
    share = wanted.square()
    share = share / share.sum(-1, keepdim=True).clamp(min=1e-9)
    closed = (torch.arange(scores.shape[1], device=scores.device) + 1) // Ratio.CSA
    visible = torch.arange(scores.shape[2], device=scores.device) < closed[:, None]
    predicted = scores.masked_fill(~visible, -1e9).log_softmax(-1)
    return mean(-(share * predicted).sum(-1), wanted.amax(-1))


# ------------------------------------------------------------------------------------------------------ run


class Run:
    """Everything that changes while training: parameters, optimizer, clock, curve.

    `weights` are the unrounded fp32 values that the optimizer moves; the models' parameters are what the forward
    pass computes with, either the same values or their rounding. All stages' models share their parameters, and
    native stages are one model.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: tuple[Stage, ...],
        step_tokens: int,
        device: str,
        rates: tuple[float, float],
    ) -> None:
        """`rates`: the largest learning rate, and that of the indexers."""
        self.stages, self.step_tokens, self.device = stages, step_tokens, device
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        see_all = dataclasses.replace(config, index_topk=config.max_position_embeddings)
        first = Reference(see_all, dtype=dtype)
        initialise(first)
        first.to(device)
        second = Reference(config, native=True, dtype=dtype).to(device)
        second.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        for model in (first, second):
            prepare(model, device)
        self.models = [second if plan.native else first for plan in stages]
        self.parameters = dict(first.named_parameters())
        self.weights = {name: value.detach().clone().requires_grad_() for name, value in self.parameters.items()}
        self.rounding = rounding_functions(config, self.weights)
        self.optimizer = make_optimizer(self.weights, rates, device)
        self.replays: dict[tuple[int, int], Callable[[], tuple[Tensor, ...]]] = {}
        self.pool: Any = None
        self.seconds, self.step, self.tokens = 0.0, 0, 0
        self.curve: list[dict[str, float]] = []

    def loss(self, stage: int, length: int, data: Data) -> tuple[Tensor, ...]:
        """The losses of one batch, on the device: what is minimised, then LOSSES in their order."""
        model = self.models[stage]
        rows, answers, counted = data.rows(self.step_tokens // length, length + 2)
        ids, next_ids, targets = rows[:, :-2], rows[:, 1:-1], rows[:, 2:]
        index = IndexLoss()
        streams = model.streams(ids, observe=index)
        losses = cross_entropy(model.logits(model, streams), next_ids)
        answer, text = ((kind & counted)[:, 1:-1].float() for kind in (answers, ~answers))
        main = mean(losses, text + ANSWER_WEIGHT * answer)
        draft = mean(cross_entropy(model.draft_logits(streams, next_ids), targets), counted[:, 2:].float())
        indexing = torch.stack(index.losses).mean()
        total = main + DRAFT_WEIGHT * draft + indexing
        return total, mean(losses, text), mean(losses, answer), draft, indexing

    def warm_up(self, stage: int, length: int, data: Data) -> None:
        """Compile a step of a stage and, on a GPU, record it; the weights stay as they are."""
        begin = time.monotonic()
        self.set_learning_rate(0.0)
        if self.device == "cuda":
            self.replays[stage, length] = self.record(stage, length, data)
        else:
            self.compute(stage, length, data)
        print(f"stage {stage + 1}, rows of {length}: ready in {time.monotonic() - begin:.0f} s", flush=True)

    def record(self, stage: int, length: int, data: Data) -> Callable[[], tuple[Tensor, ...]]:
        """One step as a CUDA graph: thousands of launches become one, and the host never waits."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.compute(stage, length, data)
        torch.cuda.current_stream().wait_stream(side)
        self.clear_gradients()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            losses = self.compute(stage, length, data)
        self.pool = graph.pool()

        def replay() -> tuple[Tensor, ...]:
            graph.replay()
            return losses

        return replay

    def train(self, data: Data, seconds: float, out: Path) -> None:
        """Train until the clock, which counts earlier runs too, shows `seconds` more than now."""
        end, begin, log = self.seconds + seconds, time.monotonic() - self.seconds, Log(self.device)
        with progress_bar() as bar:
            task = bar.add_task("training", total=end, completed=self.seconds)
            while self.seconds < end:
                share = self.seconds / end
                stage = next(i for i, plan in enumerate(self.stages) if share < plan.until)
                length = self.stages[stage].lengths[self.step % len(self.stages[stage].lengths)]
                losses = self.update(stage, length, share, data)
                self.seconds = time.monotonic() - begin
                if self.step % 49 == 0 or self.step < 3:  # an odd number: all lengths come up
                    self.curve.append(log.line(self, stage, length, losses, share))
                    bar.update(task, completed=self.seconds, description=f"answers {self.curve[-1]['answer']:.3f}")
                if self.step % 2000 == 0:
                    self.save(out)
        write_curve(self.curve, out)

    def update(self, stage: int, length: int, share: float, data: Data) -> tuple[Tensor, ...]:
        """One step of the optimizer at `share` of the training time."""
        self.set_learning_rate(min(1.0, (self.step + 1) / 200) * max(0.02, 1 - share))
        replay = self.replays.get((stage, length))
        losses = replay() if replay else self.compute(stage, length, data)
        self.step += 1
        self.tokens += self.step_tokens
        return losses

    def compute(self, stage: int, length: int, data: Data) -> tuple[Tensor, ...]:
        """The device's part of one step. Nothing here reads a value back, so that it can be recorded."""
        self.clear_gradients()
        losses = self.loss(stage, length, data)
        losses[0].backward()
        for name, weight in self.weights.items():
            weight.grad = self.parameters[name].grad
        for part in (True, False):  # each by itself: neither loss may shrink the other's steps
            torch.nn.utils.clip_grad_norm_([w for name, w in self.weights.items() if is_indexer(name) == part], 1.0)
        self.optimizer.step()
        if self.stages[stage].native:
            self.round_weights()
        else:
            with torch.no_grad():
                torch._foreach_copy_(list(self.parameters.values()), list(self.weights.values()))
        self.balance(stage)
        return tuple(loss.detach() for loss in losses)

    def set_learning_rate(self, share: float) -> None:
        """Set each group's learning rate to a share of its largest."""
        for group in self.optimizer.param_groups:
            group["lr"].fill_(share * group["peak"])

    def clear_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.weights[name].grad = None

    @torch.no_grad()
    def round_weights(self) -> None:
        """Set the models' parameters to the values that a checkpoint would hold."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.rounding[name](self.weights[name]))

    def gates(self, stage: int) -> list[nn.Module]:
        model = self.models[stage]
        return [layer.ffn.gate for layer in (*model.layers, *model.mtp) if not layer.ffn.gate.hashed]

    @torch.no_grad()
    def balance(self, stage: int) -> None:
        for gate in self.gates(stage):
            gate.bias.add_((gate.load.mean() - gate.load).sign(), alpha=BALANCE_RATE)
            gate.load.zero_()

    def report(self, data: Data, most: int) -> dict[str, dict[str, dict[str, float]]]:
        """Held-out figures as trained, as shipped (rounded), and as shipped with nothing but the window to read."""
        first, second = self.models[0], self.models[-1]
        with torch.compiler.set_stance("force_eager"):  # rows of many lengths are not worth compiling for
            with torch.no_grad():
                torch._foreach_copy_(list(self.parameters.values()), list(self.weights.values()))
            trained = evaluate(first, data, most=most)
            self.round_weights()
            shipped, window_only = (evaluate(second, data, most=most, window_only=alone) for alone in (False, True))
        return {"trained": trained, "shipped": shipped, "window only": window_only}

    def state(self) -> dict[str, Tensor]:
        """All values by reference name, unrounded."""
        values = dict(self.models[0].state_dict())
        return {name: self.weights.get(name, value).detach().cpu().contiguous() for name, value in values.items()}

    def save(self, out: Path) -> None:
        """Write what `resume` needs; the file appears whole or not at all."""
        state = {"weights": self.state(), "optimizer": self.optimizer.state_dict(), "curve": self.curve}
        state |= {"seconds": self.seconds, "step": self.step, "tokens": self.tokens}
        torch.save(state, out / "state.pt.part")
        (out / "state.pt.part").replace(out / "state.pt")

    def resume(self, out: Path) -> None:
        """Go on from the state in `out`, if there is one."""
        if not (out / "state.pt").exists():
            return
        state = torch.load(out / "state.pt", map_location=self.device, weights_only=True)
        self.set_weights(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.curve, self.seconds, self.step, self.tokens = (state[k] for k in ("curve", "seconds", "step", "tokens"))
        print(f"going on from step {self.step}")

    def set_weights(self, values: dict[str, Tensor]) -> None:
        """Take the unrounded values of another run, by reference name."""
        self.models[0].load_state_dict(values)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(values[name])

    def export(self, out: Path) -> None:
        """Write the unrounded values in files of at most `EXPORT_BYTES`."""
        parts: list[dict[str, Tensor]] = [{}]
        for name, value in self.state().items():
            size = sum(tensor.nbytes for tensor in parts[-1].values())
            if size + value.nbytes > EXPORT_BYTES:
                parts.append({})
            parts[-1][name] = value
        for number, part in enumerate(parts, start=1):
            save_file(part, out / f"weights-{number}.safetensors")


def prepare(model: Reference, device: str) -> None:
    """Hooks for balance and indexers; rotation tables on the device."""
    watch_load(model)
    detach_indexers(model)
    for module in model.modules():
        if hasattr(module, "frequencies"):
            module.frequencies = module.frequencies.to(device)


def is_indexer(name: str) -> bool:
    return ".attn.indexer." in name


def make_optimizer(weights: dict[str, Tensor], rates: tuple[float, float], device: str) -> torch.optim.AdamW:
    """AdamW, where matrices decay; each group's "peak" is its largest learning rate, `rates[1]` for indexers."""
    groups = []
    for indexers, rate in ((False, rates[0]), (True, rates[1])):
        for decay in (0.1, 0.0):
            chosen = [w for name, w in weights.items() if is_indexer(name) == indexers and (w.dim() > 1) == (decay > 0)]
            lr = torch.tensor(rate, device=device)  # one each, for they are set in place
            groups.append({"params": chosen, "weight_decay": decay, "lr": lr, "peak": rate})
    on_gpu = device == "cuda"
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)


def compile_parts() -> None:
    """Compile the reference's chains of elementwise operations, each by itself.

    Whole layers as one graph each would run faster, but take minutes to compile.
    """
    for name in PARTS:
        setattr(reference, name, torch.compile(getattr(reference, name)))


def rounding_functions(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Callable[[Tensor], Tensor]]:
    """For each parameter of the reference, the function that rounds it to its storage format."""
    functions = {
        "fp8": lambda w: fp8_dequantize(*fp8_quantize_weight(w), torch.float32),
        "expert": fp4_round_trip,
        "plain_bf16": lambda w: w.bfloat16().float(),
        "plain_fp32": lambda w: w,
    }
    specs = weight_specs(config)
    stacked = {
        name: name.replace(".experts.", ".experts.0.") + ".weight" for name in weights if ".ffn.experts." in name
    }
    return {name: functions[specs[stacked.get(name, name)].kind] for name in weights}


# ---------------------------------------------------------------------------------------------------- show


class Log:
    """Prints and records where the run is; reading the losses is the only wait for the device."""

    def __init__(self, device: str) -> None:
        self.device, self.tokens, self.time = device, 0, time.monotonic()

    def line(self, run: Run, stage: int, length: int, losses: tuple[Tensor, ...], share: float) -> dict[str, float]:
        values = torch.stack([loss.detach().float() for loss in losses]).tolist()
        now, done = time.monotonic(), run.tokens
        rate = (done - self.tokens) / (now - self.time)
        self.tokens, self.time = done, now
        entry = dict(zip(LOSSES, values[1:], strict=True))
        entry |= {
            "length": length,
            "step": run.step,
            "seconds": round(run.seconds, 1),
            "tokens": done,
            "rate": round(rate),
        }
        figures = " ".join(f"{name} {entry[name]:.3f}" for name in LOSSES)
        print(
            f"step {run.step:6} stage {stage + 1} rows of {length:4} {share:6.1%} {figures} {rate:,.0f} tokens/s",
            flush=True,
        )
        return entry


def progress_bar() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), "{task.percentage:.1f}%", TimeRemainingColumn())


def write_curve(curve: list[dict[str, float]], out: Path) -> None:
    """`curve.csv`, and `curve.png` where matplotlib is installed."""
    with (out / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(curve[0]))
        writer.writeheader()
        writer.writerows(curve)
    try:
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name in LOSSES:
        axes.plot([entry["tokens"] / 1e6 for entry in curve], [entry[name] for entry in curve], label=name)
    axes.set(xlabel="million tokens", ylabel="nats", ylim=(0, None))
    axes.legend()
    figure.savefig(out / "curve.png", dpi=120)


def profile(run: Run, data: Data) -> None:
    """Print how long a step of each stage takes, how busy it keeps the GPU, and its most costly operations."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    run.set_learning_rate(0.0)
    for (stage, length), replay in run.replays.items():
        synchronize(run.device)
        begin = time.monotonic()
        for _ in range(10):
            replay()
        synchronize(run.device)
        seconds = (time.monotonic() - begin) / 10
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"stage {stage + 1}, rows of {length}: {seconds * 1e3:.1f} ms a step, "
            f"{run.step_tokens / seconds:,.0f} tokens/s, {memory:.0f} GiB"
        )
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(3):
                replay()
            synchronize(run.device)
        kernels = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        busy = sum(event.self_device_time_total for event in kernels) / 3000
        print(f"GPU busy {busy:.1f} ms a step, {sum(event.count for event in kernels) // 3} kernels; the longest:")
        for event in kernels[:25]:
            print(f"{event.self_device_time_total / 3000:8.3f} ms {event.count // 3:5} x {event.key[:90]}")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
