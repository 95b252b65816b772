"""Transforms without a step: records that are applied later, one by one or as a chain."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, Protocol, cast, overload

import attrs

from fnaccel.errors import ArgumentError, require
from fnaccel.step.callables import title
from fnaccel.step.step import Step, StepLike, Transform, as_step

P = ParamSpec("P")
_WHERE = "fa.chain"


@attrs.frozen(repr=False)
class Chain:
    """Several transforms as one: what `fa.chain` returns. Call it with a step or a loss function."""

    is_transform: ClassVar[bool] = True
    members: tuple[Callable[[Any], Step], ...]

    def __call__(self, step: StepLike) -> Step:
        """The step under all of them, the first one innermost."""
        following = as_step(step, _WHERE)
        for member in self.members:
            following = member(following)
            require(
                isinstance(following, Step),  # pyright: ignore[reportUnnecessaryIsInstance]
                f"{title(member)} returned {type(following).__name__}, not a step",
                _WHERE,
                "a function in a chain takes a step and returns one",
            )
        return following

    def __repr__(self) -> str:
        names = (member.name if isinstance(member, Transform) else title(member) for member in self.members)
        return f"chain({', '.join(names)})"


def chain(*transforms: Callable[[Any], Step]) -> Chain:
    """Put transforms together: `chain(a, b)(loss_fn)` is `b(a(loss_fn))`, as `optax.chain` reads.

    Each transform of the library returns such a member if its step is left out: `fa.clip_norm(1.0)`. A member
    is a frozen record, so it can be kept, compared and written as a decorator. A function in the first place
    of a call is the step, unless another argument is missing then; options that are functions or classes go
    by keyword: `fa.remat(units=Block)`.

    Args:
        transforms: transforms without a step, a `fa.Transform` of your own, further chains, and functions
            that take a step and return one.

    Returns:
        A frozen record. Call it with a step or a loss function.

    Raises:
        ArgumentError: something that can't be applied to a step.

    Source: https://optax.readthedocs.io/en/latest/api/combining_optimizers.html

    Example:
        >>> recipe = fa.chain(fa.with_precision("bf16"), fa.accumulate(4), fa.clip_norm(1.0))
        >>> step = recipe(loss_fn)
        >>> [transform.name for transform in step.transforms]
        ['with_precision', 'accumulate', 'clip_norm']
        >>> @fa.accumulate(2)
        ... def loss(model, batch):
        ...     return loss_fn(model, batch)
    """
    members: list[Callable[[Any], Step]] = []
    for member in transforms:
        if isinstance(member, Chain):
            members += member.members
            continue
        problem = _problem(member)
        if problem:
            is_part = getattr(type(member), "is_optimizer_part", False)
            fix = "fa.optim.chain(..., lr=)" if is_part else "fa.chain(fa.accumulate(4), fa.clip_norm(1.0))"
            raise ArgumentError(problem, where=_WHERE, fix=fix)
        members.append(member)
    return Chain(tuple(members))


def _problem(member: Any) -> str:
    """Why something can't be a member of a chain. Empty if it can."""
    if isinstance(member, Step):
        return "fa.chain got a step, and takes transforms: call the chain with the step"
    if getattr(type(member), "is_optimizer_part", False):
        return f"fa.chain got {member!r}, which is a part of an optimizer, and no transform of a step"
    if not callable(member):
        return f"fa.chain got {member!r}, which can't be applied to a step"
    if getattr(member, "is_transform", False) and not isinstance(member, Transform):
        missing = [
            name
            for name, parameter in list(inspect.signature(member).parameters.items())[1:]
            if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        ]
        if missing:
            return f"fa.{member.__name__} needs more than a step: {', '.join(missing)}"
    return ""


class TakesStep(Protocol[P]):
    """A transform of the library. Its step may be left out."""

    @overload
    def __call__(self, step: StepLike, /, *args: P.args, **kwargs: P.kwargs) -> Step: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Transform | Chain: ...


def takes_step(make: Callable[P, Transform | Chain]) -> TakesStep[P]:
    """A transform whose first argument is a step, of a function that makes the record of its options.

    A function in the first place is the step, unless a required option is missing then.

    Example:
        >>> @fa.extend.takes_step
        ... def halved(names="*"):
        ...     def halve(grads, own, info):
        ...         return {name: grad / 2 for name, grad in grads.items()}, own
        ...     return fa.Transform("halved", fa.Phase.GRADS, apply=halve)
        >>> step = halved(loss_fn)
        >>> same = fa.chain(halved())(loss_fn)
    """
    options, where = inspect.signature(make), f"fa.{make.__name__}"

    def fits(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Whether `make` takes these arguments. With None, whether it takes the positional ones."""
        try:
            _ = options.bind_partial(*args) if kwargs is None else options.bind(*args, **kwargs)
        except TypeError:
            return False
        return True

    @functools.wraps(make)
    def transform(*args: Any, **kwargs: Any) -> Any:
        if not args:
            return make(*args, **kwargs)
        first, *rest = args
        leads = isinstance(first, Step) or (callable(first) and fits(rest, kwargs))
        if not leads and fits(args, kwargs if callable(first) else None):
            return make(*args, **kwargs)
        step = as_step(cast(StepLike, first), where)
        make_of: Callable[..., Any] = make
        return make_of(*rest, **kwargs)(step)

    step = inspect.Parameter("step", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="StepLike")
    parameters = [step, *options.parameters.values()]
    described: Any = transform
    described.__signature__ = inspect.Signature(parameters, return_annotation="Step")
    described.is_transform = True
    return described
