"""The state of a train step: one pytree, leased to one user at a time.

`TrainState` holds handles to parameters that are updated in place. Calling a train step donates
the state, as `jax.jit(..., donate_argnums=0)` does: a donated state raises when it is used.
"""

# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001 - the functions of this file share the private fields of a state
from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import attrs
import torch

from fnaccel import _torch, tree
from fnaccel.errors import ArgumentError, AveragedError, ReadOnlyError, StaleStateError, UnleasedStateError
from fnaccel.step.html_table import folded, table
from fnaccel.texts import size_of
from fnaccel.tree import Tree
from fnaccel.world.devices import run_recorded
from fnaccel.world.every_rank import outside_inference


@attrs.frozen
class Position:
    """The position of a run in its data, in global samples: the same on any ranks.

    Attributes:
        epoch: passes over the data that are complete.
        samples: samples of this epoch that were used, on all ranks together.

    Example:
        >>> state, metrics = train_step(state, next(iter(fa.shard(loader))))
        >>> state.data
        Position(epoch=0, samples=4)
    """

    epoch: int = 0
    samples: int = 0

    @property
    def epoch_ended(self) -> bool:
        """Whether an epoch has just ended: nothing of the next one was used."""
        return self.samples == 0 and self.epoch > 0


@attrs.frozen
class Seed:
    """The root of a run's randomness. Every other seed is folded from it.

    Example:
        >>> train_step.init(seed=7).rng
        Seed(root=7)
    """

    root: int = 0


tree.register(Position)
tree.register(Seed)


