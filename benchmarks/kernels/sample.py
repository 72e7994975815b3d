"""sample on a GPU: tokens against the definition on the CPU, and times at V4's vocabulary."""

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.kernels.timing import READ_BANDWIDTH, attempt, copies_of, table, time_us
from leadline.engine.sampling import SamplingParams, SamplingRow, sampling_tensors
from leadline.kernels import sample as definition
from leadline.kernels.gpu import sample as gpu

VOCAB = 129_280
ROWS = 128
KINDS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0.0)],
    "plain": [SamplingParams()],
    "top_k 50": [SamplingParams(top_k=50)],
    "top_p 0.9": [SamplingParams(top_p=0.9)],
    "top_k 40, top_p 0.95": [SamplingParams(top_k=40, top_p=0.95)],
    "min_p 0.05": [SamplingParams(min_p=0.05)],
    "hot top_p": [SamplingParams(top_p=0.9, temperature=2.0)],
    "penalised": [SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 2.0})],
    "mixed": [
        SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.95, temperature=0.6),
        SamplingParams(top_k=40), SamplingParams(top_k=64, top_p=0.9), SamplingParams(min_p=0.1),
        SamplingParams(top_p=0.8, temperature=1.3), SamplingParams(temperature=0.7),
    ],
}  # fmt: skip


def logits_like(kind: str, rows: int, seed: int) -> Tensor:
    """Logits [rows, VOCAB]: "peaked" as a trained model's (a few nats of entropy), or "flat"."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, VOCAB, generator=generator, device="cuda")
    if kind == "flat":
        return x
    x *= 2.5
    heads = torch.randint(0, VOCAB, (rows, 40), generator=generator, device="cuda")
    return x.scatter(1, heads, 18 - 8 * torch.rand(rows, 40, generator=generator, device="cuda"))


def how(params: list[SamplingParams], rows: int, seed: int = 0) -> definition.SamplingTensors:
    """Tensors for `rows` rows that use `params` in turn."""
    counts = definition.TokenCounts.empty(rows, VOCAB, "cuda") if any(p.penalised for p in params) else None
    if counts is not None:
        counts.output.random_(0, 50).sub_(47).clamp_(min=0)
    listed = [SamplingRow(params[i % len(params)], seed + 977 * i, i, slot=i) for i in range(rows)]
    return sampling_tensors(listed, counts, "cuda")


def check(name: str, shape: str) -> None:
    """Tokens against the definition on the CPU; a row may differ where rounding decides, so a few are no alarm."""
    rows = 16
    logits = logits_like(shape, rows, 1)
    tensors = how(KINDS[name], rows)
    got = gpu.sample(logits, tensors).cpu()
    want = definition.sample(logits.cpu(), _moved(tensors))
    differ = int((got != want).sum())
    print(f"{'OK ' if differ == 0 else 'BAD'} {name}, {shape}: {differ} of {rows} rows differ", flush=True)


def _moved(tensors: definition.SamplingTensors) -> definition.SamplingTensors:
    moved = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in vars(tensors).items()}
    for key in ("penalties", "bias"):
        part = moved[key]
        if part is not None:
            fields = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in vars(part).items()}
            if key == "penalties":
                fields["counts"] = replace(
                    part.counts, output=part.counts.output.cpu(), prompt=part.counts.prompt.cpu()
                )
            moved[key] = replace(part, **fields)
    return definition.SamplingTensors(**moved)


def measure(name: str, shape: str, rows: int) -> list[object]:
    """A row of the table; the floor is one pass over the logits."""
    size = rows * VOCAB * 4
    cases = [logits_like(shape, rows, seed) for seed in range(copies_of(size, 8))]
    tensors = how(KINDS[name], rows)
    time = time_us(lambda i: gpu.sample(cases[i], tensors), len(cases), 10, 9)
    return [name, shape, rows, time, size / READ_BANDWIDTH * 1e6, time / (size / READ_BANDWIDTH * 1e6)]


def main() -> None:
    """Checks, then times."""
    for shape in ("peaked", "flat"):
        for name in KINDS:
            attempt(f"check {name}", lambda name=name, shape=shape: check(name, shape))
    rows = []
    for shape, count in (("peaked", ROWS), ("flat", ROWS), ("peaked", 1), ("peaked", 16)):
        names = list(KINDS) if count == ROWS else ["greedy", "plain", "mixed", "top_p 0.9"]
        made = [attempt(name, lambda name=name, s=shape, n=count: measure(name, s, n)) for name in names]
        rows += [row for row in made if row]
    table("sample", ["kind", "logits", "rows", "us", "floor us", "ratio"], rows)


if __name__ == "__main__":
    main()
