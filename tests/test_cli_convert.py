"""`leadline convert` on the built-in checkpoint, there and back."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from leadline import LLM, SamplingParams
from leadline.checkpoint.reader import Checkpoint
from leadline.cli.main import app
from leadline.engine.loading import BUILT_IN


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


def bits(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone().view(torch.uint8) for name, tensor in Checkpoint(folder).tensors()}


@pytest.mark.parametrize("layout", ["native", "transformers"])
def test_another_layout_and_back_is_bit_exact(layout: str, tmp_path: Path) -> None:
    assert f"{layout} names, fp4 experts, other matrices fp8" in run(BUILT_IN, tmp_path / "a", "--layout", layout)
    run(tmp_path / "a", tmp_path / "b")
    first, second = bits(BUILT_IN), bits(tmp_path / "b")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_expanded_weights_answer_alike(tmp_path: Path) -> None:
    assert "bf16 experts, other matrices bf16" in run(BUILT_IN, tmp_path / "bf16", "--weights", "bf16")
    params = SamplingParams(temperature=0, max_tokens=30)
    answers = [LLM(model).generate("Once upon a time", params)[0] for model in (None, str(tmp_path / "bf16"))]
    assert answers[0].token_ids == answers[1].token_ids


def test_mistakes_are_sentences(tmp_path: Path) -> None:
    for words in ([tmp_path / "none", tmp_path / "x"], [BUILT_IN, BUILT_IN]):
        result = CliRunner().invoke(app, ["convert", *map(str, words)])
        assert result.exit_code == 1
        assert "Traceback" not in result.output and result.output.startswith("leadline: ")
