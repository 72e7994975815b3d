"""Models without a checkpoint, and requests whose prompt is taken as run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from leadline.checkpoint.loader import Slot
from leadline.config import EngineConfig, ModelConfig
from leadline.engine.engine import Engine
from leadline.engine.pretend import fill_state, pretend_prefilled
from leadline.engine.random_weights import RandomWeights, fill_random, geometry, official_format, random_engine
from leadline.engine.sampling import SamplingParams
from leadline.kernels.project import Weight
from leadline.model.state import State, StateSize
from leadline.model.transformer import Transformer
from leadline.presets import preset

CPU = torch.device("cpu")
SMALL = EngineConfig(state_bytes=24 << 20, max_running=4, step_tokens=256, chunk_tokens=256, device="cpu")


def engine(stacks: int = 3, layers: int = 3, config: EngineConfig = SMALL) -> Engine:
    return random_engine(config, geometry("tiny", layers), stacks, progress=False)[0]


def store(model: ModelConfig, stacks: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> RandomWeights:
    """Filled weights in the official formats, without the arranging that a GPU's kernels want."""
    weights = RandomWeights(stacks, model, official_format(model), dtype, True, CPU)
    weights.model = Transformer(model, weights)  # type: ignore[attr-defined]
    fill_random(weights, seed)
    return weights


# -------------------------------------------------------------------------------------------------- geometry


def test_a_geometry_may_be_cut_or_laid_out_anew() -> None:
    assert geometry("flash", 8).compress_ratios == (0, 0, 4, 128, 4, 128, 4, 128)
    assert geometry("flash", 8) == geometry("flash", [0, 0, 4, 128, 4, 128, 4, 128])
    one = geometry("pro", [128])
    assert (one.num_hidden_layers, one.num_hash_layers, one.hca_layers) == (1, 1, (0,))
    drafting = geometry("flash-0731")
    assert (drafting.num_draft_layers, drafting.dspark) == (0, None)
    assert drafting.compress_ratios == preset("flash").compress_ratios
    assert geometry("tiny").hidden_size == 256


