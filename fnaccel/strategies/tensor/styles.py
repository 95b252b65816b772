"""How the layers of a plan are cut: for each style, the parts of the parameters and the forward.

A layer keeps its class and the names of its parameters. It holds this rank's part of them, and its `forward`
is patched.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from fnaccel.errors import ArgumentError, CapabilityError, nearest
from fnaccel.extend import Cut, MeshAxis
from fnaccel.losses.logits import logits_forward
from fnaccel.strategies.tensor.collectives import all_reduce, copied, gathered, scattered, summed
from fnaccel.strategies.tensor.region import SEQUENCE_DIM, Region
from fnaccel.strategies.tensor.vocabulary import check_within, embedded, unable

STYLES = (
    "colwise", "rowwise", "colwise_gather", "packed_colwise:N", "vocab", "replicate", "replicate_partial",
    "sequence", "scatter_input", "gather_input", "gather_output", "/",
)  # fmt: skip
"""The styles of a plan. Two are joined by "+", such as "scatter_input+gather_output"."""

ENDS = ("scatter_input", "gather_input", "gather_output")
"""Styles of modules whose parameters stay as they are. Without `sequence=True` they have no effect."""

_PACKED = re.compile(r"packed_colwise:(\d+)")


@attrs.frozen
class Piece:
    """This rank's part of one parameter: how it is cut, and its values."""

    cut: Cut
    part: torch.Tensor


@attrs.frozen
class Layer:
    """A module that a plan names, with its path."""

    path: str
    module: nn.Module

    @property
    def features(self) -> tuple[int, int]:
        """The dimensions of the weight for output and input features. `(1, 0)` for an embedding's rows."""
        if isinstance(self.module, nn.Linear):
            return 0, 1
        if isinstance(self.module, nn.Embedding) or type(self.module).__name__ == "Conv1D":
            return 1, 0
        kind = type(self.module)
        inner = [name for name, module in self.module.named_modules() if type(module) is nn.Linear]
        example = f': "{self.path}.{inner[0]}"' if inner else ""
        raise ArgumentError(
            f"{self.path} is a {kind.__module__}.{kind.__name__}, which has no style for its features",
            where="fa.tensor(plan=)",
            fix=f"name the torch.nn.Linear, torch.nn.Embedding or Conv1D modules in it{example}",
        )

    def length(self, dim: int) -> int:
        """The size of the weight along a dimension, before it is cut."""
        weight: Any = self.module.weight
        return int(weight.shape[dim])


def parse(style: str) -> tuple[str, ...]:
    """The parts of a style's text.

    Raises:
        ArgumentError: it is no style. Names the nearest.
    """
    parts = tuple(style.split("+")) if isinstance(style, str) else ()  # pyright: ignore[reportUnnecessaryIsInstance]
    for part in parts or (str(style),):
        if part not in STYLES and not _PACKED.fullmatch(part):
            raise ArgumentError(
                f"no style is called {part!r}", where="fa.tensor(plan=)", fix=nearest(part, STYLES)
            )
    return parts


def matrices_of(style: str) -> int:
    """How many matrices a style cuts side by side."""
    packed = _PACKED.fullmatch(style)
    return int(packed[1]) if packed else 1


