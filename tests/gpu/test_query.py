"""query and index_query: the kernels against the definitions in float64, and a row's bits in any company."""

import pytest
import torch

from leadline.kernels import query as definition
from leadline.kernels.gpu import query as gpu
from leadline.kernels.rope import Angles
from tests.gpu.rows import DEVICE, assert_near, assert_rounded_alike, draw, poison_new_tensors, turns

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(0, 2, 64, 16), (1, 1, 64, 16), (3, 5, 32, 8), (5, 3, 48, 6), (3, 3, 512, 64)]


def wide(by: Angles) -> Angles:
    return Angles(by.cos.double().cpu(), by.sin.double().cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "heads", "width", "rotated"), SIZES)
def test_query_is_normed_and_turned(
    tokens: int, heads: int, width: int, rotated: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(width)
    q, by = draw(tokens, heads, width + 8, dtype=dtype)[..., :width], turns(tokens, rotated)
    want = definition.query(q.double().cpu(), wide(by), 1e-3)
    poison_new_tensors(monkeypatch)
    got = gpu.query(q, by, 1e-3)
    assert got.dtype == dtype and got.is_contiguous()
    assert_near("query", got.cpu(), want, 2.5, dtype)


@pytest.mark.parametrize("native", [False, True], ids=["exact", "native"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "heads", "width", "rotated"), [(0, 4, 32, 8), (1, 3, 16, 8), (7, 5, 32, 16), (2, 9, 128, 64)]
)
def test_index_query(
    tokens: int, heads: int, width: int, rotated: int, dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(width)
    q, by = draw(tokens, heads, width + 8, dtype=dtype)[..., :width], turns(tokens, rotated)
    want = definition.index_query(q.cpu(), Angles(by.cos.cpu(), by.sin.cpu()), native)
    poison_new_tensors(monkeypatch)
    got = gpu.index_query(q, by, native)
    assert got.dtype == dtype and got.is_contiguous()
    if native:
        # one step of e2m1 is at most a third of its block's largest; fp32 sums are taken in the definition's order
        assert_rounded_alike("index query", got.cpu(), want, 0.34, 0.0 if dtype == torch.float32 else 0.03)
    else:
        assert_near("index query", got.cpu(), want, 2.5, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, index_q, by = draw(11, 3, 64, dtype=dtype), draw(11, 5, 32, dtype=dtype), turns(11, 16)
    whole, index_whole = gpu.query(q, by, 1e-6), gpu.index_query(index_q, by, True)
    for pick in (slice(0, 1), slice(4, 9), slice(10, 11)):
        part = Angles(by.cos[pick], by.sin[pick])
        assert torch.equal(gpu.query(q[pick], part, 1e-6), whole[pick])
        assert torch.equal(gpu.index_query(index_q[pick], part, True), index_whole[pick])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 130, 4096])
def test_official_sizes(tokens: int) -> None:
    q, by = draw(tokens, 64, 512, dtype=torch.bfloat16), turns(tokens, 64)
    few = Angles(by.cos.cpu(), by.sin.cpu())
    assert_rounded_alike("query", gpu.query(q, by, 1e-6).cpu(), definition.query(q.cpu(), few, 1e-6), 0.01, 0.01)
    q = draw(tokens, 64, 128, dtype=torch.bfloat16)
    want = definition.index_query(q.cpu(), few, True)
    assert_rounded_alike("index query", definition.index_query(q, by, True).cpu(), want, 0.34, 0.01)
    assert DEVICE == "cuda"
