"""Inputs of blocks wait in host memory from their forward to their backward (activation offloading).

torch's checkpoint keeps what a block is called with. Hooks of saved tensors copy it to the host, and back
when the backward comes to that block. While it computes, the input of the block before is on its way.
https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator
from typing import Any

import attrs
import torch

from fnaccel import _torch

LEAST = 2**20
"""Bytes. Smaller tensors stay on an accelerator."""
PINNED = 2**35
"""Bytes of pinned memory. What is beyond waits in ordinary memory, which is slower to copy."""


@attrs.define(eq=False)
class _Waiting:
    """A tensor that waits on the host.

    Attributes:
        storage: of the tensor that was sent.
        shape, strides, dtype, device: of it.
        host: its values. None if it has none, in an estimate.
        sent: the end of the copy to the host, on CUDA.
        before: what was sent before it, which comes back after it.
        coming: the tensor that is on its way back, and on CUDA the end of that copy.
        uses: how many blocks will ask for it.
        back: the tensor that is back, while a block will ask for it again.
    """

    storage: weakref.ref[torch.UntypedStorage]
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    host: torch.Tensor | None = None
    sent: Any = None
    before: weakref.ref[_Waiting] | None = None
    coming: tuple[torch.Tensor, Any] | None = None
    uses: int = 0
    back: torch.Tensor | None = None


class HostMemory:
    """What the blocks of a model keep for backward.

    Attributes:
        pinned: bytes of pinned memory in use.
    """

    def __init__(self) -> None:
        self.pinned = 0
        self._last: weakref.ref[_Waiting] | None = None
        # by what a tensor is in memory
        self._known: weakref.WeakValueDictionary[Any, _Waiting] = weakref.WeakValueDictionary()
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def keeping(self) -> Generator[None]:
        """In the body tensors that autograd keeps go to the host."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Waiting:
        size, storage = tensor.numel() * tensor.element_size(), tensor.untyped_storage()
        stays = (
            not (type(tensor) is torch.Tensor or _is_fake(tensor))
            or not tensor.is_floating_point()
            or (tensor.is_leaf and tensor.requires_grad)
            or size > storage.nbytes()  # expanded
            or (size < LEAST and tensor.device.type != "cpu")
        )
        if stays:
            return tensor
        place = id(storage), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        place += (_torch.version_of(tensor),)
        waiting = self._known.get(place)
        if waiting is None or waiting.storage() is not storage:  # memory that is used again
            waiting = self._known[place] = self._sent(tensor, size)
            waiting.before, self._last = self._last, weakref.ref(waiting)
        waiting.uses += 1
        return waiting

    def _unpack(self, kept: torch.Tensor | _Waiting) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        value = kept.back
        if value is None:
            value, arrived = kept.coming or self._returning(kept)
            kept.coming = None
            if arrived is not None:
                stream = torch.cuda.current_stream(kept.device)
                stream.wait_event(arrived)
                value.record_stream(stream)
        kept.uses -= 1
        kept.back = value if kept.uses > 0 else None
        before = None if kept.before is None else kept.before()
        if before is not None and before.uses > 0 and before.coming is None and before.back is None:
            before.coming = self._returning(before)
        return value

    def _sent(self, tensor: torch.Tensor, size: int) -> _Waiting:
        cuda = tensor.device.type == "cuda"
        pin = cuda and self.pinned + size <= PINNED
        storage = weakref.ref(tensor.untyped_storage())
        waiting = _Waiting(storage, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if _is_fake(tensor):
            return waiting
        # torch keeps pinned memory that is free, and knows of which copies it is part
        waiting.host = host = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=pin
        )
        if pin:
            self.pinned += size
            weakref.finalize(waiting, self._unpin, size).atexit = False
        if not cuda:
            host.copy_(tensor.detach())
            return waiting
        out, _ = self._streams_of(tensor.device)
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(out):
            host.copy_(tensor.detach(), non_blocking=True)
            waiting.sent = out.record_event()
        tensor.record_stream(out)
        return waiting

    def _unpin(self, size: int) -> None:
        self.pinned -= size

    def _returning(self, waiting: _Waiting) -> tuple[torch.Tensor, Any]:
        layout: Any = {"dtype": waiting.dtype, "device": waiting.device}
        if waiting.host is None:
            return torch.empty_strided(waiting.shape, waiting.strides, **layout), None
        if waiting.sent is None:
            return torch.empty_strided(waiting.shape, waiting.strides, **layout).copy_(waiting.host), None
        _, back = self._streams_of(waiting.device)
        with torch.cuda.stream(back):
            back.wait_event(waiting.sent)
            value = torch.empty_strided(waiting.shape, waiting.strides, **layout)
            value.copy_(waiting.host, non_blocking=True)
            return value, back.record_event()

    def _streams_of(self, device: torch.device) -> tuple[Any, Any]:
        """The streams of copies to the host, and back."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether this is a tensor without values, of an estimate."""
    return hasattr(tensor, "fake_mode")
