"""Matrix products of a compiled graph by oneDNN in place of MKL. (2.13)

PyTorch computes products of fp32 by MKL, which takes AVX2 on a processor of AMD that has AVX-512. oneDNN,
which PyTorch has beside it, takes AVX-512, and is twice as quick there. Both sum in fp32, in another order.
"""

# ruff: noqa: SLF001
from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fnaccel import _torch

LEAST, LEAST_RESULT = 1 << 22, 1 << 13
"""Multiplications of a product, and elements of its result, below which the call costs more than it saves."""

_aten = torch.ops.aten


@functools.cache
def is_quicker(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Whether oneDNN is quicker than MKL, by the maker and the instructions of the processor."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    file = Path(cpuinfo)
    by_amd = file.is_file() and "AuthenticAMD" in file.read_text()
    return by_amd and torch.backends.cpu.get_cpu_capability() == "AVX512"


def pass_beside(other: Any) -> Any:
    """Another pass, and then products of the graph become oneDNN's if that is quicker."""
    if not (is_quicker() and torch.backends.mkldnn.enabled):
        return other
    _register()

    def change(graph: Any) -> None:
        if other is not None:
            other(graph)
        replace(graph)

    return _torch.graph_pass(change, (__file__,), "" if other is None else str(other.uuid()))


def replace(graph: fx.Graph) -> None:
    """Let oneDNN compute the large fp32 products of a graph on the CPU."""
    for node in list(graph.nodes):
        if node.target is _aten.mm.default and not node.kwargs:
            bias, a, b = None, *node.args
        elif node.target is _aten.addmm.default and not node.kwargs:
            bias, a, b = node.args
        else:
            continue
        if not _gains(node.meta["val"], a.meta["val"]):
            continue
        is_bias = bias is None or bias.meta["val"].shape == node.meta["val"].shape[1:]
        added = None if is_bias else bias  # oneDNN takes a number for each column alone
        with graph.inserting_before(node):
            new = graph.call_function(torch.ops.fnaccel.product.default, (a, b, None if added else bias))
            new.meta = dict(node.meta)
            if added is not None:
                new = graph.call_function(_aten.add.Tensor, (new, added))
                new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.lint()


def _gains(result: Any, a: Any) -> bool:
    sizes = [*result.shape, a.shape[1]]
    if not all(isinstance(size, int) for size in sizes):
        return False
    plain = result.dtype == torch.float32 and result.device.type == "cpu" and result.is_contiguous()
    rows, columns, inner = sizes
    return plain and rows * columns >= LEAST_RESULT and rows * columns * inner >= LEAST


@functools.cache
def _register() -> Any:
    library = torch.library.Library("fnaccel", "FRAGMENT")
    library.define("product(Tensor a, Tensor b, Tensor? bias) -> Tensor", tags=_torch.EXACT_STRIDES)
    library.impl("product", _product, "CPU")
    torch.library.register_fake(
        "fnaccel::product", lambda a, b, _: a.new_empty(len(a), b.shape[1]), lib=library
    )
    return library


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # it would read a bias with a stride as if it had none
    dense = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), dense, "none", [], "")
