"""What `leadline bench` measures against: floors, experts that are read, and kernels sorted by operation."""

import numpy as np
import pytest
import torch

from leadline.bench.breakdown import Kernel, busy_seconds, operations, shares
from leadline.bench.floors import Floors, Machine, RowBytes, dense_bytes, experts_hit
from leadline.config import Ratio
from leadline.engine.random_weights import geometry, official_format
from leadline.kernels.packed import kv_rows
from leadline.model.state import State, StateSize

FLASH = geometry("flash")
OFFICIAL = Floors(FLASH, official_format(FLASH), RowBytes(584, 68), Machine(4.4e12, 675e12))


def test_bytes_of_flash_are_the_published_ones() -> None:
    """Dense parts 7.77 GB; with 43 * 256 experts, embedding and the MTP layer the files' 159.6 GB."""
    assert sum(OFFICIAL.dense.values()) == pytest.approx(7.77e9, rel=1e-3)
    assert OFFICIAL.expert == pytest.approx(3 * 4096 * 2048 * 0.53125)
    assert dense_bytes(FLASH, official_format(FLASH))["head"] == 129280 * 4096 * 2
    base = geometry("flash-base")
    assert Floors(base, official_format(base), RowBytes(584, 68), OFFICIAL.machine).expert > 1.8 * OFFICIAL.expert


@pytest.mark.parametrize(
    ("batch", "hit", "milliseconds"),
    [(1, 6.0, (2.55, 2.56, 2.66)), (16, 80.8, (12.4, 12.6, 14.1)), (128, 243.7, (33.9, 35.6, 47.6))],
)
def test_decode_floors_of_flash_worked_out_by_hand(batch: int, hit: float, milliseconds: tuple[float, ...]) -> None:
    for context, wanted in zip((4096, 1 << 17, 1 << 20), milliseconds, strict=True):
        parts = OFFICIAL.decode(batch, context, 43 * hit)
        assert sum(parts.values()) * 1e3 == pytest.approx(wanted, abs=0.06), context


@pytest.mark.parametrize(
    ("ratio", "context", "kv_rows", "keys"),
    [
        (Ratio.SWA, 50, 50, 0),
        (Ratio.SWA, 5000, 128, 0),
        (Ratio.CSA, 2048, 128 + 512, 0),  # as many entries as are chosen: nothing is scored
        (Ratio.CSA, 4096, 128 + 512, 1024),
        (Ratio.HCA, 5000, 128 + 39, 0),
    ],
)
def test_rows_that_a_token_reads(ratio: Ratio, context: int, kv_rows: int, keys: int) -> None:
    assert OFFICIAL.row_bytes(ratio, context) == (kv_rows * 584, keys * 68)


def test_prefill_floor_counts_the_published_operations() -> None:
    """About 30 GFLOP a token, of which attention's and the indexer's part grows with the context."""
    per_token = [OFFICIAL.prefill(tokens) * 675e12 / tokens for tokens in (1024, 8192, 32768)]
    assert 25e9 < per_token[0] < per_token[1] < per_token[2] < 31e9


def test_prefill_floor_adds_up_what_each_token_reads() -> None:
    model, tokens = geometry("tiny"), 700
    floors = Floors(model, official_format(model), RowBytes(1, 1), Machine(1.0, 1.0))

    def attention(position: int) -> int:
        """Operations of the token that ends a context of `position` tokens."""
        total = 0
        for ratio in model.compress_ratios:
            entries = position // ratio if ratio else 0
            if ratio == Ratio.CSA and entries > model.index_topk:
                total += 2 * model.index_n_heads * model.index_head_dim * entries
            read = min(entries, model.index_topk) if ratio == Ratio.CSA else entries
            total += 4 * model.num_attention_heads * model.head_dim * (min(position, model.sliding_window) + read)
        return total

    weights = floors.prefill(1) - attention(1)
    assert weights > 2 * 3 * 256 * 128 * 2 * 6  # those of the two chosen experts, in six layers, and others
    assert floors.prefill(tokens) == pytest.approx(tokens * weights + sum(map(attention, range(1, tokens + 1))))


def test_rows_are_counted_as_the_state_keeps_them() -> None:
    size, cpu = StateSize(2, 2, 4, 2), torch.device("cpu")
    config = geometry("flash", [0, 4, 128])
    assert RowBytes.of(State(config, size, torch.bfloat16, cpu, packed=True)) == RowBytes(584, 68)
    assert RowBytes.of(State(config, size, torch.float32, cpu)) == RowBytes(512 * 4, 128 * 4)
    assert kv_rows(64, 512, 64, cpu).row_bytes == 576


def test_the_machine_is_measured() -> None:
    machine = Machine.measured(torch.device("cpu"))
    assert 1e8 < machine.bandwidth < 1e13 and 1e8 < machine.rate < 1e14


