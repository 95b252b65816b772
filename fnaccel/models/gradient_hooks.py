"""The user's hooks on gradients: `param.register_hook`, and backward hooks of modules.

They run in the backward pass, so they see gradients of a total that is not divided by its weight yet, unless
the weight is known by then. Hooks on activations, set inside a forward, can't be seen here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from torch import nn

from fnaccel.errors import CapabilityError
from fnaccel.models._torch import hooks_on_module, hooks_on_parameter
from fnaccel.models.note import Note
from fnaccel.texts import counted, first_of

_EVERY = 100  # steps between two counts, since a count walks over all modules

Modules = Mapping[str | None, nn.Module]


def hooked(modules: Modules) -> Iterator[tuple[str, nn.Parameter | nn.Module]]:
    """(name, parameter or module) of each hook on gradients."""
    for key, root in modules.items():
        prefix = "" if key is None else f"{key}/"
        for name, param in root.named_parameters():
            yield from [(prefix + name, param)] * hooks_on_parameter(param)
        for path, module in root.named_modules():
            yield from [(prefix + path or type(module).__name__, module)] * hooks_on_module(module)


def hook_notes(modules: Modules) -> list[Note]:
    """A note for the plan about hooks that see gradients of a sum."""
    names = [name for name, _ in hooked(modules)]
    if not names:
        return []
    what = counted(len(names), "backward hook sees", "backward hooks see")
    text = f"{what} gradients of a total, not of a mean, if an update has several micro-batches"
    return [
        Note(f"{text}: {first_of(names)}. fa.with_weight(step, weight_fn) divides before the backward pass")
    ]


def check_hooks_run(modules: Modules, *, captured: bool, shards: bool) -> None:
    """Raise CapabilityError if hooks would never run.

    Args:
        modules: the modules by key.
        captured: whether the step is captured as one graph, which runs none.
        shards: whether fsdp puts shards in the place of all parameters. It runs no hook of a shard.
    """
    lost = [
        name
        for name, owner in hooked(modules)
        if captured or hasattr(owner, "placements") or (shards and isinstance(owner, nn.Parameter))
    ]
    if lost:
        why = (
            "the step is captured as one graph" if captured else "fsdp puts shards in the place of parameters"
        )
        raise CapabilityError(
            f"the backward hook of {first_of(lost)} would never run: {why}",
            where="the model of this train step",
            fix='change gradients in a transform, fa.Transform("name", fa.Phase.GRADS, apply=fn)'
            + ("; or fa.compile(step, scope='loss')" if captured else "; or use fa.ddp"),
        )


class GradientHooks:
    """Counts the hooks of a model's modules in some steps. A strategy may have added hooks of its own.

    Args:
        modules: the modules by key, as the strategy left them.
        captured: whether the step is captured as one graph.
        arrived: how many hooks the user's code had made before.
        speaks: whether this rank warns.

    Attributes:
        present: whether the user has a hook.
    """

    def __init__(self, modules: Modules, *, captured: bool, arrived: int, speaks: bool = True) -> None:
        self._modules = modules
        self._captured = captured
        self._steps = 0
        self._warned = not speaks
        self._first = count_hooks(modules)
        self.present = arrived > 0

    def look_again(self) -> None:
        """Look in the first two steps and in each hundredth: a hook may have been added.

        Raises:
            CapabilityError: one was, and would never run.
        """
        self._steps += 1
        if (self._steps <= 2 or self._steps % _EVERY == 0) and count_hooks(self._modules) > self._first:
            self.present = True
            check_hooks_run(self._modules, captured=self._captured, shards=False)

    def warn(self) -> None:
        """Warn once, before an update whose weight is not known before its backward passes."""
        if not self._warned:
            self._warned = True
            for note in hook_notes(self._modules):
                warnings.warn(note.text, UserWarning, stacklevel=2)


def count_hooks(modules: Modules) -> int:
    """How many hooks on gradients there are."""
    return sum(1 for _ in hooked(modules))
