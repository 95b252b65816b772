"""Parameters as values: `fa.params(model)`, and `fa.call(model, params, ...)`, a model as a function of them.

A train step registers its modules here, since only its engine knows which parameters are trained and how to
make them whole. Any other module simply has its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from fnaccel import _torch
from fnaccel.errors import (
    ArgumentError,
    CapabilityError,
    StaleStateError,
    TreeMismatchError,
    UnknownNameError,
    nearest,
)
from fnaccel.models.building import Built

if TYPE_CHECKING:
    from fnaccel.strategies.whole_leaves import WholeLeaves


@attrs.define(eq=False, kw_only=True)
class Access:
    """How a loss takes the parameters of a train step's model as values.

    Attributes:
        trained: their canonical names.
        refusal: why it can't. "" if it can.
        whole: makes them whole. None if the modules hold them whole.
        canonical: the canonical name of each other name of a tied parameter.
    """

    trained: frozenset[str]
    refusal: str = ""
    whole: WholeLeaves | None = None
    canonical: dict[str, str] = attrs.field(factory=dict)

    @property
    def gathers(self) -> bool:
        """Whether the modules hold parts at this moment, and nothing was put in their place."""
        return self.whole is not None and self not in _giving


_giving: list[Access | None] = []
"""The train steps whose modules hold given values at this moment. None for a module of no train step."""

# modules to the access of their train step, which the train step holds, and to what stands before their names
_known: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Access], str]] = weakref.WeakKeyDictionary()


def register(built: Built, access: Access) -> None:
    """Let `fa.params` and `fa.call` find the modules of a train step, as long as it holds `access`."""
    reference = weakref.ref(access)
    for key, root in built.modules.items():
        start = "" if key is None else f"{key}/"
        firsts: dict[int, str] = {}
        for name, param in root.named_parameters(remove_duplicate=False):
            first = firsts.setdefault(id(param), name)
            if first != name:
                access.canonical[start + name] = start + first
        for name, module in root.named_modules():
            _known[module] = reference, f"{start}{name}." if name else start


def _access_of(model: nn.Module, where: str) -> tuple[Access | None, str]:
    """The access of a module's train step, if it has one, and what its canonical names begin with."""
    if torch.compiler.is_compiling():  # a captured step has put whole parameters into its modules
        return None, ""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
        several = isinstance(model, Mapping)
        raise ArgumentError(
            f"the model is {type(model).__name__}, not a module",
            where=where,
            fix=f"name one of them: model[{next(iter(model), '')!r}]" if several else "give an nn.Module",
        )
    reference, start = _known.get(model, (None, ""))
    access = None if reference is None else reference()
    if access is not None and access.refusal:
        raise CapabilityError(
            access.refusal, where=where, fix="fa.local(), fa.ddp(), fa.fsdp() or fa.hsdp() for this loss"
        )
    return access, start


def params(model: nn.Module) -> dict[str, torch.Tensor]:
    """The trained parameters of a model as values: whole, differentiable tensors.

    Inside a loss, gradients that reach them become gradients of the step, on every strategy that can. Under
    `fsdp` the first call in an update gathers the whole model: the plan says how large that is. Take them
    anew in each update.

    Args:
        model: a module of a train step, as its loss gets it, or any other module.

    Returns:
        Name -> tensor, named and shaped as `state.params`, in the dtype in which parameters are stored. A
        tied parameter has one name. Frozen ones are left out. Those of a lent model (`given=`) are detached.

    Raises:
        CapabilityError: ranks hold parts of a layer (tensor, context, pipelines), or a runtime keeps them.
        StaleStateError: by the train step, under `fsdp`, if a loss used those of an earlier update.
        ArgumentError: a dict of models, of which one has to be named.

    Example:
        >>> def loss_fn(model, batch):
        ...     params = fa.params(model)
        ...     smooth = {name: 0.5 * value for name, value in params.items()}
        ...     return fa.Mean(fa.call(model, smooth, batch).square().sum(), weight=len(batch))
        >>> loss_fn(torch.nn.Linear(3, 1), torch.ones(2, 3)).weight
        2
    """
    access, start = _access_of(model, "fa.params(model)")
    own: dict[str, torch.Tensor] = dict(model.named_parameters())
    if access is None:
        taken = {name: value for name, value in own.items() if value.requires_grad}
        # in a captured step no parameter of a lent model takes a gradient
        return taken or {name: value.detach() for name, value in own.items()}
    whole = access.whole.values() if access.whole is not None and access.gathers else None
    found: dict[str, torch.Tensor] = {}
    for name, value in own.items():
        canonical = access.canonical.get(start + name, start + name)
        if canonical in access.trained:
            value = value if whole is None else whole[canonical]
            found[name] = value if value.requires_grad else value.detach()
    return found


