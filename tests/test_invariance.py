"""A row's result must not depend, to its last bit, on what other rows there are: every kernel, and the whole model."""

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import pytest
import torch
from models import Cut, at_once, one_by_one, random_config, random_cut, random_reference, serve, serving_model
from torch import Tensor

from leadline.formats import fp4_quantize_weight, fp8_quantize_weight
from leadline.kernels import attend, compress, experts, mix, output, project, query, rope, route, rowwise, select, store
from leadline.kernels.compress import Gating
from leadline.kernels.mix import Mixing, Reading
from leadline.kernels.project import Weight
from leadline.kernels.rope import Angles

MODULES = (attend, compress, experts, mix, output, project, query, rope, route, rowwise, select, store)
ROWS = 203
Rows = tuple[Tensor, ...]


@dataclass
class Case:
    """A kernel as a function of row tensors only: `call(*rows)`, each [ROWS, ...], gives rows again."""

    function: str
    rows: Rows
    call: Callable[..., Tensor | Rows]


class Drawer:
    """Random tensors of a case."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.wide = dtype, torch.float64 if dtype == torch.float64 else torch.float32
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, wide: bool = False) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.to(self.wide if wide else self.dtype)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def angles(self, count: int = ROWS) -> Rows:
        turn = rope.angles(self.ints(0, 5000, count), self(8, wide=True).abs())
        return turn.cos, turn.sin


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every kernel at least once, in awkward sizes."""
    draw = Drawer(dtype)
    yield from _rowwise_and_mix(draw)
    yield from _projections(draw)
    yield from _experts(draw)
    yield from _compressors(draw)
    yield from _attention(draw)


def _rowwise_and_mix(draw: Drawer) -> Iterator[Case]:
    for name in ("high", "sigmoid", "silu", "softplus"):
        for width in (1, 5, 49):
            yield Case(name, (draw(ROWS, width),), getattr(rowwise, name))
    weight = draw(52, wide=True)
    yield Case("rms_norm", (draw(ROWS, 52),), lambda x: rowwise.rms_norm(x, weight, 1e-6))
    yield Case("rms_norm", (draw(ROWS, 3, 52),), lambda x: rowwise.rms_norm(x, None, 1e-6))
    for n in (1, 2, 3, 4):
        count = (2 + n) * n
        weights = Mixing(draw(count, n * 52, wide=True), draw(count, wide=True), draw(3, wide=True))
        final = Mixing(draw(n, n * 52, wide=True), draw(n, wide=True), draw(1, wide=True))
        streams, comb, post = draw(ROWS, n, 52), draw(ROWS, n, n, wide=True), draw(ROWS, n, wide=True)

        def opened(x: Tensor, weights: Mixing = weights) -> Rows:
            reading = mix.open_sublayer(x, weights, weight, 20, 1e-6, 1e-6)
            return reading.x, reading.post, reading.comb

        yield Case("open_sublayer", (streams,), opened)
        yield Case("mixing_logits", (streams,), lambda x, w=weights: mix.mixing_logits(x, w, 1e-6))
        yield Case("sinkhorn", (comb,), lambda c: mix.sinkhorn(c, 20, 1e-6))
        yield Case("collapse", (post, streams), mix.collapse)
        yield Case("final_collapse", (streams,), lambda x, w=final: mix.final_collapse(x, w, weight, 1e-6, 1e-6))

        def boundary(x: Tensor, y: Tensor, p: Tensor, c: Tensor, weights: Mixing = weights) -> Rows:
            closed, reading = mix.close_and_open(x, y, Reading(y, p, c), weights, weight, 20, 1e-6, 1e-6)
            return closed, reading.x, reading.post, reading.comb

        yield Case("close_and_open", (streams, draw(ROWS, 52), post, comb), boundary)
        yield Case(
            "close_sublayer",
            (streams, draw(ROWS, 52), post, comb),
            lambda x, y, p, c: mix.close_sublayer(x, y, Reading(y, p, c)),
        )


