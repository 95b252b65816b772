"""The private names of torch for models and traces without values, with the versions each was checked on."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# ruff: noqa: SLF001
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# the base classes of dropouts, of batch norms, and of all norms with running statistics (2.9 to 2.13)
Dropout = _DropoutNd
BatchNorm = _BatchNorm
Norm = _NormBase


def check_norm_input(norm: Any, value: torch.Tensor) -> None:
    """Raise ValueError if a batch norm does not take a tensor of so many dimensions. (2.9 to 2.13)"""
    norm._check_input_dim(value)


def hooks_on_parameter(param: torch.Tensor) -> int:
    """How many hooks a backward pass runs at a parameter. (2.9 to 2.13)"""
    return len(param._backward_hooks or ()) + len(getattr(param, "_post_accumulate_grad_hooks", None) or ())


def hooks_on_module(module: torch.nn.Module) -> int:
    """How many hooks a backward pass runs at a module. (2.9 to 2.13)"""
    return len(module._backward_hooks) + len(module._backward_pre_hooks)


def cast_floats(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters, and the buffers that have their dtype. (2.9 to 2.13)

    `module.to(dtype)` makes complex numbers real, and takes digits from fp64 buffers beside fp32 parameters.
    """
    kinds = {param.dtype for param in module.parameters() if param.is_floating_point()}
    module._apply(lambda value: value.to(dtype) if value.dtype in kinds else value)


# the base class of modes that see each operation (2.9 to 2.13)
DispatchMode = TorchDispatchMode

# the operation behind `tensor.item()` and `bool(tensor)` (2.9 to 2.13)
VALUE_OF: Any = torch.ops.aten._local_scalar_dense

# the products of mixtures of experts, which torch 2.9 has for GPUs only (2.9 to 2.13)
GROUPED_PRODUCT: Any = getattr(torch.ops.aten, "_grouped_mm", object())


def fake_mode() -> Any:
    """A mode in which tensors have a shape, a dtype and a device, and no values. (2.13)"""
    return FakeTensorMode(allow_non_fake_inputs=True)


def without_values(value: object) -> bool:
    """Whether this is a tensor of `fake_mode`. (2.13)"""
    return isinstance(value, FakeTensor)


# while the body runs, operations go past all modes (2.13)
past_modes: Callable[[], contextlib.AbstractContextManager[object]] = _disable_current_modes


# an operation whose result, or its shape, depends on values (2.13)
NEEDS_VALUES: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


# torch's own trees: transformers registers its outputs with them (2.9 to 2.13)
tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _pytree.tree_map
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten
tree_unflatten: Callable[[Sequence[Any], Any], Any] = _pytree.tree_unflatten


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, which torch's stubs leave without a type. (2.9 to 2.13)"""
    return function.apply(*args)


def break_graph(text: str) -> None:
    """End the graph that torch.compile traces. Its error, if it needs one graph, has the text. (2.13)"""
    torch._dynamo.graph_break(text)
