"""What a foreign name is called here: wrappers' prefixes taken off, numbered moments given names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from fnaccel.checkpoint.format.found import Found, Numbered

Strip = Callable[[str], str]

_WRAPPERS = re.compile(r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\.")


def strips(names: Iterable[str]) -> Iterator[Strip]:
    """Ways to read names, the plainest first: as they are, without wrappers, without a shared prefix.

    Only a prefix that all names share is ever taken off, one component after the other.
    """
    known = list(names)
    yield lambda name: name
    bare = [_unwrapped(name) for name in known]
    if bare != known:
        yield _unwrapped
    heads: list[str] = []
    while bare and all("." in name for name in bare) and len({name.partition(".")[0] for name in bare}) == 1:
        heads.append(bare[0].partition(".")[0])
        bare = [name.partition(".")[2] for name in bare]
        yield _without(".".join(heads) + ".")


def _unwrapped(name: str) -> str:
    previous = None
    while name != previous:  # one wrapper may hold another
        previous, name = name, _WRAPPERS.sub(r"\1", name)
    return name


def _without(prefix: str) -> Strip:
    return lambda name: _unwrapped(name).removeprefix(prefix)


def name_numbered(numbered: Numbered, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, str] | None:
    """Which parameter each number stands for; None where that can't be known.

    An optimizer numbers its parameters group by group. With one group the order is the model's. With
    several (decay and no decay) each group keeps the model's order, so a shape tells the group as long as
    it occurs in one only; names that do not come out in that order show that a group had another one.

    Args:
        numbered: the optimizer's state.
        shapes: of the parameters, by name, in the model's order.
    """
    order = [number for group in numbered.groups for number in group]
    if len(order) != len(shapes) or not set(numbered.slots) <= set(order):
        return None
    if len(numbered.groups) == 1:
        found = dict(zip(order, shapes, strict=True))
    else:
        found = _by_shape(numbered, shapes)
        if found is None:
            return None
    fits = all(
        not moment.shape or moment.shape == shapes[found[number]]
        for number, slots in numbered.slots.items()
        for moment in slots.values()
    )
    return found if fits else None


def _by_shape(numbered: Numbered, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, str] | None:
    group_of: dict[tuple[int, ...], int] = {}
    waiting: dict[tuple[int, ...], list[str]] = {}
    for name, shape in shapes.items():
        waiting.setdefault(shape, []).append(name)
    found: dict[int, str] = {}
    order = {name: place for place, name in enumerate(shapes)}
    for place, group in enumerate(numbered.groups):
        last = -1
        for number in group:
            shape = _shape_of(numbered.slots.get(number, {}))
            if shape is None or group_of.setdefault(shape, place) != place or not waiting.get(shape):
                return None
            found[number] = waiting[shape].pop(0)
            if order[found[number]] < last:
                return None
            last = order[found[number]]
    return found


def _shape_of(slots: Mapping[str, Found]) -> tuple[int, ...] | None:
    return next((one.shape for slot, one in slots.items() if slot != "step"), None)
