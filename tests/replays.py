"""Decode graphs where there is no GPU: what would be replayed is run again."""

from collections.abc import Callable

from torch import Tensor

from leadline.engine.engine import Engine
from leadline.engine.graphs import DecodeGraphs


class Replays(DecodeGraphs):
    """Graphs whose replay runs the step anew, into the same result."""

    def _captured(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        logits = step()
        return lambda: logits.copy_(step()), logits


def with_replays(engine: Engine) -> Engine:
    """Let an engine on a CPU run its decode steps padded, as graphs are."""
    runner = engine.runner
    runner.graphs = Replays(runner.forward, runner.state, runner.running, runner.state.page_table.shape[1])
    return engine
