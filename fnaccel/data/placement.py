"""Moving batches to the device ahead of time, so that the copy runs beside the computation.

On the CPU nothing is done at all. The contents of a batch are decided before it comes here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from fnaccel import tree
from fnaccel.data.batch import Batch

_STREAMED = ("cuda", "xpu")  # devices that copy from pinned memory on a stream of their own


def place(batches: Iterator[Batch], device: torch.device, *, prefetch: int = 1) -> Iterator[Batch]:
    """The same batches with their tensors on `device`.

    Args:
        batches: batches whose tensors are anywhere.
        device: their device. On the CPU `batches` itself is returned.
        prefetch: how many batches beyond the one in use are read, and their copies begun.
    """
    if device.type == "cpu":
        return batches
    if prefetch and copies_aside(device):
        return _ahead(batches, device, prefetch)
    return (batch.replace(_moved(batch.data, device)) for batch in batches)


def copies_aside(device: torch.device) -> bool:
    """Whether a device copies batches while the next ones are read."""
    return device.type in _STREAMED


def _moved(data: tree.Tree, device: torch.device) -> tree.Tree:
    tree.learn(data)
    return tree.to(data, device)


def _ahead(batches: Iterator[Batch], device: torch.device, depth: int) -> Iterator[Batch]:
    side = torch.Stream(device=device)
    copies: deque[tuple[Batch, torch.Event]] = deque()
    for batch in batches:
        copies.append(_begin(batch, device, side))
        if len(copies) > depth:
            yield _await(*copies.popleft(), device)
    while copies:
        yield _await(*copies.popleft(), device)


def _begin(batch: Batch, device: torch.device, side: torch.Stream) -> tuple[Batch, torch.Event]:
    """Queue the copy of a batch on the side stream. The event marks its end."""

    tree.learn(batch.data)

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":  # made on the current stream, so it is moved there too
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    with side:
        moved = batch.replace(tree.map_tensors(copy, batch.data))
        return moved, side.record_event()


def _await(batch: Batch, copied: torch.Event, device: torch.device) -> Batch:
    """Let the current stream wait for the copy, and tell the allocator who uses its memory."""
    current = torch.accelerator.current_stream(device)
    current.wait_event(copied)

    def hand_over(tensor: torch.Tensor) -> torch.Tensor:
        placed = tensor.to(device)
        placed.record_stream(current)
        return placed

    return batch.replace(tree.map_tensors(hand_over, batch.data))
