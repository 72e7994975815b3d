"""Where weights live: written once or again in a running engine, arranged for the kernels, gates as they are stored."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from checkpoints import FORMATS, RELEASE, decode, random_tensors, tiny_config
from torch import Tensor

from leadline.checkpoint.loader import WeightLoader
from leadline.checkpoint.names import WeightFormat, scale_name
from leadline.config import ModelConfig
from leadline.kernels.project import Weight
from leadline.model import weights as weights_module
from leadline.model.layer import Experts
from leadline.model.weights import WeightStore

RAW = tiny_config(hidden_size=128, moe_intermediate_size=128, n_routed_experts=3)
CONFIG = ModelConfig.from_dict(RAW)
CPU = torch.device("cpu")
NAMES = [f"layers.1.ffn.experts.{expert}.w{number}.weight" for expert in range(3) for number in (1, 3, 2)]


@pytest.fixture
def arranging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a Hopper GPU with bf16 activations: stacks are arranged, here by Triton's interpreter."""
    from leadline.kernels.gpu import experts_arrange

    def arrange(stacks: Sequence[Weight], dtype: torch.dtype) -> None:
        if dtype == torch.bfloat16 and all(map(experts_arrange.takes, stacks)):
            experts_arrange.arrange_stacks(stacks)

    monkeypatch.setattr(weights_module, "arrange_experts", arrange)
    yield


def put(store: WeightStore, tensors: dict[str, Tensor], names: list[str]) -> None:
    """Let the loader write these weights, halves far apart."""
    loader = WeightLoader(CONFIG, store.slots)
    with store.filling():
        for name in names:
            loader.put(name, tensors[name])
        for name in names:
            loader.put(scale_name(name), tensors[scale_name(name)])
        loader.finish(partial=True)


def forms(experts: Experts) -> list[str]:
    return [experts.w13.form, experts.w2.form]


def assert_holds(experts: Experts, wanted: dict[str, Tensor]) -> None:
    w13, w2 = experts.w13.dense(torch.float64), experts.w2.dense(torch.float64)
    for name in NAMES:
        expert, part = int(name.split(".")[4]), name.split(".")[5]
        held = {"w1": w13[expert, :128], "w3": w13[expert, 128:], "w2": w2[expert]}[part]
        assert torch.equal(held, wanted[name]), name


@pytest.mark.parametrize("seed", range(2))
def test_experts_are_arranged_after_every_load_and_keep_what_is_not_written(arranging: None, seed: int) -> None:
    store = WeightStore(CONFIG, RELEASE, torch.bfloat16, True, CPU)
    experts = Experts(CONFIG, 1, store)
    addresses = experts.w13.data.data_ptr(), experts.w2.data.data_ptr()
    generator = torch.Generator().manual_seed(seed)
    wanted: dict[str, Tensor] = {}
    for turn in range(3):
        tensors = random_tensors(RAW, RELEASE, 10 * seed + turn)
        order = torch.randperm(len(NAMES), generator=generator).tolist()
        names = [NAMES[i] for i in order[: len(order) if turn == 0 else 4]]
        put(store, tensors, names)
        wanted |= {name: decode(tensors, name) for name in names}
        assert forms(experts) == ["arranged", "arranged"]
        assert_holds(experts, wanted)
    assert addresses == (experts.w13.data.data_ptr(), experts.w2.data.data_ptr())


def test_values_that_cannot_be_arranged_leave_both_stacks_until_better_ones_come(arranging: None) -> None:
    store = WeightStore(CONFIG, RELEASE, torch.bfloat16, True, CPU)
    experts = Experts(CONFIG, 1, store)
    tensors = random_tensors(RAW, RELEASE)
    good = dict(tensors)
    name = NAMES[7]
    tensors[name] = torch.full_like(tensors[name], 0x11)
    far = torch.full(tensors[scale_name(name)].shape, 100, dtype=torch.uint8)
    far[5, 1] = 120
    tensors[scale_name(name)] = far.view(torch.float8_e8m0fnu)
    put(store, tensors, NAMES)
    assert forms(experts) == ["fp4", "fp4"]
    assert_holds(experts, {name: decode(tensors, name) for name in NAMES})
    put(store, good, [name])
    assert forms(experts) == ["arranged", "arranged"]
    assert_holds(experts, {name: decode(good, name) for name in NAMES})


