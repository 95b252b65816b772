"""A block as one function of its inputs and its parameters, which runs again in backward.

torch's checkpoint runs a block again when `fa.call` has ended and the modules have their own parameters back,
and torch.func can't differentiate it. This one takes the parameters of its first run as inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fnaccel import _torch
from fnaccel.models.parameter_values import run_given
from fnaccel.world.random_streams import generators_of


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


def recomputed_with_parameters(
    forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`forward(module, *args, **kwargs)`, with the parameters that the module holds at this moment.

    The second run draws the random numbers of the first one, under the same autocast.
    """
    named = dict(module.named_parameters())
    flat, structure = _torch.flatten((args, kwargs))
    places = [place for place, value in enumerate(flat) if isinstance(value, torch.Tensor)]
    tensors = [flat[place] for place in places]
    kind = tensors[0].device if tensors else torch.device("cpu")
    autocast = torch.autocast(
        kind.type,
        dtype=torch.get_autocast_dtype(kind.type),
        enabled=torch.is_autocast_enabled(kind.type),
    )
    streams = generators_of(kind)
    first: list[torch.Tensor] = []
    shapes: list[Any] = []

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(flat)
        for place, value in zip(places, values[: len(places)], strict=True):
            given[place] = value
        inner_args, inner_kwargs = _torch.unflatten(given, structure)
        params = dict(zip(named, values[len(places) :], strict=True))
        now = [stream.get_state() for stream in streams]
        again = bool(first)
        _restore(streams, first) if again else first.extend(now)
        try:
            with autocast:
                result = run_given(module, params, _of_keywords, forward, inner_args, inner_kwargs)
        finally:
            if again:
                _restore(streams, now)
        results, shape = _torch.flatten(result)
        shapes[:] = [shape]
        return tuple(results)

    results = _Recomputed.apply(run, *tensors, *named.values())
    return _torch.unflatten(list(results), shapes[0])


def _of_keywords(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return forward(module, *args, **kwargs)


def _restore(streams: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for stream, state in zip(streams, states, strict=True):
        stream.set_state(state)
