"""`Tail`: all that follows the gradients of a step, once for eager steps and for graphs."""

from __future__ import annotations

from typing import Any

import attrs

from fnaccel.engine.engine import Engine
from fnaccel.engine.gradients import Gradients
from fnaccel.errors import ArgumentError
from fnaccel.step.step import GradientHook, Info, UpdateHook
from fnaccel.tree import Tree


@attrs.frozen(kw_only=True)
class Tail:
    """The hooks of a step, in order.

    Attributes:
        skips: whether an update may be left out on the device.
        gradients: the hooks before the update, by name.
        updates: the hooks after it, by name.
    """

    skips: bool
    gradients: tuple[tuple[str, GradientHook], ...]
    updates: tuple[tuple[str, UpdateHook], ...]

    def change(self, grads: Gradients, states: dict[str, Any], info: Info) -> None:
        """Run the hooks on gradients. Changes no parameter.

        Args:
            grads: averaged over ranks.
            states: the states of transforms by name, updated in place.
            info: the call, as hooks see it.
        """
        if self.skips:
            grads.skip_where_nonfinite()  # before a transform could clamp an infinity away
        for name, hook in self.gradients:
            _keep(states, name, hook.on_gradients(grads, states.get(name), info))

    def finish(self, engine: Engine, grads: Gradients, states: dict[str, Any], info: Info) -> Any:
        """Run the hooks after the update.

        Args:
            engine: handed to the hooks.
            grads: of the update.
            states: the states of transforms by name, updated in place.
            info: as for `change`. Hooks are told besides whether the update was left out.

        Returns:
            1 if the update was left out, 0 if not, None if it never is.
        """
        skip = grads.left_out()
        if self.updates:
            after_update = Info(
                step=info.step,
                updates=info.updates,
                params=info.params,
                record=info.record,
                skip=skip,
                metrics=info.metrics,
            )
            for name, hook in self.updates:
                _keep(states, name, hook.on_update(engine, states.get(name), after_update))
        return skip if self.skips else grads.skip


def _keep(transforms: dict[str, Any], name: str, state: Tree) -> None:
    """Keep the next state of a transform, if it has one: states keep their structure."""
    if name in transforms:
        transforms[name] = state
    elif state is not None:
        raise ArgumentError(
            f"transform {name!r} returned a state of its own and began without one",
            where=f"transform {name}",
            fix="give its first state: fa.Transform(..., init=lambda params: first)",
        )