def test_a_failed_refit_leaves_the_kernels_order(arranging: None) -> None:
    store = WeightStore(CONFIG, RELEASE, torch.bfloat16, True, CPU)
    experts = Experts(CONFIG, 1, store)
    tensors = random_tensors(RAW, RELEASE)
    put(store, tensors, NAMES)
    with pytest.raises(KeyError), store.filling():
        assert forms(experts) == ["fp4", "fp4"]
        raise KeyError
    assert forms(experts) == ["arranged", "arranged"]
    assert_holds(experts, {name: decode(tensors, name) for name in NAMES})


def test_stacks_that_layers_share_are_arranged_once(arranging: None) -> None:
    made: dict[tuple[str, ...], Weight] = {}

    class Shared(WeightStore):
        def experts(self, prefix: str, *names: str) -> Weight:
            if names not in made:
                made[names] = super().experts(prefix, *names)
            return made[names]

    store = Shared(CONFIG, RELEASE, torch.bfloat16, True, CPU)
    first, second = Experts(CONFIG, 1, store), Experts(CONFIG, 2, store)
    tensors = random_tensors(RAW, RELEASE)
    for _ in range(2):
        put(store, tensors, NAMES)
        for experts in (first, second):
            assert forms(experts) == ["arranged", "arranged"]
            assert_holds(experts, {name: decode(tensors, name) for name in NAMES})


@pytest.mark.parametrize(
    ("keep", "dtype", "native"),
    [(RELEASE, torch.float32, True), (RELEASE, torch.bfloat16, False), (FORMATS["fp8"], torch.bfloat16, True)],
    ids=["fp32 activations", "exact numerics", "fp8 experts"],
)
def test_nothing_else_is_arranged(arranging: None, keep: WeightFormat, dtype: torch.dtype, native: bool) -> None:
    store = WeightStore(CONFIG, keep, dtype, native, CPU)
    experts = Experts(CONFIG, 1, store)
    with store.filling():
        pass
    assert forms(experts) == [keep.experts, keep.experts]


def test_on_a_cpu_nothing_is_arranged() -> None:
    store = WeightStore(CONFIG, RELEASE, torch.bfloat16, True, CPU)
    experts = Experts(CONFIG, 1, store)
    put(store, random_tensors(RAW, RELEASE), NAMES)
    assert forms(experts) == ["fp4", "fp4"]


@pytest.mark.parametrize(
    ("keep", "dtype", "held"),
    [
        (RELEASE, torch.bfloat16, torch.bfloat16),
        (FORMATS["bf16"], torch.bfloat16, torch.bfloat16),
        (FORMATS["fp32"], torch.bfloat16, torch.float32),
        (None, torch.bfloat16, torch.float32),
        (RELEASE, torch.float32, torch.float32),
        (RELEASE, torch.float64, torch.float64),
    ],
)
def test_gates_are_held_in_bf16_where_they_come_and_run_in_it(
    keep: WeightFormat | None, dtype: torch.dtype, held: torch.dtype
) -> None:
    store = WeightStore(CONFIG, keep, dtype, True, CPU)
    experts = Experts(CONFIG, 2, store)
    name = "layers.2.ffn.gate.weight"
    tensor = random_tensors(RAW, keep or RELEASE)[name]
    WeightLoader(CONFIG, store.slots).put(name, tensor)
    assert experts.gate.dtype == held and torch.equal(experts.gate.double(), tensor.double())


def test_rows_that_are_no_tokens_are_zero_and_not_counted() -> None:
    """In every layer type of routing, at random places; the other rows do not change."""
    store = WeightStore(CONFIG, None, torch.float32, False, CPU)
    layers = [Experts(CONFIG, layer, store) for layer in (0, 2)]
    loader = WeightLoader(CONFIG, store.slots)
    for name, tensor in random_tensors(RAW, FORMATS["fp32"]).items():
        loader.put(name, tensor)
    generator = torch.Generator().manual_seed(5)
    for rows in (1, 5, 16):
        x, ids = torch.randn(rows, 128, generator=generator), torch.randint(0, 71, (rows,), generator=generator)
        absent = torch.rand(rows, generator=generator) < 0.4
        absent[0] = True
        for experts in layers:
            want = experts.forward(x, ids)
            only, counts = (torch.zeros(3, dtype=torch.int64) for _ in range(2))
            experts.forward(x[~absent], ids[~absent], only)
            got = experts.forward(x, ids.masked_fill(absent, -1), counts)
            assert torch.equal(got[~absent], want[~absent]) and got.isfinite().all()
            assert torch.equal(counts, only) and counts.sum() == 2 * (~absent).sum()
