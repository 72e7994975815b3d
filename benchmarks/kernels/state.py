"""query, store and compress on this GPU: `python -m benchmarks.kernels.state [--sweep]`."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.kernels.timing import READ_BANDWIDTH, attempt, copies_of, relative_error, table, time_us
from leadline.kernels import compress, query, store
from leadline.kernels.compress import Gating, Pieces
from leadline.kernels.packed import IndexRows, KvRows, index_rows, kv_rows
from leadline.kernels.rope import Angles, angles
from leadline.model.state import State, StateSize
from leadline.presets import preset

HEADS, WIDTH, ROTATED, INDEX_HEADS, INDEX_WIDTH, HIDDEN = 64, 512, 64, 64, 128, 4096
EPS = 1e-6
POOL_ROWS = 1 << 16
CPU = torch.device("cpu")
Launch = Callable[[int], object]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def turns(count: int, device: str = "cuda") -> Angles:
    return angles(torch.randint(0, 100_000, (count,), device=device), torch.rand(ROTATED // 2, device=device))


def wide(*shape: int) -> Tensor:
    return draw(*shape, dtype=torch.float32)


# --------------------------------------------------------------------------------------------- correctness


def to_cpu(value: object) -> object:
    """A copy on the CPU of tensors, pools and what holds them."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, KvRows):
        return KvRows(value.blocks.cpu(), value.width, value.rotated)
    if isinstance(value, IndexRows):
        return IndexRows(value.blocks.cpu(), value.width)
    if isinstance(value, tuple):
        return tuple(to_cpu(part) for part in value)
    if isinstance(value, Angles | Gating | Pieces):
        return type(value)(*(to_cpu(part) for part in vars(value).values()))
    return value


def values(pool: object, rows: int) -> list[Tensor]:
    """What a result or a pool that was written to holds."""
    if isinstance(pool, KvRows | IndexRows):
        return [pool.read(torch.arange(rows, device=pool.blocks.device))]
    if isinstance(pool, tuple):
        return [value for part in pool for value in values(part, rows)]
    return [pool] if isinstance(pool, Tensor) else []


def cleared(*pools: KvRows | IndexRows) -> tuple[KvRows | IndexRows, ...]:
    """Pools of zeros: a row that only one side wrote is then an error of 1."""
    for pool in pools:
        pool.blocks.zero_()
    return pools


def compare(name: str, function: Callable, arguments: tuple, written: tuple[int, ...], bound: float) -> str | None:
    """Run `function` here and, by its definition, on the CPU; compare what it returns and the `written` arguments."""
    there = to_cpu(arguments)
    assert isinstance(there, tuple)
    got = values((function(*arguments), *(arguments[i] for i in written)), 192)
    want = values((function(*there), *(there[i] for i in written)), 192)
    errors = [relative_error(a.cpu(), b) for a, b in zip(got, want, strict=True)]
    return None if max(errors) <= bound else f"{name}: {', '.join(f'{e:.1e}' for e in errors)} of {bound:.0e}"


def checks() -> None:
    """Every kernel against the definition on the CPU. A few elements in a thousand may round to the other side."""
    device = torch.device("cuda")
    found = []
    for dtype, bound in ((torch.bfloat16, 6e-3), (torch.float32, 2e-6)):
        for tokens in (1, 37):
            q, kv, by = (
                draw(tokens, HEADS, WIDTH, dtype=dtype),
                draw(tokens, 600, dtype=dtype)[:, :WIDTH],
                turns(tokens),
            )
            index_q = draw(tokens, INDEX_HEADS, INDEX_WIDTH, dtype=dtype)
            found.append(compare("query", query.query, (q, by, EPS), (), bound))
            for native in (False, True):
                exact = 2e-3 if native and dtype == torch.float32 else bound
                found.append(compare("index_query", query.index_query, (index_q, by, native), (), 2 * exact))
                plain = torch.zeros(192, WIDTH, dtype=dtype, device=device)
                arguments = (q, kv, wide(WIDTH), by, EPS, native, plain, 62)
                found.append(compare("query_and_store", store.query_and_store, arguments, (6,), exact))
            packed = cleared(kv_rows(192, WIDTH, ROTATED, device))[0]
            found.append(compare("store", store.store, (kv, wide(WIDTH), by, EPS, True, packed, 62), (5,), 6e-3))
            found += compare_compression(tokens, dtype, bound, device)
    bad = [line for line in found if line]
    print("\n".join(f"BAD {line}" for line in bad) or f"OK  {len(found)} comparisons with the definitions")


