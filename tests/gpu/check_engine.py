"""The whole engine on a GPU: against itself on the CPU, against `transformers`, and against known answers.

    python -m tests.gpu.check_engine

A script, since a GPU machine may have no pytest. Prints a line for each check and ends with 1 if one is bad.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from huggingface import HuggingFace
from models import native_weights, random_config, random_reference
from schedules import Job, play, random_jobs

from leadline import LLM, SamplingParams
from leadline.checkpoint.names import WeightFormat
from leadline.checkpoint.writer import write_native
from leadline.config import EngineConfig
from leadline.engine.engine import Engine
from leadline.engine.llm import Result
from leadline.engine.memory import plan_memory
from leadline.engine.request import Request
from leadline.model.state import State

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0)
PROMPTS = (
    "Once upon a time",
    "The three",
    "Max was very kind, and everyone knew it. Every morning he ate honey and looked out of the window. " * 12,
    "a",
)
EXACT_ERROR = 1e-3
"""Of a log-probability in fp32, against another implementation in fp32: sums in another order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--configs", type=int, default=6, help="random models to compare with transformers")
    parser.add_argument("--seconds", type=float, default=20, help="of random batches")
    parser.add_argument("--minutes", type=float, help="of random schedules, and nothing else")
    parser.add_argument("--device", default="cuda", help="of random schedules")
    arguments = parser.parse_args()
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "greedy tokens as on the CPU": tokens_as_on_the_cpu,
        "transformers on the GPU": lambda: as_transformers(arguments.configs),
        "any batch, any cut, any prefix": lambda: any_batch(arguments.seconds),
        "the same bits in any batch and cut, native": lambda: same_bits("native"),
        "the same bits in any batch and cut, exact": lambda: same_bits("exact"),
        "native numerics": native,
    }
    if arguments.minutes is not None:
        checks = {"random schedules": lambda: random_schedules(arguments.device, 60 * arguments.minutes)}
    bad = 0
    for name, check in checks.items():
        begin = time.monotonic()
        try:
            problems = list(check())
        except Exception:
            problems = [traceback.format_exc()[-1500:]]
        bad += bool(problems)
        print("BAD" if problems else "OK ", name, f"({time.monotonic() - begin:.0f} s)", *problems[:6], flush=True)
    sys.exit(1 if bad else 0)


def exact(device: str, **options: object) -> LLM:
    """The built-in model in fp32 and exact numerics; few requests at once, so that there is little to record."""
    return LLM(device=device, dtype="float32", numerics="exact", **{"max_running": 24, **options})


def tokens_as_on_the_cpu() -> Iterator[str]:
    """Greedy tokens and their log-probabilities, batched and with prompts cut into chunks."""
    wanted = exact("cpu").generate(PROMPTS, GREEDY)
    got = exact("cuda", chunk_tokens=40).generate(PROMPTS, GREEDY)
    for prompt, want, have in zip(PROMPTS, wanted, got, strict=True):
        if want.token_ids != have.token_ids:
            yield f"{prompt[:20]!r}: {have.token_ids[:12]} instead of {want.token_ids[:12]}"
        pairs = zip(want.logprobs or (), have.logprobs or (), strict=False)
        error = max(abs(a.logprob - b.logprob) for a, b in pairs)
        if error > EXACT_ERROR:
            yield f"{prompt[:20]!r}: log-probabilities differ by {error:.1e}"


