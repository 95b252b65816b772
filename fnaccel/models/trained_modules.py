"""`TrainedModules`: notices a parameter that was replaced, added or removed after the model was built.

The optimizer updates the parameters that it was made for, so any other would stay as it is, silently. A
buffer that is added later is noticed too, since states do not hold it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fnaccel import _torch
from fnaccel.errors import ReplacedParameterError
from fnaccel.models.parameter import Leaf
from fnaccel.texts import first_of

_takes_gradient = operator.attrgetter("requires_grad")
_watched: weakref.WeakKeyDictionary[nn.Module, weakref.ref[TrainedModules]] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


def _on_registration(module: nn.Module, name: str, value: object) -> None:  # noqa: ARG001 - torch's signature
    # a slice of a ModuleList makes a new one in each forward of Llama. A graph that read the dictionary would
    # be guarded by all of its keys, and can't be compiled if a module among them is freed meanwhile
    if torch.compiler.is_compiling():
        return
    watcher = _watched.get(module)
    owner = None if watcher is None else watcher()
    if owner is not None:
        owner.suspicious = True


def _on_buffer(module: nn.Module, name: str, value: object) -> None:
    # a buffer that only gets another value is no news
    if value is not None and _torch.buffers_of(module).get(name) is None:
        _on_registration(module, name, value)


class TrainedModules:
    """The parameters that modules had when their optimizer was made, and the names of their buffers.

    torch calls a hook when a parameter or a module is registered, so that no step walks over the modules.
    A parameter whose storage was replaced (`param.data = value`, `model.half()`) is found by its address.

    Args:
        modules: the modules by key.
        leaves: the trainable parameters.
        trains: whether there is an optimizer. If so, a frozen parameter has to stay frozen.
    """

    def __init__(
        self, modules: Mapping[str | None, nn.Module], leaves: Sequence[Leaf], *, trains: bool = True
    ) -> None:
        self.suspicious = False
        self._modules = dict(modules)
        self._names = self._named()
        self._buffers = self._saved_buffers()
        self._frozen = [param for param in self._names.values() if trains and not param.requires_grad]
        self._identities = {name: id(value) for name, value in self._names.items()}
        whole = [
            leaf
            for leaf in leaves
            if leaf.param.device.type in ("cpu", "cuda") and not hasattr(leaf.param, "placements")
        ]
        # a strategy may keep empty parameters in the modules, and show others
        self._plain = [leaf for leaf in whole if leaf.shard.data_ptr() == leaf.param.data_ptr()]
        self._addresses = [leaf.shard.data_ptr() for leaf in self._plain]
        self._params = [leaf.param for leaf in self._plain]
        if not _hooks:
            _hooks.append(register_module_parameter_registration_hook(_on_registration))
            _hooks.append(register_module_module_registration_hook(_on_registration))
            _hooks.append(register_module_buffer_registration_hook(_on_buffer))
        for root in modules.values():
            for module in root.modules():
                _watched[module] = weakref.ref(self)

    def _named(self) -> dict[str, Any]:
        return {
            name if key is None else f"{key}/{name}": value
            for key, root in self._modules.items()
            for name, value in root.named_parameters(remove_duplicate=False)
        }

    def _saved_buffers(self) -> set[str]:
        saved: set[str] = set()
        for key, root in self._modules.items():
            names = {name for name, _ in root.named_buffers(remove_duplicate=False)}
            names -= set(_torch.transient_buffers({None: root}))
            saved |= names if key is None else {f"{key}/{name}" for name in names}
        return saved

    def check(self, *, frozen: bool = False) -> None:
        """Raise ReplacedParameterError if a parameter is another than when the optimizer was made.

        The same is raised for a buffer that is new and that the model saves.

        Args:
            frozen: whether a frozen parameter that takes a gradient raises too, since no optimizer has it.
        """
        if self.suspicious:
            self._check_names()
            self.suspicious = False
        if list(map(Tensor.data_ptr, self._params)) != self._addresses:
            moved = [
                leaf.name
                for leaf, address in zip(self._plain, self._addresses, strict=True)
                if leaf.param.data_ptr() != address
            ]
            raise _replaced(f"the storage of {', '.join(moved[:5])} was replaced")

        if frozen and self._frozen and any(map(_takes_gradient, self._frozen)):
            names = [
                name
                for name, param in self._names.items()
                if param.requires_grad and any(param is frozen for frozen in self._frozen)
            ]
            raise ReplacedParameterError(
                f"{first_of(names)} takes a gradient since the optimizer was made, and would not be trained",
                where="the model of this train step",
                fix="let it take one in the factory; to train it from a later update on: "
                "fa.optim.starting_at(updates, optimizer), in fa.optim.optimizer_groups",
            )

    def _check_names(self) -> None:
        now = self._named()
        changes = [f"{name} was added" for name in now if name not in self._names]
        changes += [f"{name} was removed" for name in self._names if name not in now]
        changes += [
            f"{name} was replaced"
            for name, value in now.items()
            if name in self._identities and id(value) != self._identities[name]
        ]
        if changes:
            raise _replaced("; ".join(changes[:5]))
        added = sorted(self._saved_buffers() - self._buffers)
        if added:
            raise ReplacedParameterError(
                f"the buffer {', '.join(added[:5])} was added after the first state: no checkpoint has it",
                where="the model of this train step",
                fix="register it with a tensor in the constructor; or with persistent=False, if it need not "
                "be saved",
            )

    def close(self) -> None:
        """Watch these modules no longer."""
        for root in self._modules.values():
            for module in root.modules():
                _watched.pop(module, None)


def _replaced(change: str) -> ReplacedParameterError:
    return ReplacedParameterError(
        f"{change} after the optimizer was made, so it would not be trained",
        where="the model of this train step",
        fix="build the model as it is to be trained, in its constructor or before fa.distribute; to change a "
        "value, write param.copy_(value) under torch.no_grad()",
    )
