"""Copies between host and device for which neither waits."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray, device: torch.device | str) -> Tensor:
    """`array` as a tensor on `device`, of the same shape and dtype. On a CPU it may share the array's memory."""
    tensor = torch.from_numpy(array)
    device = torch.device(device)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def overwrite(tensor: Tensor, array: NDArray) -> None:
    """Copy `array` into `tensor`, of the same shape and dtype, without waiting for the device."""
    values = torch.from_numpy(array)
    tensor.copy_(values.pin_memory() if tensor.is_cuda else values, non_blocking=True)


class Receipt:
    """Tensors on their way from a device to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy them, behind whatever the device has been told to do so far."""
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if self._tensors and self._tensors[0].is_cuda:
            self._tensors = [_pinned_copy(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[NDArray]:
        """Wait for them. Raises RuntimeError where the device has failed."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


def _pinned_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """All elements of `arrays` in one row, to be sent at once."""
    return np.concatenate([array.ravel() for array in arrays])


def parted(packed: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views [shapes[i]] of the elements that `joined` put one after another."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(packed.split(sizes), shapes, strict=True)]
