"""Pages of mapped files: read before they are needed, and let go afterwards. Nothing is copied."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

import torch

_POPULATE_READ = (
    22  # Linux 5.14: read pages and map them, https://man7.org/linux/man-pages/man2/madvise.2.html
)
_LEAST = 1 << 16  # bytes: below, a page fault costs less than two calls


def read_ahead(tensor: torch.Tensor) -> None:
    """Have the pages of a tensor in a mapped file read and mapped."""
    if tensor.nbytes >= _LEAST and _advise(tensor, _POPULATE_READ) != 0:
        _advise(tensor, getattr(mmap, "MADV_WILLNEED", 3))


def let_go(tensor: torch.Tensor) -> None:
    """Unmap the pages of a tensor in a mapped file. They stay in the page cache while there is room."""
    if tensor.nbytes >= _LEAST and not _written(tensor):
        _advise(tensor, getattr(mmap, "MADV_DONTNEED", 4))


def _written(tensor: torch.Tensor) -> bool:
    """Whether somebody wrote to a page, also past torch (`weight.data`): the process has a copy of it then.

    Source: https://docs.kernel.org/admin-guide/mm/pagemap.html.
    """
    start, end = tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:  # noqa: PTH123 - as quick as can be
            pages.seek(start * 8)
            entries = pages.read((end - start) * 8)
    except OSError:
        return False
    kinds = torch.frombuffer(bytearray(entries), dtype=torch.int64) >> 61 & 7
    return bool(((kinds & 1 == 0) & (kinds & 6 != 0)).any())  # here or swapped out, and no page of a file


@functools.cache
def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    except (OSError, AttributeError):  # no such call here: pages are read when they are used
        return None
    return libc


def _advise(tensor: torch.Tensor, advice: int) -> int:
    """Whole pages of a tensor: its first and last may hold other tensors."""
    libc = _libc()
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return libc.madvise(start, end - start, advice) if libc is not None and end > start else 0
