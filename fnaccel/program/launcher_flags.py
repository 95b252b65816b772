"""What a train step takes of the launcher's flags: all that the script leaves open. The rest has to agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from fnaccel.errors import FlagMismatchError
from fnaccel.step.step import Step, StepLike, Transform, as_step
from fnaccel.strategies.distribute import Distributed
from fnaccel.strategies.strategy import Strategy, strategy
from fnaccel.transforms.from_fields import KINDS, OPTIONS, transforms_of
from fnaccel.world import flags
from fnaccel.world.world import World

STEP_FIELDS = {"strategy", *KINDS, *OPTIONS}
"""The fields of a recipe that a train step can use."""


@attrs.frozen
class Chosen:
    """A step, a model and its strategy, none of them open, and a note about what the launcher chose."""

    step: Step
    model: Any
    strategy: Strategy
    notes: tuple[str, ...] = ()


def choose(step: StepLike, model: Distributed, world: World, *, trains: bool) -> Chosen:
    """Fill in what the script leaves open: a strategy, and transforms of a kind that the step lacks.

    Without a flag, an open strategy is `local` on one rank, and `ddp` on several.

    Args:
        step: of the script.
        model: of the script.
        world: its flags are used, unless a recipe has taken them.
        trains: whether the train step has an optimizer. Else only the strategy is filled in.

    Raises:
        FlagMismatchError: a flag says something else than the script.
        UnusedOverrideError: a field that only a recipe has.
        ArgumentError: options of a transform that is not chosen.
    """
    described, fields = as_step(step, "fa.train_step"), flags.take_for_steps(world.flags)
    used: dict[str, Any] = {}
    text, axes = fields.get("strategy"), model.strategy
    if axes is None:
        axes = strategy(text or ("local" if world.size == 1 else "ddp"))
        used |= {} if text is None else {"strategy": text}
    elif trains and text is not None and strategy(text) != axes:
        raise _mismatch("strategy", text, f"fa.distribute(..., {axes})", "fa.distribute(model)")
    if trains:
        others = {name: value for name, value in fields.items() if name.partition(".")[0] not in STEP_FIELDS}
        if others:
            raise flags.unused(others)
        described, taken = filled(described, fields)
        used |= taken
    notes = (f"from the launcher: {flags.described(used)}",) if used else ()
    return Chosen(described, model.model, axes, notes)


def filled(step: Step, fields: Mapping[str, Any]) -> tuple[Step, dict[str, Any]]:
    """A step with a transform for each field whose kind it lacks, and the fields that were used so.

    Args:
        step: the step.
        fields: dotted fields of a recipe. Those that choose no transform are left alone.

    Raises:
        FlagMismatchError: the step has a transform of that kind, and it is another one.
        ArgumentError: options of a transform that is not chosen.
    """
    said = _nested(fields)
    used: dict[str, Any] = {}
    for name, transform in transforms_of(said).items():
        own = [t for t in step.transforms if t.name in KINDS[name].names]
        if own:
            _check_same(name, said[name], own)
        elif transform is not None:
            step = transform(step)
            used |= {key: said[key] for key in (name, KINDS[name].options) if key in said}
    return step, used


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields with their sections as mappings: `{"compile_options": {"backend": "eager"}}`."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        section, _, inner = name.partition(".")
        if inner:
            nested.setdefault(section, {})[inner] = value
        else:
            nested[section] = value
    return nested


def _check_same(name: str, value: Any, own: list[Transform]) -> None:
    """Raise FlagMismatchError if the transforms of a step are not those that the value chooses."""
    kind = KINDS[name]
    wanted: dict[str, Any] = {}
    if value not in kind.off or name in ("precision", "accumulate"):
        step = kind.make(value, {})(_nothing)
        wanted = {t.name: t.apply for t in step.transforms if t.name in kind.names}
    have = {t.name: t.apply for t in own}

    def choice(record: Any) -> Any:
        return None if kind.chooses is None else getattr(record, kind.chooses, None)

    if have.keys() != wanted.keys() or any(choice(have[t]) != choice(wanted[t]) for t in have):
        shown = ", ".join(f"{t.name}({t.describe()})" for t in own)
        raise _mismatch(name, value, shown, f"a step without {own[0].name}")


def _nothing(model: object, batch: object) -> None:
    """A loss function that is never called."""
    del model, batch


def _mismatch(name: str, value: object, own: str, open_way: str) -> FlagMismatchError:
    return FlagMismatchError(
        f"the launcher says {name}={value!r}, and the script says {own}",
        where="fa.train_step",
        fix=f"leave one of them out: {open_way} takes what the launcher says",
    )
