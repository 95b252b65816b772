"""Answers to a model that asks for values during a trace, in which tensors have none.

A model may ask whether a mask has only ones, or whether sequences are packed, and skip work if not. The
answers are those of an ordinary batch: "all of them" is true, "any of them" is false, and a number is 1.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Generator, Mapping
from typing import Any
from unittest import mock

import torch

from fnaccel.models import _torch
from fnaccel.models._torch import VALUE_OF, DispatchMode, fake_mode, past_modes, tree_leaves, without_values

_SMALL = 1 << 16  # elements


class Answers(DispatchMode):
    """While the body runs, tensors without values answer for them."""

    def __init__(self) -> None:
        super().__init__()
        self._any: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if packet is VALUE_OF:
            value = args[0]
            truth = value.untyped_storage() not in self._any
            return truth if value.dtype is torch.bool else 1.0 if value.is_floating_point() else 1
        if packet is _torch.GROUPED_PRODUCT:
            return _grouped_product(func, args, dict(kwargs or {}))
        result = func(*args, **dict(kwargs or {}))
        if packet is torch.ops.aten.any:
            self._any.add(result.untyped_storage())
        return result


def _grouped_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A product of groups of rows. CPUs take any dtype, but without values torch takes bf16 alone."""
    dtype = kwargs.get("out_dtype") or args[0].dtype
    low = [value.to(torch.bfloat16) if _is_float(value) else value for value in args]
    return func(*low, **{**kwargs, "out_dtype": None}).to(dtype)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Constants(DispatchMode):
    """While the body runs in a fake mode, small tensors that are made of no other ones have values.

    Libraries keep such tables for the process. One that was made without values would be wrong in training.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        tensors = [each for each in tree_leaves((args, options)) if isinstance(each, torch.Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or any(map(without_values, tensors)):
            return func(*args, **options)
        if not tensors:
            made = func(*args, **options)
            if not isinstance(made, torch.Tensor) or made.numel() > _SMALL:
                return made
        with past_modes():
            return func(*args, **options)


@contextlib.contextmanager
def without_memory() -> Generator[None]:
    """While the body runs, new tensors have no memory. Small ones that are made of constants have values."""
    with fake_mode(), ordinary_batch(), Constants():
        yield


@contextlib.contextmanager
def ordinary_batch() -> Generator[None]:
    """Answer questions about values as an ordinary batch would.

    transformers asks whether a tensor is a fake one, and then builds masks that it would skip with values.
    """
    with contextlib.ExitStack() as stack:
        module = sys.modules.get("transformers.utils.import_utils")
        if hasattr(module, "is_fake_tensor"):
            stack.enter_context(mock.patch.object(module, "is_fake_tensor", return_value=False))
        stack.enter_context(Answers())
        yield
