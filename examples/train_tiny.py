"""Train the tiny DeepSeek-V4 that ships with Leadline. The model is `leadline/reference.py`, unchanged.

    python examples/tiny_data.py --out build/tiny-data
    python examples/train_tiny.py --data build/tiny-data --out build/tiny --minutes 9
    python examples/export_tiny.py --weights build/tiny --data build/tiny-data --out leadline/tiny

Two stages share one set of parameters. The first learns in bf16, with every entry visible. The second rounds
activations, window rows, entries and index keys as official inference does (`native`), lets CSA layers read only the
best `index_topk` entries, and computes with weights rounded to their storage format, while the optimizer keeps the
unrounded ones: the straight-through estimator. So the shipped files behave as trained. Steps of short and long rows
take turns, each of documents that just fit into a row.

Indexers are not trained: after each step they are copies of their layers' attention, see `tiny_indexers.py`. With
`--minutes 0` the weights of `--init` get such indexers and stay as they are.

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
from tiny_indexers import check_indexers, copy_attention, fit_head_weights, freeze_indexers, is_indexer
from torch import Tensor, nn

from leadline import reference
from leadline.checkpoint.names import weight_specs
from leadline.config import ModelConfig
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
FIT_STEPS = 100
"""Steps from one fit of the index heads' weights to the next."""
FIT_ROWS = ((32, 512), (16, 1024))
"""Rows to fit to and their tokens, drawn once; FINAL_FIT times as many at the end."""
FINAL_FIT = 4
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
    run = Run(ModelConfig.from_dict(CONFIG), stages, arguments.tokens, arguments.device, arguments.learning_rate)
    if arguments.init:
        run.set_weights(
            {
                name: value
                for file in sorted(arguments.init.glob("*.safetensors"))
                for name, value in load_file(file).items()
            }
        )
    run.resume(arguments.out)
    if arguments.minutes:
        run.warm_up_all(data)
        print(f"ready after {time.monotonic() - start:.0f} s")
        if arguments.profile:
            profile(run, data)
        run.train(data, arguments.minutes * 60 - (time.monotonic() - start) - arguments.reserve, arguments.out)
    run.round_weights()
    run.fit_indexers(data, FINAL_FIT)
    run.save(arguments.out)
    run.export(arguments.out)
    if arguments.held_out:
        report = run.report(data, arguments.held_out)
        (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1))
    print(f"done after {time.monotonic() - start:.0f} s")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder written by tiny_data.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, state, curve and report")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="wall time of the whole run; 0 to fit indexers alone"
    )
    parser.add_argument("--reserve", type=float, default=30.0, help="seconds of it kept for saving and evaluation")
    parser.add_argument("--held-out", type=int, default=200, help="documents of each kind to measure; 0 for none")
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


# ---------------------------------------------------------------------------------------------------- losses

LOSSES = ("text", "answer", "draft")
"""Names of what is written to the curve, in nats a token: the model's loss outside and inside answers, and the MTP
block's against the model's own choices."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits [B, S, V] and token ids [B, S] -> [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def draft_loss(drafts: Tensor, logits: Tensor) -> Tensor:
    """The MTP block's logits and the model's own for the same tokens, both [B, S, V] -> cross-entropy [B, S].

    A draft is worth something if the model would say it, right or wrong, so the model's choices are the targets.
    """
    return -(logits.softmax(-1) * drafts.log_softmax(-1)).sum(-1)


def mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean; 0 where no weight is."""
    return (losses * weights).sum() / weights.sum().clamp(min=1)


# ------------------------------------------------------------------------------------------------------ run