class ReadOnlyDict(dict[str, Any]):
    """A dict of handles that a state shows: writing to it would train nothing, so it raises."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise ReadOnlyError(
            "the trees of a state are read-only: writing to one would not change the parameters",
            where="state.params, state.buffers, state.opt, state.scale or state.ema",
            fix="train_step.adopt(attrs.evolve(state, params={**state.params, name: value})), or under "
            "torch.no_grad() state.params[name].copy_(value)",
        )

    def update(self, *others: Any, **named: Any) -> None:
        """Raise ReadOnlyError, unless every value is the one that is there, as after `functional_call`."""
        new = dict(*others, **named)
        if any(key not in self or self[key] is not value for key, value in new.items()):
            self._refuse()

    __setitem__: Any = _refuse
    __delitem__: Any = _refuse
    __ior__: Any = _refuse
    clear: Any = _refuse
    pop: Any = _refuse
    popitem: Any = _refuse
    setdefault: Any = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        # torch.load reads no class of ours by default, and no plain dict that is rebuilt by a call
        return OrderedDict, (), None, None, iter(self.items())

    def __copy__(self) -> ReadOnlyDict:
        return ReadOnlyDict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadOnlyDict:
        return ReadOnlyDict(copy.deepcopy(dict(self), memo))


class StaleTree(ReadOnlyDict):
    """A tree that was read from a state which is donated by now: using it raises, since its tensors move on.

    `donate` changes the class of the tree itself, so that everyone who holds it is told.
    """

    def _stale(self, *_: object, **__: object) -> Any:
        raise stale_tree()

    def __repr__(self) -> str:
        return "<a tree of a donated state>"

    __getitem__: Any = _stale
    __iter__: Any = _stale  # a class with its own makes dict(tree) and {**tree} call keys()
    __reversed__: Any = _stale
    __contains__: Any = _stale
    __len__: Any = _stale
    __eq__: Any = _stale
    __ne__: Any = _stale
    __or__: Any = _stale
    __ror__: Any = _stale
    __copy__: Any = _stale
    __deepcopy__: Any = _stale
    __reduce__: Any = _stale
    __reduce_ex__: Any = _stale
    copy: Any = _stale
    get: Any = _stale
    items: Any = _stale
    keys: Any = _stale
    values: Any = _stale


def stale_tree(path: str = "") -> StaleStateError:
    """The error for a tree of a donated state, which stands at `path` of another tree."""
    what = "a tree that was read from a state (params, buffers, opt, scale, ema)"
    return StaleStateError(
        f"{what} was used after the state was donated{f': {path}' if path else ''}",
        where=path or "a tree of a state that a train step, restore or close() has consumed",
        fix="read it from the state that was returned: state.params; to keep values, copy before the call: "
        "fa.snapshot(state).params, or fa.tree.map(torch.clone, state.params)",
    )


for _kind in (ReadOnlyDict, StaleTree):
    tree.register_mapping(_kind)
    _torch.register_mapping(_kind)


class Lease:
    """The owner of a state's tensors, and its live state. Not part of the tree."""

    __slots__ = ("averaged", "live", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.live: TrainState | None = None
        self.averaged = False
        """Whether the parameters hold averages at this moment, or are where an optimizer evaluates."""


@attrs.frozen(kw_only=True)
class Trees:
    """The trees behind a leased state. They belong to its owner, and the next state shows them too."""

    params: Any = None
    buffers: Any = None
    opt: Any = None
    scale: Any = None
    ema: Any = None


_DONATED = Trees()
_TREES = ("params", "buffers", "opt", "scale", "ema")
_VALUES = ("updates", "extras", "transforms")


@attrs.frozen(kw_only=True)
class TrainState:
    """Everything a run needs to continue, as a frozen pytree.

    Attributes:
        step: calls of the train step so far (int).
        updates: updates applied. A 0-d float32 tensor if an update may be skipped on the device.
        params: parameters by canonical name. By model first, if there are several models.
        buffers: buffers, by the same names.
        opt: optimizer slots: name -> slot -> tensor.
        scale: dynamic loss scale (fp16), or None.
        ema: averaged parameters by name, or None. Also averaged buffers, if `with_ema` was asked for them.
        rng: the root seed.
        data: the position in the data.
        extras: the user's own pytree.
        transforms: the state of transforms, by name.

    Example:
        >>> state.step, state.params["lm_head.bias"].shape
        (0, torch.Size([16]))
    """

    step: int
    updates: Any
    params: Any
    buffers: Any
    opt: Any
    scale: Any = None
    ema: Any = None
    rng: Seed = attrs.field(factory=Seed)
    data: Position = attrs.field(factory=Position)
    extras: Any = None
    transforms: Any = attrs.field(factory=dict)
    _lease: Lease | None = attrs.field(default=None, init=False, repr=False, eq=False)
    # None: made by hand, so the fields hold the trees. Else a tree is made when it is first read
    _trees: Trees | None = attrs.field(default=None, init=False, repr=False, eq=False)
    _shown: list[tuple[str, Any]] = attrs.field(factory=list, init=False, repr=False, eq=False)

    if not TYPE_CHECKING:  # type checkers know the fields, so that any other name is an error for them

        def __getattr__(self, name: str) -> Any:
            # reached for a field that is not set: a tree that no one has read, or one that `donate` deleted
            if name in _TREES and (trees := self._trees) is not None and trees is not _DONATED:
                shown = _read_only(getattr(trees, name))
                self._shown.append((name, shown))  # first: after an interrupt `donate` knows of it
                object.__setattr__(self, name, shown)
                return shown
            if name in _TREES or name in _VALUES:
                raise StaleStateError(
                    f"state.{name} was used after the state was donated",
                    where="a state that a train step, restore or close() has consumed",
                    fix="use the state that was returned, which train_step.live_state is too: "
                    "state, metrics = train_step(state, batch); fa.snapshot(state) before the call keeps a "
                    "copy",
                )
            raise AttributeError(f"a TrainState has no {name!r}")

    def __repr__(self) -> str:
        if is_stale(self):
            return f"TrainState(step={self.step}, donated)"
        count = sum(1 for leaf in tree.leaves(self.params) if isinstance(leaf, torch.Tensor))
        return f"TrainState(step={self.step}, updates={self.updates}, {count} parameter tensors, {self.data})"

    def with_extras(self, extras: Tree) -> TrainState:
        """This state with other extras. If it is live, the result is, and this one is donated as by a step.

        Raises:
            StaleStateError: it was donated already.
            AveragedError: its parameters hold their averages.

        Example:
            >>> state = state.with_extras({"best": 0.5})
            >>> state, metrics = train_step(state, batch)
        """
        check_live(self)
        tree.learn_records(extras)
        if self._lease is None:
            return attrs.evolve(self, extras=extras)
        owner = lease_of(self, "state.with_extras(extras)").owner
        return owner.succeed(following(self, extras=extras))

    def _repr_html_(self) -> str:
        if is_stale(self):
            return table(repr(self), [])
        rows: list[tuple[object, ...]] = [("step", self.step), ("updates", self.updates), ("data", self.data)]
        for name in ("params", "buffers", "opt", "ema"):
            tensors = [leaf for leaf in tree.leaves(getattr(self, name)) if isinstance(leaf, torch.Tensor)]
            if tensors:
                elements = sum(tensor.numel() for tensor in tensors)
                size = size_of(sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors))
                rows.append((name, f"{len(tensors)} tensors, {elements:,} elements, {size}"))
        tensors = [(path, x) for path, x in tree.items(self.params) if isinstance(x, torch.Tensor)]
        named = [(path, list(x.shape), x.dtype) for path, x in tensors]
        return table("TrainState", rows) + folded("parameters", table("", named))

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle and deepcopy take the values. A copy is not leased, as a snapshot is not
        check_live(self)
        check_trained(self, "a copy of a state")
        fields = [field.name for field in attrs.fields(TrainState) if field.init]
        return _rebuild, ({name: getattr(self, name) for name in fields},)


