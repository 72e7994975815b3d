"""What every test file relies on: one thread per process, Hypothesis without time limits, and Triton's interpreter.

With pytest-xdist's `--dist loadgroup` a file's tests run in one process, so that its models, servers and compiled
kernels are made once; the random schedules, which share nothing, fill up whoever is idle.
"""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported
torch.set_num_threads(1)  # pytest-xdist runs a process per core
settings.register_profile("leadline", deadline=None, print_blob=True)
settings.load_profile("leadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pytest-xdist keep files together."""
    for item in items:
        if item.path.name != "test_schedules.py":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
