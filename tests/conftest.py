"""What every test file relies on: one thread per process, and Hypothesis without time limits."""

import torch
from hypothesis import settings

torch.set_num_threads(1)  # pytest-xdist runs a process per core
settings.register_profile("leadline", deadline=None, print_blob=True)
settings.load_profile("leadline")
