"""A soak: many short requests with cancellations on a pool that is far too small, and nothing left behind.

    python benchmarks/soak.py --requests 20000

Runs a small random model on the CPU. Prints requests per second, how requests ended, preemptions, and what remains
when all are done: pages, slots, host objects, resident memory. Exits with 1 if anything leaked.
"""

import argparse
import gc
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from schedules import engine

from leadline.engine.engine import Engine
from leadline.engine.request import Request
from leadline.engine.sampling import SamplingParams


def resident_bytes() -> int:
    """Memory of this process that is resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def run(built: Engine, count: int, rng: random.Random, ends: Counter[str]) -> None:
    """Pass `count` requests through the engine, about a fifth of them cancelled at a random moment."""
    live: dict[Request, int] = {}
    step = fed = 0
    while fed < count or built.busy:
        while fed < count and built.stats().waiting < 12:
            length = rng.randint(1, 60) if rng.random() < 0.8 else rng.randint(100, 300)
            stem = [rng.randrange(2, 90)] * length
            params = SamplingParams(max_tokens=rng.randint(1, 8), seed=fed, temperature=rng.choice([0, 1]))
            for request in built.add(torch.tensor(stem, dtype=torch.int32).numpy(), params):
                live[request] = step + rng.randrange(60) if rng.random() < 0.25 else -1
            fed += 1
        for request in [request for request, moment in live.items() if moment == step]:
            built.abort(request)
        for update in built.step():
            if update.finish_reason:
                ends[update.finish_reason] += 1
                live.pop(update.request, None)
        if step % 1000 == 0:
            problems = built.problems()
            assert not problems, problems
        step += 1
    assert not live


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=20000)
    count = parser.parse_args().requests
    torch.set_num_threads(1)
    built = engine("csa", 8, 10, max_running=8, step_tokens=128, chunk_tokens=64, overlap=False)
    rng, ends = random.Random(0), Counter[str]()
    run(built, 500, rng, Counter())  # the allocators' own growth comes first
    built.reset_cache()
    gc.collect()
    objects, memory = len(gc.get_objects()), resident_bytes()
    start = time.perf_counter()
    run(built, count, rng, ends)
    seconds = time.perf_counter() - start
    built.reset_cache()
    gc.collect()
    stats = built.stats()
    objects, memory = len(gc.get_objects()) - objects, resident_bytes() - memory
    print(f"{count:,} requests in {seconds:.0f} s ({count / seconds:.0f}/s), {stats.steps:,} steps; ends: {dict(ends)}")
    print(f"preemptions {stats.preemptions:,}, tokens run {stats.tokens_run:,}, reused {stats.tokens_reused:,}")
    print(f"left: pages {stats.pages_used}, slots {stats.slots_used}, host objects {objects:+}, memory {memory:+,} B")
    leaked = stats.pages_used or stats.slots_used or objects > 200 or memory > 32 << 20 or built.problems()
    return 1 if leaked else 0


if __name__ == "__main__":
    sys.exit(main())