@pytest.mark.parametrize("batch", [1, 4, 16, 100])
def test_experts_hit_agrees_with_steps_that_are_counted_one_by_one(batch: int) -> None:
    """Skewed routing in two layers, tokens independent: the mean number of distinct experts in 300 steps."""
    rng, experts, active = np.random.default_rng(batch), 24, 3
    skew = rng.exponential(1, (2, experts)) + 0.05
    counts, distinct, steps = np.zeros((2, experts), np.int64), 0, 300
    for _ in range(steps):
        for layer in range(2):
            noise = rng.gumbel(size=(batch, experts)) + np.log(skew[layer])
            chosen = noise.argsort(1)[:, -active:]
            counts[layer] += np.bincount(chosen.ravel(), minlength=experts)
            distinct += len(np.unique(chosen))
    assert experts_hit(counts, batch, active) == pytest.approx(distinct / steps, rel=0.02)


def test_experts_hit_knows_the_ends() -> None:
    one = np.zeros((1, 8), np.int64)
    one[0, :2] = 5
    assert experts_hit(one, 50, 2) == pytest.approx(2)
    assert experts_hit(np.ones((3, 8), np.int64), 1000, 2) == pytest.approx(24)
    assert experts_hit(np.ones((3, 8), np.int64), 1, 2) == pytest.approx(6)


# ------------------------------------------------------------------------------------------------- breakdown

MIX = [("_close_and_project", "mix"), ("_mix_and_read", "mix")]
LATENT = [("few_product", "project"), ("_rms_norm", "query/store"), ("few_product", "project")]
STORE = [("store_kernel", "query/store")]
ATTEND = [("_attend", "attend"), ("_join", "attend"), ("few_product", "output"), ("few_product", "project")]
INDEX = [
    ("few_product", "select"),
    ("index_query_kernel", "select"),
    ("product_kernel", "select"),
    ("_score_kernel", "select"),
    ("_choose_kernel", "select"),
    ("_entry_rows_kernel", "select"),
]
GATES = [("product_kernel", "compress")]
COMPRESSING = {
    "swa": [],
    "csa": [*GATES, *INDEX],
    "csa closing": [*GATES, ("close_csa_kernel", "compress"), *INDEX],
    "hca": [*GATES, ("hca_fold_kernel", "compress")],
}
ROUTE = [("_multiply", "route"), ("_choose", "route")]
SHARED = [("few_product", "experts"), ("_hidden_rows", "experts"), ("few_product", "experts")]
SUM = [("_summed_pairs", "experts")]
ARRANGED = [("_prepare", "experts"), ("up_product", "experts"), ("down_product", "experts")]
MANY = [
    ("_count", "experts"),
    ("_place", "experts"),
    ("_gather_rounded", "experts"),
    ("prompt_product", "experts"),
    ("quantize_kernel", "experts"),
    ("prompt_product", "experts"),
]
IN_ORDER = [("_count", "experts"), ("_place", "experts"), ("_gate_up", "experts"), ("_down", "experts")]
EXPERTS = {
    "together": [*ARRANGED, *SUM],
    "shared one apart": [*SHARED, ("_count", "experts"), *ARRANGED, *SUM],
    "many pairs": [*SHARED, *MANY, *SUM],
    "in the checkpoint's order": [*SHARED, *IN_ORDER, *SUM],
}
BEFORE = [("Memcpy HtoD (Pinned -> Device)", "other"), ("void at::native::index_elementwise_kernel", "other")]
HEAD = [
    *MIX,
    ("nvjet_tst_128x64_gemm", "head"),
    ("sample_tops_kernel", "sample"),
    ("sample_choose_kernel", "sample"),
    ("sample_weigh_kernel", "sample"),
    ("sample_draw_kernel", "sample"),
    ("sample_pick_kernel", "sample"),
    ("Memcpy DtoH", "other"),
]


def layer(kind: str, experts: str) -> list[tuple[str, str]]:
    return [*MIX, *LATENT, *STORE, *COMPRESSING[kind], *ATTEND, *MIX, *ROUTE, *EXPERTS[experts]]


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("kind", COMPRESSING)
def test_kernels_of_a_layer_are_sorted_by_their_order(kind: str, experts: str) -> None:
    expected = [*BEFORE, *layer(kind, experts), *layer("swa", experts), *HEAD] * 2
    names = [name for name, _ in expected]
    assert list(zip(names, operations(names), strict=True)) == expected


def test_products_whose_input_is_rounded_first() -> None:
    """With more rows than a few a launch of its own rounds a product's input."""
    rounded = [(name, operation) for name, operation in layer("csa closing", "shared one apart")]
    for place in reversed([i for i, (name, _) in enumerate(rounded) if name == "few_product"]):
        if rounded[place][1] != "output":  # this input is never rounded
            rounded.insert(place, ("quantize_kernel", rounded[place][1]))
    expected = [*rounded, *HEAD]
    names = [name for name, _ in expected]
    assert list(zip(names, operations(names), strict=True)) == expected


def test_shares_are_of_one_step_and_busy_time_counts_overlaps_once() -> None:
    kernels = [
        Kernel("store_kernel", 0, 10),
        Kernel("_attend", 5, 10),
        Kernel("_attend", 30, 5),
        Kernel("_join", 31, 1),
    ]
    assert busy_seconds(kernels) == pytest.approx(20e-6)
    found = shares(kernels, 2)
    assert (found["attend"].launches, found["attend"].seconds) == (1.5, pytest.approx(8e-6))
    assert found["query/store"].seconds == pytest.approx(5e-6)
    assert busy_seconds([]) == 0
