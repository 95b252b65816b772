"""The collectives that the layers of a plan need, counted without running them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fnaccel.extend import Traffic
from fnaccel.strategies.tensor.styles import Layer


def traffic_of(layers: Iterable[tuple[Layer, tuple[str, ...]]], *, sequence: bool) -> list[Traffic]:
    """The collectives of one micro-batch.

    Args:
        layers: the layers of a plan, with their styles.
        sequence: whether activations between blocks are cut along the sequence.
    """
    layers = list(layers)
    sizes: dict[tuple[str, str], list[int]] = {}
    between = next((_bytes_of_outputs(layer) for layer, styles in layers if "rowwise" in styles), 0)

    def add(kind: str, what: str, size: int) -> None:
        sizes.setdefault((kind, what), []).append(size)

    for layer, styles in layers:
        for style in styles:
            if style == "rowwise":
                width = _bytes_of_outputs(layer)
                if sequence:
                    for kind in ("all_gather", "reduce_scatter"):
                        add(kind, "activations of column and row layers", 2 * width)
                        add(kind, "activations of column and row layers", 0)
                else:
                    add("all_reduce", "activations of row layers", width)
                    add("all_reduce", "gradients of the inputs of column layers", width)
            elif style in ("scatter_input", "gather_output") and sequence:
                add("all_gather", "activations at the ends of the blocks", between)
            elif style == "colwise_gather":
                add("all_gather", f"outputs of {layer.path}", _bytes_of_outputs(layer))
                add("all_reduce", f"gradients of the inputs of {layer.path}", _bytes_of_inputs(layer))
            elif style == "vocab" and isinstance(layer.module, nn.Embedding):
                add("all_reduce", f"rows of {layer.path}", _bytes_of_outputs(layer))
            elif style == "vocab":
                add("all_reduce", f"maxima and sums of {layer.path}", 4)
                add("all_reduce", f"maxima and sums of {layer.path}", 8)
                add("all_reduce", f"gradients of the inputs of {layer.path}", _bytes_of_inputs(layer))
    return [
        Traffic(axis="tp", kind=kind, count=len(each), size=sum(each), per="token", what=what)
        for (kind, what), each in sizes.items()
    ]


def _bytes_of_outputs(layer: Layer) -> int:
    return layer.length(layer.features[0]) * _itemsize(layer)


def _bytes_of_inputs(layer: Layer) -> int:
    return layer.length(layer.features[1]) * _itemsize(layer)


def _itemsize(layer: Layer) -> int:
    weight: Any = layer.module.weight
    return weight.dtype.itemsize