def compare_compression(tokens: int, dtype: torch.dtype, bound: float, device: torch.device) -> list[str | None]:
    """The same for `gate_rows`, `close_csa` and `hca_fold`."""
    columns = 4 * (WIDTH + INDEX_WIDTH)
    found = []
    gating = Gating(draw(columns, HIDDEN, dtype=dtype), wide(4, columns))
    raw = torch.full((tokens, columns), 77.0, device=device)
    if dtype == torch.bfloat16:
        found.append(compare("gate_rows", compress.gate_rows, (draw(tokens, HIDDEN), gating, raw), (2,), 1e-5))
    rows, targets = torch.randint(0, 300, (tokens, 8), device=device), torch.randperm(192, device=device)[:tokens]
    rows[::3, :4], targets[::5] = -1, -1
    norms, by = (wide(WIDTH), wide(INDEX_WIDTH)), turns(tokens)
    pending = wide(300, columns)
    for native in (False, True):
        exact = 2e-3 if native and dtype == torch.float32 else bound
        pools = tuple(torch.zeros(192, w, dtype=dtype, device=device) for w in (WIDTH, INDEX_WIDTH))
        arguments = (pending, rows, gating, norms, by, EPS, native, pools, targets)
        found.append(compare("close_csa", compress.close_csa, arguments, (7,), 2 * exact))
    packed = cleared(kv_rows(192, WIDTH, ROTATED, device), index_rows(192, INDEX_WIDTH, device))
    arguments = (pending, rows, gating, norms, by, EPS, True, packed, targets)
    found.append(compare("close_csa packed", compress.close_csa, arguments, (7,), 1.2e-2))
    folds = wide(50 + tokens, 3, WIDTH)
    folds[:, 1:] = folds[:, 1:].abs() + 1
    counts = torch.randint(1, 129, (tokens,), device=device)
    counts[0] = 128
    first, full = torch.arange(tokens, device=device) * 128 + 128 - counts, torch.arange(tokens, device=device)
    before = torch.where(counts == 128, -1, torch.randint(0, 50, (tokens,), device=device))
    pieces = Pieces(first, counts, before, full, targets, 128)
    gating = Gating(draw(1), wide(128, 2 * WIDTH))
    positions = torch.arange(128 * tokens, device=device)
    pool = cleared(kv_rows(192, WIDTH, ROTATED, device))[0]
    targets = targets.clamp(min=0)
    arguments = (wide(128 * tokens, 2 * WIDTH), positions, gating, pieces, folds, 50, wide(WIDTH), by, EPS, True, pool)
    return [*found, compare("hca_fold", compress.hca_fold, arguments, (4, 10), 6e-3)]


# --------------------------------------------------------------------------------------------- times


def launches(tokens: int) -> dict[str, tuple[float, Callable[[int], Launch]]]:
    """Per operation the bytes that it must move for `tokens` tokens, and what makes its launches for some copies."""
    device = torch.device("cuda")
    window, entries = kv_rows(POOL_ROWS, WIDTH, ROTATED, device), kv_rows(POOL_ROWS, WIDTH, ROTATED, device)
    keys = index_rows(POOL_ROWS, INDEX_WIDTH, device)
    by, norm, index_norm = turns(tokens), wide(WIDTH), wide(INDEX_WIDTH)
    columns = 4 * (WIDTH + INDEX_WIDTH)
    closed = tokens if tokens <= 128 else tokens // 4

    def queries(copies: int) -> Launch:
        sets = [(draw(tokens, HEADS, WIDTH), draw(tokens, WIDTH)) for _ in range(copies)]
        return lambda i: store.query_and_store(*sets[i], norm, by, EPS, True, window, 64)

    def stores(copies: int) -> Launch:
        sets = [draw(tokens, WIDTH) for _ in range(copies)]
        return lambda i: store.store(sets[i], norm, by, EPS, True, window, 64)

    def index_queries(copies: int) -> Launch:
        sets = [draw(tokens, INDEX_HEADS, INDEX_WIDTH) for _ in range(copies)]
        return lambda i: query.index_query(sets[i], by, True)

    def gates(copies: int) -> Launch:
        sets = [Gating(draw(columns, HIDDEN), wide(4, columns)) for _ in range(copies)]
        x, out = draw(tokens, HIDDEN), wide(tokens, columns)
        return lambda i: compress.gate_rows(x, sets[i], out)

    def closings(copies: int) -> Launch:
        sets = [wide(closed * 4 + 4, columns) for _ in range(copies)]
        rows = torch.arange(closed, device=device)[:, None] * 4 + torch.arange(8, device=device)
        gating, targets = Gating(norm, wide(4, columns)), torch.randperm(POOL_ROWS, device=device)[:closed]
        pools, norms, turn = (entries, keys), (norm, index_norm), turns(closed)
        rows %= len(sets[0])
        return lambda i: compress.close_csa(sets[i], rows, gating, norms, turn, EPS, True, pools, targets)

    def folding(copies: int) -> Launch:
        sets = [wide(tokens, 2 * WIDTH) for _ in range(copies)]
        size = 1 if tokens <= 128 else 128
        first = torch.arange(0, tokens, size, device=device)
        full = torch.arange(0 if size == 1 else len(first), device=device)
        before = torch.arange(len(first), device=device) if size == 1 else torch.full_like(first, -1)
        pieces = Pieces(first, torch.full_like(first, size), before, full, full, size)
        folds, gating = wide(2 * len(first), 3, WIDTH).abs(), Gating(norm, wide(128, 2 * WIDTH))
        positions = torch.arange(tokens, device=device) if size > 1 else torch.zeros(tokens, dtype=torch.int64).cuda()
        spare, turn = len(first), turns(len(full))
        return lambda i: compress.hca_fold(
            sets[i], positions, gating, pieces, folds, spare, norm, turn, EPS, True, entries
        )

    kv_bytes, query_bytes = tokens * (WIDTH * 2 + 584), tokens * HEADS * WIDTH * 4
    return {
        "query+store": (query_bytes + kv_bytes, queries),
        "store": (kv_bytes, stores),
        "index_query": (tokens * INDEX_HEADS * INDEX_WIDTH * 4, index_queries),
        "gate_rows": (columns * HIDDEN * 2 + tokens * columns * 4, gates),
        "close_csa": (closed * (8 * 4 * 2 * (WIDTH + INDEX_WIDTH) + 652), closings),
        "hca_fold": (tokens * WIDTH * 8, folding),
    }


