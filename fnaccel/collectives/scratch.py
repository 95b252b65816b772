"""Memory that calls use one after the other, as fresh pages cost more than the copies into them.

Nothing that a user is handed may lie in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

_LARGEST = 2**24  # bytes that stay allocated. A larger buffer is allocated for one call

# buffers that no call uses. A call takes one out, so calls of several threads share none
_spares: list[torch.Tensor] = []


@contextlib.contextmanager
def spare(nbytes: int, device: torch.device) -> Generator[torch.Tensor]:
    """uint8 `[nbytes]` with any contents, for the length of a block. Aligned for any dtype."""
    if device.type != "cpu" or not 0 < nbytes <= _LARGEST:  # accelerators' allocators keep freed memory
        yield torch.empty(nbytes, dtype=torch.uint8, device=device)
        return
    buffer = _taken()
    if buffer is None or buffer.numel() < nbytes:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
    yield buffer[:nbytes]
    _spares.append(buffer)  # not after an error: a collective that was given up may write into it still


def _taken() -> torch.Tensor | None:
    try:
        return _spares.pop()
    except IndexError:
        return None
