"""`deterministic`: where it reaches, what refuses it, and on a CPU the same bits alone, in a batch and in chunks."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import random_config, random_reference
from typer.testing import CliRunner

from leadline import LLM, SamplingParams
from leadline.cli import bench as bench_module
from leadline.cli import serve as serve_module
from leadline.cli.main import app
from leadline.config import EngineConfig
from leadline.engine import llm as llm_module
from leadline.engine import loading
from leadline.kernels.compress import Gating
from leadline.kernels.gpu import chips
from leadline.kernels.project import Weight
from leadline.model.attention import Attention
from leadline.model.transformer import Transformer
from leadline.model.weights import WeightStore

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def parts(module: Any) -> Iterator[Any]:
    """Everything that a model's modules hold."""
    for value in vars(module).values():
        for each in value if isinstance(value, list) else [value]:
            yield each
            if type(each).__module__.startswith("leadline.model"):
                yield from parts(each)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_matrix_of_a_model_knows_it(deterministic: bool) -> None:
    config = random_reference(random_config(random.Random(0), num_hidden_layers=3, compress_ratios=[0, 4, 128])).config
    model = Transformer(config, WeightStore(config, None, torch.float32, False, CPU, deterministic))
    told = [part for part in parts(model) if isinstance(part, Weight | Gating | Attention)]
    assert {type(part) for part in told} == {Weight, Gating, Attention}
    assert all(part.deterministic == deterministic for part in [model, *told])


def test_a_view_of_one_expert_knows_it_too() -> None:
    assert Weight(torch.zeros(2, 3, 4), None, False, True).expert(1).deterministic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_activations_than_bf16_are_refused_on_a_gpu_with_a_sentence(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"activations are float\d\d: .* use dtype 'bfloat16', 'checkpoint' or 'auto'"):
        loading.check_deterministic(dtype, CUDA)
    loading.check_deterministic(dtype, CPU)


@pytest.mark.parametrize("chip", chips.CHIPS)
def test_chips_whose_sums_follow_the_size_of_a_tile_are_refused(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    monkeypatch.setattr(chips, "chip_of", lambda device: chips.CHIPS[chip])
    if chip.startswith("sm"):
        loading.check_deterministic(torch.bfloat16, CUDA)
    else:
        with pytest.raises(ValueError, match=f"deterministic is True, but {chip}"):
            loading.check_deterministic(torch.bfloat16, CUDA)


def test_the_setting_reaches_the_weights_and_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    checked: list[torch.dtype] = []
    monkeypatch.setattr(loading, "check_deterministic", lambda dtype, device: checked.append(dtype))

    class Store(WeightStore):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self.deterministic)

    monkeypatch.setattr(loading, "WeightStore", Store)
    for deterministic in (False, True):
        LLM(device="cpu", deterministic=deterministic, state_bytes=1 << 26).close()
    assert made == [False, True] and checked == [torch.float32]


@pytest.mark.parametrize("command", ["generate hello", "chat", "eval", "serve", "bench", "bench --random-weights tiny"])
@pytest.mark.parametrize("option", ["", "--deterministic"])
def test_every_command_hands_the_option_on(monkeypatch: pytest.MonkeyPatch, command: str, option: str) -> None:
    given: list[bool] = []

    def refuse(**settings: Any) -> EngineConfig:
        given.append(settings["deterministic"])
        raise ValueError("enough")

    for module in (llm_module, bench_module, serve_module):
        monkeypatch.setattr(module, "EngineConfig", refuse)
    result = CliRunner().invoke(app, [*command.split(), *option.split()])
    assert result.exit_code == 1 and given == [bool(option)]


def test_log_probabilities_have_the_same_bits_alone_in_a_batch_and_in_chunks() -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 3000) for _ in range(rng.choice((1, 3, 40, 150)))] for _ in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    settings: dict[str, Any] = {"device": "cpu", "deterministic": True, "state_bytes": 1 << 28, "max_running": 12}
    llm = LLM(**settings)
    alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    together = llm.generate(prompts, params)
    in_chunks = LLM(chunk_tokens=17, **settings).generate(prompts, params)
    for number, want in enumerate(alone):
        for have in (together[number], in_chunks[number]):
            assert (have.logprobs, have.prompt_logprobs) == (want.logprobs, want.prompt_logprobs), f"prompt {number}"
