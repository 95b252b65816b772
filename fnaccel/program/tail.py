"""`Tail`: all that follows the gradients of a step, eager or traced: hooks, the update, hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import attrs
import torch

from fnaccel import tree
from fnaccel.engine.engine import Engine
from fnaccel.engine.gradients import Gradients
from fnaccel.errors import ArgumentError
from fnaccel.step.step import GradientHook, Info, UpdateHook
from fnaccel.tree import Tree

_ABSENT = object()
Drawing = Callable[[], AbstractContextManager[None]]


@attrs.frozen(kw_only=True)
class Tail:
    """The hooks of a step, in order.

    Attributes:
        skips: whether an update may be left out on the device.
        gradients: the hooks before the update, by name.
        updates: the hooks after it, by name.
        users: the names of hooks that are the user's. Their states stay if an update is left out. The
            library's own say what moves: `on_spike` counts the step that it leaves out.
    """

    skips: bool
    gradients: tuple[tuple[str, GradientHook], ...]
    updates: tuple[tuple[str, UpdateHook], ...]
    users: tuple[str, ...] = ()

    def run(
        self,
        engine: Engine,
        grads: Gradients,
        states: dict[str, Any],
        info: Info,
        apply: Callable[[], None],
        drawing: Drawing = nullcontext,
    ) -> Any:
        """Run the hooks on gradients, the update, and the hooks after it.

        Args:
            engine: handed to the hooks after the update.
            grads: averaged over ranks.
            states: the states of transforms by name, updated in place.
            info: the call, as hooks see it.
            apply: updates the parameters. An error before it has changed none.
            drawing: a context for hooks, which may draw random numbers.

        Returns:
            1 if the update was left out, 0 if not, None if no transform and no check may leave one out.
        """
        stays = self.users and states and (self.skips or grads.uncounted is not None)
        # containers anew: a hook may write to its own
        before = tree.map(lambda leaf: leaf, states) if stays else None
        self.change(grads, self.gradients, states, info, keep_state, drawing)
        apply()
        skip = grads.skipped()
        if self.updates:
            after = replace(info, skip=skip)
            with drawing():
                for name, hook in self.updates:
                    own = hook.on_update(engine, states.get(name), after)
                    if own is not None or name in states:
                        keep_state(states, name, own)
        if before is not None:
            self._stay_if_skipped(before, states, skip)
        # a step that only the device knows to have no row counts, and its metrics say nothing
        return skip if self.skips else grads.skip

    def change(
        self,
        grads: Any,
        hooks: Sequence[tuple[str, GradientHook]],
        states: dict[str, Any],
        info: Info,
        keep: Callable[[dict[str, Any], str, Any], None],
        drawing: Drawing = nullcontext,
    ) -> None:
        """Let hooks change the gradients of an update, eager, traced or pure. It may be left out then.

        Args:
            grads: the gradients, `Gradients` or `PureGradients`.
            hooks: those on gradients, with the numbers of this call.
            states, info, drawing: as for `run`.
            keep: `keep(states, name, state)` keeps the next state of a transform.
        """
        if self.skips:
            grads.skip_where_nonfinite()  # before a transform could clamp an infinity away
        if hooks:
            with drawing():
                for name, hook in hooks:
                    own = hook.on_gradients(grads, states.get(name), info)
                    if own is not None or name in states:
                        keep(states, name, own)
        if self.skips and self.users:  # what they return may not be finite either
            grads.skip_where_nonfinite()

    def _stay_if_skipped(self, before: Mapping[str, Any], states: dict[str, Any], skip: Any) -> None:
        """Give the user's transforms their states of before, if the update was left out.

        On a CPU that is known at once. On an accelerator its tensors are chosen there. A state that holds
        anything else, such as a tensor of the host, waits for the device if updates are checked, or moves.

        Args:
            before: the states before the step, by name.
            states: those after it, updated in place.
            skip: 1 if the update was left out, else 0.
        """
        for name in self.users:
            first, last = before.get(name), states.get(name)
            if last is first:
                continue
            leaves = [*tree.leaves(first), *tree.leaves(last)]
            there = all(type(leaf) is torch.Tensor and leaf.device == skip.device for leaf in leaves)
            if skip.device.type == "cpu" or (self.skips and not there):
                states[name] = first if skip else last
            elif there:
                states[name] = tree.map(lambda old, new: torch.where(skip.bool(), old, new), first, last)


def keep_state(transforms: dict[str, Any], name: str, state: Tree, of: str = "transform") -> None:
    """Keep the next state of a transform, or of an axis. States keep their structure.

    Raises:
        ArgumentError: a checkpoint with this state could not be restored, since the first state is another.
    """
    if name not in transforms:
        raise ArgumentError(
            f"{of} {name!r} returned a state of its own and began without one",
            where=f"{of} {name}",
            fix="give its first state, by init=",
        )
    before, after = dict(tree.items(transforms[name])), dict(tree.items(state))
    for path in [*before, *(path for path in after if path not in before)]:
        old, new = _kind(before, path), _kind(after, path)
        if old != new:
            raise ArgumentError(
                f"the state of {of} {name!r} changed: {path or 'it'} was {old}, and is {new}",
                where=f"{of} {name}",
                fix="return values of the kinds, shapes and dtypes that init= made: 0.0 for a float, "
                "torch.zeros(n) for the last n numbers",
            )
    if any(map(_is_partial, after.values())):  # a sum over ranks that is still to be made
        state = tree.map(lambda leaf: tree.whole(leaf) if _is_partial(leaf) else leaf, state)
    transforms[name] = state


def _kind(leaves: Mapping[str, object], path: str) -> str:
    """What a checkpoint compares of a leaf."""
    leaf = leaves.get(path, _ABSENT)
    if leaf is _ABSENT:
        return "absent"
    if isinstance(leaf, torch.Tensor):
        return f"a tensor of shape {list(leaf.shape)} in {str(leaf.dtype).removeprefix('torch.')}"
    return "float" if isinstance(leaf, float) else type(leaf).__name__


def _is_partial(leaf: object) -> bool:
    return any(placement.is_partial() for placement in getattr(leaf, "placements", ()))
