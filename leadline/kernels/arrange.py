"""arrange: the order in which weights lie in memory, where a kernel reads another one than the checkpoint's faster."""

from collections.abc import Sequence

import torch

from leadline.kernels.project import Weight


def arrange_experts(stacks: Sequence[Weight], dtype: torch.dtype) -> None:
    """Put a layer's w13 and w2, in place, in the order that the fastest kernel for activations of `dtype` reads.

    Both or neither: nothing changes where no kernel wants another order, or where some values do not fit it. What is
    arranged already stays.
    """
    if stacks[0].data.is_cuda and dtype == torch.bfloat16:
        from leadline.kernels.gpu import experts_arrange as gpu

        gpu.arrange_experts(stacks)


def restore_experts(stacks: Sequence[Weight]) -> None:
    """Put them, in place, back in the checkpoint's order."""
    if stacks[0].form == "arranged":
        from leadline.kernels.gpu import experts_arrange as gpu

        gpu.restore_stacks(stacks)
