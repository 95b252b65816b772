"""From foreign names to the model's: removes wrappers' prefixes, and names numbered moments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from fnaccel.checkpoint.format.found import Numbered

Strip = Callable[[str], str]

_WRAPPERS = re.compile(r"(^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module)\.")


def strips(names: Iterable[str]) -> Iterator[Strip]:
    """Ways to read names, the plainest first: as they are, without wrappers, without a shared prefix.

    Only a prefix that all names share is ever taken off, one component after the other.
    """
    all_names = list(names)
    yield lambda name: name
    bare = [unwrapped(name) for name in all_names]
    if bare != all_names:
        yield unwrapped
    heads: list[str] = []
    while bare and all("." in name for name in bare) and len({name.partition(".")[0] for name in bare}) == 1:
        heads.append(bare[0].partition(".")[0])
        bare = [name.partition(".")[2] for name in bare]
        yield _without(".".join(heads) + ".")


def unwrapped(name: str) -> str:
    """The name in the plain module, without the parts of wrappers such as `torch.compile`'s `_orig_mod`."""
    previous = None
    while name != previous:  # one wrapper may hold another
        previous, name = name, _WRAPPERS.sub(r"\1", name)
    return name


def _without(prefix: str) -> Strip:
    return lambda name: unwrapped(name).removeprefix(prefix)


def is_number(slot: str) -> bool:
    """Whether a slot counts updates, or is a number of the parameter's group."""
    return slot == "step" or slot.startswith("group.")


def name_numbered(numbered: Numbered, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, str] | None:
    """The parameter of each number, or None if it can't be known.

    An optimizer numbers its parameters group by group. With one group the order is the model's. With
    several (decay and no decay) each group keeps the model's order, so a shape tells the group as long as
    it occurs in one only. If the resulting names are not in that order, a group had another order.

    Args:
        numbered: the optimizer's state.
        shapes: of the parameters, by name, in the model's order.
    """
    order = [number for group in numbered.groups for number in group]
    if len(order) != len(shapes) or not set(numbered.slots) <= set(order):
        return None
    if len(numbered.groups) == 1:
        names = dict(zip(order, shapes, strict=True))
    else:
        names = _by_shape(numbered, shapes)
        if names is None:
            return None
    fits = all(
        not moment.shape or moment.shape == shapes[names[number]]
        for number, slots in numbered.slots.items()
        for moment in slots.values()
    )
    return names if fits else None


def _by_shape(numbered: Numbered, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, str] | None:
    group_of: dict[tuple[int, ...], int] = {}
    waiting: dict[tuple[int, ...], list[str]] = {}
    for parameter, shape in shapes.items():
        waiting.setdefault(shape, []).append(parameter)
    names: dict[int, str] = {}
    order = {parameter: place for place, parameter in enumerate(shapes)}
    for place, group in enumerate(numbered.groups):
        last = -1
        for number in group:
            slots = numbered.slots.get(number, {}).items()
            shape = next((moment.shape for slot, moment in slots if not is_number(slot)), None)
            if shape is None or group_of.setdefault(shape, place) != place or not waiting.get(shape):
                return None
            names[number] = waiting[shape].pop(0)
            if order[names[number]] < last:
                return None
            last = order[names[number]]
    return names
