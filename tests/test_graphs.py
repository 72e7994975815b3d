"""Size classes of decode graphs, and padding that changes nothing."""

import random
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from replays import with_replays
from schedules import MODELS, Job, check, engine, model, play, random_case

from leadline.engine import plan as plans
from leadline.engine.graphs import Padding, SizeClass, row_classes
from leadline.engine.plan import Chunk, FrontierWrite, Layout, Preparation, build_plan
from leadline.engine.sampling import SamplingParams, SamplingRow


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 63, 64, 100, 128, 1000])
def test_row_classes_reach_every_number_with_little_padding(most: int) -> None:
    classes = row_classes(most)
    assert classes == sorted(set(classes)) and classes[-1] == most
    assert all(after <= max(before + 4, before * 1.26) or after <= 4 for before, after in pairwise(classes))


def test_a_padded_plan_is_the_plan_and_then_nothing() -> None:
    table = np.arange(24, dtype=np.int32).reshape(3, 8)
    chunks = [Chunk(2, 127, 1), Chunk(0, 130, 1), Chunk(1, 3, 1)]
    plan = build_plan(chunks, np.array([5, -1, 7]), table, Layout(3, 16), np.arange(3), [], Preparation([], [], []))
    padding = Padding(SizeClass(8, 4, counting=False, random=True))
    rows = [
        SamplingRow(SamplingParams(temperature=0.5 + i / 2, top_k=i, top_p=0.25, min_p=0.125), 7 - i, i)
        for i in range(3)
    ]
    padded, how = padding.parted(torch.from_numpy(padding.filled(plan, rows)))
    empty, greedy = padding.parted(torch.from_numpy(padding.array))
    for field in fields(plan):
        before, after, without = (getattr(each, field.name) for each in (plan, padded, empty))
        if not isinstance(before, np.ndarray) or field.name.startswith(("table", "logit")):
            continue
        if not field.name.endswith("copies"):
            np.testing.assert_array_equal(after[: len(before)], before, field.name)
            np.testing.assert_array_equal(after[len(before) :], without[len(before) :], field.name)
    assert (empty.positions == -1).all() and (empty.piece_counts == 0).all() and (empty.closing_entries == -1).all()
    assert how.temperature.tolist() == [0.5, 1, 1.5, 0, 0, 0, 0, 0] and not greedy.temperature.any()
    assert how.top_k.tolist()[:3] == [0, 1, 2] and how.seed.tolist()[:3] == [7, 6, 5]
    assert how.position.tolist()[:3] == [0, 1, 2]
    assert how.top_p.tolist()[:3] == [0.25] * 3 and how.min_p.tolist()[:3] == [0.125] * 3


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_of_single_tokens_is_that_of_any_chunks(seed: int) -> None:
    """Both ways of planning, over the boundaries of windows; the general one is taken where a snapshot is wanted."""
    rng = random.Random(seed)
    count, layout = rng.choice([1, 1, 2, 9]), Layout(12, rng.choice([16, 128]))
    table = np.array([[rng.randrange(500) for _ in range(8)] for _ in range(12)], np.int32)
    starts = [rng.choice([0, 1, 3, 126, 127, 128, 255, 500, rng.randrange(900)]) for _ in range(count)]
    chunks = [Chunk(slot, start, 1) for slot, start in zip(rng.sample(range(12), count), starts, strict=True)]
    rest = (np.arange(count), table, layout, np.arange(count), [], Preparation([(1, 2, 3)], [], []))
    planned = build_plan(chunks, *rest)
    rows = plans._Rows.of(chunks)
    pieces = plans._pieces(rows, table)
    want = {**plans._keeps(rows, pieces, layout, []), **plans._closings(rows, table, layout)}
    want |= {"positions": rows.positions, "chunks": rows.chunks, "starts": rows.starts, "firsts": rows.firsts}
    want |= {"piece_firsts": pieces.firsts, "piece_counts": pieces.counts, "piece_slots": pieces.slots}
    want |= {"full_pieces": pieces.full, "full_pages": pieces.full_pages, "full_positions": pieces.full_positions}
    for name, array in want.items():
        got = getattr(planned, name)
        assert got.dtype == np.int64 and got.shape == array.shape, name
        np.testing.assert_array_equal(got, array, name)
    assert planned.longest_piece == 1 and planned.most_pages == max(starts) // 128 + 1
    kept = build_plan(chunks, *rest[:4], [FrontierWrite(0, starts[0] + 1, 11)], rest[5])
    assert len(kept.window_target) > count, "the snapshot is planned"


