"""With `deterministic` a row has the same bits alone and in every batch: plans, kernels in the interpreter, and on a
GPU every operation at official sizes and a whole model.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from leadline import SamplingParams
from leadline.config import EngineConfig
from leadline.engine import loading
from leadline.engine.random_weights import geometry, random_engine
from leadline.kernels.arrange import arrange_experts
from leadline.kernels.gpu import attend, experts, mix, output, project, route, select
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.gpu.experts_arrange import arrange_stacks
from leadline.kernels.gpu.experts_fp4 import fits_beside
from leadline.kernels.gpu.experts_products import blocks_for
from leadline.kernels.gpu.experts_prompt import pays
from leadline.kernels.gpu.product_plan import FEW_TOKENS, Product, constants, fill, plan_hopper, plan_product
from leadline.kernels.gpu.project import Input, multiply, taken
from leadline.kernels.mix import Mixing
from leadline.kernels.packed import index_rows
from leadline.kernels.project import Weight, row_product
from leadline.kernels.rope import Angles
from tests.gpu.test_attend import Problem
from tests.gpu.test_experts import routing, stack
from tests.gpu.test_project import weight_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHES = (1, 5, 8, 9, 16, 17, 33, 64, 128, 130, 300)
LARGEST = max(BATCHES)


def deterministic(weight: Weight) -> Weight:
    return replace(weight, deterministic=True)


# ---------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize("chip", [name for name, chip in CHIPS.items() if chip.ordered])
def test_a_products_sums_are_cut_alike_for_every_number_of_tokens(chip):
    draw = random.Random(chip)
    for _ in range(200):
        rows, columns = draw.choice([draw.randint(1, 300), 128 * draw.randint(1, 1100)]), 32 * draw.randint(1, 400)
        groups = draw.choice([1, 1, 8])
        weight, rounds = draw.choice([("fp8", True), ("fp8", False), ("fp4", True), ("plain", True), ("plain", False)])
        seen = set()
        for tokens in (1, 8, 9, 16, FEW_TOKENS, FEW_TOKENS + 1, 100, 128, 129, 500, 8192):
            form = "round" if rounds else "plain"
            if tokens > FEW_TOKENS:
                form = "codes" if rounds and weight == "fp8" and CHIPS[chip].fp8_dot else "plain"
            product = Product(tokens, rows, columns, groups, form, weight, True)
            plans = [plan_product(product, CHIPS[chip], 132), plan_hopper(product, CHIPS[chip], 132)]
            operand = constants(product, plans[0], CHIPS[chip], e8m0=True, interpreted=False)["operand"]
            seen |= {(plan.splits, plan.steps, plan.block_in, str(operand)) for plan in plans if plan is not None}
        assert len(seen) == 1, f"{rows} x {columns}, {weight}, rounded {rounds}: {seen}"


def test_a_product_of_many_tokens_writes_no_partial_sums():
    for rows, columns in ((1536, 4096), (4096, 8192), (2048, 4096)):
        plan = plan_product(Product(8192, rows, columns, 1, "codes", "fp8", True), CHIPS["sm90"], 132)
        assert plan.alone and plan.splits > 1
    assert not plan_product(Product(16, 1536, 4096, 1, "round", "fp8", True), CHIPS["sm90"], 132).alone


@pytest.mark.parametrize("chip", CHIPS)
def test_experts_take_as_many_columns_a_step_for_every_number_of_pairs(chip):
    for dtype in (torch.bfloat16, torch.float32):
        made = [blocks_for(CHIPS[chip], dtype, pairs, 256, deterministic=True) for pairs in (6, 2000, 8000, 50000)]
        assert len({blocks.columns for blocks in made}) == 1 and len({blocks.tokens for blocks in made}) > 1


# ------------------------------------------------------------------------------------ kernels, in the interpreter too


@pytest.mark.parametrize(("kind", "rounds"), [("fp8", True), ("fp8", False), ("fp4", True), ("bf16", False)])
def test_a_program_that_makes_all_splits_adds_them_as_several_programs_do(kind, rounds):
    torch.manual_seed(0)
    x = (torch.randn(5, 896) * torch.exp(3 * torch.randn(896))).bfloat16().to(DEVICE)
    weight = weight_of(kind, 130, 896, rounds)
    form = taken(x, weight).form
    product = Product(5, 130, 896, 1, form, weight.form, True)
    several, alone, whole = (
        fill(product, CHIPS["sm80"], 4, (64, 16, 128), splits, 4, together)
        for splits, together in ((3, False), (3, True), (1, False))
    )
    assert several.splits == 3 and several.steps == 3 and alone.alone  # 7 blocks: the last split has one
    made = [multiply(Input(x, None, form), weight, 1, torch.float32, plan) for plan in (several, alone, whole)]
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def part_of(problem: Problem, rows: slice, entries: int) -> torch.Tensor:
    """attend for some of a problem's tokens, with lists of at most `entries` entries."""
    by = Angles(problem.by.cos[rows], problem.by.sin[rows])
    lists = problem.window_rows[rows], problem.entries, problem.entry_rows[rows, :entries]
    return attend.attend(problem.q[rows], problem.sink, problem.window, *lists, by, deterministic=True)


