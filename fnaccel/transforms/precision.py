"""`with_precision`: the precision of a step by its name, as a `Precision`, or as a `Float8`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fnaccel import _lazy
from fnaccel.errors import CapabilityError, require
from fnaccel.step.chain import Chain, takes_step
from fnaccel.step.choices import PrecisionName
from fnaccel.step.precision_policy import Precision, dtype_of
from fnaccel.step.step import Phase, Transform

if TYPE_CHECKING:
    from fnaccel.transforms.float8.record import Float8


@takes_step
def with_precision(
    precision: Precision | Float8 | PrecisionName, *, recipe: str | None = None
) -> Transform | Chain:
    """Choose the dtypes a step computes in. It means the same on every strategy.

    Args:
        step: a step or a loss function; or none, for `fa.chain`.
        precision: `"fp32"`, `"bf16"`, `"fp16"` (parameters stay fp32, compute is cast, fp16 keeps a
            dynamic loss scale in the state), or a `Precision` policy. `"fp8"` or a `Float8` for linear
            layers in fp8 and the rest in bf16.
        recipe: with `"fp8"`, how tensors are scaled. See `Float8`.

    Raises:
        UnknownNameError: no such dtype or recipe.
        ArgumentError: a recipe without `"fp8"`.
        CapabilityError: a compute dtype that autocast can't cast to. At `train_step`, a device without fp8.

    Example:
        >>> step = fa.with_precision(loss_fn, "bf16")
    """
    if precision == "fp8" or not isinstance(precision, Precision | str):
        record: Any = _lazy.load("fnaccel.transforms.float8.record")
        if precision == "fp8":
            return record.float8(record.Float8() if recipe is None else record.Float8(recipe=recipe))
        if isinstance(precision, record.Float8) and recipe is None:
            return record.float8(precision)
    require(
        recipe is None,
        f"recipe={recipe!r} says how fp8 is scaled, and the precision is {precision!r}",
        "fa.with_precision",
        'with_precision(step, "fp8", recipe=...), or fa.transforms.Float8(recipe=...)',
    )
    policy: Any = precision
    if not isinstance(policy, Precision):
        require(
            isinstance(policy, str),
            f"a precision is a name or a Precision, not {type(precision).__name__}",
            "fa.with_precision",
            'with_precision(step, "bf16")',
        )
        compute = dtype_of(policy, "fa.with_precision", ("fp8",))
        policy = Precision(compute=compute)
    if policy.autocast and policy.compute not in (torch.bfloat16, torch.float16):
        raise CapabilityError(
            f"compute in {policy.compute} with parameters in {policy.param} would need casts up",
            where="fa.with_precision",
            fix="compute in bf16 or fp16, or keep the parameters in the compute dtype",
        )
    return Transform("with_precision", Phase.FORWARD, apply=policy)
