"""What is fetched ahead: whole pieces, within bounds, only where a chip can."""

import pytest
import torch

from leadline.kernels.gpu import overlap


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "early_start", lambda device: {"launch_pdl": True})


def test_whole_pieces_up_to_what_the_cache_holds(able: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MOST_AHEAD", 5 * 4096)
    weights = [torch.zeros(3, 4096, dtype=torch.float8_e4m3fn), torch.zeros(5000), torch.zeros(9)]
    tensors, pieces = overlap.wanted_ahead(weights, 1)
    assert [each.nbytes for each in tensors] == [3 * 4096, 20000, 36] and pieces == (3, 2, 0)


def test_what_is_not_asked_for(able: None) -> None:
    weight = torch.zeros(2, 8192, dtype=torch.uint8)
    assert overlap.wanted_ahead([], 1) == ((), ())
    assert overlap.wanted_ahead([weight], overlap.MOST_ROWS_AHEAD + 1) == ((), ())
    assert overlap.wanted_ahead([weight[:, 1:], weight.flatten()[8:]], 1) == ((), ())


def test_nothing_on_other_devices() -> None:
    assert overlap.wanted_ahead([torch.zeros(8192)], 1) == ((), ())
