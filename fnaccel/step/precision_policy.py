"""`Precision`: the dtypes of parameters, compute, reduction and output, and the loss scale.

Compute runs under autocast around the whole loss function, so methods that the loss calls are
covered as `forward` is. A strategy's own part (gathering in bf16) is in that strategy's file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
import torch

from fnaccel import tree
from fnaccel.errors import UnknownNameError, nearest
from fnaccel.step.choices import DtypeName
from fnaccel.step.loss import Concat, Extreme, Mean, Sum
from fnaccel.tree import Tree

S = TypeVar("S", bound=attrs.AttrsInstance)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def dtype_of(name: str | torch.dtype, where: str, extra: tuple[str, ...] = ()) -> torch.dtype:
    """A dtype by its short name. `extra` are further names that `where` takes, for the message.

    Raises:
        UnknownNameError: there is no such dtype. Names the nearest.
    """
    if isinstance(name, torch.dtype):
        return name
    long = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    short = long.get(name.removeprefix("torch."), name)
    if short not in DTYPES:
        names = (*DTYPES, *extra)
        raise UnknownNameError(f"no precision is called {name!r}", where=where, fix=nearest(name, names))
    return DTYPES[short]


def check_precision(name: str, where: str) -> None:
    """Raise UnknownNameError unless `with_precision` takes a name."""
    if name != "fp8":
        dtype_of(name, where, ("fp8",))


def _to_dtype(name: DtypeName | torch.dtype) -> torch.dtype:
    return dtype_of(name, "fa.transforms.Precision")


@attrs.frozen(kw_only=True)
class Precision:
    """An explicit policy. Each field is a dtype or one of "fp32", "bf16", "fp16", "fp64".

    Attributes:
        param: how parameters are kept and updated. Buffers of their dtype follow. Others stay, such as fp64
            buffers beside fp32 parameters, and so do complex parameters and buffers.
        compute: the dtype of matrix products (autocast, if it differs from `param`).
        reduce: the dtype in which ranks average gradients. By default fp32, or fp64 for parameters in fp64.
        output: the dtype of the loss. By default fp32, or fp64 if the loss is computed in fp64.
        init_scale, growth, backoff, interval: the dynamic loss scale, used if compute is fp16:
            its first value, the factors up and down, and how many good steps make it grow
            (https://docs.pytorch.org/docs/stable/amp.html).
        min_scale: the loss scale sinks no lower.
        max_skipped: the number of updates skipped in a row after which the next call raises NonfiniteError
            (the state stays live). None allows any number. 25 of them are a warning.

    Example:
        >>> step = fa.with_precision(loss_fn, fa.transforms.Precision(compute="bf16", reduce="bf16"))
    """

    param: torch.dtype = attrs.field(default=torch.float32, converter=_to_dtype)
    compute: torch.dtype = attrs.field(default=torch.float32, converter=_to_dtype)
    reduce: torch.dtype = attrs.field(
        default=attrs.Factory(lambda self: torch.promote_types(self.param, torch.float32), takes_self=True),
        converter=_to_dtype,
    )
    output: torch.dtype = attrs.field(
        default=attrs.Factory(lambda self: torch.promote_types(self.compute, torch.float32), takes_self=True),
        converter=_to_dtype,
    )
    init_scale: float = 65_536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2_000
    min_scale: float = 1.0
    max_skipped: int | None = 200

    def configure(self, settings: S) -> S:
        """Set the dtypes of the step (`step.settings.Configures`)."""
        return attrs.evolve(settings, precision=self, casts=True)

    @property
    def scaled(self) -> bool:
        """Whether a loss scale is needed."""
        return self.compute is torch.float16

    @property
    def autocast(self) -> bool:
        """Whether compute needs casts that the parameters' dtype does not give."""
        return self.compute is not self.param

    def describe(self) -> str:
        """The text in the plan."""
        short = {dtype: name for name, dtype in DTYPES.items()}
        parts = {
            "parameters": self.param,
            "compute": self.compute,
            "reduce": self.reduce,
            "output": self.output,
        }
        text = ", ".join(f"{part} {short.get(dtype, dtype)}" for part, dtype in parts.items())
        return f"{text}, loss scale from {self.init_scale:g}" if self.scaled else text

    def __call__(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """`loss_fn` under this policy (the signature of `Phase.FORWARD`)."""
        return Cast(loss_fn, self) if self.autocast or self.compute is not torch.float32 else loss_fn


@attrs.frozen
class Cast:
    """A loss function under a policy: autocast around it, and its output in the output dtype.

    Without autocast, parameters and computation have one dtype, to which the batch is cast.
    """

    loss_fn: Callable[..., Any]
    policy: Precision

    def __call__(self, model: object, *args: Any) -> Any:
        """The loss, its floating-point tensors in the policy's output dtype."""
        if self.policy.compute is self.policy.param:
            out = self.loss_fn(model, *[_cast(arg, self.policy.compute) for arg in args])
            return _cast(out, self.policy.output)
        with torch.autocast(device_of(args) or "cpu", dtype=self.policy.compute):
            out = self.loss_fn(model, *args)
        return _cast(out, self.policy.output)


def _cast(out: Tree, dtype: torch.dtype) -> Any:
    """A batch, or a function's output, with its floating-point tensors in another dtype."""
    if isinstance(out, torch.Tensor):
        return out.to(dtype) if out.is_floating_point() else out
    if isinstance(out, Mean):
        return Mean(_cast(out.total, dtype), out.weight, _cast(out.aux, dtype))
    if isinstance(out, (Sum, Extreme)):
        return type(out)(_cast(out.value, dtype))
    if isinstance(out, Concat):
        return Concat(_cast(out.value, dtype), out.pad)
    if isinstance(out, dict):
        return {key: _cast(value, dtype) for key, value in out.items()}
    if type(out) in (list, tuple):
        return type(out)(_cast(value, dtype) for value in out)
    if isinstance(out, Mapping):  # such as a tokenizer returns
        tree.learn(out)
        return tree.cast(out, dtype)
    return out


def device_of(batch: Tree) -> str:
    """The device type of the first tensor of a batch, or ""."""
    if isinstance(batch, torch.Tensor):
        return batch.device.type
    if isinstance(batch, (dict, list, tuple)):  # a union is not traceable
        for value in batch.values() if isinstance(batch, dict) else batch:
            if found := device_of(value):
                return found
        return ""
    first = next((x for x in tree.leaves(batch) if isinstance(x, torch.Tensor)), None)
    return "" if first is None else first.device.type
