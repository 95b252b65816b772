"""Which values a checkpoint may hold, and how those that are no tensors look in JSON.

    None, bool, int, str, finite float    themselves
    inf, -inf, nan                        {"float": "inf"}
    bytes                                 {"bytes": base64}
    list                                  an array
    tuple                                 {"tuple": array}
    dict with string keys                 {"dict": object}
    dict with other keys                  {"items": array of [key, value]}
    a tensor                              {"tensor": path}, the path at which it was first met
    a NumPy array                         {"array": path}, in the same way
    TrainState, Position, Seed            {its name: object of its fields}
    another pytree node, a dataclass, an attrs class    {"node": object of its entries}
    an object with a state_dict()         {"state_dict": that}

A path joins keys with "/" (RFC 6901: "~0" and "~1" for "~" and "/"). Nothing is pickled. Reading builds only
the three classes here. Nodes and objects are rebuilt from `like` of `fa.restore`, or are their entries.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.checkpoint.format import walk
from fnaccel.checkpoint.format.boxes import is_packed, is_sharded
from fnaccel.checkpoint.format.dtypes import CODES
from fnaccel.checkpoint.format.walk import NODES, Array, Node, Object
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.errors import CheckpointError, NotSerializableError, listing
from fnaccel.state import ReadOnlyDict, StaleTree, TrainState, check_trained, not_counted, plain, stale_tree

_NO_ARRAY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_RESERVED = "__metadata__"  # reserved in a safetensors header


@attrs.frozen
class Encoded:
    """A tree as JSON, and its tensors by path. A tensor that occurs twice is listed once.

    Attributes:
        has_state: whether a TrainState is in it.
    """

    structure: Any
    tensors: dict[str, torch.Tensor]
    has_state: bool = False


def encode(value: tree.Tree, where: str = "fa.save") -> Encoded:
    """Turn a tree into JSON and tensors. Changes nothing and reads no tensor.

    Args:
        value: the tree.
        where: the public function, for messages.

    Raises:
        NotSerializableError: values can't be stored in a checkpoint. The error names the paths of all.
        StaleStateError: a state in it was donated.
    """
    encoder = _Encoder()
    try:
        structure = encoder.value("", value)
    except RecursionError:
        raise _refused("", "is nested too deep", "put less inside one another") from None
    if encoder.refused:
        first = encoder.refused[0]
        what = listing([error.what for error in encoder.refused])
        raise NotSerializableError(what, where=where, fix=first.fix) from first.__cause__
    return Encoded(structure, encoder.tensors, encoder.has_state)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._paths: dict[Any, str] = {}
        self._open: set[int] = set()
        self.has_state = False
        self.refused: list[NotSerializableError] = []

    def value(self, path: str, value: tree.Tree) -> Any:
        try:
            return self._value(path, value)
        except NotSerializableError as error:
            self.refused.append(error)

    def _value(self, path: str, value: tree.Tree) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is int:
            return value
        if kind is str:
            return _text(path, value)
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(path, value)}
        if walk.is_array(value):
            return {"array": self._tensor(path, _from_array(path, value))}
        if (number := plain(value)) is not value:
            return self.value(path, number)
        return self._container(path, value)

    def _container(self, path: str, value: tree.Tree) -> Any:
        if id(value) in self._open:
            raise _refused(path, "contains itself", "save a tree without cycles")
        self._open.add(id(value))
        try:
            if type(value) in (list, tuple):
                entries = [self.value(walk.child(path, i), entry) for i, entry in enumerate(value)]
                return entries if type(value) is list else {"tuple": entries}
            if isinstance(value, StaleTree):
                raise stale_tree(path)
            if type(value) in (dict, OrderedDict, defaultdict, ReadOnlyDict):
                return self._dict(path, value)
            name = type(value).__name__
            if NODES.get(name) is type(value):
                self.has_state |= isinstance(value, TrainState)
                check_trained(value, "fa.save")
                if (wrong := not_counted(value)) is not None:
                    what = f"is {getattr(value, wrong)!r}"
                    raise _refused(walk.child(path, wrong), what, "give a whole number from 0 on")
                return {name: self._entries(path, walk.entries_of(value))}
            if walk.is_object(value):
                return {"state_dict": self.value(path, _state_of(path, value))}
            opened = walk.opened(value)
            if opened is not None:
                return {"node": self._entries(path, opened[0])}
        finally:
            self._open.discard(id(value))
        raise _refused(
            path,
            f"is a {type(value).__module__}.{type(value).__qualname__}",
            "keep plain data there (tensors, arrays, numbers, strings, bytes, lists, tuples, dicts), "
            "dataclasses, attrs classes, or an object with state_dict() and load_state_dict()",
        )

    def _entries(self, path: str, entries: Any) -> dict[str, Any]:
        return {_text(path, key): self.value(walk.child(path, key), entry) for key, entry in entries.items()}

    def _dict(self, path: str, value: dict[Any, Any]) -> Any:
        if all(type(key) is str for key in value):
            return {"dict": self._entries(path, value)}
        for key in value:
            if key is not None and type(key) not in (str, bool, int, float, bytes):
                raise _refused(path, f"has the key {key!r}", "use str(key), or a number")
        entries = [(walk.child(path, key), key, entry) for key, entry in value.items()]
        return {"items": [[self.value(path, key), self.value(inner, entry)] for inner, key, entry in entries]}

    def _tensor(self, path: str, value: torch.Tensor) -> str:
        problem = _unfit(value)
        if problem is not None:
            raise _refused(path, *problem)
        if path == _RESERVED:
            raise _refused(path, "has a name that safetensors keeps for itself", "choose another key")
        identity = _identity(value)
        if identity not in self._paths:
            while path in self.tensors:  # the keys 1 and "1" have the same path, and no key has "~2"
                path += "~2"
            self._paths[identity] = path
            self.tensors[path] = value
        return self._paths[identity]


def _state_of(path: str, value: tree.Tree) -> Any:
    try:
        return value.state_dict()
    except Exception as error:
        raise _refused(
            path,
            f"raised {type(error).__name__} in its state_dict() ({error})",
            "see that it gives out its state at any time",
        ) from error


def _from_array(path: str, value: tree.Tree) -> torch.Tensor:
    try:
        # a copy if torch has no view: read-only memory, negative strides
        plain = value if value.flags.writeable and min(value.strides, default=1) >= 0 else value.copy()
        return torch.from_numpy(plain)
    except (TypeError, ValueError):  # of text and objects, of the other byte order
        raise _refused(
            path, f"is a NumPy array of {value.dtype}", "convert it to numbers: x.astype(...), x.tolist()"
        ) from None


def _text(path: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refused(path, "holds text that is not Unicode", "keep it as bytes") from None
    return value


def _unfit(value: torch.Tensor) -> tuple[str, str] | None:
    """The reason why a tensor can't be stored and the fix, or None if it can."""
    if value.dtype not in CODES:
        return f"has dtype {value.dtype}", "convert it, for complex128: torch.view_as_real(x)"
    if is_sharded(value):
        spread: Any = value
        odd = [place for place in spread.placements if not _is_stored(place, spread.placements)]
        if odd:
            return f"is a DTensor placed {odd[0]}", "redistribute it to Shard(dim) or Replicate() placements"
        local: Any = _torch.local_of(value)
        if type(local) not in (torch.Tensor, torch.nn.Parameter):  # it may have no memory of its own
            return f"is a DTensor of {type(local).__qualname__}", "save the plain values that it stands for"
    elif type(value) not in (torch.Tensor, torch.nn.Parameter, Remote):
        return f"is a {type(value).__qualname__}", "x.as_subclass(torch.Tensor) keeps the plain values"
    if value.is_meta:
        return "is on the meta device, so it has no values", "materialise it: module.to_empty(device=...)"
    if value.layout is not torch.strided or value.is_quantized:
        return f"is stored as {value.layout}", "x.to_dense() (or x.dequantize()) before saving"
    return None