def _rebuild(fields: dict[str, Any]) -> TrainState:
    return TrainState(**{name: _read_only(x) if name in _TREES else x for name, x in fields.items()})


def _read_only(value: Tree) -> Any:
    """A new tree of these tensors, read-only."""
    if not isinstance(value, dict):
        return value
    entries: dict[str, Any] = value
    return ReadOnlyDict(
        {key: _read_only(entry) if isinstance(entry, dict) else entry for key, entry in entries.items()}
    )


def scale_of(state: TrainState) -> dict[str, torch.Tensor] | None:
    """The loss scale of a leased state, as its owner holds it."""
    return None if state._trees is None else state._trees.scale


def state_of(
    trees: Trees, *, step: int, updates: Any, rng: Seed, data: Position, extras: Any, transforms: Any
) -> TrainState:
    """A state that shows these trees, and is still to be leased. It costs as much as a frozen class."""
    state, put = TrainState.__new__(TrainState), object.__setattr__
    put(state, "step", step)
    put(state, "updates", updates)
    put(state, "rng", rng)
    put(state, "data", data)
    put(state, "extras", extras)
    put(state, "transforms", transforms)
    put(state, "_lease", None)
    put(state, "_trees", trees)
    put(state, "_shown", [])
    return state


def following(state: TrainState, *, trees: Trees | None = None, **changes: Any) -> TrainState:
    """A state of the same trees with other values. Those of `attrs.evolve` are donated with `state`."""
    trees = trees or state._trees
    assert trees is not None  # it is not made by hand
    names = ("step", "updates", "rng", "data", "extras", "transforms")
    values: dict[str, Any] = {name: getattr(state, name) for name in names} | changes
    return state_of(trees, **values)


def is_stale(state: TrainState) -> bool:
    """Whether a state was donated."""
    return state._trees is _DONATED


def check_live(state: TrainState) -> None:
    """Raise StaleStateError if a state was donated."""
    state.extras  # noqa: B018 - reading a donated field raises


tree.register(TrainState, check=check_live)


def lease(state: TrainState, to: Lease) -> TrainState:
    """Make `state` the live one of a lease. (Trailing work of a train step, not for users.)

    If it was made by hand, its trees become those of the owner: it shows new ones from here on.
    """
    if state._trees is None:
        object.__setattr__(state, "_trees", Trees(**{name: getattr(state, name) for name in _TREES}))
        for name in _TREES:
            object.__delattr__(state, name)
    object.__setattr__(state, "_lease", to)
    to.live = state
    return state


def lease_of(state: TrainState, where: str, *, averaged: bool = False) -> Lease:
    """The lease under which a state is live.

    Args:
        state: the state.
        where: the function that asks, for error messages.
        averaged: whether parameters may hold their averages.

    Raises:
        AveragedError: they do, and may not.
        StaleStateError: it was donated.
        UnleasedStateError: it was made by hand (`evolve`, a tree map).
    """
    check_state(state, where)
    check_live(state)
    lease = state._lease
    if lease is None or lease.live is not state:
        raise UnleasedStateError(
            "this state was made by hand, so it is not tied to the parameters that are trained",
            where=where,
            fix="state = train_step.adopt(state) copies its values in and returns one that is",
        )
    if not averaged:
        refuse_averaged(lease, where)
    return lease


