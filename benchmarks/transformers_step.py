"""Hugging Face transformers' DeepSeek-V4 beside ours on one GPU: `python benchmarks/transformers_step.py`.

Random weights in V4-Flash's geometry, cut to as many layers as transformers' fit in bf16 (13 GB each; ours have the
official fp8 and fp4). Theirs runs as it is called: eager attention, its cache, no graph. Each is alone on the GPU, one
after the other in one process; a step is from one token to the next, greedy.
"""

import argparse
import functools
import gc
import importlib.metadata
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache

from leadline.bench.floors import wait
from leadline.bench.latency import decode_row
from leadline.bench.prefill import prefill_row
from leadline.bench.subject import random_subject
from leadline.config import EngineConfig
from leadline.engine.random_weights import TINY, geometry
from leadline.presets import preset_dict

BATCHES = (1, 16, 64, 128)
PROMPT = 8192
RESERVE = 24e9
"""Bytes of the GPU that transformers' layers leave to its attention and cache."""
STEPS, WARM = 12, 3


def config_of(name: str, layers: int) -> dict[str, Any]:
    """transformers' `config.json` of a preset's first `layers` layers; of the smallest sizes for "tiny"."""
    raw = {key: value for key, value in preset_dict("flash").items() if key != "quantization_config"}
    raw |= {"num_hidden_layers": layers, "compress_ratios": raw["compress_ratios"][:layers]}
    if name == TINY:
        raw |= {"hidden_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 8, "vocab_size": 512}
        raw |= {"num_attention_heads": 4, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "index_n_heads": 4}
    return raw


def layers_that_fit(raw: dict[str, Any], free: float) -> int:
    """How many bf16 layers `free` bytes hold beside the embedding and the head."""
    expert = 3 * raw["hidden_size"] * raw["moe_intermediate_size"]
    layer = 2 * (expert * (raw["n_routed_experts"] + 1) + 1.2e8)
    return int((free - RESERVE - 4 * raw["vocab_size"] * raw["hidden_size"]) // layer)


def theirs(raw: dict[str, Any], device: torch.device) -> DeepseekV4ForCausalLM:
    """transformers' model with its own initial weights; hash tables, which it leaves empty, are drawn."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = DeepseekV4ForCausalLM._from_config(DeepseekV4Config(**raw), attn_implementation="eager")
    torch.set_default_dtype(torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            order = torch.rand(len(buffer), raw["n_routed_experts"], device=device).argsort(1)
            buffer.copy_(order[:, : buffer.shape[1]])
    return model.eval()


class Run:
    """A batch of random prompts in transformers' cache."""

    def __init__(self, model: DeepseekV4ForCausalLM, batch: int, tokens: int, chunk: int) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.ids = torch.randint(0, model.config.vocab_size, (batch, tokens), device=model.device)
        self.chunk = chunk

    def prompt(self) -> Tensor:
        """Run the prompts, `chunk` tokens of each at a time: the next tokens [B, 1]."""
        for part in self.ids.split(self.chunk, 1):
            token = self.step(part)
        return token

    def step(self, ids: Tensor) -> Tensor:
        """Run tokens [B, S] and take the most probable next ones [B, 1]."""
        logits = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long a call and all that it starts on the device take."""
    wait(device)
    begun = perf_counter()
    work()
    wait(device)
    return perf_counter() - begun


@torch.inference_mode()
def their_figures(model: DeepseekV4ForCausalLM, context: int, prompt: int) -> dict[str, float]:
    """Milliseconds of a step by batch, and tokens per second of a prompt; what fails is said and left out."""
    figures: dict[str, float] = {}

    def decode(batch: int) -> float:
        run = Run(model, batch, context, max(16, 4096 // batch))
        token = run.prompt()
        times = []
        for _ in range(WARM + STEPS):
            begun = perf_counter()
            token = run.step(token)
            wait(model.device)
            times.append(perf_counter() - begun)
        return statistics.median(times[WARM:]) * 1e3

    def prefill() -> float:
        seconds(Run(model, 1, prompt, 2048).prompt, model.device)
        return prompt / seconds(Run(model, 1, prompt, 2048).prompt, model.device)

    work: dict[str, Callable[[], float]] = {str(batch): functools.partial(decode, batch) for batch in BATCHES}
    for name, measure in (work | {"prompt": prefill}).items():
        try:
            figures[name] = measure()
            print(f"transformers, {name}: {figures[name]:,.1f}", flush=True)
        except (RuntimeError, ValueError) as error:  # out of memory, mostly
            print(f"transformers, {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return figures


def our_figures(name: str, layers: int, context: int, prompt: int) -> dict[str, float]:
    """The same of ours, as `benchmarks/decode_step.py` measures it."""
    config = EngineConfig(max_running=max(BATCHES), step_tokens=prompt, chunk_tokens=prompt, device="auto")
    subject = random_subject(config, geometry(name, layers), name, layers, progress=False)
    subject.prepare(0)
    figures = {str(batch): decode_row(subject, batch, context, 48, 0).median_ms for batch in BATCHES}
    figures["prompt"] = prefill_row(subject, prompt, 0).tokens_per_second
    subject.engine.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=8, help="the most layers")
    parser.add_argument("--model", default="flash", choices=("flash", TINY))
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 60e9
    layers = min(options.layers, layers_that_fit(config_of(options.model, 1), free))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"
    version = importlib.metadata.version("transformers")
    print(f"{options.model}, {layers} layers, {where}, torch {torch.__version__}, transformers {version}", flush=True)
    model = theirs(config_of(options.model, layers), device)
    their = their_figures(model, options.context, options.prompt)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    ours = our_figures(options.model, layers, options.context, options.prompt)
    print(f"{'':>34} {'ours':>12} {'transformers':>12} {'ratio':>7}")
    for name, figure in ours.items():
        what = f"step of {name} at {options.context:,}, ms"
        if name == "prompt":
            what = f"prompt of {options.prompt:,}, tokens/s"
        other = their.get(name)
        ratio = "-" if other is None else f"{(other / figure if name != 'prompt' else figure / other):.1f}"
        print(f"{what:>34} {figure:12,.2f} {'-' if other is None else f'{other:,.2f}':>12} {ratio:>7}")


if __name__ == "__main__":
    main()
