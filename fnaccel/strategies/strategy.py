"""A strategy: a product of axes, each a frozen record, with its names and its text.

`ddp(2) * fsdp(4)` is a value: it prints as the text that makes it, and `strategy(text)` reads it.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, ParamSpec

import attrs

from fnaccel import _lazy
from fnaccel.errors import ArgumentError, ConfigError, UnknownNameError, nearest, require
from fnaccel.step.callables import plan_text
from fnaccel.step.spec import Spec
from fnaccel.step.step import EVERYTHING, Capability
from fnaccel.world.mesh import AXES

P = ParamSpec("P")


class Axis:
    """The base of axis records: frozen attrs classes with a field `degree`.

    Attributes:
        mesh_axis: the mesh axis that its ranks lie along, or None if it takes no ranks of a mesh.
        maker: the function that makes a strategy of it.
        runs_on: the kind of device that it is made for, "" for any.
        averages: whether the gradients of ranks that hold the same parameters are averaged, as the plan says.
        weighting: by what ranks that train apart weigh their gradients. "rows": the mean weight of a rank, so
            that the mean of all gradients is that of all rows. "replicas": their own weight.
        metrics: for an axis whose ranks train apart. "steps": metrics are those of all ranks. "boundary":
            replicas send nothing in a step after which they are not the same, and metrics are those of one.
        follows: for an axis that is not the library's, the mesh axis before it in the mesh. "" is the
            outermost place.
    """

    mesh_axis: ClassVar[Any] = None
    maker: ClassVar[str]
    runs_on: ClassVar[str] = ""
    averages: ClassVar[bool] = True
    weighting: Any = "rows"
    metrics: Any = "steps"
    follows: ClassVar[str] = ""
    degree: int

    @property
    def capabilities(self) -> frozenset[Capability]:
        """The capabilities that transforms may need: all, unless a class lacks some."""
        return EVERYTHING

    def check(self, spec: Spec) -> None:
        """Raise if a train step can't run on it. Nothing is built yet."""

    def plan_notes(self, spec: Spec) -> list[str]:  # noqa: ARG002
        """Notes for the plan."""
        return []

    def obstacle_to_capture(self, spec: Spec) -> str:  # noqa: ARG002
        """The obstacle to capturing a step as one graph, as a clause, or ""."""
        return ""


@attrs.frozen
class Strategy:
    """A product of axes. The empty product is `local()`.

    Example:
        >>> print(fa.ddp(2) * fa.fsdp(4))
        ddp(2) * fsdp(4)
    """

    axes: tuple[Any, ...] = ()

    def __attrs_post_init__(self) -> None:
        require(
            isinstance(self.axes, tuple) and all(map(_is_axis, self.axes)),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"{self.axes!r} is no tuple of axes",
            "fa.strategies.Strategy",
            "give records of fnaccel.strategies.Axis that have a maker: docs/extending.md",
        )

    def __mul__(self, other: Strategy) -> Strategy:
        if not isinstance(other, Strategy):
            return NotImplemented
        return Strategy((*self.axes, *other.axes))

    def degrees(self) -> list[tuple[str, int]]:
        """(mesh axis, degree) pairs, -1 if the number of ranks decides."""
        return [(axis.mesh_axis, axis.degree) for axis in self.axes if axis.mesh_axis is not None]

    def follows(self) -> dict[str, str]:
        """For each mesh axis that is not the library's, the one after which it stands."""
        return {axis.mesh_axis: axis.follows for axis in self.axes if axis.mesh_axis not in (None, *AXES)}

    def apart(self) -> tuple[str, ...]:
        """The mesh axes whose ranks train apart, since no gradients are averaged over them."""
        return tuple(axis.mesh_axis for axis in self.axes if not axis.averages)

    def capabilities(self) -> frozenset[Capability]:
        """Capabilities for transforms: those that all of its axes have."""
        if not self.axes:
            return frozenset(Capability)
        found = frozenset.intersection(*(axis.capabilities for axis in self.axes))
        # in its graph a weight is that of all ranks
        return found - {Capability.COMPILE_STEP} if self.apart() else found

    def __str__(self) -> str:
        return " * ".join(_text(axis) for axis in self.axes) or "local()"


