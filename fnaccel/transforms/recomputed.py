"""`recomputed`: a function of trees that keeps its arguments only, and runs again in backward.

A block under `fa.remat` is a function of its inputs and parameters: torch's checkpoint runs a block again
when `fa.call` has ended and modules have their own parameters back, and torch.func can't differentiate it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from fnaccel import _torch
from fnaccel.errors import ArgumentError
from fnaccel.models.parameter_values import run_given
from fnaccel.world.undo import StreamStates

P = ParamSpec("P")
R = TypeVar("R")


class _Recomputed(torch.autograd.Function):
    """`run(*tensors)`, of which nothing but the inputs is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., Any], *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG004
        ctx.run = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        differentiable = [value.is_floating_point() or value.is_complex() for value in tensors]

        def of_differentiable(*chosen: torch.Tensor) -> Any:
            values = iter(chosen)
            pairs = zip(tensors, differentiable, strict=True)
            results = ctx.run(*(next(values) if each else value for value, each in pairs))
            return tuple(result for result in results if result.is_floating_point())

        chosen = [value for value, each in zip(tensors, differentiable, strict=True) if each]
        pulled: Any = torch.func.vjp(of_differentiable, *chosen)
        results, pull = pulled
        # of integer results no gradient comes
        given = iter(pull(tuple(grad for grad in grads if grad is not None)[: len(results)]))
        return None, *(next(given) if each else None for each in differentiable)


def _kept_as_inputs(call: Callable[[Sequence[torch.Tensor]], Any], tensors: Sequence[torch.Tensor]) -> Any:
    """`call(tensors)`, a tree, of which only `tensors` are kept for backward.

    The second run draws the random numbers of the first one, under the same autocast.
    """
    kind = tensors[0].device if tensors else torch.device("cpu")
    autocast = torch.autocast(
        kind.type,
        dtype=torch.get_autocast_dtype(kind.type),
        enabled=torch.is_autocast_enabled(kind.type),
    )
    first: list[StreamStates] = []
    shapes: list[Any] = []

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        now, again = StreamStates.of(kind), bool(first)
        first[0].put_back() if again else first.append(now)
        try:
            with autocast:
                flat, structure = _torch.flatten(call(values))
        finally:
            if again:
                now.put_back()
        places = [place for place, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        results = [flat[place] for place in places]
        for place in places:
            flat[place] = None  # what is left are the results that are no tensors
        shapes[:] = [(flat, places, structure)]
        # an input that comes out again would be one tensor with two histories
        taken = {id(value) for value in values}
        return tuple(result.clone() if id(result) in taken else result for result in results)

    results = _Recomputed.apply(run, *tensors)
    flat, places, structure = shapes[0]
    flat = list(flat)
    for place, result in zip(places, results, strict=True):
        flat[place] = result
    return _torch.unflatten(flat, structure)


def recomputed_with_parameters(
    forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`forward(module, *args, **kwargs)`, with the parameters that the module holds at this moment."""
    named = dict(module.named_parameters())
    flat, structure = _torch.flatten((args, kwargs))
    places = [place for place, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def call(values: Sequence[torch.Tensor]) -> Any:
        inner_args, inner_kwargs = _given(flat, structure, places, values[: len(places)])
        params = dict(zip(named, values[len(places) :], strict=True))
        return run_given(module, params, _of_keywords, forward, inner_args, inner_kwargs)

    return _kept_as_inputs(call, [*(flat[place] for place in places), *named.values()])


def _given(flat: Sequence[Any], structure: Any, places: Sequence[int], values: Sequence[torch.Tensor]) -> Any:
    """Arguments with other tensors at some places."""
    given = list(flat)
    for place, value in zip(places, values, strict=True):
        given[place] = value
    return _torch.unflatten(given, structure)


def recomputed(fn: Callable[P, R]) -> Callable[P, R]:
    """A function of trees that keeps its arguments only, and runs again in backward.

    It saves the memory of what `fn` computes on its way, such as several updates, for one more run. It may be
    differentiated by `torch.func.grad` and `backward()`, twice too, and mapped by `torch.func.vmap`. The
    second run draws the random numbers of the first. `torch.utils.checkpoint` raises inside of torch.func.

    In compiled code it is the function itself: the compiler decides what a graph keeps.

    Args:
        fn: its tensors are in its arguments and its result, which are trees (dicts, lists, tuples).
            Everything that is differentiated has to be an argument.

    Returns:
        The function, with the same arguments.

    Raises:
        ArgumentError: in a call, `fn` takes a tensor that is differentiated or mapped from around it, and not
            as an argument: its gradient would be lost.

    Source: https://arxiv.org/abs/1604.06174

    Example:
        >>> update = fa.pure(train_step)
        >>> def four(values, batches, lr):
        ...     for batch in batches:
        ...         values, metrics = update(values, batch, lr=lr)
        ...     return values
        >>> def final(lr):
        ...     values = update.init()
        ...     for first in range(0, len(batches), 4):
        ...         values = fa.recomputed(four)(values, batches[first : first + 4], lr)
        ...     return update.loss(values, batches[0])
        >>> torch.func.grad(final)(torch.tensor(0.1)).shape
        torch.Size([])
    """

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        _check_closure(fn)
        flat, structure = _torch.flatten((args, kwargs))
        places = [place for place, value in enumerate(flat) if isinstance(value, torch.Tensor)]

        def call(values: Sequence[torch.Tensor]) -> Any:
            inner: Any = _given(flat, structure, places, values)
            function: Callable[..., Any] = fn
            return function(*inner[0], **inner[1])

        return _kept_as_inputs(call, [flat[place] for place in places])

    return run


def _check_closure(fn: Callable[..., Any]) -> None:
    """Raise ArgumentError if a function takes a tensor with a derivative from around it."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=True):
        try:
            leaves, _ = _torch.flatten(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
        if any(
            isinstance(leaf, torch.Tensor) and (leaf.requires_grad or _torch.is_mapped(leaf))
            for leaf in leaves
        ):
            raise ArgumentError(
                f"the function takes {name!r} from around it, whose gradient would be lost",
                where="fa.recomputed(fn)",
                fix=f"make it an argument: def fn(values, {name}): ...",
            )


def _of_keywords(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return forward(module, *args, **kwargs)
