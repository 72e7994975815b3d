"""The bookkeeping of one very long context (pages, plans, prefix index, snapshots), with a model that answers at once.

    python benchmarks/long_context.py --tokens 1000000

Runs the prompt in chunks, then the same prompt again, which is reused from the prefix index. Prints seconds, the time
of a decode step at that length, and host memory.
"""

import argparse
import resource
import time

import numpy as np
from host_cost import stand_in_engine

from leadline.engine.engine import Engine
from leadline.engine.sampling import SamplingParams


def run(engine: Engine, text: np.ndarray) -> tuple[float, float, int]:
    """(seconds to the first token, milliseconds of each further step, tokens reused)."""
    start = time.perf_counter()
    (request,) = engine.add(text, SamplingParams(max_tokens=100, ignore_eos=True))
    while request.known == request.prompt_length:
        engine.step()
    first = time.perf_counter()
    while engine.busy:
        engine.step()
    return first - start, (time.perf_counter() - first) / 99 * 1e3, request.reused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    tokens = parser.parse_args().tokens
    engine = stand_in_engine(running=2, context=tokens)
    text = np.random.default_rng(0).integers(2, 1000, tokens, dtype=np.int32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in ("first", "again"):
        seconds, decode, reused = run(engine, text)
        print(f"{name}: first token after {seconds:.2f} s, {decode:.2f} ms a decode step, {reused:,} tokens reused")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"peak memory grew by {grown / 1024:.0f} MiB; problems: {engine.problems() or 'none'}")


if __name__ == "__main__":
    main()
