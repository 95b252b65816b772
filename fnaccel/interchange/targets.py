"""The targets of a foreign checkpoint: tensors of a state or a tree by path, and their tied names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.checkpoint.format.found import unescaped
from fnaccel.checkpoint.format.walk import child, shown
from fnaccel.checkpoint.saving import check_same_on_ranks
from fnaccel.errors import ArgumentError, UnleasedStateError
from fnaccel.models.constant_buffers import constant_buffers
from fnaccel.state import TrainState, check_live, check_trained, lease_of
from fnaccel.tree import Tree

SECTIONS = ("params", "buffers", "opt", "ema")


def check_exportable(state: TrainState, where: str, *, anchor: bool = False) -> None:
    """See that a state can be written for others. All ranks call it.

    Args:
        state: the state.
        where: the public function, for messages.
        anchor: whether the anchor of `fa.diloco` is written between two averages.

    Raises:
        StaleStateError: it was donated.
        AveragedError, ReplacedParameterError: it shows other tensors than those that are trained.
        CheckpointError: ranks hold different values after its step.
    """
    check_live(state)
    check_trained(state, where)
    check_same_on_ranks([state], where, anchor=anchor)


@attrs.frozen(eq=False)
class Targets:
    """The tensors to fill.

    Attributes:
        tensors: by path, in the model's order.
        persistent: paths of the buffers that a checkpoint must have, or None if unknown.
        tied: from further paths of a tensor to its path in `tensors`.
        plain: paths without escapes, as other tools write them -> as they are here.
    """

    tensors: Mapping[str, torch.Tensor]
    persistent: frozenset[str] | None
    tied: Mapping[str, str]
    plain: Mapping[str, str]

    def path_of(self, path: str) -> str:
        """The path that is meant by one of another tool, which does not tell keys from "/" inside them."""
        if path in self.tensors or path in self.tied:
            return path
        return self.plain.get(path) or self.plain.get(unescaped(path)) or path


def sections_of(like: Tree, where: str) -> dict[str, Any]:
    """The parts of a state, or of a dict with its keys. Any other dict of tensors is `params`.

    Raises:
        ArgumentError: no state and no dict.
        StaleStateError: a state that was donated.
    """
    if isinstance(like, TrainState):
        check_live(like)
        return {name: getattr(like, name) for name in SECTIONS if getattr(like, name) is not None}
    if not isinstance(like, dict):
        raise ArgumentError(
            f"like= is a {type(like).__name__}, and weights go into a state or a dict of tensors",
            where=where,
            fix="like=train_step.init(seed=0), or like=state.params",
        )
    if isinstance(like.get("params"), dict):
        return {name: like[name] for name in SECTIONS if like.get(name) is not None}
    return {"params": like}


def tensors_of(node: Tree, path: str, where: str) -> dict[str, torch.Tensor]:
    """The tensors below a node, by path. Numbers of an optimizer are left out.

    Raises:
        ArgumentError: something else than a dict or a tensor.
    """
    if isinstance(node, torch.Tensor):
        return {path: node}
    if isinstance(node, dict):
        tensors: dict[str, torch.Tensor] = {}
        for key, value in node.items():
            tensors |= tensors_of(value, child(path, key), where)
        return tensors
    if node is None or isinstance(node, bool | int | float):
        return {}
    raise ArgumentError(
        f"{shown(path)} in like= is a {type(node).__name__}",
        where=where,
        fix="give a state, or a dict of tensors by name",
    )


def targets_of(like: Tree, where: str) -> Targets:
    """All that `like` can take.

    Raises:
        ArgumentError: see `sections_of` and `tensors_of`.
        StaleStateError: a state that was donated.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, section in sections_of(like, where).items():
        tensors |= tensors_of(section, name, where)
    modules = modules_of(like)
    persistent: frozenset[str] | None = None
    tied: dict[str, str] = {}
    if modules is not None:
        persistent, tied = frozenset(f"buffers/{path}" for path in persistent_paths(modules)), _tied(modules)
    plain = {unescaped(path): path for path in (*tied, *tensors)}
    return Targets(tensors, persistent, tied, plain)


def modules_of(state: Tree) -> dict[str | None, nn.Module] | None:
    """The modules of the train step that owns a live state, by key (`None`: only one). None if unowned."""
    if not isinstance(state, TrainState):
        return None
    try:
        owner = lease_of(state, "fa.interchange.adopt", averaged=True).owner
    except UnleasedStateError:
        return None
    model = owner.instance.engine.layout.model
    keyed: dict[str | None, nn.Module] = dict(model) if isinstance(model, dict) else {None: model}
    # the loss may see wrapped modules. These are the user's
    return dict(zip(keyed, owner.instance.engine.layout.modules, strict=True))


def persistent_paths(modules: Mapping[str | None, nn.Module]) -> set[str]:
    """The paths of persistent buffers. With several models, the model's key comes first."""
    return {
        child("" if key is None else child("", key), name)
        for key, module in modules.items()
        # a quantized layer's state_dict has the names of its library
        for name in (*module.state_dict(keep_vars=True), *dict(constant_buffers(module)))
    }


def tied_paths(modules: Mapping[str | None, nn.Module]) -> dict[str, str]:
    """Further names of tied parameters and buffers, as paths -> the first name, which states have."""
    tied: dict[str, str] = {}
    for key, module in modules.items():
        prefix = "" if key is None else child("", key)
        first: dict[int, str] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            path = child(prefix, name)
            if isinstance(tensor, torch.Tensor) and first.setdefault(id(tensor), path) != path:
                tied[path] = first[id(tensor)]
    return tied


def check_full_width(module: nn.Module | None, where: str) -> None:
    """Raise ArgumentError if weights of a module are codes, which have names of their own in a file."""
    name = None if module is None else next((name for name, _ in constant_buffers(module)), None)
    if name is not None:
        raise ArgumentError(
            f"the weights of the model are codes, such as {name}",
            where=where,
            fix="fa.big.save_quantized(directory, state), or fa.interchange.export_adapter(...)",
        )


def _tied(modules: Mapping[str | None, nn.Module]) -> dict[str, str]:
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for key, module in modules.items():
        for section, named in (
            ("params", module.named_parameters(remove_duplicate=False)),
            ("buffers", module.named_buffers(remove_duplicate=False)),
        ):
            for name, value in named:
                path = child(section if key is None else child(section, key), name)
                first_path = first.setdefault(id(value), path)
                if first_path != path:
                    tied[path] = first_path
    return tied