def _is_stored(placement: Any, all_of_them: Sequence[Any]) -> bool:
    """Whether a DTensor's part along one mesh dimension is made of blocks. By exact class."""
    if is_packed(placement):  # with another shard of the same dimension it is none
        return sum(getattr(place, "dim", None) == placement.dim for place in all_of_them) == 1
    return type(placement).__name__ in ("Shard", "Replicate", "OnStage")


def _identity(value: torch.Tensor) -> Any:
    """Equal for two tensors that are the same memory seen in the same way."""
    local = _torch.local_of(value)
    # no memory of its own, or (XLA) none with an address: all would be one
    if not local.numel() or isinstance(value, Remote) or local.device.type == "xla":
        return id(value)
    placed = tuple(map(str, getattr(value, "placements", ())))
    where = (local.device, local.data_ptr(), local.dtype)
    return (*where, tuple(local.shape), local.stride(), tuple(value.shape), placed)


def _refused(path: str, why: str, fix: str) -> NotSerializableError:
    return NotSerializableError(
        f"{walk.shown(path)} {why}, and has no place in a checkpoint", where="fa.save", fix=fix
    )


def decode(structure: tree.Tree, tensor: Callable[[str], Any]) -> Any:
    """The tree that a JSON structure describes, with `tensor(path)` in the place of its tensors.

    Args:
        structure: JSON as `encode` makes it. The source may be untrusted.
        tensor: a function from a stored path to the value in the tree.

    Raises:
        CheckpointError: the structure is not of this grammar.
    """
    try:
        return _decode(structure, tensor)
    except RecursionError:
        raise _malformed("is nested too deep") from None


