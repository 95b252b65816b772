"""Messages between stages: any object with tensors in it, and gradients on the way back.

The first message for batches of some shapes begins with a header: the object, with shapes and dtypes in the
place of its tensors. Later ones are its tensors alone. An object of which each rank has its own, such as a
key-value cache, does not travel.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel import tree
from fnaccel.extend import CapabilityError
from fnaccel.strategies.pipeline.caches import CacheElsewhere, is_cache
from fnaccel.tree import Tree

_MOST_HEADERS = 256
"""Of outputs: for so many shapes of arguments."""


@attrs.frozen
class Header:
    """What a message is, without its values.

    Attributes:
        data: the object as a pickle, with a number in the place of each tensor.
        tensors: the shape and dtype of each, and whether a gradient comes back for it.
    """

    data: bytes
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]


class _Pickler(pickle.Pickler):
    """Writes a number in the place of each tensor, and lists them. -1 stands for the rank's own object."""

    def __init__(self, file: io.BytesIO, own: object) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._own = own
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return -1 if obj is self._own and obj is not None else None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._places[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        return (CacheElsewhere, ()) if is_cache(obj) else NotImplemented


class _Unpickler(pickle.Unpickler):
    """Puts a tensor, or the object of this rank, in the place of each number."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor], own: object) -> None:
        super().__init__(file)
        self._tensors, self._own = tensors, own

    def persistent_load(self, pid: int) -> object:
        return self._tensors[pid] if pid >= 0 else self._own


def pack(value: object, own: object = None) -> tuple[Header, list[torch.Tensor]]:
    """An object as a header and its tensors.

    Args:
        value: the object.
        own: an object in it that does not travel, since each rank has its own.

    Raises:
        CapabilityError: it does not pickle.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, own)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CapabilityError(
            f"what blocks return can't be sent to another stage: {error}",
            where="a forward of a pipeline",
            fix="return tensors, tuples, lists, dicts and records from blocks",
        ) from error
    kinds = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in pickler.tensors)
    return Header(buffer.getvalue(), kinds), pickler.tensors


def unpack(header: Header, tensors: Sequence[torch.Tensor], own: object = None) -> Any:
    """The object of a header and its tensors. `own` is this rank's object in it that did not travel."""
    return _Unpickler(io.BytesIO(header.data), tensors, own).load()


def signature(value: Tree) -> Hashable:
    """What shapes depend on: shapes and dtypes of tensors, and plain values as they are."""
    leaves, structure = tree.flatten(value)
    return structure, tuple(
        (leaf.shape, leaf.dtype)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, int | float | str | None)
        else type(leaf)
        for leaf in leaves
    )


