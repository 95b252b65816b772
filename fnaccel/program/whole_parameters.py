"""Whole parameters: in modules by `look(whole=True)`, or as values in a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fnaccel import _torch, tree
from fnaccel.engine.engine import Engine, Layout
from fnaccel.engine.runtime_tensor import Remote
from fnaccel.errors import CapabilityError
from fnaccel.models.parameter_values import Access
from fnaccel.strategies._torch import mark_whole
from fnaccel.world.undo import Swapped

_WHOLE_AXES = ("dp_replicate", "dp_shard")
"""Axes along which ranks compute with the whole model."""


def whole_parameters(layout: Layout) -> contextlib.AbstractContextManager[None]:
    """In the body the parameters of a model are whole, ordinary tensors. Every rank must enter it.

    A forward in the body gathers its units as always, and leaves their parts behind.

    Args:
        layout: the modules, and their parameters as a state shows them.

    Raises:
        CapabilityError: a runtime keeps the parameters, so that they can't be shown in the modules.
    """
    model, parameters = layout.model, layout.parameters
    if any(isinstance(value, Remote) for value in parameters.values()):
        raise CapabilityError(
            "the runtime keeps the parameters in parts of its own",
            where="train_step.look(state, fn, whole=True)",
            fix="fa.interchange.export_hf(directory, state), or state.params, whose tensors are whole",
        )
    roots = model if isinstance(model, dict) else {"": model}
    shown = {
        id(param): parameters.get(f"{key}/{name}" if key else layout.copies.get(name, name))
        for key, root in roots.items()
        for name, param in root.named_parameters()
    }
    slots = [
        (slot, name, param)
        for root in roots.values()
        for module in root.modules()
        for slot in (_torch.parameters_of(module),)
        for name, param in slot.items()
        if param is not None and hasattr(shown.get(id(param)), "placements")
    ]
    whole: dict[int, nn.Parameter] = {}  # by identity, so that tied parameters stay tied
    for _, _, param in slots:
        value = shown[id(param)]
        if id(value) not in whole:
            whole[id(value)] = mark_whole(nn.Parameter(tree.whole(value), requires_grad=param.requires_grad))
    return _Shown([(slot, name, param, whole[id(shown[id(param)])]) for slot, name, param in slots])


class _Shown(Swapped):
    """In the body modules show other parameters.

    Args:
        slots: the parameters of a module, the name of one, its own value and the other.
    """

    def __init__(self, slots: list[tuple[dict[str, Any], str, Any, Any]]) -> None:
        self._slots = slots

    def change(self) -> None:
        for slot, name, _, other in self._slots:
            slot[name] = other

    def undo(self) -> None:
        for slot, name, own, _ in self._slots:
            slot[name] = own


def explain(error: BaseException) -> CapabilityError | None:
    """The error for a function that read the parts of sharded parameters as if they were whole."""
    message = str(error)
    if not any(part in message for part in ("DTensor", "python storage", "tensor subclasses")):
        return None
    return CapabilityError(
        f"the function read parameters of which each rank holds a part: {(message.splitlines() or [''])[0]}",
        where="train_step.look(state, fn)",
        fix="train_step.look(state, fn, whole=True), or fa.interchange.export_hf(directory, state)",
    )


def is_sharded(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether some parameter is not whole on this rank, or is kept by a runtime."""
    return any(hasattr(value, "placements") or isinstance(value, Remote) for value in parameters)


def access_of(engine: Engine) -> Access:
    """How a loss takes the model's parameters as values."""
    mesh = engine.layout.mesh
    cut = [axis for axis, degree in mesh.degrees.items() if degree > 1 and axis not in _WHOLE_AXES]
    refusal = ""
    if engine.runtime.bound is not None:
        refusal = f"{engine.name} keeps the parameters, so a loss can't take them as values"
    elif cut:
        refusal = (
            f"ranks along {' and '.join(cut)} compute parts of one model, so no rank has it as a function"
        )
    trained = frozenset(leaf.name for leaf in engine.layout.leaves)
    return Access(trained=trained, refusal=refusal, whole=engine.forward.whole)
