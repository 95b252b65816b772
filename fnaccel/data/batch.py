"""The inputs of a train step: a batch with its position, and a window of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from fnaccel.state import Position


@attrs.frozen(kw_only=True)
class Batch:
    """One rank's part of a global batch. It is unwrapped before the user's function sees it.

    Attributes:
        data: the batch that the loader made.
        valid: how many of its rows count. 0 marks a filler, run so that all ranks run the same
            number of forwards and masked out of loss, weight and metrics.
        rows: how many rows a full batch has on this rank.
        position: the position in the data after this batch.
        first: the place of its first row in the global batch. None if `fa.shard` did not make it.
        together: the rows of the global batch, on all ranks.
        samples: how many samples its rows were made of, on this rank. None if that is not known.
        per_sample: how many rows a sample has, which stay together. `rows` and `valid` count samples then.
        source: facts about the loader, which a checkpoint holds beside the position.

    Example:
        >>> batch = next(iter(fa.shard(loader)))
        >>> batch.rows, batch.valid, batch.position
        (4, 4, Position(epoch=0, samples=4))
    """

    data: Any
    valid: int
    rows: int
    position: Position
    first: int | None = None
    together: int = 0
    samples: int | None = None
    per_sample: int = 1
    source: Mapping[str, Any] | None = attrs.field(default=None, eq=False, repr=False)

    def replace(self, data: Any) -> Batch:
        """This batch with other data, of the same rows: its position and what counts stay.

        Example:
            >>> batch = next(iter(fa.shard(loader)))
            >>> batch = batch.replace({name: value.flip(1) for name, value in batch.data.items()})
        """
        return attrs.evolve(self, data=data)


class Window(tuple[Any, ...]):
    """Batches that make one update together: its members are the micro-batches as they stand.

    A tuple type of its own, so that it is never mistaken for a batch.

    Example:
        >>> state, metrics = train_step(state, fa.data.Window(batches))
        >>> state.updates
        1
    """

    __slots__ = ()


def made_of(rows: int, samples: int, cut_for: str) -> str:
    """A warning that rows are cut in their order, though a collate function made another number of them."""
    return (
        f"{samples} samples made {rows} rows, which are cut in their order for {cut_for}. Packed rows and "
        "crops that count one by one are exact so. Rows that belong together, as pairs do, are not: "
        f"fa.shard(loader, rows_per_sample={max(2, rows // samples)}) keeps those of a sample together"
    )
