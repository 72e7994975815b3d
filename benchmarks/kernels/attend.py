"""attend on one GPU: checks against the definition in float64, then times beside FlashMLA's on an H200.

`PYTHONPATH=. python3 benchmarks/kernels/attend.py` on a machine with a GPU; `--sweep` also tries other tilings.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.timing import attempt, check, copies_of, table, time_us
from leadline.kernels.attend import attend as define
from leadline.kernels.gpu import attend as kernels
from leadline.kernels.packed import KvPool, KvRows, kv_rows
from leadline.kernels.rope import Angles, angles

DEVICE = torch.device("cuda")
WIDTH, ROTATED, WINDOW = 512, 64, 128
DECODE = {
    (1, 0): 12.2, (4, 0): 11.5, (16, 0): 11.5, (64, 0): 11.3, (128, 0): 12.5,
    (1, 512): 14.1, (4, 512): 13.4, (16, 512): 16.4, (64, 512): 42.0, (128, 512): 43.6,
    (1, 1024): 15.1, (4, 1024): 15.5, (16, 1024): 19.8, (64, 1024): 59.9, (128, 1024): 73.6,
    (1, 8192): 29.0, (4, 8192): 29.6, (16, 8192): 82.8,
}  # fmt: skip
"""Microseconds of FlashMLA (sgl-flash-mla 1.0.0) on an H200 by batch and entries: fp8 rows, 64 heads, hot inputs."""
PREFILL = {0: 245.0, 512: 699.0, 1024: 1159.0}
"""The same for 4096 queries by entries: bf16 rows."""


@dataclass
class Problem:
    """Arguments of one call."""

    q: Tensor
    sink: Tensor
    window: KvPool
    window_rows: Tensor
    entries: KvPool | None
    entry_rows: Tensor | None
    by: Angles

    def run(self, function: Callable[..., Tensor] = kernels.attend) -> Tensor:
        """Call `function` with them."""
        return function(self.q, self.sink, self.window, self.window_rows, self.entries, self.entry_rows, self.by)

    def definition(self) -> Tensor:
        """The definition in float64, on the rows that are read."""
        pools = [_plain(self.window).double(), None if self.entries is None else _plain(self.entries).double()]
        by = Angles(self.by.cos.double(), self.by.sin.double())
        arguments = (self.q.double(), self.sink.double(), pools[0], self.window_rows, pools[1], self.entry_rows, by)
        return define(*arguments)


def _plain(pool: KvPool) -> Tensor:
    if not isinstance(pool, KvRows):
        return pool
    return pool.read(torch.arange(len(pool.blocks) * 64, device=DEVICE))


def decode(
    batch: int, entries: int, heads: int = 64, packed: bool = True, ragged: bool = False, widest: int = 0
) -> Problem:
    """One query for each of `batch` requests with a full window and `entries` entries of their own.

    `ragged`: fewer for some, down to none; `widest` is the width of the lists if they are wider than needed.
    """
    window_rows = torch.randperm(batch * WINDOW, device=DEVICE).view(batch, WINDOW)
    entry_rows = torch.randperm(max(1, batch * entries), device=DEVICE)[: batch * entries].view(batch, entries)
    if ragged:
        seen = torch.randint(1, WINDOW + 1, (batch, 1), device=DEVICE)
        window_rows[torch.arange(WINDOW, device=DEVICE) < WINDOW - seen] = -1
        read = torch.randint(0, entries + 1, (batch, 1), device=DEVICE)
        entry_rows[torch.arange(entries, device=DEVICE) >= read] = -1
    if widest > entries:
        entry_rows = torch.nn.functional.pad(entry_rows, (0, widest - entries), value=-1)
    return _problem(heads, packed, batch * WINDOW, window_rows, batch * entries, entry_rows)


def prefill(tokens: int, entries: int, heads: int = 64, packed: bool = False) -> Problem:
    """`tokens` queries of one prompt in the middle of it, each choosing `entries` of twice as many."""
    first = torch.arange(tokens, device=DEVICE)[:, None]
    window_rows = first + torch.arange(WINDOW, device=DEVICE)
    entry_rows = torch.rand(tokens, max(1, 2 * entries), device=DEVICE).argsort(1)[:, :entries].sort(1).values
    return _problem(heads, packed, tokens + WINDOW, window_rows, 2 * entries, entry_rows)


def _problem(heads: int, packed: bool, window_rows: int, window: Tensor, entry_rows: int, chosen: Tensor) -> Problem:
    tokens = len(window)
    q = torch.randn(tokens, heads, WIDTH, device=DEVICE).bfloat16()
    pools = [_pool(rows, packed) for rows in (window_rows, max(1, entry_rows))]
    by = angles(torch.randint(0, 60000, (tokens,), device=DEVICE), 10000 ** -torch.linspace(0, 1, ROTATED // 2).cuda())
    sink = torch.randn(heads, device=DEVICE) * 3
    return Problem(q, sink, pools[0], window, pools[1] if entry_rows else None, chosen if entry_rows else None, by)


def _pool(rows: int, packed: bool) -> KvPool:
    values = torch.randn(rows, WIDTH, device=DEVICE).bfloat16() * 1.5
    if not packed:
        return values
    pool = kv_rows(rows, WIDTH, ROTATED, DEVICE)
    pool.blocks.fill_(0x7F)
    pool.write(torch.arange(rows, device=DEVICE), values)
    return pool


def checks() -> None:
    """Every path at official sizes; bf16 results may be off by the rounding of weights and outputs, 2^-9 each."""
    cases = {
        "decode 1 x 8192": lambda: decode(1, 8192),
        "decode 4 x 1024 plain": lambda: decode(4, 1024, packed=False),
        "decode 16 x 512 ragged": lambda: decode(16, 512, ragged=True),
        "decode 16 x 700 of 8192 ragged": lambda: decode(16, 700, ragged=True, widest=8192),
        "decode 64 x 512 ragged": lambda: decode(64, 512, ragged=True),
        "decode 140 x 96 ragged": lambda: decode(140, 96, ragged=True),
        "decode 3 x 1024, 128 heads": lambda: decode(3, 1024, heads=128, ragged=True),
        "decode 5 x 70, 8 heads": lambda: decode(5, 70, heads=8, ragged=True),
        "decode 7, window only": lambda: decode(7, 0, ragged=True),
        "prefill 300 x 512 plain": lambda: prefill(300, 512),
        "prefill 300 x 512 packed": lambda: prefill(300, 512, packed=True),
        "prefill 300 x 0 plain": lambda: prefill(300, 0),
    }
    for name, make in cases.items():
        attempt(name, lambda name=name, make=make: _check(name, make()))


def _check(name: str, problem: Problem) -> None:
    torch.full((1 << 28,), float("nan"), device=DEVICE)  # what the allocator hands out next is poisoned
    torch.cuda.synchronize()
    check(name, problem.run(), problem.definition(), 5e-3)


def time_decode(batch: int, entries: int) -> list[object]:
    """[batch, entries, us cold, us hot, peer, hot / peer, GB/s, TFLOP/s], the last two cold."""
    keys = WINDOW + entries
    copies = copies_of(batch * keys * 584)
    problems = [decode(batch, entries) for _ in range(copies)]
    cold = time_us(lambda i: problems[i].run(), copies)
    hot = time_us(lambda i: problems[0].run())
    theirs = DECODE[batch, entries]
    flops = batch * keys * 64 * WIDTH * 4
    return [batch, entries, cold, hot, theirs, hot / theirs, batch * keys * 584 / cold / 1e3, flops / cold / 1e6]


def time_prefill(entries: int, packed: bool) -> list[object]:
    """[rows, entries, us, peer, us / peer, TFLOP/s] of 4096 queries."""
    problem = prefill(4096, entries, packed=packed)
    us = time_us(lambda i: problem.run(), launches=3, replays=5)
    flops = 4096 * (WINDOW + entries) * 64 * WIDTH * 4
    return ["packed" if packed else "bf16", entries, us, PREFILL[entries], us / PREFILL[entries], flops / us / 1e6]


def times() -> None:
    """Both tables."""
    columns = ["batch", "entries", "us", "hot", "peer", "hot/peer", "GB/s", "TF/s"]
    rows = [attempt(f"decode {key}", lambda key=key: time_decode(*key)) for key in DECODE]
    table("decode, packed rows, 64 heads", columns, [row for row in rows if row])
    rows = [
        attempt(f"prefill {entries}", lambda entries=entries, packed=packed: time_prefill(entries, packed))
        for packed in (False, True)
        for entries in PREFILL
    ]
    table("prefill, 4096 queries", ["rows", "entries", "us", "peer", "us/peer", "TF/s"], [row for row in rows if row])


def main() -> None:
    """Check, then time."""
    torch.manual_seed(0)
    checks()
    times()
    if "--sweep" in sys.argv:
        sweep()


def sweep() -> None:
    """Programs per token at a few sizes, and the kernel for other chips."""
    chosen = kernels.splits
    for batch, entries, most in ((1, 0, 2), (1, 512, 10), (1, 8192, 130), (16, 512, 10), (64, 512, 4), (128, 512, 3)):
        line = f"{batch} x {entries}, hot us by programs per token:"
        for parts in (1, 2, 3, 5, 8, 10, 17, 33, 65, 130):
            if parts <= most:
                kernels.splits = lambda *_, parts=parts: parts
                got = attempt(f"{parts}", lambda batch=batch, entries=entries: time_decode(batch, entries)[3])
                line += f" {parts}: {got:.1f}" if got else f" {parts}: -"
        print(line, flush=True)
    kernels.splits = chosen
    overlap, kernels.early_start = kernels.early_start, lambda _: {}
    late = [attempt("late", lambda key=key: time_decode(*key)[3]) for key in ((1, 0), (1, 512), (128, 512))]
    print("without early starts: 1 x 0, 1 x 512, 128 x 512:", *(f"{us:.1f}" for us in late if us), flush=True)
    kernels.early_start = overlap
    kernels._suits_hopper = lambda *_: False
    got = [attempt("others", lambda key=key: time_decode(*key)[3]) for key in ((1, 512), (64, 512))]
    got += [attempt("others", lambda packed=packed: time_prefill(512, packed)[2]) for packed in (False, True)]
    print("the kernel for other chips: 1, 64 x 512, prefill 512 bf16, packed:", *(f"{us:.0f}" for us in got if us))


if __name__ == "__main__":
    main()