@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_padding_change_nothing(kind: str) -> None:
    """More rows and pages than requests, over the boundaries of CSA and HCA windows."""
    rng = random.Random(kind)
    built = with_replays(engine(kind, 11, 14, max_running=7))  # as many pages as requests hold: each write counts
    assert built.runner.graphs is not None
    built.runner.graphs.row_classes, built.runner.graphs.page_classes = [3, 7], [2, 5, 64]
    lengths = [300, 250, 127, 120, 1]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    jobs = [Job(i, np.array([rng.randrange(97) for _ in range(n)], np.int32), params) for i, n in enumerate(lengths)]
    play(built, jobs)
    check(kind, jobs, built.max_context)
    assert built.runner.graphs.recorded >= 2


def test_a_step_is_recorded_once_for_each_size_class() -> None:
    built = with_replays(engine("csa", 40, 14, max_running=4))
    graphs = built.runner.graphs
    assert graphs is not None
    asked, forward = [], graphs.forward
    graphs.forward = lambda batch, state: asked.append(len(batch.ids)) or forward(batch, state)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    play(built, [Job(0, np.array([3, 4, 5], np.int32), params) for _ in range(3)])
    assert graphs.recorded == 1 and asked == [4] * 6  # recorded, then replayed for tokens 2 to 6


def test_logits_of_all_classes_lie_in_the_same_memory() -> None:
    built = with_replays(engine("csa", 40, 14, max_running=5))
    graphs = built.runner.graphs
    assert graphs is not None
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
    for count in (1, 3, 5):
        play(built, [Job(0, np.array([3, 4, 5], np.int32), params) for _ in range(count)])
    assert graphs.recorded > 1
    assert len({each.logits.data_ptr() for each in graphs._graphs.values()}) == 1


def test_experts_are_counted_in_graphs_from_the_moment_that_it_is_asked_for() -> None:
    built = with_replays(engine("csa", 40, 14, max_running=4))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=0)
    play(built, [Job(0, np.array([3, 4, 5], np.int32), params) for _ in range(3)])
    built.expert_load()
    play(built, [Job(0, np.array([3, 4, 5, 6], np.int32), params) for _ in range(3)])
    config = model("csa").config
    tokens = 3 * (4 + 4)  # of each request four of the prompt and four of the output are computed
    for layer in built.expert_load():
        assert sum(layer) == tokens * config.num_experts_per_tok


def test_cases_draw_padding() -> None:
    drawn = [random_case("window only", seed).runner.graphs is not None for seed in range(8)]
    assert any(drawn) and not all(drawn)


def test_results_do_not_change_after_they_were_read() -> None:
    """A replay overwrites the logits of the one before, not what was read from them."""
    built = with_replays(engine("csa", 40, 14, max_running=4, overlap=True))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=2)
    jobs = [Job(0, np.array([3 + i, 4, 5], np.int32), params) for i in range(3)]
    play(built, jobs)
    check("csa", jobs, built.max_context)
    built.close()
    assert torch.isfinite(
        torch.tensor([score for job in jobs for scores in job.logprobs.values() for score in scores])
    ).all()


def test_sampling_that_is_not_plain_follows_the_graph() -> None:
    """Bias, bans and penalties act on the logits of a replayed step, alone and beside plain requests."""
    plain = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    likely = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={5: 100.0})
    scarce = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, presence_penalty=2.0, repetition_penalty=10.0)
    tokens = {}
    for name, replayed in (("replayed", True), ("launched", False)):
        built = engine("csa", 40, 14, max_running=4)
        built = with_replays(built) if replayed else built
        jobs = [Job(0, np.array([3, 4 + i, 5], np.int32), how) for i, how in enumerate((plain, likely, scarce))]
        play(built, jobs)
        tokens[name] = [output for job in jobs for output in job.tokens.values()]
        built.close()
    assert tokens["replayed"] == tokens["launched"]
    assert tokens["replayed"][1] == [5] * 6 and len(set(tokens["replayed"][2])) == 6
