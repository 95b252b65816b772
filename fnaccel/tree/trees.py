"""Functions of pytrees: nested dicts, lists, tuples, named tuples and registered classes.

Dictionaries are traversed by sorted key, so two ranks that filled a dict in different order
agree. `None` holds no leaves. Only this file imports optree, and it binds optree to the namespace
`fnaccel`. See https://optree.readthedocs.io for nodes and leaves.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import attrs
import optree
import torch

NAMESPACE = "fnaccel"

Tree = Any
"""Any nesting of dicts, lists, tuples, named tuples and registered classes around leaves."""

IsLeaf = Callable[[Any], bool]
_T = TypeVar("_T", bound=type)


def map(  # noqa: A001 - the name of this operation in every pytree library
    fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf | None = None
) -> Tree:
    """Apply `fn` to each leaf of `tree` (and the matching leaves of `rest`). Same structure back.

    Raises ValueError if the structures differ. The message names the path.

    Example:
        >>> fa.tree.map(lambda a, b: a + b, {"x": 1, "y": [2, 3]}, {"x": 10, "y": [20, 30]})
        {'x': 11, 'y': [22, 33]}
    """
    if not rest:
        return optree.tree_map(fn, tree, is_leaf=is_leaf, namespace=NAMESPACE)
    found, structure = columns(tree, *rest, is_leaf=is_leaf)
    return unflatten(structure, [fn(*row) for row in zip(*found, strict=True)])


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf | None = None) -> Tree:
    """Like `map`, with the leaf's path (`"params/weight"`) as the first argument of `fn`.

    Example:
        >>> fa.tree.map_with_path(lambda path, leaf: f"{path}={leaf}", {"x": [1, 2]})
        {'x': ['x/0=1', 'x/1=2']}
    """
    found, structure = columns(tree, *rest, is_leaf=is_leaf)
    rows = zip(structure.paths(), *found, strict=True)
    return unflatten(structure, [fn(join(path), *row) for path, *row in rows])


def _check_alike(tree: Tree, *rest: Tree, is_leaf: IsLeaf | None) -> None:
    """Raise ValueError with the path where trees differ, if they do: optree does not say where."""
    for index, other in enumerate(rest, 1):
        difference = _difference(tree, other, (), is_leaf)
        if difference is not None:
            raise ValueError(f"tree {index} differs from tree 0: {difference}")


def _difference(first: Tree, other: Tree, path: tuple[str, ...], is_leaf: IsLeaf | None) -> str | None:
    """The first path at which `other` is not built like `first`, and how."""
    node = None if is_leaf is not None and is_leaf(first) else open_node(first)
    if node is None:
        return None
    name, opened = join(path) or "(the root)", open_node(other)
    kind, other_kind = type(first), type(other)
    both_dicts = issubclass(kind, dict) and issubclass(other_kind, dict)  # which pair by key
    if opened is None or not (both_dicts or kind is other_kind):
        return f"{name} is {other_kind.__name__}, not {kind.__name__}"
    for key in [*node[0], *opened[0]]:
        if key not in opened[0] or key not in node[0]:
            return f"{join((*path, key))} is {'missing' if key in node[0] else 'unknown'}"
        difference = _difference(node[0][key], opened[0][key], (*path, key), is_leaf)
        if difference is not None:
            return difference
    return None


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Apply `fn` to tensor leaves and leave everything else alone.

    Mappings such as a tokenizer's output, and dataclasses, are walked. Another object that holds tensors is
    left as it is, with a warning once for each class.

    Example:
        >>> fa.tree.map_tensors(lambda x: x.shape, {"x": torch.ones(3), "name": "a"})
        {'x': torch.Size([3]), 'name': 'a'}
    """
    return _map_tensors(fn, tree, _left_alone)


def _map_tensors(fn: Callable[[torch.Tensor], Any], tree: Tree, other: Callable[[Any], Any]) -> Tree:
    """`map_tensors`, with `other` for the leaves that are no tensors."""

    def on_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fn(leaf)
        if is_container(leaf):  # of a class that is seen for the first time: a node from now on
            return _map_tensors(fn, leaf, other)
        return other(leaf)

    return map(on_leaf, tree)


_told: set[type] = set()


