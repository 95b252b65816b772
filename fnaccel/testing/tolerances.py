"""The one table of tolerances, by dtype, and the comparison of trees that uses it.

A number here is never relaxed without a reason beside it.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs
import torch

from fnaccel import tree
from fnaccel.errors import TreeMismatchError, UnknownNameError, nearest


@attrs.frozen
class Tolerance:
    """How far apart two values may be: `absolute + relative * |expected|`."""

    absolute: float
    relative: float
    reason: str


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(1e-12, 1e-12, "the order of summation is all that may differ"),
    torch.float32: Tolerance(1e-6, 1e-6, "sums over ranks and micro-batches in another order"),
    torch.bfloat16: Tolerance(
        2e-2, 1e-2, "8 bits of mantissa: one rounding is 2**-9 relative, a step has several"
    ),
    torch.complex64: Tolerance(1e-6, 1e-6, "two numbers of float32"),
    torch.complex128: Tolerance(1e-12, 1e-12, "two numbers of float64"),
    torch.float16: Tolerance(2e-3, 2e-3, "11 bits of mantissa: one rounding is 2**-12 relative"),
}
"""The tolerance of each floating-point and complex dtype. Every other dtype must agree exactly."""

_EXACT = Tolerance(0.0, 0.0, "integers and bools do not round")
Precision = Literal["fp64", "fp32", "bf16", "fp16"]
_PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tolerance(dtype: torch.dtype | Precision) -> Tolerance:
    """The tolerance of a dtype, or of a precision by name (`"fp32"`, `"bf16"`).

    Raises:
        UnknownNameError: there is no precision of that name.

    Example:
        >>> from fnaccel.testing import tolerance
        >>> tolerance("fp32").absolute
        1e-06
    """
    if isinstance(dtype, str):
        if dtype not in _PRECISIONS:
            raise UnknownNameError(
                f"no precision is called {dtype!r}", where="tolerance", fix=nearest(dtype, _PRECISIONS)
            )
        dtype = _PRECISIONS[dtype]
    return TOLERANCES.get(dtype, _EXACT)


def differences(
    actual: tree.Tree, expected: tree.Tree, *, precision: torch.dtype | Precision | None = None
) -> list[str]:
    """One line for each path at which two trees differ by more than the table allows.

    Args:
        actual: any tree.
        expected: a tree of the same structure.
        precision: the dtype of the *computation*, if it is lower than that of the leaves
            (bf16 autocast leaves fp32 parameters). By default each leaf's own.

    Example:
        >>> from fnaccel.testing import differences
        >>> differences({"w": torch.ones(2)}, {"w": torch.zeros(2)})
        ['w: off by 1, allowed ...']
    """
    left, right = dict(tree.items(actual)), dict(tree.items(expected))
    lines = [f"{path}: only in the actual tree" for path in left if path not in right]
    lines += [f"{path}: only in the expected tree" for path in right if path not in left]
    for path in left:
        if path in right and (line := _difference(left[path], right[path], precision)):
            lines.append(f"{path or '(root)'}: {line}")
    return lines


def assert_close(
    actual: tree.Tree, expected: tree.Tree, *, precision: torch.dtype | Precision | None = None
) -> None:
    """Raise if `differences` finds any.

    Raises:
        TreeMismatchError: lists every path that differs.

    Example:
        >>> from fnaccel.testing import assert_close
        >>> assert_close({"w": torch.ones(2)}, {"w": torch.ones(2) + 1e-7})
    """
    lines = differences(actual, expected, precision=precision)
    if lines:
        raise TreeMismatchError(
            f"{len(lines)} leaves differ: " + "; ".join(lines),
            where="assert_close(actual, expected)",
            fix="find out why. The tolerances are in fnaccel/testing/tolerances.py, with reasons",
        )


def _difference(actual: Any, expected: Any, precision: torch.dtype | Precision | None) -> str | None:
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        if actual.shape != expected.shape:
            return f"shape {list(actual.shape)} is not {list(expected.shape)}"
        if actual.dtype != expected.dtype:
            return f"dtype {actual.dtype} is not {expected.dtype}"
        allowed = tolerance(precision if precision is not None else actual.dtype)
        left, right = actual.detach().cpu(), expected.detach().cpu()
        if torch.allclose(left, right, rtol=allowed.relative, atol=allowed.absolute, equal_nan=True):
            return None
        wide = torch.complex128 if left.is_complex() else torch.float64
        worst = (left.to(wide) - right.to(wide)).abs().max().item()
        return f"off by {worst:.3g}, allowed {allowed.absolute:g} ({allowed.reason})"
    if isinstance(actual, float) and isinstance(expected, float):
        allowed = tolerance(precision if precision is not None else torch.float32)
        gap = abs(actual - expected)
        if gap <= allowed.absolute + allowed.relative * abs(expected):
            return None
        return f"{actual!r} is not {expected!r}: off by {gap:.3g}, allowed {allowed.absolute:g}"
    return (
        None if type(actual) is type(expected) and actual == expected else f"{actual!r} is not {expected!r}"
    )
