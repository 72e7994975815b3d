"""mix and the row norm: closing, opening, collapsing, against the definitions in fp64."""

import pytest
import torch
from torch import Tensor

from leadline.kernels import mix as definition
from leadline.kernels import rowwise
from leadline.kernels.gpu import mix as gpu
from leadline.kernels.gpu import norm as gpu_norm
from leadline.kernels.gpu.chips import CHIPS
from leadline.kernels.mix import Mixing, Reading
from tests.gpu.compiling import failures
from tests.gpu.rows import DEVICE, assert_near, draw, poison_new_tensors

ROUNDS, HC_EPS, NORM_EPS = 20, 1e-3, 1e-2
"""Larger than the model's, so that leaving one out shows."""
ROWS, STREAMS, WIDTHS = (1, 2, 7, 16, 17, 19), (1, 2, 3, 4), (16, 52, 64, 130, 200, 640)
SUM_ULPS = 16
"""Roundings to fp32 that a sum of up to 2,560 products and 40 divisions may be away, of the row's largest."""


class Boundary:
    """Random tensors where a sublayer ends and the next begins."""

    def __init__(self, rows: int, n: int, d: int, dtype: torch.dtype) -> None:
        self.streams, self.output = draw(rows, n, d, dtype=dtype), draw(rows, d, dtype=dtype)
        self.norm = draw(d)
        # logits of one or two, their scales far from each other
        count = (2 + n) * n
        fn, base, scale = draw(count, n * d) / (n * d) ** 0.5, draw(count) / 2, torch.tensor([0.3, 0.7, 1.4])
        self.weights = Mixing(fn, base, scale.to(DEVICE))
        self.head = Mixing(draw(n, n * d) / (n * d) ** 0.5, draw(n), draw(1))
        self.reading = Reading(self.output, draw(rows, n), draw(rows, n, n))

    @classmethod
    def random(cls, seed: int, dtype: torch.dtype) -> "Boundary":
        torch.manual_seed(seed)
        sizes = [options[int(torch.randint(len(options), ()))] for options in (ROWS, STREAMS, WIDTHS)]
        return cls(*sizes, dtype)

    def close_and_open(self) -> tuple[Tensor, Reading]:
        return gpu.close_and_open(
            self.streams, self.output, self.reading, self.weights, self.norm, ROUNDS, HC_EPS, NORM_EPS
        )

    def part(self, rows: slice) -> "Boundary":
        part = Boundary.__new__(Boundary)
        part.__dict__ = dict(self.__dict__)
        part.streams, part.output = self.streams[rows], self.output[rows]
        part.reading = Reading(part.output, self.reading.post[rows], self.reading.comb[rows])
        return part


def wide(weights: Mixing) -> Mixing:
    return Mixing(weights.fn.double(), weights.base.double(), weights.scale.double())


def assert_opened(got: Reading, streams: Tensor, weights: Mixing, norm: Tensor) -> None:
    """`got` is what the definition reads from `streams`: mixes to fp32 whatever the dtype of the streams."""
    want = definition.open_sublayer(streams.double(), wide(weights), norm.double(), ROUNDS, HC_EPS, NORM_EPS)
    assert_near("post", got.post, want.post, SUM_ULPS, torch.float32)
    assert_near("comb", got.comb.flatten(1), want.comb.flatten(1), SUM_ULPS, torch.float32)
    assert_near("x", got.x, want.x, 2.5 if streams.dtype == torch.bfloat16 else SUM_ULPS, streams.dtype)
    assert (got.x.dtype, got.post.dtype, got.comb.dtype) == (streams.dtype, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(4))
