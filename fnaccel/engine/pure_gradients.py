"""`PureGradients`: the gradients of a pure update, as GRADS records and a user's functions change them.

Beside `Gradients`, which changes shards in place: here each change makes new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fnaccel.engine.gradients import check_returned
from fnaccel.tree import Tree


# a plain class: compiled code makes it
class PureGradients:
    """Gradients by the order of the parameters.

    Args:
        names: of the parameters.
        values: the gradients.

    Attributes:
        values: as they are now.
        skip: 0-d bool tensor, whether the update is left out. None if nothing may leave it out.
    """

    def __init__(
        self, names: Sequence[str], values: Sequence[torch.Tensor], skip: torch.Tensor | None
    ) -> None:
        self._names = names
        self.values = list(values)
        self.skip = skip

    def norm(self) -> torch.Tensor:
        """The Euclidean norm over all parameters, a 0-d tensor, whose derivative at 0 is 0."""
        squares = torch.stack([value.abs().square().sum() for value in self.values]).sum()
        zero = squares == 0
        return torch.where(zero, 0.0, torch.where(zero, 1.0, squares).sqrt())

    def scale_by(self, factor: Any) -> None:
        """Multiply the whole gradient."""
        self.values = [value * factor for value in self.values]

    def clamp(self, most: Any) -> None:
        """Clamp each element to at most `most` in size."""
        if not isinstance(most, torch.Tensor):
            self.values = [value.clamp(-most, most) for value in self.values]
        else:
            self.values = [value.clamp(-most.to(value.dtype), most.to(value.dtype)) for value in self.values]

    def skip_where(self, bad: torch.Tensor) -> None:
        """Leave the update out if `bad` is true."""
        self.skip = bad if self.skip is None else self.skip | bad

    def skip_where_nonfinite(self) -> None:
        """Leave the update out if the norm is NaN or infinite."""
        self.skip_where(~torch.isfinite(self.norm()))

    def skipped(self) -> torch.Tensor | None:
        """1 if the update is left out, 0 if not. None if nothing may leave it out."""
        return None if self.skip is None else self.skip.float()

    def with_copies(self, state: Tree, *_: Tree) -> Tree:
        """The state as it is: nothing writes to the values that it keeps."""
        return state

    def by_name(self, *, kept: bool = False) -> dict[str, torch.Tensor]:  # noqa: ARG002 - they are values
        """The gradients by parameter name."""
        return dict(zip(self._names, self.values, strict=True))

    def replace(self, named: Any, transform: str) -> None:
        """Take the gradients that a user's transform returned.

        Raises:
            TreeMismatchError: other names or shapes than it was given.
        """
        check_returned(named, self.by_name(), transform)
        self.values = [
            named[name].to(value.dtype) for name, value in zip(self._names, self.values, strict=True)
        ]