def _projections(draw: Drawer) -> Iterator[Case]:
    for width in (40, 96, 256):
        plain = draw(104, width)
        fp8, fp4 = fp8_quantize_weight(plain), fp4_quantize_weight(plain[:, : width // 32 * 32])
        x = draw(ROWS, width)
        yield Case("row_product", (x,), lambda x, w=plain: project.row_product(x, w))
        yield Case("wide_product", (x,), lambda x, w=plain: project.wide_product(x, w))
        for rounds in (False, True):
            short = x[:, : width // 32 * 32].contiguous()
            yield Case("project", (x,), partial(project.project, weight=Weight(plain, None, rounds)))
            yield Case("project", (x,), partial(project.project, weight=Weight(*fp8, rounds)))
            yield Case("project", (short,), partial(project.project, weight=Weight(*fp4, rounds)))
            yield Case("round_input", (x,), partial(project.round_input, weight=Weight(plain, None, rounds)))
    factors = Weight(draw(3 * 16, 2 * 40))
    yield Case("grouped_output", (draw(ROWS, 6, 40),), lambda x: output.grouped_output(x, factors, 3))


def _experts(draw: Drawer) -> Iterator[Case]:
    x, gate, bias = draw(ROWS, 96), draw(8, 96, wide=True), draw(8, wide=True)
    ids, by_token = draw.ints(0, 97, ROWS), draw.ints(0, 8, 97, 3)
    yield Case("route", (x, ids), lambda x, i: route.route(x, gate, bias, None, i, 3, 1.5))
    yield Case("route", (x, ids), lambda x, i: route.route(x, gate, None, by_token, i, 3, 1.5))
    yield Case("clamped_swiglu", (draw(ROWS, 98),), lambda x: experts.clamped_swiglu(x, 1.0))
    scores = torch.rand(ROWS, 8, generator=draw.generator)
    chosen, weights = scores.argsort(-1)[:, :3], draw(ROWS, 3, wide=True)
    for rounds in (False, True):
        w13, w2 = Weight(draw(8, 96, 96), None, rounds), Weight(draw(8, 96, 48), None, rounds)
        one = {"w13": w13.expert(0), "w2": w2.expert(0), "limit": 1.0}
        yield Case("mlp", (x,), partial(experts.mlp, **one))
        yield Case("shared_expert", (x,), partial(experts.shared_expert, **one))
        routed = partial(experts.routed_experts, w13=w13, w2=w2, limit=1.0)
        yield Case("routed_experts", (x, chosen, weights), routed)
        shared = {"shared_w13": one["w13"], "shared_w2": one["w2"]}
        both = partial(experts.experts, w13=w13, w2=w2, **shared, limit=1.0)
        yield Case("experts", (x, chosen, weights), both)


def _compressors(draw: Drawer) -> Iterator[Case]:
    gating = Gating(draw(200, 96), draw(4, 200, wide=True))

    def gated(x: Tensor) -> Tensor:
        out = torch.empty(len(x), 200, dtype=draw.wide)
        compress.gate_rows(x, gating, out)
        return out

    yield Case("gate_rows", (draw(ROWS, 96),), gated)
    yield from _closings(draw)
    yield from _folds(draw)


def _closings(draw: Drawer) -> Iterator[Case]:
    pending, norm, index_norm = draw(500, 4 * 96, wide=True), draw(64, wide=True), draw(32, wide=True)
    gating = Gating(draw(1, 1), draw(4, 4 * 96, wide=True))
    windows = draw.ints(0, 500, ROWS, 8)
    windows[::5, :4] = -1

    def closed(r: Tensor, c: Tensor, s: Tensor, native: bool) -> Rows:
        pools = tuple(torch.full((len(r) + 3, width), float("nan"), dtype=draw.dtype) for width in (64, 32))
        targets = torch.arange(len(r)) + 3
        norms = (norm, index_norm)
        compress.close_csa(pending, r, gating, norms, Angles(c, s), 1e-6, native, (pools[0], pools[1]), targets)
        return pools[0][3:], pools[1][3:]

    def put(x: Tensor, native: bool) -> Tensor:
        pool = torch.full((len(x) + 3, 32), float("nan"), dtype=draw.dtype)
        compress.put_index_keys(x, native, pool, torch.arange(len(x)) + 3)
        return pool[3:]

    for native in (False, True):
        yield Case("close_csa", (windows, *draw.angles()), partial(closed, native=native))
        yield Case("put_index_keys", (draw(ROWS, 32),), partial(put, native=native))
    main, ape = pending[:, :256], gating.ape[:, :256]
    yield Case(
        "csa_entries",
        (windows, *draw.angles()),
        lambda r, c, s: compress.csa_entries(main, r, ape, norm, Angles(c, s), 1e-6, draw.dtype),
    )


def _folds(draw: Drawer) -> Iterator[Case]:
    norm, gating = draw(64, wide=True), Gating(draw(1, 1), draw(128, 128, wide=True))
    states = torch.cat([draw(ROWS, 1, 64, wide=True), draw(ROWS, 2, 64, wide=True).abs() + 1], 1)
    yield Case(
        "hca_entries",
        (states, *draw.angles()),
        lambda x, c, s: compress.hca_entries(x, norm, Angles(c, s), 1e-6, draw.dtype),
    )
    raw, positions = draw(400, 128, wide=True), torch.arange(400) + 77
    folded = torch.cat([draw(20, 1, 64, wide=True), draw(20, 2, 64, wide=True).abs() + 1], 1)
    counts, before = draw.ints(1, 128, ROWS), draw.ints(-1, 20, ROWS)
    firsts = (torch.rand(ROWS, generator=draw.generator) * (400 - counts)).long()

    def fold(f: Tensor, n: Tensor, b: Tensor, c: Tensor, s: Tensor, native: bool) -> Rows:
        folds = torch.cat([folded, torch.full((len(f), 3, 64), float("nan"), dtype=draw.wide)])
        entries = torch.full((len(f) + 3, 64), float("nan"), dtype=draw.dtype)
        pieces = compress.Pieces(f, n, b, torch.arange(len(f)), torch.arange(len(f)) + 3, int(n.max()))
        turn = Angles(c, s)
        compress.hca_fold(raw, positions, gating, pieces, folds, 20, norm, turn, 1e-6, native, entries)
        return folds[20:], entries[3:]

    for native in (False, True):
        yield Case("hca_fold", (firsts, counts, before, *draw.angles()), partial(fold, native=native))


def _attention(draw: Drawer) -> Iterator[Case]:
    heads, turn = draw(ROWS, 3, 64), draw.angles()
    yield Case("rotate", (heads, *turn), lambda x, c, s: rope.rotate(x, Angles(c, s)))
    frequencies = draw(8, wide=True)

    def turned(positions: Tensor) -> Rows:
        made = rope.angles(positions, frequencies)
        return made.cos, made.sin

    yield Case("angles", (draw.ints(0, 100000, ROWS),), turned)
    yield Case("query", (heads, *turn), lambda x, c, s: query.query(x, Angles(c, s), 1e-6))
    norm = draw(64, wide=True)

    def stored(x: Tensor, c: Tensor, s: Tensor, native: bool) -> Tensor:
        pool = torch.full((len(x) + 3, 64), float("nan"), dtype=x.dtype)
        store.store(x, norm, Angles(c, s), 1e-6, native, pool, 3)
        return pool[3:]

    def both(q: Tensor, x: Tensor, c: Tensor, s: Tensor, native: bool) -> Rows:
        pool = torch.full((len(x) + 3, 64), float("nan"), dtype=x.dtype)
        turned = store.query_and_store(q, x, norm, Angles(c, s), 1e-6, native, pool, 3)
        return turned, pool[3:]

    def put(x: Tensor, native: bool) -> Tensor:
        pool = torch.full((len(x) + 3, 80), float("nan"), dtype=x.dtype)
        store.put_rows(x, 16, native, pool, torch.arange(len(x)) + 3)
        return pool[3:]

    for native in (False, True):
        yield Case("index_query", (heads, *turn), lambda x, c, s, n=native: query.index_query(x, Angles(c, s), n))
        yield Case("index_round", (heads,), lambda x, n=native: query.index_round(x, n))
        yield Case("round_row", (draw(ROWS, 80),), lambda x, n=native: store.round_row(x, 16, n))
        yield Case("put_rows", (draw(ROWS, 80),), partial(put, native=native))
        yield Case("store", (draw(ROWS, 64), *turn), partial(stored, native=native))
        yield Case("query_and_store", (heads, draw(ROWS, 64), *turn), partial(both, native=native))
    yield Case(
        "index_scores", (draw(ROWS, 16, 32), draw(ROWS, 16, wide=True), draw(ROWS, 128, 32)), select.index_scores
    )
    yield from _selections(draw)
    yield from _attends(draw, turn)


def _selections(draw: Drawer) -> Iterator[Case]:
    pages, visible = draw.ints(0, 40, ROWS, 12), draw.ints(0, 12 * 32 + 1, ROWS)
    visible[:60] = draw.ints(0, 20, 60)  # rows that alone would take the path without scores

    def selected(q: Tensor, w: Tensor, pages: Tensor, visible: Tensor, pool: Tensor, topk: int) -> Tensor:
        longest = int(visible.max())
        return select.select(q, w, pool, pages[:, : -(-max(1, longest) // 32)], visible, longest, topk)

    different, with_ties = draw(40 * 32, 32), draw(8, 32).repeat(160, 1)
    for topk in (1, 16, 50):
        for pool in (different, with_ties):
            rows = (draw(ROWS, 16, 32), draw(ROWS, 16, wide=True), pages, visible)
            yield Case("select", rows, partial(selected, pool=pool, topk=topk))
    ids = torch.where(draw.ints(0, 4, ROWS, 50) > 0, draw.ints(0, 12 * 32, ROWS, 50), -1)
    yield Case("entry_rows", (pages, ids), lambda p, i: select.entry_rows(p, i, 32))


def _attends(draw: Drawer, turn: Rows) -> Iterator[Case]:
    """Every row reads up to 300 entries, and a batch is only as wide as its widest row."""
    pool, sink = draw(1000, 64), draw(3, wide=True)
    window, entries = draw.ints(-1, 1000, ROWS, 24), draw.ints(0, 1000, ROWS, 300)
    seen = draw.ints(0, 301, ROWS)
    seen[:60] = draw.ints(0, 4, 60)
    entries = torch.where(torch.arange(300) < seen[:, None], entries, -1)

    def attended(q: Tensor, w: Tensor, e: Tensor, c: Tensor, s: Tensor) -> Tensor:
        widest = int((e >= 0).sum(1).max())
        return attend.attend(q, sink, pool, w, pool, e[:, :widest], Angles(c, s))

    heads = draw(ROWS, 3, 64)
    yield Case("attend", (heads, window, entries, *turn), attended)
    yield Case(
        "attend",
        (heads, window, *turn),
        lambda q, w, c, s: attend.attend(q, sink, pool, w, None, None, Angles(c, s)),
    )


def picks() -> Iterator[Tensor | slice]:
    """Batches to try: slices, which begin at any address, and random rows in any order and company."""
    for count in (1, 2, 3, 5, 8, 13, 64, 65):
        for start in (0, 4, 11, 60):
            yield slice(start, start + count)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 2, 7, 9, 31, 70, 150):
        for _ in range(3):
            yield torch.randint(0, ROWS, (count,), generator=generator)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp64"])
def test_every_kernel_gives_a_row_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    wrong = []
    for number, case in enumerate(cases(dtype)):
        whole = as_rows(case.call(*case.rows))
        assert all(value.isfinite().all() for value in whole), f"case {number}, {case.function}: not finite"
        for pick in picks():
            part = as_rows(case.call(*(row[pick] for row in case.rows)))
            if not all(torch.equal(a[pick], b) for a, b in zip(whole, part, strict=True)):
                wrong.append(f"case {number}, {case.function}: rows {pick}")
                break
    assert not wrong, "\n".join(wrong)


def as_rows(result: Tensor | Rows) -> Rows:
    return (result,) if isinstance(result, Tensor) else result


def public_functions(module: ModuleType) -> set[str]:
    found = inspect.getmembers(module, inspect.isfunction)
    return {name for name, function in found if function.__module__ == module.__name__ and name[0] != "_"}


def test_every_kernel_has_a_case() -> None:
    tested = {case.function for case in cases(torch.float32)}
    assert tested == set().union(*map(public_functions, MODULES))


# -------------------------------------------------------------------------------------------- the whole model

CUTS: dict[str, Cut] = {
    "one by one": one_by_one,
    "threes": lambda sequence, start: 3,
    "windows of 4": lambda sequence, start: 4,
    "pages": lambda sequence, start: 128,
    "a page and one": lambda sequence, start: 129,
    "random": random_cut(1),
    "random again": random_cut(2),
}


@pytest.mark.parametrize("native", [False, True], ids=["exact", "native"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp64"])
def test_logits_are_the_same_bits_for_any_cut(dtype: torch.dtype, native: bool) -> None:
    rng = random.Random(f"{dtype} {native}")
    ratios = rng.sample([0, 4, 128], 3)
    raw = random_config(rng, num_hidden_layers=3, compress_ratios=[*ratios, 0], index_topk=rng.choice([4, 16]))
    model = serving_model(random_reference(raw), dtype, native)
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 5, 130, 270]
    sequences = [torch.randint(0, raw["vocab_size"], (length,), generator=generator) for length in lengths]
    whole = serve(model, sequences, at_once, dtype).logits
    assert all(logits.isfinite().all() for logits in whole)
    for name, cut in CUTS.items():
        for mine, expected in zip(serve(model, sequences, cut, dtype).logits, whole, strict=True):
            assert torch.equal(mine, expected), f"cut {name}, {len(mine)} tokens"
    for ids, expected in zip(sequences, whole, strict=True):
        alone = serve(model, [ids], random_cut(3), dtype).logits[0]
        assert torch.equal(alone, expected), f"alone, {len(ids)} tokens"
