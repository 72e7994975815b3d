"""Streaming tensors out of files: mapped, read ahead by a few threads, and forgotten again behind the consumer.

The tensors are views of mapped files, so nothing is copied before the consumer copies. Reading ahead only warms the
system's page cache, and pages that were consumed are given back, so resident memory does not grow with the files.
"""

import mmap
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from leadline.checkpoint.headers import StoredTensor

TORCH_DTYPES = {
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The dtypes of a V4 checkpoint."""

THREADS = 4
PIECE_BYTES = 32 << 20
"""Neighbouring tensors are read and forgotten in pieces of about this size."""
PIECES_AHEAD = 2 * THREADS
SCRATCH_BYTES = 4 << 20


class MappedFile:
    """A file mapped read-only."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.path = path
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)

    def tensor(self, stored: StoredTensor) -> Tensor:
        """The tensor as a view; a copy where its bytes are not aligned to its dtype."""
        raw, dtype = self.bytes[stored.start : stored.end], TORCH_DTYPES[stored.dtype]
        if stored.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(stored.shape)

    def forget(self, start: int, end: int) -> None:
        """Give the pages of these bytes back. Views stay valid: touching them reads the page again."""
        start -= start % mmap.PAGESIZE
        if end > start:
            self.map.madvise(mmap.MADV_DONTNEED, start, end - start)


def stream(folder: Path, tensors: Sequence[StoredTensor]) -> Iterator[Tensor]:
    """The tensors in the given order, as read-only views."""
    files = {shard: MappedFile(folder / shard) for shard in {stored.shard for stored in tensors}}
    scratch = threading.local()

    def warm(piece: list[StoredTensor]) -> list[StoredTensor]:
        if not hasattr(scratch, "buffer"):
            scratch.buffer = memoryview(bytearray(SCRATCH_BYTES))
        for stored in piece:
            _touch(files[stored.shard].path, stored.start, stored.end, scratch.buffer)
        return piece

    with ThreadPoolExecutor(THREADS, "read") as pool:
        pieces = iter(_pieces(tensors))
        ahead = deque(pool.submit(warm, piece) for piece in islice(pieces, PIECES_AHEAD))
        try:
            while ahead:
                piece = ahead.popleft().result()
                ahead.extend(pool.submit(warm, following) for following in islice(pieces, 1))
                for stored in piece:
                    yield files[stored.shard].tensor(stored)
                for stored in piece:
                    files[stored.shard].forget(stored.start, stored.end)
        finally:  # the consumer may stop early
            for future in ahead:
                future.cancel()


def _pieces(tensors: Sequence[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Runs of tensors of about `PIECE_BYTES` together; a larger tensor is a piece of its own."""
    piece: list[StoredTensor] = []
    size = 0
    for stored in tensors:
        if piece and size + stored.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(stored)
        size += stored.nbytes
    if piece:
        yield piece


def _touch(path: Path, start: int, end: int, scratch: memoryview) -> None:
    """Read a range of a file and drop it, so that it lies in the page cache."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            count = file.readinto(scratch[: min(len(scratch), end - start)])
            if not count:
                raise OSError(f"{path} ended at byte {start}, {end} were expected: it was changed while being read")
            start += count