def _left_alone(leaf: Any) -> Any:
    kind = type(leaf)
    if kind in _told:
        return leaf
    _told.add(kind)
    held = [name for name, value in getattr(leaf, "__dict__", {}).items() if isinstance(value, torch.Tensor)]
    if held:
        warnings.warn(
            f"{kind.__qualname__} holds tensors ({', '.join(held)}) and is no container of a tree: they are "
            "left as they are. Make it a dict or a dataclass, or register it: fa.tree.register",
            UserWarning,
            stacklevel=3,
        )
    return leaf


def flatten(tree: Tree, *, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Any]:
    """The leaves of `tree` in traversal order, and its structure for `unflatten`.

    Example:
        >>> leaves, structure = fa.tree.flatten({"y": 2, "x": 1})
        >>> leaves
        [1, 2]
    """
    leaves, structure = optree.tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)
    return leaves, structure


def unflatten(structure: Any, leaves: Iterable[Any]) -> Tree:
    """The inverse of `flatten`.

    Example:
        >>> leaves, structure = fa.tree.flatten({"y": 2, "x": 1})
        >>> fa.tree.unflatten(structure, [10, 20])
        {'y': 20, 'x': 10}
    """
    return optree.tree_unflatten(structure, leaves)


def columns(tree: Tree, *rest: Tree, is_leaf: IsLeaf | None = None) -> tuple[list[list[Any]], Any]:
    """The leaves of each tree, and the structure of the first one. It raises as `map` does."""
    first, *others = _alike(tree, *rest)
    found, structure = flatten(first, is_leaf=is_leaf)
    try:
        return [found, *(structure.flatten_up_to(other) for other in others)], structure
    except ValueError:
        _check_alike(tree, *rest, is_leaf=is_leaf)
        raise


