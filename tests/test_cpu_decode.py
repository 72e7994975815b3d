"""Decoding one request on a CPU: few operations a step, and the shortened ones compute what their formulas say."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leadline import LLM, SamplingParams
from leadline.formats import fp8_round_trip
from leadline.kernels.attend import attend
from leadline.kernels.experts import routed_experts
from leadline.kernels.mix import sinkhorn
from leadline.kernels.project import ROW_MULTIPLE, Weight, row_product
from leadline.kernels.rope import Angles
from leadline.kernels.rowwise import sigmoid

WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


class Operations(TorchDispatchMode):
    """Counts PyTorch operations, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **kwargs or {})


def test_a_decode_step_of_the_built_in_model_takes_few_operations() -> None:
    """Most of its time is the cost of an operation, whatever is in it. Four steps: one closes windows."""
    engine = LLM().engine
    engine.add(np.arange(2, 60, dtype=np.int32), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    for _ in range(3):
        engine.step()
    with Operations() as operations:
        for _ in range(4):
            engine.step()
    assert 1000 < operations.count / 4 < 3750


@WIDE
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 8])
def test_sinkhorn_is_its_rounds(streams: int, dtype: torch.dtype) -> None:
    logits = 3 * torch.randn(37, streams, streams, dtype=dtype, generator=torch.Generator().manual_seed(streams))
    before = logits.clone()
    for rounds in (1, 2, 20):
        want = logits.softmax(-1) + 1e-6
        want = want / (want.sum(-2, keepdim=True) + 1e-6)
        for _ in range(rounds - 1):
            want = want / (want.sum(-1, keepdim=True) + 1e-6)
            want = want / (want.sum(-2, keepdim=True) + 1e-6)
        tight = 4 * rounds * torch.finfo(dtype).eps
        torch.testing.assert_close(sinkhorn(logits, rounds, 1e-6), want, rtol=tight, atol=0)
    assert torch.equal(logits, before)


@WIDE
def test_sigmoid_is_its_formula_to_the_bit(dtype: torch.dtype) -> None:
    x = torch.linspace(-120, 120, 9973, dtype=dtype)
    assert torch.equal(sigmoid(x), 1 / (1 + torch.exp(-x)))


@pytest.mark.parametrize("rows", [1, 2, ROW_MULTIPLE, 9])
def test_a_product_keeps_its_rows_and_its_input(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, matrix = torch.randn(rows, 40, generator=generator), torch.randn(24, 40, generator=generator)
    before, got = x.clone(), row_product(x, matrix)
    assert got.shape == (rows, 24) and torch.equal(x, before)
    torch.testing.assert_close(got.double(), x.double() @ matrix.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "native"])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_routed_experts_are_each_tokens_experts_in_turn(tokens: int, rounds: bool) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, weights = (torch.randn(tokens, size, generator=generator, dtype=torch.float64) for size in (96, 3))
    w13, w2 = (torch.randn(7, *shape, generator=generator, dtype=torch.float64) for shape in ((64, 96), (96, 32)))
    chosen = torch.rand(tokens, 7, generator=generator).argsort(-1)[:, :3]
    chosen[::4, 1] = -1
    chosen[2::8] = -1
    as_kept = fp8_round_trip if rounds else torch.clone
    want = torch.zeros_like(x)
    for token in range(tokens):
        for place in range(3):
            expert = int(chosen[token, place])
            if expert >= 0:
                gate, up = (w13[expert] @ as_kept(x[token])).split(32)
                hidden = gate.clamp(max=1.0) * torch.sigmoid(gate.clamp(max=1.0)) * up.clamp(-1.0, 1.0)
                want[token] += w2[expert] @ as_kept(hidden * weights[token, place])
    got = routed_experts(x, chosen, weights, Weight(w13, None, rounds), Weight(w2, None, rounds), 1.0)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 64, 65, 130])
def test_attention_is_one_softmax_over_sink_window_and_entries(tokens: int) -> None:
    """More tokens than a tile, more entries than a block, and NaN in rows that nobody reads."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, sink, window, entries = draw(tokens, 3, 32), draw(3), draw(50, 32), draw(300, 32)
    window[0], entries[0] = float("nan"), float("nan")
    near = torch.randint(-1, 50, (tokens, 16), generator=generator)
    near[near == 0] = -1
    far = torch.randint(1, 300, (tokens, 150), generator=generator)
    far[torch.arange(150) >= torch.randint(0, 151, (tokens, 1), generator=generator)] = -1
    still = Angles(torch.ones(tokens, 4, dtype=torch.float64), torch.zeros(tokens, 4, dtype=torch.float64))
    got = attend(q, sink, window, near, entries, far, still)
    for t in range(tokens):
        keys = torch.cat([window[near[t][near[t] >= 0]], entries[far[t][far[t] >= 0]]])
        logits = torch.cat([sink[:, None], q[t] @ keys.T * 32**-0.5], 1)
        torch.testing.assert_close(got[t], logits.softmax(-1)[:, 1:] @ keys, rtol=1e-10, atol=1e-12)
