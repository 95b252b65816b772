"""Memory that calls use one after the other, as fresh pages cost more than the copies into them.

Nothing that a user is handed may lie in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

_LARGEST = 2**24  # bytes that stay allocated; what is larger is allocated for one call

# buffers that no call uses; a call takes one out, so calls of several threads share none
_spares: list[torch.Tensor] = []


@contextlib.contextmanager
def spare(nbytes: int, device: torch.device) -> Generator[torch.Tensor]:
    """uint8 `[nbytes]` with anything in it, for the length of a block; aligned for any dtype."""
    if device.type != "cpu" or not 0 < nbytes <= _LARGEST:  # accelerators' allocators keep what is freed
        yield torch.empty(nbytes, dtype=torch.uint8, device=device)
        return
    held = _taken()
    if held is None or held.numel() < nbytes:
        held = torch.empty(nbytes, dtype=torch.uint8)
    yield held[:nbytes]
    _spares.append(held)  # not after an error: a collective that was given up may write into it still


def _taken() -> torch.Tensor | None:
    try:
        return _spares.pop()
    except IndexError:
        return None
