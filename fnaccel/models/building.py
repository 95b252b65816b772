"""From a model or a factory to modules on a device: seeded, from rank 0, or without values."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import nn

from fnaccel.errors import ArgumentError, CapabilityError, OwnershipError, nearest
from fnaccel.models.blocks import NamedUnits
from fnaccel.models.constant_buffers import constant_weights
from fnaccel.models.meta import making
from fnaccel.models.parameter import Cut, Select, memory_of, takes
from fnaccel.step.callables import plan_text

Init = Literal["seeded", "rank0", "meta"]


class Ownership:
    """The owner of a module: the module is free again when the owner is closed, or is garbage."""

    def __init__(self, root: nn.Module, holder: object) -> None:
        self.holder = weakref.ref(holder)
        self.close: weakref.WeakMethod[Callable[[], None]] | None = None
        # the flags that a train step changes in a module: a later train step gets them back
        self._flags = [(weakref.ref(param), param.requires_grad) for param in root.parameters()]
        self._forwards = [(weakref.ref(module), vars(module).get("forward")) for module in root.modules()]

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that took a gradient when the module was claimed."""
        return [param for reference, flag in self._flags if flag and (param := reference()) is not None]

    def has(self, param: nn.Parameter) -> bool:
        """Whether a parameter is one of the module's."""
        return any(reference() is param for reference, _ in self._flags)

    def end(self) -> None:
        """Undo the marks of frozen parameters and the patches of forwards. A cut module stays cut."""
        for reference, flag in self._flags:
            param = reference()
            if param is not None:
                param.requires_grad_(flag)
        for reference, forward in self._forwards:
            module = reference()
            if module is not None and vars(module).get("forward") is not forward:
                if forward is None:
                    del module.forward
                else:
                    module.forward = forward


_owned: weakref.WeakKeyDictionary[nn.Module, Ownership] = weakref.WeakKeyDictionary()
_cut: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_owned(module: nn.Module) -> bool:
    """Whether a live train step trains a module. A garbage-collected train step gives it up."""
    ownership = _owned.get(module)
    if ownership is None:
        return False
    if ownership.holder() is not None:
        gc.collect()  # a train step is part of a cycle
    if ownership.holder() is not None:
        return True
    close = None if ownership.close is None else ownership.close()
    if close is not None:
        close()  # a state of it is still held, whose tensors are about to be another's
    elif module in _owned:
        _owned.pop(module).end()
    return False


def claim(built: Built, holder: object, close: Callable[[], None]) -> None:
    """Let modules be owned as long as `holder` lives. `close`, a method, frees the values of its states."""
    for module in built.modules.values():
        _owned[module].holder = weakref.ref(holder)
        _owned[module].close = weakref.WeakMethod(close)