def _decode(structure: tree.Tree, tensor: Callable[[str], Any]) -> Any:
    if structure is None or isinstance(structure, bool | int | float | str):
        return structure
    if isinstance(structure, list):
        return [_decode(entry, tensor) for entry in structure]
    if not isinstance(structure, dict) or len(structure) != 1:
        raise _malformed(f"holds {str(structure)[:60]!r}, which is no value")
    [(tag, content)] = structure.items()
    if tag == "tensor" and isinstance(content, str):
        return tensor(content)
    if tag == "float" and isinstance(content, str) and content in _NONFINITE:
        return _NONFINITE[content]
    if tag == "bytes" and isinstance(content, str):
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error:
            raise _malformed("holds bytes that are not base64") from None
    if tag == "tuple" and isinstance(content, list):
        return tuple(_decode(entry, tensor) for entry in content)
    if tag == "array" and isinstance(content, str):
        stored = tensor(content)
        if getattr(stored, "dtype", None) in _NO_ARRAY:
            raise _malformed(f"holds an array of {stored.dtype}, which NumPy lacks")
        return Array(stored)
    if tag == "dict" and isinstance(content, dict):
        return {key: _decode(entry, tensor) for key, entry in content.items()}
    if tag == "items" and isinstance(content, list):
        pairs = [_pair(entry, tensor) for entry in content]
        table = dict(pairs)
        if len(table) != len(pairs):
            raise _malformed("holds one key twice")
        return table
    if tag == "node" and isinstance(content, dict):
        return Node({key: _decode(entry, tensor) for key, entry in content.items()})
    if tag == "state_dict":
        return Object(_decode(content, tensor))
    if tag in NODES and isinstance(content, dict):
        return _node(NODES[tag], {key: _decode(entry, tensor) for key, entry in content.items()})
    raise _malformed(f"holds a {tag[:60]!r} that this version does not know")


def _pair(structure: tree.Tree, tensor: Callable[[str], Any]) -> tuple[Any, Any]:
    if not isinstance(structure, list) or len(structure) != 2:
        raise _malformed("holds an entry that is no pair")
    key = _decode(structure[0], tensor)
    if key is not None and type(key) not in (str, bool, int, float, bytes):
        raise _malformed(f"holds a {type(key).__name__} as a key")
    return key, _decode(structure[1], tensor)


def _node(cls: type[Any], values: dict[str, Any]) -> Any:
    fields = {field.name: field for field in attrs.fields(cls) if field.init}
    extra = values.keys() - fields.keys()
    missing = [n for n, field in fields.items() if field.default is attrs.NOTHING and n not in values]
    if extra or missing:
        what = f"has the field {min(extra)!r}" if extra else f"lacks the field {missing[0]!r}"
        raise _malformed(f"holds a {cls.__name__} that {what}")
    node = cls(**values)
    if (wrong := not_counted(node)) is not None:
        raise _malformed(f"holds a {cls.__name__} whose {wrong} is {getattr(node, wrong)!r}"[:200])
    return node


def _malformed(what: str) -> CheckpointError:
    return CheckpointError(
        f"the tree in the manifest {what}",
        where="fa.restore",
        fix="restore another checkpoint, or read this one with the version of fnaccel that wrote it",
    )