class Links:
    """Sends to other stages, and receives from them.

    Args:
        forward, backward: the process groups of activations and of gradients, over the axis of stages.
        device: of the tensors.

    Attributes:
        own: an object of which each rank has its own. It does not travel with a message that has it.
    """

    def __init__(self, forward: dist.ProcessGroup, backward: dist.ProcessGroup, device: torch.device) -> None:
        self._forward, self._backward = forward, backward
        self._pretends = dist.get_backend(forward) == "fake"
        self.device = device
        self.own: object = None
        self._sent: dict[Hashable, Header] = {}
        self._rank = forward.rank()
        self._local: dict[tuple[int, bool], Any] = {}  # messages between two stages of this rank
        self._received: dict[Hashable, Header] = {}
        self._shared: dict[Hashable, Header] = {}
        self._under_way: dict[tuple[int, bool], list[tuple[Any, torch.Tensor]]] = {}

    def check(self) -> None:
        """Raise CapabilityError in a simulated world, where nobody answers."""
        if self._pretends:
            raise CapabilityError(
                "a simulated rank gets no activations from other stages",
                where="a forward of a pipeline under fa.simulate()",
                fix="fa.estimate.training(...) for the memory and the time of stages",
            )

    def send(self, value: object, to: int, tag: int, key: Hashable) -> list[torch.Tensor]:
        """Send an object. Returns its tensors, in the order of the gradients that come back.

        Args:
            value: the object.
            to: the rank, counted within the group.
            tag: of this message.
            key: equal for messages whose tensors have the same shapes.

        Raises:
            CapabilityError: they have others.
        """
        header, tensors = pack(value, self.own)
        if to == self._rank:
            self._local[tag, False] = header, [tensor.detach() for tensor in tensors]
            return tensors
        if key not in self._sent:
            self._sent[key] = header
            for part in _dumped(header, self.device):
                self._begin(part, to, tag)
        elif self._sent[key] != header:
            raise CapabilityError(
                "blocks return other shapes, or other plain values, than for a batch of the same shapes: "
                f"{header.tensors} after {self._sent[key].tensors}",
                where="a forward of a pipeline",
                fix="let the shapes of activations depend on the shapes of the batch alone, and return "
                "numbers as tensors",
            )
        for tensor in tensors:
            self._begin(tensor.detach().to(self.device).contiguous(), to, tag)
        return tensors

    def receive(self, source: int, tag: int, key: Hashable) -> tuple[Header, list[torch.Tensor]]:
        """Wait for an object: its header, and its tensors without a graph."""
        if source == self._rank:
            return self._local.pop((tag, False))
        if key not in self._received:
            length = torch.empty(1, dtype=torch.int64, device=self.device)
            dist.recv(length, group=self._forward, group_src=source, tag=tag)
            data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
            dist.recv(data, group=self._forward, group_src=source, tag=tag)
            self._received[key] = pickle.loads(bytes(data.cpu().numpy()))
        header = self._received[key]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in header.tensors]
        for tensor in tensors:
            dist.recv(tensor, group=self._forward, group_src=source, tag=tag)
        return header, tensors

    def send_gradients(self, grads: Sequence[torch.Tensor], to: int, tag: int) -> None:
        """Send the gradients of the tensors of a message back."""
        if to == self._rank:
            self._local[tag, True] = list(grads)
            return
        for grad in grads:
            self._begin(grad.contiguous(), to, tag, back=True)

    def receive_gradients(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> list[torch.Tensor]:
        """Wait for the gradients of the tensors of a message that take one. Lets go of that message."""
        if source == self._rank:
            return self._local.pop((tag, True), [])
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        for grad in grads:
            dist.recv(grad, group=self._backward, group_src=source, tag=tag)
        self._wait(tag, back=False)
        return grads

    def share(self, value: object, source: int, key: Hashable, *, own: bool) -> Any:
        """The object of one rank, on all of them. `own` says whether it is this one.

        All ranks forget the headers of old messages at the same call, when there are many.
        """
        header, tensors = pack(value, self.own) if own else (None, [])
        if header is not None and self._shared.get(key, header) != header:
            raise CapabilityError(
                "the model returned other shapes than for arguments of the same shapes",
                where="a forward of a pipeline",
                fix="let the shapes of its outputs depend on the shapes of its arguments alone",
            )
        if key not in self._shared:
            if len(self._shared) >= _MOST_HEADERS:
                for headers in (self._sent, self._received, self._shared):
                    headers.clear()
            parts = _dumped(header, self.device) if header is not None else [self._number(0), self._number(0)]
            dist.broadcast(parts[0], group=self._forward, group_src=source)
            if header is None:
                parts[1] = torch.empty(int(parts[0]), dtype=torch.uint8, device=self.device)
            dist.broadcast(parts[1], group=self._forward, group_src=source)
            self._shared[key] = pickle.loads(bytes(parts[1].cpu().numpy()))
        header = self._shared[key]
        if not own:
            tensors = [torch.empty(s, dtype=dtype, device=self.device) for s, dtype, _ in header.tensors]
        else:
            tensors = [x.detach().to(self.device).contiguous() for x in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, group=self._forward, group_src=source)
        return unpack(header, tensors, self.own)

    def settle(self) -> None:
        """Wait for all that was sent."""
        for tag, back in list(self._under_way):
            self._wait(tag, back=back)

    def _wait(self, tag: int, *, back: bool) -> None:
        for work, _ in self._under_way.pop((tag, back), ()):
            work.wait()

    def _number(self, value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self.device)

    def _begin(self, tensor: torch.Tensor, to: int, tag: int, *, back: bool = False) -> None:
        group = self._backward if back else self._forward
        work = dist.isend(tensor, group=group, group_dst=to, tag=tag)
        self._under_way.setdefault((tag, back), []).append((work, tensor))


def _dumped(header: Header, device: torch.device) -> list[torch.Tensor]:
    """A header as its length and its bytes."""
    data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
    return [torch.tensor([len(data)], dtype=torch.int64, device=device), data.to(device)]