class Host(nn.Module):
    """The module whose forward runs any function of the model.

    A strategy arms its hooks on this one forward, so a loss may call any method of the model.
    """

    def __init__(self, model: object) -> None:
        super().__init__()
        self.target = nn.ModuleDict(model) if isinstance(model, dict) else model
        self._view = (model,)  # in a tuple, so that it is not registered a second time

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(model, *args)` with the user's module or dict of modules."""
        return fn(self._view[0], *args)


@attrs.frozen(kw_only=True)
class Built:
    """Modules ready for a strategy.

    Attributes:
        model: as the loss sees it.
        modules: by key. `None` if there is only one.
        host: the module that runs functions of the model.
        empty: whether parameters have no values yet.
        prebuilt: whether a built module was given, whose values may differ between ranks.
        units: by key, the units of fsdp if they were found before an axis changed the modules.
        cuts: by canonical name, how an axis cut a parameter of which the modules have this rank's part.
        copies: names of parameters that are copies of another rank's, and the canonical names of those.
        patched: the layers whose forward an axis patched.
    """

    model: Any
    modules: dict[str | None, nn.Module]
    host: Host
    empty: bool = False
    prebuilt: bool = False
    cuts: dict[str, Cut] = attrs.field(factory=dict)
    copies: dict[str, str] = attrs.field(factory=dict)
    patched: list[nn.Module] = attrs.field(factory=list)
    units: dict[str | None, NamedUnits] = attrs.field(factory=dict)

    def named(self, what: str) -> Iterator[tuple[str, Any]]:
        """(canonical name, tensor) of `"parameters"` or `"buffers"`, the model's key first.

        A tensor that several models share is named under the first of them.
        """
        seen: set[int] = set()
        for key, module in self.modules.items():
            for name, value in getattr(module, f"named_{what}")():
                if id(value) in seen or name in self.copies:
                    continue
                seen.add(id(value))
                yield (name if key is None else f"{key}/{name}"), value

    def held(self) -> Iterator[tuple[str, Any]]:
        """(name, parameter) of those that the modules compute with: copies of another rank's, too."""
        yield from self.named("parameters")
        for name in self.copies:
            yield name, self.model.get_parameter(name)


def construct(model: object, seed: int, *, empty: bool = False) -> Built:
    """Build the modules on the CPU, as `torch.manual_seed(seed)` and the factory would.

    Args:
        model: a factory, a module, or a dict of them. In a dict the key of another model stands for a copy.
        seed: the seed of torch's generator while factories run.
        empty: make parameters on the meta device (buffers keep their values).

    Raises:
        OwnershipError: a module that another train step owns, one module under two keys, or a parameter that
            another train step has too, unless neither trains it.
        ArgumentError: a factory that returns no module, or a lazy module that has not run yet.
        CapabilityError: transformers has put parts of a module on several devices, or on the disk.
    """
    parts = model if isinstance(model, dict) else {None: model}
    modules: dict[str | None, nn.Module] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for key, source in parts.items():
            if not isinstance(source, str):
                modules[key] = _one(source, key, empty=empty)
    modules = {
        key: copy.deepcopy(modules[source]) if isinstance(source, str) else modules[key]
        for key, source in parts.items()
    }
    seen: set[int] = set()
    for module in modules.values():
        _check_sizes(module)
        _check_place(module)
        if module in _cut or any(hasattr(param, "placements") for param in module.parameters()):
            raise OwnershipError(
                f"this {type(module).__name__} is sharded already",
                where="train_step.init",
                fix="give a factory (a class or lambda), or a module that no strategy has sharded",
            )
        if id(module) in seen or is_owned(module):
            raise OwnershipError(
                f"this {type(module).__name__} is owned by another train step",
                where="train_step.init",
                fix="give a factory (a class or lambda), or call close() on the train step that owns it",
            )
        seen.add(id(module))
    _check_shared(modules)
    whole: Any = modules[None] if None in modules else dict(modules)
    host = Host(whole)
    for module in modules.values():
        _owned[module] = Ownership(module, host)
    return Built(model=whole, modules=modules, host=host, empty=empty, prebuilt=not has_factories(model))


def _check_sizes(module: nn.Module) -> None:
    """Raise ArgumentError for a lazy module, whose parameters have no size before its first forward."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, value in named if nn.parameter.is_lazy(value)]
    if lazy:
        raise ArgumentError(
            f"{type(module).__name__} is lazy, and has not run: {', '.join(lazy[:5])} without a size",
            where="train_step.init",
            fix="give the sizes, or run one batch through the model in its factory: "
            "def make(): model = Net(); model(example); return model",
        )


def _check_place(module: nn.Module) -> None:
    """Raise CapabilityError if transformers has put a model on several devices, or on the disk.

    Hooks move values in each forward pass then. A model that lies whole on one device is moved by its engine.
    """
    for part in module.modules():  # the model may be inside a wrapper, such as peft's
        noted = vars(part).get("hf_device_map")
        placed: Mapping[str, object] = noted if isinstance(noted, Mapping) else {}
        first: dict[str, str] = {}
        for path, device in placed.items():
            first.setdefault(str(device), path or "all")
        if len(first) > 1 or "disk" in first:
            parts = ", ".join(f"{path} on {device}" for device, path in first.items())
            raise CapabilityError(
                f"a train step needs a model on one device, and {type(part).__name__} has by its "
                f"hf_device_map {parts}",
                where="train_step.init",
                fix="load it without device_map=, or on one device: fa.fsdp() divides it over ranks. Run it "
                "as it is by fa.big.load(model, path, fa.big.device_map(model))",
            )


def _check_shared(modules: dict[str | None, nn.Module]) -> None:
    """Raise OwnershipError if a parameter is trained here, or in another train step, and is part of both.

    Freezing it for one of them, or lending one to the other, would stop the training of both.
    """
    params = {
        id(param): (name, param) for root in modules.values() for name, param in root.named_parameters()
    }
    for root, ownership in list(_owned.items()):
        shared = [params[id(param)][0] for param in ownership.trainable() if id(param) in params]
        shared += [
            name
            for name, param in params.values()
            if param.requires_grad and name not in shared and ownership.has(param)
        ]
        if shared and is_owned(root):
            raise OwnershipError(
                f"{', '.join(shared[:5])} is a parameter of a {type(root).__name__} too, "
                "which is owned by another train step",
                where="train_step.init",
                fix="train both models in one train step: model={'generator': g, 'critic': c}; "
                "or call requires_grad_(False) on it before both, if neither is to train it",
            )


def _one(source: Any, key: str | None, *, empty: bool) -> nn.Module:
    if isinstance(source, nn.Module):
        return source
    with making(parameters="meta") if empty else contextlib.nullcontext():
        module = source()
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"the factory of model {key or ''} returned {type(module).__name__}, not a module".replace(
                "  ", " "
            ),
            where="train_step.init",
            fix="return the torch.nn.Module from the factory",
        )
    return _unwrapped(module)


def _unwrapped(module: Any) -> nn.Module:
    """A module without the wrappers of `torch.compile`, which would be in all paths. It stays compiled."""
    inner: Any = getattr(module, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        inner.forward = module.dynamo_ctx(inner.forward)
        module = inner
    for name, child in module.named_children():
        if (bare := _unwrapped(child)) is not child:
            setattr(module, name, bare)
    return module


def freeze(built: Built, patterns: Iterable[Select]) -> None:
    """Take the gradient from parameters that a selection takes by their canonical name.

    Raises:
        ArgumentError: a selection takes nothing, or is none.
    """
    named = dict(built.named("parameters"))
    for pattern in patterns:
        matched = [name for name, param in named.items() if takes(pattern, name, param)]
        text = plan_text(pattern)
        if not (
            matched or (isinstance(pattern, str) and fnmatch.filter(constant_weights(built.modules), pattern))
        ):
            raise ArgumentError(f"{text} matches no parameter", where="frozen=", fix=nearest(text, named))
        for name in matched:
            named[name].requires_grad_(False)


def check_sparse(built: Built) -> None:
    """Raise CapabilityError for a trained embedding with sparse gradients."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [each.weight for each in built.host.modules() if isinstance(each, kinds) and each.sparse]
    for name, param in built.named("parameters"):
        if param.requires_grad and any(param is weight for weight in sparse):
            raise CapabilityError(
                f"{name} has sparse gradients (sparse=True), which this optimizer or strategy can't take",
                where="train_step.init",
                fix="sparse=False; or fa.optim.from_torch(torch.optim.SGD, lr=...) on local() or ddp()",
            )


def check_memory(built: Built) -> None:
    """Raise ArgumentError for a trained parameter whose elements share memory: no update could part them."""
    for name, param in built.named("parameters"):
        if param.requires_grad and memory_of(param) == "shared":
            raise ArgumentError(
                f"elements of {name} share memory: shape {list(param.shape)}, strides {list(param.stride())}",
                where="train_step.init",
                fix="give it memory of its own, nn.Parameter(value.contiguous()); or expand in the forward",
            )


def mark_cut(built: Built, patched: Iterable[nn.Module]) -> None:
    """Note that modules hold parts of parameters, which no other train step can train."""
    _cut.update(built.modules.values())
    built.patched.extend(patched)


def check_patched(built: Built, where: str) -> None:
    """Raise CapabilityError if a layer whose forward an axis patched is no longer part of the model."""
    present = {id(module) for root in built.modules.values() for module in root.modules()}
    for module in built.patched:
        if id(module) not in present:
            raise CapabilityError(
                f"{where} replaced a {type(module).__name__} whose parameters a model axis has cut",
                where=where,
                fix="leave these layers out of the transform, or the layers out of the plan of the axis",
            )


def release(built: Built) -> None:
    """Let another train step own these modules."""
    for module in built.modules.values():
        ownership = _owned.pop(module, None)
        if ownership is not None:
            ownership.end()


def share_first_values(built: Built, group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of a group the values of its first one: those of a built module may differ."""
    with torch.no_grad():
        for _, value in [*built.named("parameters"), *built.named("buffers")]:
            copy = value.detach().to(device)  # a process group of GPUs sends no tensors of the host
            dist.broadcast(copy, group=group, group_src=0)
            value.copy_(copy)


def has_factories(model: object) -> bool:
    """Whether a model, or each of a dict of models, is a factory. A built module can't be built again."""
    sources = model.values() if isinstance(model, dict) else (model,)
    return not any(isinstance(source, nn.Module) for source in sources)


def check_factories(model: object, where: str) -> None:
    """Raise OwnershipError if a model can't be built again."""
    if not has_factories(model):
        raise OwnershipError(
            "init was called before, and the values of a built module have moved since",
            where=where,
            fix="give a factory, which init can call again; or adopt a snapshot of the first state",
        )