def cuts_of(layer: Layer, style: str, size: int, *, sequence: bool) -> dict[str, Cut]:
    """How a style cuts the parameters of a layer, by their names in it.

    Args:
        layer: the layer.
        style: one style.
        size: ranks along the tensor axis.
        sequence: whether activations outside of column and row layers are cut along the sequence.

    Raises:
        ArgumentError: the style does not fit the layer, or a size does not divide.
    """
    params: dict[str, Any] = dict(layer.module.named_parameters(recurse=False))
    if style in ("replicate", *ENDS):
        return {}
    if style in ("replicate_partial", "sequence"):
        if style == "sequence" and not sequence:
            return {}
        every = layer.module.named_parameters() if not params else params.items()
        return {name: Cut(shape=param.shape, partial=True) for name, param in every}
    out, inp = layer.features
    _check_plain(layer, params)
    cuts: dict[str, Cut] = {}
    if style == "rowwise":
        _check_divides(layer, "input features", params["weight"].shape[inp], size)
        cuts["weight"] = Cut(shape=params["weight"].shape, dim=inp)
        if sequence and params.get("bias") is not None:  # it is added to this rank's part of the sequence
            cuts["bias"] = Cut(shape=params["bias"].shape, partial=True)
        return cuts
    if style == "vocab" and isinstance(layer.module, nn.Embedding):
        _check_vocabulary(layer, params["weight"].shape[0], size)
        return {"weight": Cut(shape=params["weight"].shape, dim=0)}
    matrices = matrices_of(style)
    length = params["weight"].shape[out]
    if style in ("vocab", "colwise_gather"):
        _check_vocabulary(layer, length, size)  # the last rank may have fewer columns
    elif length % matrices:
        raise ArgumentError(
            f"{layer.path} has {length} output features, which are no {matrices} matrices of one size",
            where="fa.tensor(plan=)",
            fix='"packed_colwise:N" has N matrices of equal size, such as query, key and value',
        )
    else:
        _check_divides(layer, "output features", length // matrices, size)
    cuts["weight"] = Cut(shape=params["weight"].shape, dim=out, matrices=matrices)
    if params.get("bias") is not None:
        cuts["bias"] = Cut(shape=params["bias"].shape, dim=0, matrices=matrices)
    return cuts


def _check_plain(layer: Layer, params: dict[str, Any]) -> None:
    module: Any = layer.module
    if "weight" not in params:
        raise ArgumentError(
            f"the weight of {layer.path} is computed from other parameters ({', '.join(params) or 'none'})",
            where="fa.tensor(plan=)",
            fix='"replicate" leaves the layer whole; or remove its parametrization (weight_norm and others)',
        )
    if getattr(module, "max_norm", None) is not None or getattr(module, "sparse", False):
        raise ArgumentError(
            f"{layer.path} has max_norm or sparse gradients, which no style can cut",
            where="fa.tensor(plan=)",
            fix='"replicate" leaves it whole',
        )


def _check_divides(layer: Layer, what: str, length: int, size: int) -> None:
    if length % size:
        raise ArgumentError(
            f"{layer.path} has {length} {what}, which {size} ranks can't divide",
            where=f"fa.tensor({size})",
            fix=f"a degree among {', '.join(map(str, divisors(length)))}; or leave the layer whole: "
            f'plan={{"{layer.path}": "replicate", ...}}',
        )


def _check_vocabulary(layer: Layer, rows: int, size: int) -> None:
    if -(-rows // size) * (size - 1) >= rows:
        raise ArgumentError(
            f"{layer.path} has a vocabulary of {rows}, too small for {size} ranks",
            where=f"fa.tensor({size})",
            fix='"replicate" leaves it whole',
        )


def divisors(number: int, most: int = 8) -> list[int]:
    """The first divisors of a number."""
    return [degree for degree in range(1, number + 1) if number % degree == 0][:most]


def part_of(value: torch.Tensor, cut: Cut, rank: int, size: int) -> torch.Tensor:
    """This rank's part of a whole parameter, in memory of its own."""
    if cut.dim is None:
        return value
    if cut.matrices == 1:
        chunk = -(-value.shape[cut.dim] // size)
        start = min(rank * chunk, value.shape[cut.dim])
        part = value.narrow(cut.dim, start, min(chunk, value.shape[cut.dim] - start))
    else:
        matrices = value.unflatten(cut.dim, (cut.matrices, size, -1))
        part = matrices.select(cut.dim + 1, rank).flatten(cut.dim, cut.dim + 1)
    return part.clone(memory_format=torch.contiguous_format)


def patch(layer: Layer, styles: Iterable[str], axis: MeshAxis, region: Region) -> None:
    """Let a layer's forward compute with parts. Called when its parameters are cut."""
    for style in styles:
        make = _FORWARDS.get("packed_colwise" if _PACKED.fullmatch(style) else style)
        if make is None:
            continue
        module: Any = layer.module
        plain = getattr(module.forward, "__func__", None)
        if plain is None:
            raise CapabilityError(
                f"the forward of {layer.path} is patched already",
                where="fa.tensor(plan=)",
                fix="give a factory that builds an ordinary module",
            )
        if type(module).__name__ == "Conv1D" and style not in ENDS:
            plain = _conv1d  # its own forward knows the whole number of features
        module.forward = types.MethodType(make(layer, plain, axis, region), module)


Forward = Callable[..., Any]


def _conv1d(module: Any, value: torch.Tensor) -> torch.Tensor:
    return F.linear(value, module.weight.t(), module.bias)


def _column(layer: Layer, plain: Forward, axis: MeshAxis, region: Region) -> Forward:  # noqa: ARG001
    if isinstance(layer.module, nn.Embedding):
        return plain  # each rank looks up its own features

    out, _ = layer.features
    length = layer.length(out)

    def column(module: nn.Module, value: torch.Tensor) -> Any:
        _check_parts(module, out, length)
        return plain(module, region.enter(value, module))

    return column


def _row(layer: Layer, plain: Forward, axis: MeshAxis, region: Region) -> Forward:  # noqa: ARG001
    out, inp = layer.features
    length = layer.length(inp)

    def row(module: Any, value: torch.Tensor) -> torch.Tensor:
        _check_parts(module, inp, length)
        weight = module.weight if out == 0 else module.weight.t()
        try:
            part = F.linear(value, weight)
        except BaseException:
            region.end()  # a recomputed block stops here, at the last tensor that backward needs
            raise
        total = region.leave(part)
        return total if module.bias is None else total + module.bias.to(total.dtype)

    return row


def _gathering(layer: Layer, plain: Forward, axis: MeshAxis, region: Region) -> Forward:
    out, _ = layer.features
    length = layer.length(out)

    def column(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
        _check_parts(module, out, length)
        return gathered(plain(module, copied(value, region.group)), region.group, -1, length)

    return column if isinstance(layer.module, nn.Embedding) else _head(layer, axis, region, whole=column)


def _vocabulary(layer: Layer, plain: Forward, axis: MeshAxis, region: Region) -> Forward:  # noqa: ARG001
    if not isinstance(layer.module, nn.Embedding):
        return _head(layer, axis, region, refuse=unable)
    length = layer.length(0)
    start = axis.rank * -(-length // axis.size)

    def embedding(module: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
        _check_parts(module, 0, length)
        return summed(embedded(module, tokens, start), region.group)

    return embedding


def _head(layer: Layer, axis: MeshAxis, region: Region, **options: Any) -> Forward:
    """The forward of a layer with this rank's columns of the logits."""
    dim, _ = layer.features
    length = layer.length(dim)

    def enter(value: torch.Tensor) -> torch.Tensor:
        _check_parts(layer.module, dim, length)
        return copied(value, region.group)

    def all_reduced(value: torch.Tensor, operation: str) -> torch.Tensor:
        return all_reduce(value, region.group, operation)

    columns = axis.rank * -(-length // axis.size), length, all_reduced

    def check(targets: Any) -> None:
        counted = targets.labels != targets.ignore_index
        check_within(targets.labels.where(counted, 0), length, "target")

    return logits_forward(layer.module, enter, columns, transposed=dim == 1, check=check, **options)


def _check_parts(module: Any, dim: int, length: int) -> None:
    """Raise CapabilityError if a layer shows its whole parameters: its forward computes with parts."""
    if module.weight.shape[dim] == length:
        raise CapabilityError(
            "a forward ran while whole parameters are shown, and tensor computes with parts",
            where="train_step.look(state, fn, whole=True)",
            fix="call the model in train_step.look(state, fn), or read parameters only",
        )


def _scattering(layer: Layer, plain: Forward, axis: MeshAxis, region: Region) -> Forward:
    def scatter(value: torch.Tensor) -> torch.Tensor:
        length = value.shape[SEQUENCE_DIM]
        if length % axis.size:
            raise CapabilityError(
                f"a sequence of {length} can't be cut in {axis.size}",
                where=f"{layer.path}, under fa.tensor({axis.size}, sequence=True)",
                fix=f"pad sequences to a multiple of {axis.size}; or sequence=False, for generation",
            )
        return scattered(value, region.group, SEQUENCE_DIM)

    def first(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_input(args, kwargs, scatter)
        return plain(module, *args, **kwargs)

    return first


def _entering(layer: Layer, plain: Forward, axis: MeshAxis, region: Region) -> Forward:  # noqa: ARG001
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_input(args, kwargs, lambda value: region.enter(value, module))
        return plain(module, *args, **kwargs)

    return attention


def _with_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward, with its input changed: the first one, or `hidden_states`."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _joining(layer: Layer, plain: Forward, axis: MeshAxis, region: Region) -> Forward:  # noqa: ARG001
    def last(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(module, *args, **kwargs)
        value = output[0] if isinstance(output, tuple) else output
        whole = gathered(value, region.group, SEQUENCE_DIM, value.shape[SEQUENCE_DIM] * axis.size)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    return last


_FORWARDS = {
    "colwise": _column,
    "packed_colwise": _column,
    "rowwise": _row,
    "colwise_gather": _gathering,
    "vocab": _vocabulary,
    "scatter_input": _scattering,
    "gather_input": _entering,
    "gather_output": _joining,
}
