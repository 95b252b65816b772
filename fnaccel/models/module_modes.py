"""`ModuleModes`: the mode of each module, training or evaluation, as its model arrived at `init`.

`from_pretrained` returns modules in evaluation mode, and a user may freeze a batch norm by `.eval()`. So
training puts back each module's own mode, and not the root's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from torch import nn

from fnaccel.models._torch import Dropout, Norm
from fnaccel.models.note import Note, count_of
from fnaccel.texts import first_of


class ModuleModes:
    """Switches modules between evaluation mode and their own modes.

    A model whose root arrives in evaluation mode is trained in training mode as a whole.

    Args:
        roots: modules, each with whether it is trained. If not, it is always in evaluation mode.
    """

    def __init__(self, roots: Sequence[tuple[nn.Module, bool]]) -> None:
        self._roots = roots
        for root, trains in roots:
            if root.training is not trains:
                root.train(trains)
        members = [module for root, _ in roots for module in root.modules()]
        # roots come last: `train` looks at them alone
        self._own = [(module, module.training) for module in reversed(members)]
        # a module's own `train` may do more than switch, such as merge an adapter into its weights
        self._plain = all(type(module).train is nn.Module.train for module in members)
        self._evaluating: bool | None = False  # None: a switch is under way, or an interrupt cut it off

    def train(self) -> None:
        """Put each module in its own mode. Only the roots are looked at if nothing changed."""
        changed = self._evaluating is not False
        for root, trains in self._roots:
            changed = changed or root.training is not trains
        if changed:
            self._set(evaluating=False)

    @contextlib.contextmanager
    def during(self, *, training: bool) -> Generator[None]:
        """In the body modules are in their own modes or in evaluation mode. The mode of before comes back."""
        before = self.switch(training=training)
        try:
            yield
        finally:
            self.switch_back(before)

    def switch(self, *, training: bool) -> bool:
        """Switch modules. Returns what `switch_back` takes: whether they were in evaluation mode."""
        before = self._evaluating is True
        if training:
            self.train()
        elif not before:
            self._set(evaluating=True)
        return before

    def switch_back(self, evaluating: bool) -> None:
        """Put modules back in the mode in which they were."""
        if not (evaluating and self._evaluating):
            self._set(evaluating=evaluating)

    def _set(self, *, evaluating: bool) -> None:
        before, self._evaluating = self._evaluating, None
        if evaluating:
            for root, _ in self._roots:
                if root.training or before is None:
                    root.eval()
            self._evaluating = True
            return
        if before is not False and not self._plain:
            for root, trains in self._roots:
                root.train(trains)
        for module, training in self._own:
            # past `Module.__setattr__`, which looks for parameters: 0.05 us in the place of 1 us
            vars(module)["training"] = training
        self._evaluating = False


def mode_notes(modules: Mapping[str | None, nn.Module]) -> list[Note]:
    """Notes for the plan about modules that arrive in evaluation mode, before they are switched."""
    notes: list[Note] = []
    for key, root in modules.items():
        name = "the model" if key is None else f"the model {key!r}"
        if not root.training:
            notes.append(Note(f"{name} arrived in evaluation mode: all of it trains in training mode"))
            continue
        stay = [(path, m) for path, m in root.named_modules() if not m.training and _differs_in_training(m)]
        if stay:
            text = (
                f"{name} keeps {count_of(m for _, m in stay)} in evaluation mode while it trains: "
                f"{first_of(path for path, _ in stay)}. Call .train() on them in the factory to change that"
            )
            notes.append(Note(text, warns=True))
    return notes


def _differs_in_training(module: nn.Module) -> bool:
    """Whether a module computes otherwise in training mode: a dropout, or a norm with running statistics."""
    if isinstance(module, Norm):
        return module.running_mean is not None
    dropout: Any = module.p if isinstance(module, Dropout) else 0.0
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        dropout = module.dropout
    return bool(dropout)