class Run:
    """Everything that changes while training: parameters, optimizer, clock, curve.

    `weights` are the unrounded fp32 values that the optimizer moves; the models' parameters are what the forward
    pass computes with, either the same values or their rounding. All stages' models share their parameters, and
    native stages are one model. Indexers are no part of `weights`: the models' alone exist.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: tuple[Stage, ...],
        step_tokens: int,
        device: str,
        learning_rate: float,
    ) -> None:
        """`learning_rate`: the largest. Raises ValueError for a shape whose indexers cannot copy the attention."""
        check_indexers(config)
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
        self.parameters = {name: value for name, value in first.named_parameters() if not is_indexer(name)}
        self.weights = {name: value.detach().clone().requires_grad_() for name, value in self.parameters.items()}
        self.rounding = rounding_functions(config, self.weights)
        self.optimizer = make_optimizer(self.weights, learning_rate, device)
        self.replays: dict[tuple[int, int], Callable[[], tuple[Tensor, ...]]] = {}
        self.pool: Any = None
        self.fit_rows: list[Tensor] = []
        self.seconds, self.step, self.tokens = 0.0, 0, 0
        self.curve: list[dict[str, float]] = []

    def loss(self, stage: int, length: int, data: Data) -> tuple[Tensor, ...]:
        """The losses of one batch, on the device: what is minimised, then LOSSES in their order."""
        model = self.models[stage]
        rows, answers, counted = data.rows(self.step_tokens // length, length + 1)
        ids, next_ids = rows[:, :-1], rows[:, 1:]
        streams = model.streams(ids)
        logits = model.logits(model, streams)
        losses = cross_entropy(logits, next_ids)
        answer, text = ((kind & counted)[:, 1:].float() for kind in (answers, ~answers))
        main = mean(losses, text + ANSWER_WEIGHT * answer)
        drafts = model.draft_logits(streams[:, :-1], next_ids[:, :-1])
        draft = mean(draft_loss(drafts, logits[:, 1:].detach()), counted[:, 1:-1].float())
        return main + DRAFT_WEIGHT * draft, mean(losses, text), mean(losses, answer), draft

    def warm_up_all(self, data: Data) -> None:
        """`warm_up` of every kind of step that the run will take."""
        for stage, plan in enumerate(self.stages):
            if plan.until > (self.stages[stage - 1].until if stage else 0):
                for length in plan.lengths:
                    self.warm_up(stage, length, data)

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
                if self.step % FIT_STEPS == 0:
                    self.fit_indexers(data)
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
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        if self.stages[stage].native:
            self.round_weights()
        else:
            with torch.no_grad():
                torch._foreach_copy_(list(self.parameters.values()), list(self.weights.values()))
        copy_attention(self.models[stage])
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

    def fit_indexers(self, data: Data, times: int = 1) -> None:
        """Copy the indexers and fit their heads' weights, with the rounded weights in native stages' model.

        FIT_ROWS are drawn at the first call and `times` as many at others with `times`; what they load the experts
        with does not count.
        """
        model = self.models[-1]
        copy_attention(model)
        if not self.fit_rows or times > 1:
            self.fit_rows = [data.rows(count, length)[0] for _ in range(times) for count, length in FIT_ROWS]
        fit_head_weights(model, self.fit_rows)
        for gate in self.gates(len(self.models) - 1):
            gate.load.zero_()

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
        """Take the unrounded values of another run, by reference name, all but the indexers'."""
        missing, unexpected = self.models[0].load_state_dict(
            {name: value for name, value in values.items() if not is_indexer(name)}, strict=False
        )
        if unexpected or not all(map(is_indexer, missing)):
            raise ValueError(f"the weights do not fit: {[n for n in missing if not is_indexer(n)]} {unexpected}")
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
    """Hooks for balance; indexers without gradients; rotation tables on the device."""
    watch_load(model)
    freeze_indexers(model)
    for module in model.modules():
        if hasattr(module, "frequencies"):
            module.frequencies = module.frequencies.to(device)


def make_optimizer(weights: dict[str, Tensor], learning_rate: float, device: str) -> torch.optim.AdamW:
    """AdamW, where matrices decay; each group's "peak" is the largest learning rate."""
    groups = []
    for decay in (0.1, 0.0):
        chosen = [weight for weight in weights.values() if (weight.dim() > 1) == (decay > 0)]
        lr = torch.tensor(learning_rate, device=device)  # one each, for they are set in place
        groups.append({"params": chosen, "weight_decay": decay, "lr": lr, "peak": learning_rate})
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