def _is_axis(value: object) -> bool:
    return isinstance(value, Axis) and attrs.has(type(value)) and hasattr(value, "maker")


def runtime_in(spec: Spec) -> str:
    """The name of a runtime in a product, which lays out models and averages by itself, or ""."""
    makers = [axis.maker for axis in spec.strategy.axes if axis.mesh_axis is None]
    return next(iter(makers), spec.runtime)


class Pairs(tuple[tuple[str, Any], ...]):
    """The items of a dict as a field of an axis: hashable, and printed as the dict."""

    __slots__ = ()

    def __repr__(self) -> str:
        return plan_text(dict(self))


def _text(axis: Axis) -> str:
    parts: list[str] = []
    for field in attrs.fields(type(axis)):
        value = getattr(axis, field.name)
        if value != field.default:
            parts.append(repr(value) if field.name == "degree" else f"{field.name}={plan_text(value)}")
    return f"{axis.maker}({', '.join(parts)})"


MAKERS: dict[str, Callable[..., Strategy]] = {}
"""Functions that a strategy's text may call, by name. User code may add to it with `maker`."""

ARGUMENT_MAKERS: dict[str, Callable[..., Any]] = {}
"""Functions that an argument of a strategy's text may call, such as `powersgd` for `ddp(hook=...)`."""

PRESETS: dict[str, str] = {
    "local": "local()",
    "ddp": "ddp()",
    "fsdp": "fsdp()",
    "zero3": "fsdp()",
    "fsdp_zero3": "fsdp()",
    "zero2": "fsdp(reshard_after_forward=False)",
    "fsdp_zero2": "fsdp(reshard_after_forward=False)",
    **{f"deepspeed_zero{stage}": f"deepspeed(stage={stage})" for stage in range(4)},
}
"""Short names of strategies."""


def maker(fn: Callable[P, Strategy]) -> Callable[P, Strategy]:
    """Decorator: let the text of a strategy call this function: `"name(2)"`, or `"module:name(2)"`.

    The second is for functions outside of fnaccel. The module is imported if a text names it.
    """
    internal = fn.__module__.split(".")[0] == "fnaccel"
    MAKERS[fn.__name__ if internal else f"{fn.__module__}:{fn.__name__}"] = fn
    return fn


_LATE = {
    "context": "context",
    "deepspeed": "deepspeed",
    "diloco": "replicas",
    "local_sgd": "replicas",
    "pipeline": "pipeline",
    "tensor": "tensor",
    "xla": "xla",
}
"""The folders of strategies that are imported when a text names them."""

_ELSEWHERE = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?=\s*\()")
"""`module:name` before a bracket, in the text of a strategy."""


def _import_makers(text: str) -> tuple[str, dict[str, str]]:
    """Import the modules that a text names.

    Returns:
        The text with plain names in their place, and the makers that these mean.

    Raises:
        ConfigError: a module can't be imported.
        UnknownNameError: it has no such maker.
    """
    meanings: dict[str, str] = {}

    def plain(match: re.Match[str]) -> str:
        module, name = match[1], match[2]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"{module!r} can't be imported: {error}",
                where=f"strategy {text!r}",
                fix="install it, or start in its directory",
            ) from error
        if match[0] not in MAKERS:
            names = [key.partition(":")[2] for key in MAKERS if key.startswith(f"{module}:")]
            raise UnknownNameError(
                f"{module} has no strategy {name!r}",
                where=f"strategy {text!r}",
                fix=nearest(name, names) if names else "decorate it with fnaccel.strategies.maker",
            )
        short = f"maker_{len(meanings)}"
        meanings[short] = match[0]
        return short

    return _ELSEWHERE.sub(plain, text), meanings