def times(names: set[str] | None = None, sizes: tuple[int, ...] = (1, 16, 64, 128, 4096)) -> list[list[object]]:
    """A row per operation: microseconds at each number of tokens, and at the largest its floor."""
    rows: dict[str, list[object]] = {}
    for tokens in sizes:
        for name, (moved, make) in launches(tokens).items():
            if names is None or name in names:
                copies = min(20, copies_of(moved))
                taken = attempt(f"{name} {tokens}", lambda m=make, c=copies: time_us(m(c), c))
                rows.setdefault(name, [name]).append(taken)
                if tokens == sizes[-1]:
                    rows[name].append(moved / READ_BANDWIDTH * 1e6)
    return list(rows.values())


def sweep() -> None:
    """Other cuts of the same kernels."""
    from leadline.kernels.gpu import compress as gpu_compress
    from leadline.kernels.gpu import query as gpu_query

    rows: list[list[object]] = []
    for count, warps in ((8, 2), (16, 4), (16, 8)):
        gpu_query.INDEX_ROWS, gpu_query.INDEX_WARPS = count, warps
        rows += [[f"rows {count} warps {warps}", *row] for row in times({"index_query"}, (1, 128, 4096))]
    for count, warps in ((4, 4), (16, 4), (8, 8)):
        gpu_compress.FOLD_ROWS, gpu_compress.FOLD_WARPS = count, warps
        rows += [[f"rows {count} warps {warps}", *row] for row in times({"hca_fold"}, (1, 128, 4096))]
    table("other cuts, us", ["cut", "operation", "1", "128", "4096", "floor"], rows)


def commit_times() -> list[list[object]]:
    """What `State.commit` takes for all layers of Flash, per number of tokens that each keep a row of every kind."""
    slots = 128
    state = State(preset("flash"), StateSize(64, slots, 4096, slots), torch.bfloat16, torch.device("cuda"), packed=True)
    row: list[object] = ["commit"]
    for count in (1, 16, 64, 128):
        rows = torch.arange(count, device="cuda")
        slot = torch.randperm(slots, device="cuda")[:count]
        batch = SimpleNamespace(
            window_source=state.window_scratch + rows,
            window_target=slot * state.ring + 5,
            pending_source=state.pending_scratch + rows,
            pending_target=slot * 8 + 5,
            fold_source=state.fold_scratch + rows,
            fold_target=slot,
        )
        row.append(attempt(f"commit {count}", lambda b=batch: time_us(lambda i: state.commit(b), launches=5)))
    return [row]


def main() -> None:
    """Checks, then times; with --sweep also other cuts."""
    torch.manual_seed(0)
    attempt("checks", checks)
    table("query, store, compress, us", ["operation", "1", "16", "64", "128", "4096", "floor"], times())
    table("state, us", ["operation", "1", "16", "64", "128"], commit_times())
    if "--sweep" in sys.argv:
        sweep()


if __name__ == "__main__":
    main()
