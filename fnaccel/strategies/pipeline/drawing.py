"""Initial values of this rank's stages: those of the whole seeded model, the rest of which is not kept.

Random numbers of later parameters depend on those that earlier ones took. So a parameter of another stage is
made, too, in pages that go back to the system as soon as the next one is written.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fnaccel import tree
from fnaccel.extend import FnaccelError
from fnaccel.models._torch import DispatchMode
from fnaccel.models.meta import making
from fnaccel.world.undo import StreamStates

Factory = Callable[[], nn.Module]


class _OneAtATime(DispatchMode):
    """Gives the pages of a parameter back when another one is written. They read as zeros then.

    Attributes:
        stale: whether something read a parameter that was given back, such as a copy of a layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stale = False
        self._gone: set[int] = set()
        self._pages: dict[int, mmap.mmap] = {}
        self._written: int | None = None

    def in_pages(self, param: nn.Parameter) -> nn.Parameter:
        """An empty parameter in pages of its own."""
        if not param.nbytes or param.device.type != "cpu" or not hasattr(mmap, "MADV_DONTNEED"):
            return param
        pages = mmap.mmap(-1, param.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        values = torch.frombuffer(pages, dtype=torch.uint8).view(param.dtype).view(param.shape)
        self._pages[values.data_ptr()] = pages
        return type(param)(values, requires_grad=param.requires_grad)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        writes = func._schema.is_mutable  # noqa: SLF001 - documented by torch
        tensors = [x for x in tree.leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        addresses = [x.untyped_storage().data_ptr() for x in tensors if x.layout is torch.strided]
        if any(address in self._gone for address in addresses[1 if writes else 0 :]):
            self.stale = True
        if writes and addresses and addresses[0] in self._pages and addresses[0] != self._written:
            if self._written is not None:
                self._pages[self._written].madvise(mmap.MADV_DONTNEED)
                self._gone.add(self._written)
            self._written = addresses[0]
        return func(*args, **(kwargs or {}))


def with_own_values(factory: Factory, own: Callable[[nn.Module], set[int]]) -> Factory:
    """A factory whose modules have values where this rank needs them, and zeros in pages without memory else.

    It runs the user's factory twice, the first time without values.

    Args:
        factory: the user's.
        own: of a model on the meta device, the ids of the parameters that get values.
    """

    def make() -> nn.Module:
        made: list[nn.Parameter] = []

        def on_meta(param: nn.Parameter) -> nn.Parameter:
            made.append(type(param)(param.to("meta"), requires_grad=param.requires_grad))
            return made[-1]

        streams = StreamStates.of(torch.device("cpu"))
        try:
            with making(on_meta):
                wanted = own(factory())
        except FnaccelError:
            raise
        except Exception:  # it needs values. The second run raises what is the user's
            wanted = None
        streams.put_back()
        if wanted is None:
            return factory()
        numbers = iter(range(len(made)))
        mode = _OneAtATime()

        def placed(param: nn.Parameter) -> nn.Parameter:
            return param if id(made[next(numbers)]) in wanted else mode.in_pages(param)

        with making(placed), mode:
            model = factory()
        if mode.stale:  # initial values depend on those of other stages: it has to be whole for a moment
            streams.put_back()
            model = factory()
        return model

    return make
