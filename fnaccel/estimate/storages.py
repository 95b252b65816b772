"""The bytes of live storages, counted as operations run: each storage once, however many tensors share it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from unittest import mock

import torch

from fnaccel.models._torch import DispatchMode, tree_leaves


class LiveStorages(DispatchMode):
    """While the body runs, the bytes of live storages and their peak.

    An operation's results are counted until the last tensor of their storage is gone. Memory that an
    operation takes and frees by itself is not seen. Tensors without memory (fake tensors, the meta device)
    count as if they had it.

    Args:
        arguments: count the arguments of operations too, so that a second step knows the storages that
            were there before the first.

    Example:
        >>> with fa.estimate.LiveStorages() as storages:
        ...     kept = torch.ones(1_000)
        ...     gone = (kept + kept).sum()
        >>> storages.live, storages.peak
        (4004, 8004)
    """

    def __init__(self, *, arguments: bool = False) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._arguments = arguments
        self._sizes: dict[int, int] = {}
        self._finalizers: dict[int, Any] = {}
        self._left_out: list[torch.UntypedStorage] = []
        self._resizing: Any = None

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count nothing for the storages of these tensors, which must outlive the body."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._sizes.setdefault(id(storage), 0)
            self._left_out.append(storage)

    def hold(self, size: int) -> None:
        """Count bytes that no storage stands for. A negative number frees them."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def begin(self) -> None:
        """Forget the peak."""
        self.peak = self.live

    def __enter__(self) -> Self:
        resize, storages = torch.UntypedStorage.resize_, self

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            storages.refresh(storage)
            return result

        # FSDP2 frees gathered parameters by resizing their storages, which is not an operation
        self._resizing = mock.patch.object(torch.UntypedStorage, "resize_", watched)
        self._resizing.start()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._resizing.stop()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if self._arguments:
            self._count((args, options))
        result = func(*args, **options)
        self._count(result)
        self.observe(func, args, options, result)
        return result

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
        """Called after each operation."""

    def _count(self, values: object) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor):
                for part in _parts(value):
                    self.refresh(part.untyped_storage())

    def refresh(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, or its new size."""
        key, size = id(storage), storage.nbytes()
        before = self._sizes.get(key)
        if before is None:
            # torch keeps the Python object of a storage as long as the storage itself
            self._finalizers[key] = weakref.finalize(storage, self._end, key)
            self._finalizers[key].atexit = False
        elif before == size or key not in self._finalizers:
            return
        self._sizes[key] = size
        self.changed(key, size - (before or 0))

    def changed(self, key: int, size: int) -> None:  # noqa: ARG002
        """Called when a storage begins, is resized or ends, with the bytes that it has more than before."""
        self.hold(size)

    def _end(self, key: int) -> None:
        self._finalizers.pop(key, None)
        self.changed(key, -self._sizes.pop(key))


def _parts(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with memory of a tensor: those inside of a DTensor, or of a quantized tensor."""
    if not hasattr(value, "__tensor_flatten__"):
        yield value
        return
    for name in value.__tensor_flatten__()[0]:
        part = getattr(value, name)
        if isinstance(part, torch.Tensor):  # a DTensor has its mesh here too
            yield from _parts(part)
