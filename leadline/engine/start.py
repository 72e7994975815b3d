"""Where the time of a start goes, for whoever waits for it."""

from time import perf_counter

import torch


class Start:
    """The start of an engine: whether progress is shown on stderr, and how long each part of it took."""

    def __init__(self, progress: bool) -> None:
        self.progress = progress
        self.parts: dict[str, float] = {}
        self._last = perf_counter()

    def done(self, part: str) -> None:
        """What happened since the last part, or since the beginning, was `part`; waits for the GPU."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = perf_counter()
        self.parts[part], self._last = now - self._last, now

    def report(self) -> str:
        """One sentence: seconds in all, and of each part in its order."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"ready after {sum(self.parts.values()):.1f} s: {parts}"