def check_state(state: Tree, where: str) -> None:
    """Raise ArgumentError for anything but a state."""
    if not isinstance(state, TrainState):
        raise ArgumentError(
            f"this is {type(state).__name__}, not the state of a train step",
            where=where,
            fix="state = train_step.init(seed=0), then pass on the state that each call returns: "
            "state, metrics = train_step(state, batch)",
        )


def plain(value: tree.Tree) -> Any:
    """A NumPy number as a Python number, the form that is stored. Other values are returned unchanged."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        number = value.item()
        return value if isinstance(number, numpy.generic) else number  # a long double has no equal
    return value


_COUNTS: dict[type[Any], tuple[str, ...]] = {
    TrainState: ("step", "updates"),
    Position: ("epoch", "samples"),
    Seed: ("root",),
}


def not_counted(node: Position | Seed | TrainState) -> str | None:
    """The first field of a node of the library that has to be a whole number from 0 on, and is not."""
    for name in _COUNTS[type(node)]:
        value = plain(getattr(node, name))
        on_device = name == "updates" and not isinstance(value, bool | int | float | str | None)
        if not on_device and (type(value) is not int or value < 0):
            return name
    return None


def check_ema(state: TrainState, where: str) -> None:
    """Raise ArgumentError if a state holds no averaged parameters."""
    if state.ema is None:
        raise ArgumentError(
            "there are no averaged parameters", where=where, fix="step = fa.with_ema(step, 0.999)"
        )


def refuse_averaged(lease: Lease | None, where: str) -> None:
    """Raise AveragedError while the parameters of a lease hold their averages."""
    if lease is not None and lease.averaged:
        raise AveragedError(
            "the parameters hold averages at this moment, or are where an optimizer evaluates: not the "
            "values that are trained",
            where=where,
            fix="call it after the body of train_step.averaged(state), or after fa.evaluate or look. If an "
            "error of a signal handler has cut its end, make a new train step",
        )


def check_trained(state: Tree, where: str) -> None:
    """Check that the tensors of a tree, if it is a live state, are those that are trained.

    Raises:
        AveragedError: they hold their averages.
        ReplacedParameterError: the model holds other parameters by now.
    """
    if isinstance(state, TrainState):
        lease = state._lease
        refuse_averaged(lease, where)
        if lease is not None and lease.live is state:
            lease.owner.instance.check_modules()


def donate(state: TrainState) -> None:
    """Kill a state, if it lives, and each tree that was read from it: its tensors move on."""
    if state._trees is _DONATED:
        return
    object.__setattr__(state, "_trees", _DONATED)
    object.__setattr__(state, "_lease", None)
    for name in _VALUES:
        object.__delattr__(state, name)
    for name, value in state._shown:
        _kill(value)
        with contextlib.suppress(AttributeError):
            object.__delattr__(state, name)
    state._shown.clear()


def _kill(value: Tree) -> None:
    """Make every use of a tree raise, wherever it is held."""
    if type(value) is ReadOnlyDict:
        for entry in value.values():
            if isinstance(entry, dict):
                _kill(entry)
        value.__class__ = StaleTree
        # it holds no memory, and views such as items(), and code in C that skips the class, find no values
        dict.clear(value)
        dict.__setitem__(value, "donated", None)


@outside_inference
def snapshot(state: TrainState) -> TrainState:
    """An independent copy of a state, on the same devices. It survives any number of steps.

    The copy is not leased: `train_step.adopt(copy)` goes back to it.

    Raises:
        StaleStateError: the state was donated already.
        AveragedError: its parameters hold their averages.

    Example:
        >>> best = fa.snapshot(state)
        >>> state, metrics = train_step(state, batch)
        >>> state = train_step.adopt(best)
        >>> state.step
        0
    """
    check_trained(state, "fa.snapshot(state)")
    copied: TrainState = tree.map_tensors(lambda x: x.detach().clone(), state)
    run_recorded(tree.leaves(copied))
    return copied