def as_transformers(configs: int) -> Iterator[str]:
    """Log-probabilities of prompt tokens of random small models, next to `transformers` on the same GPU in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for number in range(configs):
        raw = random_config(random.Random(number))
        reference = random_reference(raw, seed=number)
        oracle = HuggingFace(raw, reference)
        oracle.model.cuda()
        ids = torch.randint(0, raw["vocab_size"], (300,), generator=torch.Generator().manual_seed(number))
        with torch.inference_mode():
            logits = oracle.model(ids[None].cuda(), use_cache=False).logits[0].float()
        want = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None].cuda())[:, 0].cpu()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            write_native(path, raw, native_weights(reference).items(), WeightFormat("fp32", "fp32"))
            options = {"dtype": "float32", "numerics": "exact", "max_running": 1, "state_bytes": 1 << 28}
            llm = LLM(str(path), device="cuda", chunk_tokens=77, **options)
            params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
            found = llm.generate([ids.numpy()], params)[0].prompt_logprobs
        assert found is not None
        have = torch.tensor([entry.logprob for entry in found[1:] if entry is not None])
        error = (have - want).abs()
        if not bool((error <= EXACT_ERROR).all()):
            first = int(torch.nonzero(~(error <= EXACT_ERROR))[0])
            share = float((error > EXACT_ERROR).float().mean())
            yield f"config {number} {raw['compress_ratios']}: from {first} on, {share:.1%}, {error.max():.1e}"


def any_batch(seconds: float) -> Iterator[str]:
    """Random requests in random company give the tokens that each gives alone."""
    alone, together = exact("cuda", prefix_cache=False), exact("cuda", chunk_tokens=64)
    rng, end, runs = random.Random(0), time.monotonic() + seconds, 0
    known: dict[tuple[int, ...], list[int]] = {}
    stems = [[rng.randrange(3, 3000) for _ in range(rng.choice((5, 130, 400)))] for _ in range(4)]
    while time.monotonic() < end:
        prompts = [
            [*rng.choice(stems)[: rng.randint(1, 400)], *(rng.randrange(3, 3000) for _ in range(rng.randint(1, 30)))]
            for _ in range(rng.randint(1, 30))
        ]
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        for prompt, result in zip(prompts, together.generate(prompts, params), strict=True):
            key = tuple(prompt)
            if key not in known and len(known) < 200:
                known[key] = alone.generate([prompt], params)[0].token_ids
            if key in known and known[key] != result.token_ids:
                yield f"run {runs}, a prompt of {len(prompt)}: {result.token_ids} instead of {known[key]}"
        runs += 1
    if problems := together.engine.problems():
        yield str(problems)


def random_schedules(device: str, seconds: float) -> Iterator[str]:
    """Random engines, small pools and schedules with cancellations, choices and preemptions, audited at every step:
    each request gives what it gives alone, uncached and uncut."""
    alone, end = exact(device, prefix_cache=False), time.monotonic() + seconds
    counts: Counter[str] = Counter()
    number = 0
    while time.monotonic() < end:
        rng = random.Random(number)
        running = rng.choice([1, 2, 4, 8])
        options = {
            "max_running": running,
            "step_tokens": rng.choice([running, 64, 300, 700]),
            "chunk_tokens": rng.choice([1, 5, 64, 128, 130, 500]),
            "snapshot_stride": 128 * rng.choice([1, 2, 32]),
            "prefix_cache": rng.random() < 0.8,
            "overlap": rng.random() < 0.5,
        }
        memory = rng.choice([4, 5, 6, 8, 12, 30])
        built = small_engine(alone.engine, memory, running + rng.choice([0, 1, running]), options)
        jobs = random_jobs(rng, 3000, built.model.sliding_window, min(400, memory * 128 - 40))
        play(built, jobs)
        for job in jobs:
            for request in job.requests:
                counts[str(request.finish_reason)] += 1
                yield from differences(alone, job, request, f"schedule {number}")
        stats = built.stats()
        counts["preemptions"] += stats.preemptions
        counts["tokens reused"] += stats.tokens_reused
        built.close()
        number += 1
    print(f"    {number:,} schedules: {dict(counts)}")


def small_engine(like: Engine, pages: int, slots: int, options: dict[str, Any]) -> Engine:
    """An engine over the same weights with few pages and slots, whose memory begins as NaN."""
    config = EngineConfig(**{"state_bytes": 1 << 26, **options})
    memory = plan_memory(like.model, config, torch.float32)
    memory = replace(memory, size=replace(memory.size, pages=pages, slots=slots), max_context=pages * 128)
    state = State(like.model, memory.size, torch.float32, like.runner.device)
    for pool in (state.window, state.pending, state.folds, state.csa_entries, state.index_keys, state.hca_entries):
        assert isinstance(pool, torch.Tensor)
        pool.fill_(float("nan"))
    return Engine(like.runner.forward, like.model, config, memory, state, like.tokenizer)


def differences(alone: LLM, job: Job, request: Request, where: str) -> Iterator[str]:
    """How a request's tokens differ from what its prompt and seed give by themselves."""
    got = job.tokens[request.number]
    params = replace(job.params, n=1, seed=request.seed)
    want = alone.generate([job.prompt.tolist()], params)[0].token_ids
    if got != want[: len(got)] or (request.finish_reason != "abort" and len(got) != len(want)):
        yield f"{where}, a prompt of {len(job.prompt)}: {got} instead of {want}"


def same_bits(numerics: str) -> Iterator[str]:
    """With `deterministic`: log-probabilities of a request alone, to the bit, beside 39 others and in chunks of 64."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 3000) for _ in range(rng.choice((1, 3, 40, 200, 700)))] for _ in range(40)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    alone: list[Result] = []
    for chunk in (2048, 64):
        options = {"numerics": numerics, "chunk_tokens": chunk, "max_running": 40}
        llm = LLM(device="cuda", deterministic=True, state_bytes=1 << 30, **options)
        alone = alone or [llm.generate([prompt], params)[0] for prompt in prompts]
        for number, (want, have) in enumerate(zip(alone, llm.generate(prompts, params), strict=True)):
            if (want.logprobs, want.prompt_logprobs) != (have.logprobs, have.prompt_logprobs):
                yield f"chunks of {chunk}: prompt {number} of {len(want.prompt_token_ids)} tokens"
        llm.close()


def native() -> Iterator[str]:
    """Weights as stored, fp8 rows, fp4 index keys: tasks that the model knows are answered, and nothing is NaN."""
    try:
        from leadline.chat import ChatFormat
    except ImportError as error:  # the machine may lack the chat format's package
        print(f"    no tasks: {error}")
        return
    from leadline.cli.eval import answer_room, token_measure
    from leadline.tasks.suite import tasks
    from leadline.tasks.task import mark, read_answer

    llm = LLM(device="cuda", numerics="native")
    format, measure = ChatFormat(llm.tokenizer, llm.engine.model.eos_token_ids), token_measure(llm)
    for kind, length in (("recall", 128), ("recall", 1000), ("copy", 32), ("arithmetic", 0), ("tool", 0)):
        asked = tasks(kind, 0, 24, length, measure)
        prompts = [format.prompt(task.body) for task in asked]
        params = [SamplingParams(temperature=0.0, max_tokens=answer_room(task.expected, measure)) for task in asked]
        results = llm.generate([prompt.token_ids for prompt in prompts], params)
        right = sum(
            mark(task, read_answer(format, prompt, result.token_ids, result.finish_reason or "length"))
            for task, prompt, result in zip(asked, prompts, results, strict=True)
        )
        print(f"    {kind} {length or ''}: {right} of {len(asked)} right")
        if right < 0.8 * len(asked):
            yield f"{kind} {length}: {right} of {len(asked)}"
    begin = time.monotonic()
    llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    print(f"    {(time.monotonic() - begin) * 10:.2f} ms a token for one request")


if __name__ == "__main__":
    main()
