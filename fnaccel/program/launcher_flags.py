"""The launcher's flags in a train step: they fill in a script's open places. The rest has to agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from fnaccel.errors import ArgumentError, FlagMismatchError
from fnaccel.step.step import Step, StepLike, Transform, as_step
from fnaccel.strategies.axis import finishing_axis
from fnaccel.strategies.distribute import Distributed
from fnaccel.strategies.strategy import Strategy, strategy
from fnaccel.transforms.from_fields import KINDS, OPTIONS, Kind, transforms_of
from fnaccel.world import flags

STEP_FIELDS = {"strategy", *KINDS, *OPTIONS}
"""The fields of a recipe that a train step can use."""


@attrs.frozen
class Chosen:
    """A step, a model and its strategy, none of them open, and a note about the choices of the launcher."""

    step: Step
    model: Any
    strategy: Strategy
    notes: tuple[str, ...] = ()


def choose(
    step: StepLike, model: Distributed, ranks: int, fields: Mapping[str, Any], *, trains: bool
) -> Chosen:
    """Fill in a script's open places: a strategy, and transforms of a kind that the step lacks.

    Without a flag, an open strategy is `local` on one rank, and `ddp` on several.

    Args:
        step: of the script.
        model: of the script.
        ranks: how many there are.
        fields: dotted fields of a recipe: the flags.
        trains: whether the train step has an optimizer. Else only the strategy is filled in.

    Raises:
        FlagMismatchError: a flag says something else than the script.
        UnusedOverrideError: a field that only a recipe has.
        ArgumentError: a model that was not distributed, or options of a transform that is not chosen.
        CapabilityError: no engine runs the strategy.
    """
    described = as_step(step, "fa.train_step")
    if not isinstance(model, Distributed):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"model= is {type(model).__name__}, and nothing says how it lies over the ranks",
            where="fa.train_step",
            fix="model=fa.distribute(model, fa.local())",
        )
    used: dict[str, Any] = {}
    text, axes = fields.get("strategy"), model.strategy
    if axes is None:
        axes = strategy(text or ("local" if ranks == 1 else "ddp"))
        used |= {} if text is None else {"strategy": text}
    elif trains and text is not None and strategy(text) != axes:
        raise _mismatch(f"strategy={text!r}", f"fa.distribute(..., {axes})", "fa.distribute(model)")
    finishing_axis(axes)
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
        chosen = {key: said[key] for key in (name, KINDS[name].options) if key in said}
        if own:
            _check_same(KINDS[name], chosen, own)
        elif transform is not None:
            step = transform(step)
            used |= chosen
    return step, used


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted fields with their sections as mappings: `{"compile_options": {"backend": "eager"}}`."""
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        section, _, inner = name.partition(".")
        nested[section] = nested.get(section, {}) | {inner: value} if inner else value
    return nested


def _check_same(kind: Kind, chosen: Mapping[str, Any], own: list[Transform]) -> None:
    """Raise FlagMismatchError if the transforms of a step are not those that the fields of a kind choose.

    Only attributes that the fields set are compared: a script may set others.
    """
    value, *rest = chosen.values()
    options: Mapping[str, Any] = rest[0] if rest else {}
    wanted: dict[str, Any] = {}
    if value or value not in kind.off:  # 1 micro-batch and fp32 are records too
        step = kind.make(value, options)(_nothing)
        wanted = {t.name: t.apply for t in step.transforms if t.name in kind.names}
    have = {t.name: t.apply for t in own}
    names = [name for name in (kind.chooses, *options) if name is not None]

    def choices(record: Any) -> list[Any]:
        return [getattr(record, name, None) for name in names]

    if have.keys() != wanted.keys() or any(choices(have[t]) != choices(wanted[t]) for t in have):
        shown = ", ".join(f"{t.name}({t.describe()})" for t in own)
        raise _mismatch(flags.described(chosen), shown, f"a step without {own[0].name}")


def _nothing(model: object, batch: object) -> float:
    """A loss function that is never called."""
    del model, batch
    return 0.0


def _mismatch(said: str, own: str, open_way: str) -> FlagMismatchError:
    return FlagMismatchError(
        f"the launcher says {said}, and the script says {own}",
        where="fa.train_step",
        fix=f"leave one of them out: {open_way} takes the launcher's choice",
    )
