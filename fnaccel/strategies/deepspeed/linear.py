"""DeepSpeed replaces `torch.nn.functional.linear` for stage 3. Here that holds only while its engine runs.

Its function keeps no gathered weight for backward, and gives up a fused kernel for that. DeepSpeed itself
leaves it in place for the life of the process, so that sums of other models would round in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch

Linear = Callable[..., torch.Tensor]


class LinearFunction:
    """The linear function of one engine: DeepSpeed's if the engine replaces torch's, or None."""

    def __init__(self) -> None:
        self._replacement: Linear | None = None

    @contextlib.contextmanager
    def built(self) -> Generator[None]:
        """Note the function that DeepSpeed puts in place as the body builds it, and put torch's back."""
        functions: Any = torch.nn.functional
        before = functions.linear
        try:
            yield
        finally:
            if functions.linear is not before:
                self._replacement = functions.linear
            functions.linear = before

    @contextlib.contextmanager
    def active(self) -> Generator[None]:
        """Have the engine's function in place while the body runs."""
        functions: Any = torch.nn.functional
        before = functions.linear
        functions.linear = self._replacement or before
        try:
            yield
        finally:
            functions.linear = before