def strategy(text: str | Strategy) -> Strategy:
    """A strategy from its name or text: `"fsdp"`, `"zero2"`, `"ddp(2) * fsdp(2)"`.

    Only calls of known strategies with literal arguments are read, and `powersgd(...)` for a hook. Nothing
    is evaluated.

    Raises:
        UnknownNameError: no such strategy. Names the nearest.
        ConfigError: the text is no product of strategies, or an argument is unknown.

    Example:
        >>> fa.strategy("ddp(2) * fsdp(4)") == fa.ddp(2) * fa.fsdp(4)
        True
    """
    if isinstance(text, Strategy):
        return text
    if not isinstance(text, str):
        raise ArgumentError(
            f"a strategy is not {type(text).__name__}",
            where="strategy",
            fix='fa.ddp(), fa.fsdp(), or a name such as "fsdp"',
        )
    source, meanings = _import_makers(PRESETS.get(text.strip(), text))
    try:
        return _evaluate(ast.parse(source.strip(), mode="eval").body, text, meanings)
    except (SyntaxError, RecursionError, MemoryError) as error:  # of thousands of factors or brackets
        raise ConfigError(
            f"{text[:200]!r} is no strategy",
            where="strategy",
            fix='write a product of calls, such as "ddp(2) * fsdp(4)"',
        ) from error


def _evaluate(node: ast.expr, text: str, meanings: Mapping[str, str]) -> Strategy:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _evaluate(node.left, text, meanings) * _evaluate(node.right, text, meanings)
    name = node.id if isinstance(node, ast.Name) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = meanings.get(node.func.id, node.func.id)
    if name is None:
        raise ConfigError(
            f"{text!r} is no strategy",
            where="strategy",
            fix='write a product of calls, such as "ddp(2) * fsdp(4)"',
        )
    if name in PRESETS and not isinstance(node, ast.Call):
        return strategy(name)
    if name in _LATE:
        _lazy.load(f"fnaccel.strategies.{_LATE[name]}")
    if name not in MAKERS:
        raise UnknownNameError(
            f"no strategy is called {name!r}",
            where=f"strategy {text!r}",
            fix=nearest(name, {*MAKERS, *PRESETS, *_LATE}),
        )
    try:
        args, options = arguments_of(node) if isinstance(node, ast.Call) else ([], {})
        product = MAKERS[name](*args, **options)
    except (ValueError, TypeError) as error:
        if isinstance(error, ArgumentError | UnknownNameError):
            raise
        raise ConfigError(
            f"{name} can't be called as in {text!r}: {error}",
            where="strategy",
            fix=f"see the arguments of {name if ':' in name else f'fa.{name}'}",
        ) from error
    if not isinstance(product, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{name} returned {type(product).__name__}, not a strategy",
            where=f"strategy {text!r}",
            fix="return fa.strategies.Strategy((axis,))",
        )
    return product


def arguments_of(call: ast.Call) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call whose text is read. Raises ValueError if one is no literal."""
    options = {keyword.arg: _argument(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    return [_argument(node) for node in call.args], options


def _argument(node: ast.expr) -> Any:
    """A literal, or a call of one of `ARGUMENT_MAKERS` with literals."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ARGUMENT_MAKERS:
        args, options = arguments_of(node)
        return ARGUMENT_MAKERS[node.func.id](*args, **options)
    return ast.literal_eval(node)


def check_degree(degree: int, where: str) -> None:
    """Raise ArgumentError unless `degree` is positive or -1."""
    if not isinstance(degree, int) or isinstance(degree, bool) or (degree < 1 and degree != -1):
        raise ArgumentError(
            f"an axis can't have degree {degree!r}", where=where, fix="a positive number, or -1 for the rest"
        )