def kept_values(what: str) -> StaleStateError:
    """The error for parameters that were taken in one update and used in another."""
    return StaleStateError(
        what,
        where="fa.params(model)",
        fix="call fa.params(model) in each call of the loss, and keep its result no longer",
    )


def call(
    model: nn.Module, params: Mapping[str, torch.Tensor], *args: Any, method: str = "forward", **kwargs: Any
) -> Any:
    """The model as a function of parameters: its result with these in the place of its own.

    It may be differentiated again, and mapped: by `torch.func.grad`, `torch.func.jvp`, `torch.func.vmap`.
    What a loss differentiates by itself belongs to one micro-batch of one rank: sums over rows are exact at
    any split, a nonlinear function of such a gradient, such as its norm, is that of the micro-batch.

    Args:
        model: a module of a train step, or any other.
        params: values by name, in the shapes of `fa.params(model)`. Names of buffers are taken too. What is
            not named is the model's own.
        args, kwargs: of the method.
        method: which method is called. `forward` is called as `model(...)`, with the hooks of a user.

    Returns:
        What the method returns.

    Raises:
        UnknownNameError: no parameter or buffer has this name.
        TreeMismatchError: a value has another shape.
        CapabilityError: as `fa.params`.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> half = {name: 0.5 * value for name, value in fa.params(model).items()}
        >>> torch.allclose(fa.call(model, half, torch.ones(2, 3)), 0.5 * model(torch.ones(2, 3)))
        True
    """
    if not torch.compiler.is_compiling():
        _check(model, params)
    return run_with(model, params, _called, method, args, kwargs)


def _called(model: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs) if method == "forward" else getattr(model, method)(*args, **kwargs)


def run_with(model: nn.Module, params: Mapping[str, torch.Tensor], fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(model, *args)`, while the modules hold other parameters. What is not named is the model's own."""
    access, start = _access_of(model, "fa.call(model, params, ...)")
    values = dict(params)
    if access is not None and access.whole is not None and access.gathers:
        whole = access.whole.values()
        names = {name: start + name for name, _ in model.named_parameters()}
        values = {n: whole[access.canonical.get(full, full)] for n, full in names.items()} | values
    return run_given(model, values, fn, *args)


def run_given(model: nn.Module, values: dict[str, torch.Tensor], fn: Callable[..., Any], *args: Any) -> Any:
    """`run_with`, if all parameters of which ranks hold parts are named."""
    access, _ = _access_of(model, "fa.call(model, params, ...)")
    whole = None if access is None else access.whole
    _giving.append(access)
    try:
        with contextlib.nullcontext() if whole is None else whole.ungathered():
            return _torch.with_tensors(model, values, fn, *args)
    finally:
        _giving.pop()


def gives_parameters() -> bool:
    """Whether modules may hold parameters at this moment that are not their own."""
    return bool(_giving)


def _check(model: nn.Module, params: Mapping[str, torch.Tensor]) -> None:
    """Raise for a name that the model does not have, or a value of another shape: torch takes both."""
    where = "fa.call(model, params, ...)"
    _access_of(model, where)
    if not isinstance(params, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
        raise ArgumentError(
            f"params is {type(params).__name__}, not a dict of tensors by name",
            where=where,
            fix="begin with fa.params(model)",
        )
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, value in params.items():
        if name not in own:
            raise UnknownNameError(
                f"the model has no parameter or buffer {name!r}", where=where, fix=nearest(str(name), own)
            )
        if not isinstance(value, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance] - the user's
            raise ArgumentError(
                f"params[{name!r}] is {type(value).__name__}, not a tensor",
                where=where,
                fix="give a tensor for each name",
            )
        if value.shape != own[name].shape:
            raise TreeMismatchError(
                f"params[{name!r}] has shape {list(value.shape)}, not {list(own[name].shape)}",
                where=where,
                fix="give values in the shapes of fa.params(model); torch.func.vmap maps a first dimension",
            )