def leaves(tree: Tree, *, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of `tree` in traversal order.

    Example:
        >>> fa.tree.leaves({"y": 2, "x": [1, None]})
        [1, 2]
    """
    return optree.tree_leaves(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def structure(tree: Tree, *, is_leaf: IsLeaf | None = None) -> Any:
    """The structure of `tree`: comparable, hashable, printable.

    Example:
        >>> fa.tree.structure([1, 2]) == fa.tree.structure([3, 4])
        True
    """
    return optree.tree_structure(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def join(path: Iterable[Any]) -> str:
    """One string for a path of keys and attribute names: `("a", 0, "b") -> "a/0/b"`."""
    return "/".join(str(entry) for entry in path)


def paths(tree: Tree, *, is_leaf: IsLeaf | None = None) -> list[str]:
    """The path of each leaf, in traversal order.

    Example:
        >>> fa.tree.paths({"x": [1, 2], "y": 3})
        ['x/0', 'x/1', 'y']
    """
    return [join(path) for path in optree.tree_paths(tree, is_leaf=is_leaf, namespace=NAMESPACE)]


def items(tree: Tree, *, is_leaf: IsLeaf | None = None) -> Iterator[tuple[str, Any]]:
    """Pairs of (path, leaf), in traversal order.

    Example:
        >>> list(fa.tree.items({"x": [1, 2]}))
        [('x/0', 1), ('x/1', 2)]
    """
    return zip(paths(tree, is_leaf=is_leaf), leaves(tree, is_leaf=is_leaf), strict=True)


def select(tree: Tree, pattern: str | Iterable[str]) -> dict[str, Any]:
    """The leaves whose path matches a shell pattern (or one of several), keyed by path.

    Example:
        >>> sorted(fa.tree.select(state, "params/lm_head.*"))
        ['params/lm_head.bias', 'params/lm_head.weight']
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    return {
        path: leaf for path, leaf in items(tree) if any(fnmatch.fnmatchcase(path, glob) for glob in patterns)
    }


def partition(keep: Callable[[Any], bool], tree: Tree) -> tuple[Tree, Tree]:
    """Two trees shaped like `tree`: leaves for which `keep` holds, and the others.

    A leaf that went to the other side is `None`. `combine` puts the two together again.

    Example:
        >>> fa.tree.partition(lambda leaf: leaf > 1, {"x": 1, "y": 2})
        ({'x': None, 'y': 2}, {'x': 1, 'y': None})
    """
    return (
        map(lambda leaf: leaf if keep(leaf) else None, tree),
        map(lambda leaf: None if keep(leaf) else leaf, tree),
    )


def combine(first: Tree, second: Tree) -> Tree:
    """The inverse of `partition`: if a leaf of `first` is `None`, take it from `second`.

    Example:
        >>> fa.tree.combine({"x": None, "y": 2}, {"x": 1, "y": None})
        {'x': 1, 'y': 2}
    """
    is_none: IsLeaf = lambda node: node is None  # noqa: E731
    try:
        return optree.tree_map(
            lambda a, b: b if a is None else a,
            *_alike(first, second),
            none_is_leaf=True,
            namespace=NAMESPACE,
        )
    except ValueError:
        _check_alike(first, second, is_leaf=is_none)
        raise


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    """Floating-point tensors in another dtype. Integers, bools and non-tensors as they are.

    Example:
        >>> fa.tree.cast({"x": torch.ones(2), "n": torch.arange(2)}, torch.float16)
        {'x': tensor([1., 1.], dtype=torch.float16), 'n': tensor([0, 1])}
    """
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def to(tree: Tree, device: torch.device | str, *, non_blocking: bool = False) -> Tree:
    """Tensors on another device. Other leaves as they are, if they have no method `to` of their own.

    A module would be changed by its `to`, so it stays.

    Example:
        >>> fa.tree.to({"x": torch.ones(2)}, "meta")["x"].device
        device(type='meta')
    """

    def ask(leaf: Any) -> Any:
        own = None if isinstance(leaf, torch.nn.Module | type) else getattr(leaf, "to", None)
        return own(device) if callable(own) else _left_alone(leaf)

    return _map_tensors(lambda x: x.to(device, non_blocking=non_blocking), tree, ask)


def allclose(first: Tree, second: Tree, *, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Whether two trees have one structure and all their leaves agree (tensors to tolerance).

    Every rank must call it if tensors are sharded, since they are gathered one by one.

    Example:
        >>> fa.tree.allclose({"x": torch.ones(2)}, {"x": torch.ones(2) + 1e-9})
        True
    """
    first, second = _alike(first, second)
    if structure(first) != structure(second):
        return False
    for a, b in zip(leaves(first), leaves(second), strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            a, b = whole(a), whole(b)
            if a.shape != b.shape or not torch.allclose(a, b, rtol=rtol, atol=atol):
                return False
        elif a != b:
            return False
    return True


_CONTAINERS = (dict, list, tuple)


def whole(leaf: Any) -> Any:
    """A sharded tensor gathered from all ranks, each of which has to call it. Any other leaf as it is.

    Raises:
        TypeError: a dict, a list or a tuple, which is no leaf.

    Example:
        >>> fa.tree.whole(state.params["lm_head.bias"]).shape
        torch.Size([16])
    """
    if isinstance(leaf, _CONTAINERS):
        raise TypeError(f"a {type(leaf).__name__} is no leaf: fa.tree.map(fa.tree.whole, tree) gathers it")
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():  # it detaches no DTensor
        return torch.inference_mode(False)(whole)(leaf)
    return leaf.detach().full_tensor() if hasattr(leaf, "full_tensor") else leaf


def register(
    cls: _T,
    *,
    children: tuple[str, ...] | None = None,
    check: Callable[[Any], None] | None = None,
) -> _T:
    """Make a frozen attrs class a pytree node. Fields not in `children` are compared, not walked.

    Args:
        cls: the attrs class.
        children: names of the fields to walk. All of the init fields by default.
        check: called with the instance before it is flattened. It may raise.

    Example:
        >>> @fa.tree.register
        ... @attrs.frozen
        ... class Pair:
        ...     first: int
        ...     second: int
        >>> fa.tree.map(lambda x: x + 1, Pair(1, 2))
        Pair(first=2, second=3)
    """
    fields = [f.name for f in attrs.fields(cls) if f.init]
    walked = tuple(children) if children is not None else tuple(fields)
    static = tuple(name for name in fields if name not in walked)

    def flatten_node(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        if check is not None:
            check(node)
        return (
            tuple(getattr(node, name) for name in walked),
            tuple(getattr(node, name) for name in static),
            walked,
        )

    def unflatten_node(metadata: tuple[Any, ...], values: Iterable[Any]) -> Any:
        return cls(**dict(zip(walked, values, strict=True)), **dict(zip(static, metadata, strict=True)))

    optree.register_pytree_node(cls, flatten_node, unflatten_node, namespace=NAMESPACE)  # pyright: ignore[reportArgumentType]
    return cls


def open_node(value: Any) -> tuple[dict[str, Any], Callable[[Iterable[Any]], Any]] | None:
    """The entries of a node by name, and a function that rebuilds it from new ones. None for a leaf."""
    try:
        children, metadata, entries, rebuild = optree.tree_flatten_one_level(value, namespace=NAMESPACE)
    except ValueError:  # a leaf
        return None
    names = getattr(value, "_fields", entries) if isinstance(value, tuple) else entries
    return dict(zip(map(str, names), children, strict=True)), lambda children_by_name: rebuild(
        metadata, children_by_name
    )


def register_sequence(kind: type) -> None:
    """Make a subclass of list a pytree node of its own."""
    optree.register_pytree_node(
        kind, lambda node: (list(node), None), lambda _, values: kind(values), namespace=NAMESPACE
    )


def register_mapping(kind: type) -> None:
    """Make a subclass of dict a pytree node, by sorted key. `map` pairs it with plain dicts too."""
    _containers[kind] = True
    _as_dicts.add(kind)
    _register(kind, sorted, lambda node, key: node[key], kind)


def _alike(*trees: Tree) -> tuple[Tree, ...]:
    """Trees whose subclasses of dict are plain dicts, unless they are the same classes in all trees."""
    first = structure(trees[0]) if len(trees) > 1 else None
    if all(structure(tree) == first for tree in trees[1:]):  # no set: torch.compile can't hash them
        return trees
    return tuple(_plain(tree) for tree in trees)


def _plain(tree: Tree) -> Tree:
    def is_mapping(node: Any) -> bool:
        return type(node) in _as_dicts

    def as_dict(node: Any) -> Any:
        return {key: _plain(node[key]) for key in node} if is_mapping(node) else node

    return optree.tree_map(as_dict, tree, is_leaf=is_mapping, namespace=NAMESPACE)


_containers: dict[type, bool] = {}
"""The classes of leaves that were looked at: whether they are containers, which are nodes since then."""
_as_dicts: set[type] = set()


def learn(value: Any) -> bool:
    """Let a tree be walked into mappings that are no dicts, and into dataclasses, at any depth.

    The output of a tokenizer is such a mapping. Other classes stay leaves: `register` takes them.

    Returns:
        Whether it has more leaves now.
    """
    found = False
    # inside of a class that was learned there may be another
    while any(is_container(leaf) for leaf in leaves(value)):
        found = True
    return found


def learn_records(value: Any) -> None:
    """Let a tree of the user's be walked into attrs classes as well as mappings and dataclasses.

    An object that has a `state_dict()` stays a leaf.
    """
    while any(map(learn_record, leaves(value))):
        pass


def learn_record(leaf: Any) -> bool:
    """Whether a leaf is a dataclass, an attrs object or a mapping. Its class is registered then."""
    kind = type(leaf)
    if isinstance(leaf, type) or hasattr(leaf, "state_dict"):
        return False
    if attrs.has(kind):
        names = [field.name for field in attrs.fields(kind)]
        _register(kind, lambda _: names, getattr, functools.partial(_remade, kind))
        return True
    return is_container(leaf)


def _remade(kind: type, entries: dict[str, Any]) -> Any:
    """An object with these attributes. Its `__init__` may convert them, or not take all of them."""
    made: Any = object.__new__(kind)
    for name, entry in entries.items():
        object.__setattr__(made, name, entry)
    return made


def is_container(value: Any) -> bool:
    """Whether a leaf is a container. Its class is registered then."""
    kind = type(value)
    known = _containers.get(kind)
    if known is None:
        known = _containers[kind] = _learn(value, kind)
    return known


def _learn(value: Any, kind: type) -> bool:
    if isinstance(value, Mapping):
        # a transformers ModelOutput is a dataclass too, and takes its entries by name
        make = (lambda entries: kind(**entries)) if dataclasses.is_dataclass(value) else kind
        _register(kind, sorted, lambda node, key: node[key], make)
    elif dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(value)
        names = [field.name for field in fields]
        remade = functools.partial(_remade, kind)
        make = (lambda entries: kind(**entries)) if all(field.init for field in fields) else remade
        _register(kind, lambda _: names, getattr, make)
    else:
        return False
    return True


def _register(
    kind: type,
    keys: Callable[[Any], Iterable[str]],
    read: Callable[[Any, str], Any],
    make: Callable[[dict[str, Any]], Any],
) -> None:
    def flatten_node(node: Any) -> tuple[list[Any], tuple[str, ...], tuple[str, ...]]:
        names = tuple(keys(node))
        return [read(node, key) for key in names], names, names

    def unflatten_node(metadata: Any, values: Iterable[Any]) -> Any:
        return make(dict(zip(metadata, values, strict=True)))

    optree.register_pytree_node(kind, flatten_node, unflatten_node, namespace=NAMESPACE)  # pyright: ignore[reportArgumentType]
