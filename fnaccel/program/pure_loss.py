"""The first stage of a pure update: totals, weights and gradients of micro-batches as functions of tensors.

Nothing is written: buffers go in as clones, and come out as the modules hold them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fnaccel import _torch
from fnaccel.data.cut import split_sizes
from fnaccel.engine.aux_values import check_aux, combined, pick, unpick
from fnaccel.engine.passes import Loss
from fnaccel.models.building import Host
from fnaccel.models.parameter_values import run_with
from fnaccel.step.loss import check_weight, masked, read_loss
from fnaccel.step.total_graph import check_total

Tensors = Mapping[str, torch.Tensor]


class Sums(NamedTuple):
    """What the micro-batches of an update leave.

    Attributes:
        grads: of the sum of totals, in the order of the parameters. Empty if none were asked for.
        total: the sum of totals, 0-d.
        weight: the sum of weights, a number or a 0-d tensor.
        aux: combined by its types, or None.
        buffers: by name.
    """

    grads: list[torch.Tensor]
    total: torch.Tensor
    weight: Any
    aux: Any
    buffers: dict[str, torch.Tensor]


class PureLoss:
    """The loss of a train step as a function of parameters and buffers.

    Args:
        model: as the loss sees it.
        loss: the loss function under its FORWARD transforms.
        slots: (module, attribute, name) of each buffer.
    """

    def __init__(self, model: Any, loss: Loss, slots: Sequence[tuple[torch.nn.Module, str, str]]) -> None:
        self._host = Host(model)
        self._loss = loss
        self._slots = list(slots)
        self._nested = isinstance(model, dict)

    def sums(
        self,
        trained: Tensors,
        fixed: Tensors,
        buffers: Tensors,
        datas: Sequence[Any],
        infos: Sequence[Any],
        *,
        differentiate: bool,
    ) -> Sums:
        """Sums over micro-batches, each of which is differentiated by itself.

        Args:
            trained: parameters by name, of which gradients are taken.
            fixed: the other parameters.
            buffers: by name.
            datas, infos: of each micro-batch. `infos` is None for a loss without `info`.
            differentiate: whether gradients are asked for.
        """
        grads: list[torch.Tensor] = []
        total: Any = None
        weight: Any = 0
        auxes: list[Any] = []
        for data, info in zip(datas, infos, strict=True):
            known = None if self._loss.weight_fn is None else self._loss.weight_fn(data)
            skeletons: list[Any] = []

            def run(
                params: Tensors,
                buffers: Tensors = buffers,
                data: Any = data,
                info: Any = info,
                known: Any = known,
                skeletons: list[Any] = skeletons,
            ) -> tuple[torch.Tensor, tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
                part, own, aux, now = self._once(params, fixed, buffers, data, info, known)
                tensors: list[torch.Tensor] = []
                skeletons.append(pick((own, aux), tensors))  # functions of torch.func return tensors only
                return part, (tensors, now)

            if differentiate:
                listed, part, (tensors, buffers) = _differentiated(run, dict(trained))
                grads = [a + b for a, b in zip(grads, listed, strict=True)] if grads else listed
            else:
                part, (tensors, buffers) = run(trained)
            own, aux = unpick(skeletons[-1], tensors)
            total = part if total is None else total + part
            weight = own if type(weight) is int and weight == 0 else weight + own
            auxes.append(aux)
        return Sums(grads, total, weight, None if auxes[0] is None else combined(auxes), dict(buffers))

    def _once(
        self, params: Tensors, fixed: Tensors, buffers: Tensors, data: Any, info: Any, known: Any
    ) -> tuple[torch.Tensor, Any, Any, dict[str, torch.Tensor]]:
        """Total, weight, aux and the buffers of one micro-batch."""
        loss = self._loss
        values = {self._path(name): value for name, value in {**fixed, **params}.items()}
        values.update({self._path(name): value.clone() for name, value in buffers.items()})
        if loss.informed is not None:
            loss.informed.info = info
        out, now = run_with(self._host, values, self._called, data)
        if loss.informed is not None:
            loss.informed.info = None
        parts = read_loss(out, loss.where)
        weight = parts.weight if known is None else check_weight(known, loss.where)
        if known is None and not torch.compiler.is_compiling():
            check_total(parts, loss.where)
        check_aux(parts.aux)
        total, weight = masked(parts.total, weight)
        return total, weight, parts.aux, now

    def _called(self, host: Callable[..., Any], data: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """The loss, and the buffers that the modules hold after it."""
        out = host(self._loss.fn, data)
        return out, {name: _torch.buffers_of(module)[slot] for module, slot, name in self._slots}  # pyright: ignore[reportReturnType]

    def _path(self, name: str) -> str:
        """The name of a tensor below the host: `g/out.weight` of several models is `target.g.out.weight`."""
        if self._nested:
            key, _, own = name.partition("/")
            return f"target.{key}.{own}"
        return f"target.{name}"


def _differentiated(
    run: Callable[..., tuple[torch.Tensor, Any]], trained: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], torch.Tensor, Any]:
    """Gradients in the order of the parameters, the total, and the rest of what `run` returns."""
    values = list(trained.values())
    in_graph = torch.is_grad_enabled() and all(value.requires_grad for value in values)
    if in_graph and not torch.compiler.is_compiling() and _torch.transform_now() is None:
        # the parameters belong to a graph of autograd already: torch.func would wrap each tensor once more
        part, rest = run(trained)
        if not part.requires_grad:  # of no parameter
            return [torch.zeros_like(value) for value in values], part, rest
        grads = torch.autograd.grad(part, values, create_graph=True, materialize_grads=True)
        return list(grads), part, rest
    taken: Any = torch.func.grad_and_value(run, has_aux=True)(trained)
    by_name, (part, rest) = taken
    return [by_name[name] for name in trained], part, rest


def cut_in_graph(batch: Any, count: int) -> list[Any]:
    """The micro-batches of a batch of tensors, cut along dim 0. torch.compile can trace it."""
    if count <= 1:
        return [batch]
    leaves, structure = _torch.flatten(batch)
    rows = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim)
    sizes = split_sizes(rows, count)
    columns = [
        leaf.split(sizes) if isinstance(leaf, torch.Tensor) and leaf.ndim else [leaf] * count
        for leaf in leaves
    ]
    return [_torch.unflatten([column[i] for column in columns], structure) for i in range(count)]
