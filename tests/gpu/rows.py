"""What the tests of query, store and compress share: random angles, poisoned outputs, pools, and how near is near."""

import pytest
import torch
from torch import Tensor

from leadline.kernels.packed import IndexRows, KvRows, index_rows, kv_rows
from leadline.kernels.rope import Angles, angles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16_ULP = 2.0**-8 if DEVICE == "cuda" else 2.0**-7
"""Largest relative error of one cast to bf16: Triton's interpreter truncates where GPUs round to nearest."""
FORMS = ["plain", "rounded", "packed"]


def turns(count: int, rotated: int) -> Angles:
    """Random angles [count, rotated / 2] of positions up to 5000."""
    made = angles(torch.randint(0, 5000, (count,)), torch.rand(rotated // 2) + 0.01)
    return Angles(made.cos.to(DEVICE), made.sin.to(DEVICE))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random values, some large."""
    return (torch.randn(shape) * 2).to(DEVICE, dtype)


def poison_new_tensors(patch: pytest.MonkeyPatch) -> None:
    """Fill every tensor that `torch.empty` makes with NaN, or 77 where it holds integers."""
    original = torch.empty

    def poisoned(*shape, **options) -> Tensor:  # type: ignore[no-untyped-def]
        made = original(*shape, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 77)

    patch.setattr(torch, "empty", poisoned)


def kv_pool(form: str, rows: int, width: int, rotated: int, dtype: torch.dtype) -> Tensor | KvRows:
    """A pool whose every row reads as finite garbage."""
    if form != "packed":
        return torch.full((rows, width), 77, dtype=dtype, device=DEVICE)
    pool = kv_rows(rows, width, rotated, torch.device(DEVICE))
    pool.blocks.fill_(77)
    return pool


def key_pool(form: str, rows: int, width: int, dtype: torch.dtype) -> Tensor | IndexRows:
    """The same for index keys."""
    if form != "packed":
        return torch.full((rows, width), 77, dtype=dtype, device=DEVICE)
    pool = index_rows(rows, width, torch.device(DEVICE))
    pool.blocks.fill_(77)
    return pool


def content(pool: Tensor | KvRows | IndexRows, rows: int) -> Tensor:
    """The first `rows` rows as fp32."""
    if isinstance(pool, Tensor):
        return pool[:rows].float()
    return pool.read(torch.arange(rows, device=DEVICE)).float()


def assert_near(name: str, got: Tensor, want: Tensor, ulps: float, dtype: torch.dtype) -> None:
    """Every element within `ulps` roundings to `dtype` (fp32: 2^-22, its sums' error included) of its row's largest."""
    assert got.shape == want.shape and got.isfinite().all(), name
    if not want.numel():
        return
    unit = BF16_ULP if dtype == torch.bfloat16 else 2.0**-22
    error = (got.double() - want.double()).abs() / want.double().abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert error.max() <= ulps * unit, f"{name}: {error.max():.2e} at {error.argmax()}, {ulps} x {unit:.1e} allowed"


def assert_rounded_alike(name: str, got: Tensor, want: Tensor, step: float, share: float) -> None:
    """All but a `share` of the elements are equal, and the others differ by one `step` of the row's largest at most."""
    assert got.shape == want.shape and got.isfinite().all(), name
    if not want.numel():
        return
    different = (got != want).double().mean()
    error = (got - want).abs() / want.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert different <= share, f"{name}: {different:.4f} of the elements differ, {share} may"
    assert error.max() <= step, f"{name}: {error.max():.3f} of a row's largest"