def widest(problem: Problem, rows: slice) -> int:
    return int((problem.entry_rows[rows] >= 0).sum(1).max())


@pytest.mark.parametrize("form", ["fp32", "bf16-packed"])
@pytest.mark.parametrize("keys", [16, 48])
def test_attend_gives_a_token_the_same_bits_in_any_batch(monkeypatch, form, keys):
    """Tokens of one part (of 48 keys: 20 and 7) alone, which nothing joins, and beside others; few at a time, too."""
    monkeypatch.setattr(attend, "KEYS_OF_A_PART", keys)
    problem = Problem(11, 6, 5, 64, 16, 20, 90, form)
    problem.entry_rows[2, 7:] = -1
    whole = part_of(problem, slice(0, 6), 90)
    for first, last in [(i, i + 1) for i in range(6)] + [(1, 4), (2, 6)]:
        rows = slice(first, last)
        assert torch.equal(part_of(problem, rows, widest(problem, rows)), whole[rows]), rows
    monkeypatch.setattr(attend, "MOST_PARTIALS", 2 * 4 * 5 * 64)
    assert torch.equal(part_of(problem, slice(0, 6), 90), whole)


# --------------------------------------------------------------------------------------------------- on a GPU


def same_in_every_batch(name, call):
    """`call(rows)` for a slice of LARGEST rows gives tensors by row; each row alone, and all of BATCHES."""
    alone = [call(slice(row, row + 1)) for row in range(LARGEST)]
    wrong = []
    for count in BATCHES:
        first = (LARGEST - count) // 3
        for number, got in enumerate(call(slice(first, first + count))):
            want = torch.cat([each[number] for each in alone[first : first + count]])
            assert got.isfinite().all(), f"{name}: not finite"
            differ = (got != want).flatten(1).any(1).sum().item()
            if differ:
                wrong.append(f"{count} rows: {differ} differ")
    assert not wrong, f"{name}: {wrong}"


def bf16(*shape):
    return torch.randn(*shape, device=DEVICE).bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8, rounded", "fp8", "fp4, rounded", "bf16, rounded", "bf16"])
def test_project(kind):
    torch.manual_seed(0)
    fp8 = kind == "fp8, rounded"
    for rows, columns in [(1536, 4096), (4096, 8192)] + [(8192, 1024), (32768, 1024), (65536, 512), (200, 480)] * fp8:
        weight = deterministic(weight_of(kind.split(",")[0], rows, columns, "rounded" in kind))
        x = bf16(LARGEST, columns)
        same_in_every_batch(f"{rows} x {columns}", lambda t, x=x, w=weight: (project.project(x[t], w),))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_grouped_output(kind):
    torch.manual_seed(1)
    heads, weight = bf16(LARGEST, 64, 512), deterministic(weight_of(kind, 8192, 4096, False))
    same_in_every_batch("wo_a", lambda t: (output.grouped_output(heads[t], weight, 8),))


