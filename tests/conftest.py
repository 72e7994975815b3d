"""What every test file relies on: one thread per process, Hypothesis without time limits, and Triton's interpreter."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any is imported
torch.set_num_threads(1)  # pytest-xdist runs a process per core
settings.register_profile("leadline", deadline=None, print_blob=True)
settings.load_profile("leadline")
