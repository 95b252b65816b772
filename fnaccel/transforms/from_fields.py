"""Transforms by the fields of a recipe that choose them. The launcher's flags have the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from fnaccel import _lazy
from fnaccel.errors import ConfigError, as_names, require
from fnaccel.step.chain import Chain
from fnaccel.step.step import Transform
from fnaccel.transforms.accumulation import accumulate
from fnaccel.transforms.attention import attention
from fnaccel.transforms.averaging import with_ema
from fnaccel.transforms.clipping import clip_norm, clip_value
from fnaccel.transforms.compilation import compile  # noqa: A004
from fnaccel.transforms.precision import with_precision
from fnaccel.transforms.rematerialisation import remat
from fnaccel.transforms.skipping import skip_nonfinite
from fnaccel.transforms.spikes import on_spike


def _precision(value: Any, options: Mapping[str, Any]) -> Any:
    if value != "fp8":
        return with_precision(value)
    float8 = _lazy.load("fnaccel.transforms.float8.record").Float8
    return with_precision(_made(float8, "fp8", "Float8", options))


def _compile(value: Any, options: Mapping[str, Any]) -> Any:
    return _made(lambda **chosen: compile(value, **chosen), "compile_options", "compile", options)


def _remat(value: Any, options: Mapping[str, Any]) -> Any:  # noqa: ARG001
    kept: Any = value if isinstance(value, str) else "nothing"
    return remat(save=kept)


def _attention(value: Any, options: Mapping[str, Any]) -> Any:  # noqa: ARG001
    kernels: Any = as_names(value)
    return attention(*kernels)


@attrs.frozen
class Kind:
    """A field that chooses a transform.

    Attributes:
        make: the transform of a value, and of the field with its options.
        names: the names that such transforms have in a step.
        chooses: the attribute of the transform's record that the value sets.
        off: values that ask for no transform.
        options: the field with further options.
        with_options: the one value that takes them. None if all do that ask for a transform.
    """

    make: Callable[[Any, Mapping[str, Any]], Transform | Chain]
    names: tuple[str, ...]
    chooses: str | None = None
    off: tuple[Any, ...] = (None,)
    options: str | None = None
    with_options: str | None = None

    def takes_options(self, value: Any) -> bool:
        """Whether the transform of a value has further options."""
        return value not in self.off if self.with_options is None else value == self.with_options


_NO = (None, False)  # of fields without numbers: 0 is False
KINDS: dict[str, Kind] = {
    "precision": Kind(_precision, ("with_precision", "float8"), "compute", ("fp32",), "fp8", "fp8"),
    "accumulate": Kind(lambda value, _: accumulate(value), ("accumulate",), "n", (1,)),
    "skip_nonfinite": Kind(lambda _, __: skip_nonfinite(), ("skip_nonfinite",), off=_NO),
    "on_spike": Kind(lambda value, _: on_spike(do=value), ("on_spike",), "do"),
    "clip_norm": Kind(lambda value, _: clip_norm(value), ("clip_norm",), "max_norm"),
    "clip_value": Kind(lambda value, _: clip_value(value), ("clip_value",), "max_value"),
    "ema": Kind(lambda value, _: with_ema(value), ("with_ema",), "decay"),
    "remat": Kind(_remat, ("remat",), "save", _NO),
    "attention": Kind(_attention, ("attention",), "kernels", ((), [], None)),
    "compile": Kind(_compile, ("compile",), "scope", (None,), "compile_options"),
}
"""The fields that choose a transform, in the order in which a recipe applies them."""

OPTIONS = {kind.options: name for name, kind in KINDS.items() if kind.options is not None}
"""The fields with options of a transform, and the field that chooses it."""


def transforms_of(fields: Mapping[str, Any]) -> dict[str, Transform | Chain | None]:
    """The transform that each field chooses, by field: None if its value asks for none.

    Args:
        fields: values by name. Other names than those of `KINDS` and `OPTIONS` are left alone.

    Raises:
        ArgumentError: options of a transform that is not chosen.
        ConfigError, UnknownNameError: options or values that it does not take.

    Example:
        >>> list(transforms_of({"clip_norm": 1.0, "accumulate": 1}))
        ['accumulate', 'clip_norm']
    """
    for name, chooser in OPTIONS.items():
        kind, options = KINDS[chooser], fields.get(name)
        require(
            not options or kind.takes_options(fields.get(chooser)),
            f"{name}={options} has no effect",
            "Recipe",
            f"{chooser}: {kind.with_options or 'auto'}, or leave it out",
        )
    chosen: dict[str, Transform | Chain | None] = {}
    for name, kind in KINDS.items():
        if name in fields:
            value, options = fields[name], fields.get(kind.options or "") or {}
            chosen[name] = None if value in kind.off else kind.make(value, options)
    return chosen


def _made(make: Callable[..., Any], field: str, function: str, options: Mapping[str, Any]) -> Any:
    """Call `make` with the options of a field.

    Raises:
        ConfigError: an option that it does not take.
    """
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(
            f"{function} can't take these options: {error}",
            where=field,
            fix=f"see the options of fa.{function}",
        ) from error