@pytest.mark.parametrize(
    ("name", "layers", "words"),
    [
        ("falsh", None, "no random weights of 'falsh'; there are tiny, flash,"),
        ("tiny", 0, "tiny has 6 layers; 0 of them"),
        ("flash", -1, "-1 of them"),
        ("flash", 44, "flash has 43 layers; 44"),
        ("flash", [], "ratio none"),
        ("flash", [0, 5, 4, 9], r"ratio \[5, 9\] were asked for; there are \[0, 4, 128\]"),
    ],
)
def test_what_no_geometry_has_is_refused(name: str, layers: int | list[int] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        geometry(name, layers)


# --------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_official_formats_are_filled_with_sane_values(experts: str) -> None:
    """Matrices keep variance, whatever the code; no NaN; norms 1; tables name different experts that exist."""
    model = replace(geometry("tiny", [0, 4, 128]), expert_dtype=experts, num_hash_layers=1)
    weights = store(model, 3)
    dtypes = set()
    for name, slot in weights.slots.items():
        values = slot.weight
        if slot.scale is not None:
            dtypes.add((values.dtype, slot.scale.dtype))
            values = _expanded(values, slot.scale)
        if name.endswith("tid2eid"):
            assert ((values >= 0) & (values < model.n_routed_experts)).all()
            assert (values.sort(1).values.diff(dim=1) > 0).all(), "an expert stands twice in a row"
            assert len(values.unique(dim=0)) > 20
            continue
        assert values.isfinite().all(), name
        if name.endswith("norm.weight"):
            assert (values == 1).all(), name
        elif values.numel() > 20_000 and values.shape[-1] >= 64 and name != "embed.weight":
            gain = float(values.double().square().sum(1).mean())
            few = slot.scale is not None and slot.scale.numel() < 100  # of two sizes, drawn for each tile
            assert (0.25 < gain < 4) if few else gain == pytest.approx(1, rel=0.1), name
    kinds = {"fp4": (torch.int8, torch.float8_e8m0fnu), "fp8": (torch.float8_e4m3fn, torch.float32)}
    assert kinds[experts] in dtypes


def _expanded(codes: Tensor, scale: Tensor) -> Tensor:
    return Weight(codes, scale).dense(torch.float32)


def test_codes_are_all_drawn_and_scales_vary() -> None:
    weights = store(geometry("tiny", [4]), 1)
    codes = weights.slots["layers.0.attn.wq_b.weight"]
    assert len(codes.weight.view(torch.uint8).unique()) == 254
    experts = weights.slots["layers.0.ffn.experts.3.w2.weight"]
    assert len(experts.weight.view(torch.uint8).unique()) == 256
    assert experts.scale is not None and len(experts.scale.view(torch.uint8).unique()) == 2


@pytest.mark.parametrize(("shape", "scales"), [((2048, 4096), (16, 32)), ((4096, 1536), (32, 12))])
def test_fp8_matrices_of_many_tiles_keep_variance(shape: tuple[int, int], scales: tuple[int, int]) -> None:
    codes, scale = torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty(scales, dtype=torch.float8_e8m0fnu)
    fill_random(SimpleNamespace(device=CPU, config=None, slots={"a.weight": Slot(codes, scale)}), 0)  # type: ignore
    assert float(_expanded(codes, scale).square().sum(1).mean()) == pytest.approx(1, rel=0.1)


def test_the_seed_decides_and_layers_differ() -> None:
    model = geometry("tiny", [0, 0])
    first, again, other = (store(model, 2, seed=seed).slots for seed in (1, 1, 2))
    for name in ("layers.0.ffn.gate.weight", "layers.1.ffn.experts.0.w1.weight", "embed.weight"):
        assert torch.equal(_bits(first[name].weight), _bits(again[name].weight)), name
        assert not torch.equal(_bits(first[name].weight), _bits(other[name].weight)), name
        twin = name.replace("layers.0", "layers.1")
        assert twin == name or not torch.equal(_bits(first[name].weight), _bits(first[twin].weight)), name


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def test_layers_share_stacks_in_turn_and_nothing_else() -> None:
    model = geometry("tiny", [0, 4, 128, 4, 0])
    shared, whole = store(model, 2), store(model, 5)
    layers = shared.model.layers  # type: ignore[attr-defined]
    for number, layer in enumerate(layers):
        for other in layers[:number]:
            same = number % 2 == other.layer % 2
            assert (layer.experts.w13 is other.experts.w13) == same
            assert (layer.experts.w2.data.data_ptr() == other.experts.w2.data.data_ptr()) == same
            assert not torch.equal(layer.experts.gate, other.experts.gate)
    stacks = [expert.data.nbytes + expert.scale.nbytes for expert in (layers[0].experts.w13, layers[0].experts.w2)]
    assert whole.bytes - shared.bytes == 3 * sum(stacks)
    with pytest.raises(ValueError, match="0 distinct stacks"):
        store(model, 0)


@pytest.mark.parametrize("dtype", ["auto", "checkpoint"])
def test_a_random_model_runs_with_logits_of_about_unit_size_and_near_uniform_routing(dtype: str) -> None:
    running = engine(config=replace(SMALL, dtype=dtype))
    running.expert_load()
    rng = np.random.default_rng(0)
    logprobs = []
    for _ in range(4):
        running.add(rng.integers(0, 3072, 200, dtype=np.int32), SamplingParams(max_tokens=2, logprobs=5))
    while running.busy:
        for update in running.step():
            assert update.error is None
            logprobs += [entry.logprob for entry in update.logprobs or []]
    assert np.isfinite(logprobs).all()
    # Of 3,072 tokens each has a probability near 1 / 3,072: logits of unit size, neither flat nor peaked.
    assert -11 < np.mean(logprobs) < -4
    for counts in np.array(running.expert_load()):
        assert counts.sum() == 2 * (800 + 4)
        assert counts.max() < 2.5 * counts.mean() and counts.min() > 0.2 * counts.mean()


# -------------------------------------------------------------------------------------------- pretended prompts


@pytest.mark.parametrize("packed", [False, True])
def test_state_is_filled_with_rows_that_tokens_might_have_left(packed: bool) -> None:
    model, size = geometry("tiny", [0, 4, 128]), StateSize(50, 6, 40, 6)
    state = State(model, size, torch.bfloat16 if packed else torch.float32, CPU, packed)
    for pool in (state.window, state.csa_entries, state.hca_entries, state.index_keys):
        (pool if isinstance(pool, Tensor) else pool.whole.blocks).view(torch.uint8).fill_(255)
    state.pending.fill_(float("nan"))
    state.folds.fill_(float("nan"))
    fill_state(state, 3)
    for pool in (state.window, state.csa_entries, state.hca_entries, state.index_keys):
        rows = pool if isinstance(pool, Tensor) else pool.whole.read(torch.arange(len(pool.whole.blocks) * 64))
        assert rows.isfinite().all()
        assert float(rows.float().square().mean()) == pytest.approx(1, abs=0.1)
    assert state.pending.isfinite().all()
    entries = state.folds[:, :, 2] / state.folds[:, :, 1]
    assert entries.isfinite().all() and (state.folds[:, :, 1] >= 1).all()


@pytest.mark.parametrize("length", [1, 128, 129, 300, 1500])
def test_a_pretended_prompt_is_found_and_only_its_rest_runs(length: int) -> None:
    running = engine()
    fill_state(running.runner.state, 0)
    prompt = np.random.default_rng(length).integers(0, 3072, length, dtype=np.int32)
    told = pretend_prefilled(running, prompt)
    assert told == (length - 1) // 128 * 128
    assert running.problems() == []
    [request] = running.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    while running.busy:
        assert all(update.error is None for update in running.step())
    assert request.reused == told
    assert running.stats().tokens_run == length - told + 2
    assert running.problems() == []
    running.reset_cache()
    assert running.stats().pages_used == running.stats().slots_used == 0


def test_what_lies_in_the_pools_is_what_the_request_reads() -> None:
    def first_logprob(seed: int) -> float:
        running = engine()
        fill_state(running.runner.state, seed)
        prompt = np.arange(400, dtype=np.int32)
        pretend_prefilled(running, prompt)
        running.add(prompt, SamplingParams(max_tokens=1, temperature=0, logprobs=0))
        while running.busy:
            for update in running.step():
                for entry in update.logprobs or []:
                    return entry.logprob
        raise AssertionError("no token came")

    assert first_logprob(1) == first_logprob(1) != first_logprob(2)


def test_a_prompt_that_cannot_be_pretended_changes_nothing() -> None:
    running = engine()
    free = running.scheduler.pages.free
    with pytest.raises(ValueError, match=r"needs [\d,]+ pages and a slot; free are"):
        pretend_prefilled(running, np.zeros((free + 1) * 128 + 1, np.int32))
    assert running.scheduler.pages.free == free and running.problems() == []
    without = engine(config=replace(SMALL, prefix_cache=False))
    with pytest.raises(ValueError, match="prefix_cache is off"):
        pretend_prefilled(without, np.zeros(300, np.int32))
