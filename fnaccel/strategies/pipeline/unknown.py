"""A value of another stage: it has a shape and no meaning, and so has all that is computed from it.

Code before a stage's own blocks runs on such values. Where one reaches a block, the loss, or a decision of
Python's, an error names it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from fnaccel import tree
from fnaccel.extend import CapabilityError
from fnaccel.strategies.pipeline._torch import as_plain, base_of
from fnaccel.tree import Tree

_READ = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    *("__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__"),
}
"""Functions that read a value on the host."""
_KNOWN = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
}
"""Functions whose result depends on the shape alone."""
_OF_FIRST = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""Functions that take the shape, the dtype or the device of their second argument alone."""
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__"}
"""Functions that change their first argument, beside those whose name ends in an underscore."""


class Unknown(torch.Tensor):
    """A tensor of NaN, or of zeros where the dtype has none."""

    what: str

    @staticmethod
    def of(value: torch.Tensor, what: str) -> Unknown:
        """A tensor, from now on a value of another stage. `what` names that, for messages."""
        made: Any = value
        made.__class__ = Unknown  # `as_subclass` would make a view, which FSDP2 does not take from its units
        made.what = what
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function. What it computes or changes is unknown, too."""
        name = getattr(func, "__name__", "")
        given = [x for x in tree.leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        newest = [x for x in given if isinstance(x, Unknown)][-1]
        if name in _READ:
            newest.refuse()
        result = as_plain(func, args, kwargs or {})
        if name in _KNOWN or (name in _OF_FIRST and not isinstance(args[0], Unknown)):
            return result
        out = tree.leaves((kwargs or {}).get("out", ()))
        if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            out += tree.leaves(args[0])
        out += [base for x in out if (base := base_of(x)) is not None]
        computed = [x for x in tree.leaves(result) if all(x is not other for other in given)]
        for value in (*out, *computed):
            if type(value) is torch.Tensor:
                Unknown.of(value, newest.what)
        return result

    def refuse(self) -> NoReturn:
        """Raise CapabilityError: it depends on another stage."""
        raise unknown(self.what)


def check_known(value: Tree) -> None:
    """Raise CapabilityError if a tree holds a value of another stage."""
    for leaf in tree.leaves(value):
        if isinstance(leaf, Unknown):
            leaf.refuse()


def unknown(what: str) -> CapabilityError:
    """The error for a use of a value that another stage has."""
    return CapabilityError(
        f"the loss depends on {what}, which lies on another stage",
        where="the loss function under fa.pipeline()",
        fix="put it on the stage that uses it: fa.pipeline(split={path: stage}); or return it from the block "
        "beside the activation; a head with the weight of an embedding: a module, head.weight = embed.weight",
    )