def test_a_boundary_is_closed_and_opened(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    i = Boundary.random(seed, dtype)
    poison_new_tensors(monkeypatch)
    before = i.streams.clone()
    closed, reading = i.close_and_open()
    assert torch.equal(i.streams, before)
    wide_reading = Reading(i.output, i.reading.post.double(), i.reading.comb.double())
    want = definition.close_sublayer(i.streams.double(), i.output.double(), wide_reading)
    assert_near("streams", closed, want, 1.1 if dtype == torch.bfloat16 else 4, dtype)
    assert_opened(reading, closed, i.weights, i.norm)
    assert torch.equal(gpu.close_sublayer(i.streams, i.output, i.reading), closed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(10, 13))
def test_streams_are_opened_and_collapsed(seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    i = Boundary.random(seed, dtype)
    poison_new_tensors(monkeypatch)
    opened = gpu.open_sublayer(i.streams, i.weights, i.norm, ROUNDS, HC_EPS, NORM_EPS)
    assert_opened(opened, i.streams, i.weights, i.norm)
    got = gpu.final_collapse(i.streams, i.head, i.norm, HC_EPS, NORM_EPS)
    want = definition.final_collapse(i.streams.double(), wide(i.head), i.norm.double(), HC_EPS, NORM_EPS)
    assert_near("collapsed", got, want, 2.5 if dtype == torch.bfloat16 else SUM_ULPS, dtype)


def test_copies_of_an_embedding_are_read_without_being_made() -> None:
    i = Boundary(3, 4, 72, torch.bfloat16)
    streams = i.output[:, None].expand(-1, 4, -1)
    got = gpu.open_sublayer(streams, i.weights, i.norm, ROUNDS, HC_EPS, NORM_EPS)
    assert_opened(got, streams, i.weights, i.norm)
    closed = gpu.close_sublayer(streams, i.output, i.reading)
    assert torch.equal(closed, gpu.close_sublayer(streams.contiguous(), i.output, i.reading))


@pytest.mark.parametrize("n", [3, 4])
def test_logits_far_below_zero(n: int) -> None:
    i = Boundary(2, n, 16, torch.float32)
    i.weights.base[2 * n :] -= 200
    got = gpu.open_sublayer(i.streams, i.weights, i.norm, ROUNDS, HC_EPS, NORM_EPS)
    assert_opened(got, i.streams, i.weights, i.norm)


def test_no_rows() -> None:
    i = Boundary(0, 4, 64, torch.bfloat16)
    closed, reading = i.close_and_open()
    assert closed.shape == (0, 4, 64) and reading.x.shape == (0, 64)
    assert reading.post.shape == (0, 4) and reading.comb.shape == (0, 4, 4)
    assert gpu.final_collapse(i.streams, i.head, i.norm, HC_EPS, NORM_EPS).shape == (0, 64)


def test_a_row_does_not_depend_on_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    i = Boundary(5, 2, 64 * (gpu.GROUP + 2) + 5, torch.bfloat16)
    whole, cuts = None, [gpu.Config(16, 1, 4), gpu.Config(16, gpu.GROUP, 4)]
    for cut in cuts:
        monkeypatch.setattr(gpu, "config", lambda chip, rows, cut=cut: cut)
        for rows in (slice(0, 5), slice(3, 4)):
            closed, reading = i.part(rows).close_and_open()
            got = torch.cat([closed.flatten(1), reading.x, reading.post, reading.comb.flatten(1)], 1)
            whole = got if whole is None else whole
            assert torch.equal(got, whole[rows]), (cut, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(1, 200), (7, 3, 48), (33, 64), (2, 5000), (0, 16), (4, 1)])
def test_row_norm(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(len(shape))
    x, weight = draw(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]], draw(shape[-1])
    poison_new_tensors(monkeypatch)
    ulps = 1.1 if dtype == torch.bfloat16 else 4
    for by in (None, weight, weight.bfloat16()):
        want = rowwise.rms_norm(x.double(), None if by is None else by.double(), 0.1)
        assert_near("norm", gpu_norm.rms_norm(x, by, 0.1), want, ulps, dtype)


@pytest.mark.parametrize("chip", CHIPS)
def test_kernels_compile_for_every_chip(chip: str) -> None:
    assert failures("cases_mix", chip) == []


@pytest.mark.gpu
@pytest.mark.parametrize("d", [4096, 7168])
@pytest.mark.parametrize("rows", [1, 16, 130, 2100])
def test_official_sizes(rows: int, d: int) -> None:
    i = Boundary(rows, 4, d, torch.bfloat16)
    reading = definition.open_sublayer(i.streams, i.weights, i.norm, ROUNDS, HC_EPS, NORM_EPS)
    assert_opened(reading, i.streams, i.weights, i.norm)
    wide_reading = Reading(i.output, reading.post.double(), reading.comb.double())
    want = definition.close_sublayer(i.streams.double(), i.output.double(), wide_reading)
    assert_near("streams", definition.close_sublayer(i.streams, i.output, reading), want, 1.1, torch.bfloat16)
    want = definition.final_collapse(i.streams.double(), wide(i.head), i.norm.double(), HC_EPS, NORM_EPS)
    got = definition.final_collapse(i.streams, i.head, i.norm, HC_EPS, NORM_EPS)
    assert_near("collapsed", got, want, 2.5, torch.bfloat16)