@pytest.mark.gpu
def test_wide_product():
    torch.manual_seed(2)
    x = bf16(LARGEST, 4096)
    for rows in (64, 2048, 129280):
        matrix = bf16(rows, 4096)
        same_in_every_batch(f"{rows}", lambda t, m=matrix: (project.wide_product(x[t], m, deterministic=True),))


@pytest.mark.gpu
def test_products_in_fp32():
    torch.manual_seed(3)
    x, matrix = torch.randn(LARGEST, 1024, device=DEVICE), torch.randn(1536, 1024, device=DEVICE)
    same_in_every_batch("fp32", lambda t: (row_product(x[t], matrix, True),))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "bf16-packed", "fp32"])
@pytest.mark.parametrize("entries", [0, 512, 5000])
def test_attend(form, entries):
    problem = Problem(4, LARGEST, 64, 512, 64, 128, entries, form, pool_rows=5000)
    problem.entry_rows[1::3, 300:] = -1  # one part
    same_in_every_batch(form, lambda t: (part_of(problem, t, widest(problem, t) if entries else 0),))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16-packed", "bf16"])
def test_attend_of_other_chips(monkeypatch, form):
    monkeypatch.setattr(attend, "_suits_hopper", lambda *_: False)
    problem = Problem(5, LARGEST, 64, 512, 64, 128, 3000, form, pool_rows=5000)
    problem.entry_rows[1::3, 300:] = -1
    same_in_every_batch(form, lambda t: (part_of(problem, t, widest(problem, t)),))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_scores_of_index_keys(packed):
    """The scores themselves, of queries that share their pages and of such that do not."""
    torch.manual_seed(6)
    longest, pages = 2000, 63
    keys = bf16(2 * pages * 32, 128)
    pool = keys
    if packed:
        pool = index_rows(len(keys), 128, DEVICE)
        pool.write(torch.arange(len(keys), device=DEVICE), keys)
    q, weights = bf16(LARGEST, 64, 128), torch.randn(LARGEST, 64, device=DEVICE)
    request = (torch.arange(LARGEST, device=DEVICE) // 7 % 2)[:, None]
    page_rows = request * pages + torch.arange(pages, device=DEVICE)
    visible = torch.full((LARGEST,), longest, device=DEVICE)

    def scores(t):
        made = torch.zeros(t.stop - t.start, 2048, device=DEVICE)
        largest = torch.zeros(len(made), 2048 // 8, device=DEVICE)
        select._score(q[t], weights[t], pool, page_rows[t], visible[t], 512, made, largest)
        return made[:, :longest], largest[:, : longest // 8]

    same_in_every_batch("scores", scores)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_route_and_mix(dtype):
    torch.manual_seed(7)
    x, gate, bias = bf16(LARGEST, 4096).to(dtype), bf16(256, 4096), torch.randn(256, device=DEVICE)
    ids = torch.zeros(LARGEST, dtype=torch.int64, device=DEVICE)
    for matrix in (gate.to(dtype), gate.float()):
        same_in_every_batch("route", lambda t, m=matrix: route.route(x[t], m, bias, None, ids[t], 6, 1.5))
    shapes = ((24, 4 * 4096), (24,), (3,), (4096,))
    *weights, norm = (torch.randn(*shape, device=DEVICE) for shape in shapes)
    streams, mixing = bf16(LARGEST, 4, 4096).to(dtype), Mixing(weights[0] / 100, *weights[1:])

    def opened(t):
        reading = mix.open_sublayer(streams[t], mixing, norm, 20, 1e-6, 1e-6)
        closed, after = mix.close_and_open(streams[t], x[t], reading, mixing, norm, 20, 1e-6, 1e-6)
        final = mix.final_collapse(closed, Mixing(weights[0][:4], weights[1][:4], weights[2][:1]), norm, 1e-6, 1e-6)
        return closed, after.x, after.post, after.comb, final

    same_in_every_batch("mix", opened)


def experts_weights(form, dtype, width=1024):
    """The stacks w13 and w2 of 16 experts in a `form`, and the shared expert's two matrices: all deterministic."""
    stored = {"arranged": "fp4", "fp32": "plain"}.get(form, form)
    scales, rounds = None if stored == "plain" else torch.float8_e8m0fnu, form == "arranged"
    shapes = ((2 * width, width), (width, width))
    stacks = [deterministic(stack(16, *shape, stored, scales, dtype, rounds)) for shape in shapes]
    kept = "plain" if stored == "plain" else "fp8"
    shared = [deterministic(stack(1, *shape, kept, scales, dtype, rounds).expert(0)) for shape in shapes]
    return stacks, shared


def test_the_shared_expert_runs_by_itself_however_few_tokens_there_are():
    stacks, shared = experts_weights("arranged", torch.bfloat16, width=128)
    arrange_stacks(stacks)
    assert not fits_beside(1, *stacks, *shared)
    assert fits_beside(1, *stacks, *(replace(weight, deterministic=False) for weight in shared))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["arranged", "fp4", "fp8", "plain", "fp32"])
def test_experts(form):
    """Up to 112 pairs an expert, so that arranged stacks take the kernel for prompts too."""
    torch.manual_seed(8)
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    stacks, shared = experts_weights(form, dtype)
    if form == "arranged":
        arrange_experts(stacks, dtype)
        assert stacks[0].form == "arranged" and stacks[0].deterministic
        assert pays(6 * LARGEST, *stacks) and not pays(6 * 128, *stacks)
    x, (chosen, weights) = bf16(LARGEST, 1024).to(dtype), routing(LARGEST, 16, 6)
    same_in_every_batch(form, lambda t: (experts.experts(x[t], chosen[t], weights[t], *stacks, *shared, 10.0),))


def logprobs_of(engine, prompts):
    """Log-probabilities of every token of the prompts, which run together, and of 8 more: by prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    owners = {engine.add(prompt, params)[0]: number for number, prompt in enumerate(prompts)}
    found = [[] for _ in prompts]
    while engine.busy:
        for update in engine.step():
            assert update.error is None, update.error
            scored = [entry for _, entry in update.prompt_logprobs or ()]
            found[owners[update.request]] += [entry.logprob for entry in scored + (update.logprobs or [])]
    return found


@pytest.mark.gpu
def test_a_whole_model_in_official_sizes(monkeypatch):
    """Prompts alone in one chunk, beside 23 others, and in chunks of 64: equal bits of every log-probability."""
    monkeypatch.setattr(loading, "warm_up", lambda engine, progress: None)
    draw, known = np.random.default_rng(0), 6
    prompts = [draw.integers(2, 120000, int(size), dtype=np.int32) for size in draw.integers(1, 700, 24)]
    prompts[0] = draw.integers(2, 120000, 2500, dtype=np.int32)
    settings = {"step_tokens": 2048, "state_bytes": 1 << 30, "max_context": 4096, "max_running": 24}
    alone = None
    for chunk in (2048, 64):
        config = EngineConfig(deterministic=True, chunk_tokens=chunk, **settings)
        engine, _ = random_engine(config, geometry("flash", [0, 4, 128, 4]), 2, False)
        alone = alone or [logprobs_of(engine, [prompt])[0] for prompt in prompts[:known]]
        assert [len(each) for each in alone] == [len(prompt) + 7 for prompt in prompts[:known]]
        assert logprobs_of(engine, prompts)[:known] == alone, f"chunks of {chunk}"
        engine.close()
