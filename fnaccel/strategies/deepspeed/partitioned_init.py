"""`partitioned_init`: parameters are partitioned as they are made, and as transformers loads their values.

DeepSpeed partitions the parameters of a module when its constructor ends. A parent that initialises them
afterwards, as transformers' models do, would write to empty tensors, so a parameter is gathered for that.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fnaccel.errors import ArgumentError, FnaccelError
from fnaccel.tree import Tree


@contextlib.contextmanager
def partitioned_init(package: ModuleType, config: dict[str, Any]) -> Generator[None]:
    """In the body each parameter is partitioned when its module's constructor ends.

    `from_pretrained` of transformers then gathers one layer at a time to fill it. A factory that writes into
    a partitioned parameter writes into the whole one.

    Args:
        package: the package deepspeed.
        config: its final configuration.

    Raises:
        ArgumentError: the factory failed, for example when it read a partitioned parameter, or it wrote to
            `param.data` of one.
    """
    # transformers first: its import fails while DeepSpeed's patches of torch are in place
    with _transformers_partitions(package, config), package.zero.Init(config_dict_or_path=config):
        try:
            with _WholeWrites(package):
                yield
        except FnaccelError:
            raise
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            summary = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise ArgumentError(
                f"the model's factory failed while parameters are partitioned ({summary})",
                where="fa.deepspeed(zero3_init=True)",
                fix="if it reads a parameter after its module was built, gather it: with deepspeed.zero."
                "GatheredParameters([param], modifier_rank=0); torch.nn.init functions need nothing",
            ) from error


@contextlib.contextmanager
def _transformers_partitions(package: ModuleType, config: dict[str, Any]) -> Generator[None]:
    """In the body transformers has the configuration. Afterwards it has the one it had before.

    It keeps a weak reference in a global of its module. Without one, `from_pretrained` makes parameters on
    the meta device, and takes their partitions for parameters of the wrong shape. A model that is built from
    its configuration has its modules initialised one by one, each with its parameters gathered.
    """
    # transformers reads the configuration with accelerate
    if any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")):
        yield
        return
    integration: Any = importlib.import_module("transformers.integrations.deepspeed")
    base: Any = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    before = integration._hf_deepspeed_config_weak_ref  # noqa: SLF001 - the user may have set one
    described = integration.HfDeepSpeedConfig(config)
    initialise = base._initialize_weights  # noqa: SLF001 - the one place that all its models pass

    def initialise_whole(model: object, module: nn.Module, *args: Any, **options: Any) -> Any:
        near = (module, *module.children())
        params = {id(p): p for each in near for p in each.parameters(recurse=False) if _is_partitioned(p)}
        with package.zero.GatheredParameters(list(params.values()), modifier_rank=0):
            return initialise(model, module, *args, **options)

    base._initialize_weights = initialise_whole  # noqa: SLF001
    try:
        yield
    finally:
        base._initialize_weights = initialise  # noqa: SLF001
        integration._hf_deepspeed_config_weak_ref = before  # noqa: SLF001
        del described  # it had to live until here


_WRITES = frozenset(
    f"{name}_"
    for name in (
        "normal", "uniform", "exponential", "bernoulli", "random", "geometric", "cauchy", "log_normal",
        "fill", "zero", "copy", "masked_fill", "add", "sub", "mul", "div", "clamp", "lerp", "erfinv",
        "log", "exp", "sqrt", "neg", "pow",
    )
) | {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}  # fmt: skip
_FIRST_VALUES = frozenset({"normal_", "uniform_", "fill_", "zero_"})


class _WholeWrites(TorchFunctionMode):
    """In the body a write to a partitioned parameter reaches the whole one, whose shape it has.

    Every rank draws the same numbers, and rank 0's are the ones that stay.
    """

    def __init__(self, package: ModuleType) -> None:
        super().__init__()
        self._gather = package.zero.GatheredParameters

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, with its target gathered if it writes to a partitioned parameter."""
        options = kwargs or {}
        target = args[0] if args else options.get("tensor")  # torch.nn.init passes its own by name
        name = getattr(func, "__name__", "")
        writes = name in _WRITES or getattr(func, "__module__", "") == "torch.nn.init"
        if isinstance(target, torch.Tensor) and target.numel() == 0:
            if _is_partitioned(target):
                if writes:
                    with self._gather(target, modifier_rank=0), torch.no_grad():
                        func(*args, **options)
                    return target
                if func in _SHAPES:
                    return func(torch.empty(target.ds_shape, device="meta"), *args[1:], **options)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            elif name in _FIRST_VALUES and target.shape == (0,) and not _called_by_deepspeed():
                raise ArgumentError(
                    f"{name} was called on an empty tensor, such as `param.data` of a partitioned parameter",
                    where="the model's factory under fa.deepspeed(zero3_init=True)",
                    fix="call it on the parameter, as torch.nn.init.normal_(module.weight) does, or in a "
                    "function for model.apply(fn)",
                )
        return func(*args, **options)


_tensor: Any = torch.Tensor
_SHAPES = (
    _tensor.dim,
    _tensor.ndimension,
    _tensor.size,
    _tensor.numel,
    _tensor.shape.__get__,
    _tensor.ndim.__get__,
)


def _is_partitioned(value: Tree) -> bool:
    status = getattr(value, "ds_status", None)
    return status is not None and status.name == "NOT_AVAILABLE"


def _called_by_deepspeed() -> bool:
    """Whether the function that called torch, two frames above, is DeepSpeed's."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("deepspeed.")  # noqa: SLF001


def check_partitioned(modules: dict[str | None, nn.Module]) -> None:
    """Check that the parameters of each model were made in the body of `partitioned_init`.

    Parameters that a factory adds to a model by hand are partitioned later, so some may be whole.

    Raises:
        ArgumentError: all parameters of a model are whole, so it was built before.
    """
    for key, module in modules.items():
        params = list(module.parameters())
        if params and not any(hasattr(param, "ds_id") for param in params):
            raise ArgumentError(
                f"no parameter of {type(module).__name__} is partitioned: the factory "
                f"{'' if key is None else f'of {key!r} '}returned a module that was built before",
                where="fa.deepspeed(zero3_init=True)",
                fix="build or load the module in the factory: lambda: Model.from_pretrained(path)",
            )
