"""Streaming tensors out of files, read ahead by a few threads.

For a consumer in main memory they are views of mapped files, so nothing is copied before the consumer copies. Reading
ahead only warms the system's page cache, and pages that were consumed are given back, so resident memory does not grow
with the files. For a GPU they are read into a few pieces of page-locked memory, which the GPU copies from many times as
fast as from a mapped file, and which are used again behind the consumer.
"""

import mmap
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

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

THREADS = 8
PIECE_BYTES = 16 << 20
"""Neighbouring tensors are read and forgotten in pieces of about this size."""
PIECES_AHEAD = 2 * THREADS
SCRATCH_BYTES = 4 << 20
ALIGNED = 64
"""Bytes of whose multiples a tensor begins at one in page-locked memory."""

Piece = list[StoredTensor]
Made = TypeVar("Made")


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
    """The tensors in the given order, as read-only views that stay valid."""
    files = {shard: MappedFile(folder / shard) for shard in {stored.shard for stored in tensors}}
    scratch = threading.local()

    def warm(piece: Piece) -> None:
        if not hasattr(scratch, "buffer"):
            scratch.buffer = memoryview(bytearray(SCRATCH_BYTES))
        for stored in piece:
            for start in range(stored.start, stored.end, SCRATCH_BYTES):
                part = scratch.buffer[: min(SCRATCH_BYTES, stored.end - start)]
                _read(files[stored.shard].path, start, part)

    for piece, _ in _ahead(_pieces(tensors), warm):
        for stored in piece:
            yield files[stored.shard].tensor(stored)
        for stored in piece:
            files[stored.shard].forget(stored.start, stored.end)


def staged(folder: Path, tensors: Sequence[StoredTensor], pinned: bool = True) -> Iterator[Tensor]:
    """The tensors in the given order, each valid until the next one is asked for.

    They lie in memory that is page-locked if `pinned`, which takes a GPU; a tensor larger than a piece in a copy of
    its own, which is not.
    """
    pieces = list(_pieces(tensors))
    free: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(min(PIECES_AHEAD + 1, len(pieces))):  # all that are read or waiting, and one that is consumed
        free.put(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pinned))

    def read(piece: Piece) -> tuple[Tensor, list[Tensor]]:
        buffer, views, start = free.get(), [], 0
        size = sum(-(-stored.nbytes // ALIGNED) * ALIGNED for stored in piece)
        place = buffer if size <= PIECE_BYTES else torch.empty(size, dtype=torch.uint8)
        for stored in piece:
            raw = place[start : start + stored.nbytes]
            _read(folder / stored.shard, stored.start, raw.numpy().data)
            views.append(raw.view(TORCH_DTYPES[stored.dtype]).view(stored.shape))
            start += -(-stored.nbytes // ALIGNED) * ALIGNED
        return buffer, views

    for _, (buffer, views) in _ahead(pieces, read):
        yield from views
        free.put(buffer)


def _ahead(pieces: Iterable[Piece], read: Callable[[Piece], Made]) -> Iterator[tuple[Piece, Made]]:
    """Pieces in their order, and what `read`, a few pieces ahead in threads, made of each."""
    with ThreadPoolExecutor(THREADS, "read") as pool:
        coming = iter(pieces)
        ahead = deque((piece, pool.submit(read, piece)) for piece in islice(coming, PIECES_AHEAD))
        try:
            while ahead:
                piece, future = ahead.popleft()
                made = future.result()
                ahead.extend((following, pool.submit(read, following)) for following in islice(coming, 1))
                yield piece, made
        finally:  # the consumer may stop early
            for _, future in ahead:
                future.cancel()


def _pieces(tensors: Sequence[StoredTensor]) -> Iterator[Piece]:
    """Runs of tensors of about `PIECE_BYTES` together; a larger tensor is a piece of its own."""
    piece: Piece = []
    size = 0
    for stored in tensors:
        if piece and size + stored.nbytes > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(stored)
        size += stored.nbytes
    if piece:
        yield piece


def _read(path: Path, start: int, into: memoryview) -> None:
    """Fill `into` with a file's bytes from `start`. Raises OSError if the file ends before."""
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        done = 0
        while done < len(into):
            count = file.readinto(into[done:])
            if not count:
                end, wanted = start + done, start + len(into)
                raise OSError(f"{path} ended at byte {end}, {wanted} were expected: it was changed while being read")
            done += count
