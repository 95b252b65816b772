"""Count the collectives of this process: a wrong gradient sync is numerically right, but it costs.

Calls of torch's c10d operators are counted, so plain calls, DDP's reducer (which is C++), FSDP2, DTensor
and compiled code count alike. torch's profiler records them. A dispatch mode would see them too, but
`torch.compile` compiles nothing under a dispatch mode, so the measurement would change the program.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Mapping

import attrs

from fnaccel import _torch
from fnaccel.errors import ArgumentError
from fnaccel.models.operation_counts import COLLECTIVE_KINDS

_PREFIX = "c10d::"


@attrs.frozen
class CollectiveCounts:
    """How many collectives of each kind this process issued.

    Attributes:
        counts: kind -> number. Kinds are `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`,
            `scatter`, `gather`, `reduce`, `all_to_all`, `send`, `recv` and `barrier`.
    """

    counts: Mapping[str, int] = attrs.field(factory=dict[str, int], converter=dict[str, int])

    @property
    def total(self) -> int:
        """Collectives of all kinds."""
        return sum(self.counts.values())

    def __getitem__(self, kind: str) -> int:
        return self.counts.get(kind, 0)


class CollectiveCounter:
    """The value of `count_collectives`. `result` is set once the block has ended."""

    def __init__(self) -> None:
        self._result: CollectiveCounts | None = None

    @property
    def result(self) -> CollectiveCounts:
        """The counts.

        Raises:
            ArgumentError: the block has not ended.
        """
        if self._result is None:
            raise ArgumentError(
                "the collectives are still being counted",
                where="count_collectives().result",
                fix="read it after the `with` block",
            )
        return self._result

    @property
    def counts(self) -> Mapping[str, int]:
        """Kind -> number, of `result`."""
        return self.result.counts

    @property
    def total(self) -> int:
        """Collectives of all kinds, of `result`."""
        return self.result.total


@contextlib.contextmanager
def count_collectives() -> Generator[CollectiveCounter]:
    """Count the collectives that this process issues inside the block, by kind.

    Blocks do not nest, and none may run under another profiler: torch has one at a time.

    Example, on 2 ranks:
        >>> from fnaccel.testing import count_collectives
        >>> with count_collectives() as counted:
        ...     every = fa.gather(torch.ones(2**14))
        >>> dict(counted.counts)  # one for the signature of the tree, one for its leaves
        {'all_gather': 2}
    """
    counter = CollectiveCounter()
    with _torch.recording_operators() as names:
        yield counter
    counts = Counter(_kind(name) for name in names if name.startswith(_PREFIX))
    counter._result = CollectiveCounts(dict(sorted(counts.items())))  # pyright: ignore[reportPrivateUsage] # noqa: SLF001


def _kind(name: str) -> str:
    bare = name.removeprefix(_PREFIX).strip("_")
    return COLLECTIVE_KINDS.get(bare, bare)
