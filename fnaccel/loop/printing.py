"""`print_in_order`: the lines of all ranks, in the order of ranks."""

from __future__ import annotations

import io
from typing import IO, Any

from fnaccel.collectives import gather_objects
from fnaccel.world.every_rank import every_rank
from fnaccel.world.world import World, current


@every_rank
def print_in_order(
    *values: object, sep: str = " ", file: IO[str] | None = None, world: World | None = None
) -> None:
    """Print a line of each rank, in the order of ranks. Rank 0 writes them all.

    All ranks call it. On several ranks each line begins with its rank.

    Args:
        values: as `print` takes them. They may differ between ranks.
        sep: the text between two values.
        file: where rank 0 writes. By default standard output.
        world: the world, if none was started in this context.

    Raises:
        PeerLostError: a rank left, exited or made another call.

    Example, on 2 ranks:
        >>> import io; written = io.StringIO()
        >>> fa.print_in_order("rows", 8 - world.rank, file=written)
        >>> written.getvalue() if world.is_main else "[rank 0] rows 8\\n[rank 1] rows 7\\n"
        '[rank 0] rows 8\\n[rank 1] rows 7\\n'
    """
    there = current(world)
    text = io.StringIO()
    print(*values, sep=sep, end="", file=text)
    texts: list[Any] = gather_objects(text.getvalue(), world=there)
    if there.is_main:
        for rank, line in enumerate(texts):
            print(line if there.size == 1 else f"[rank {rank}] {line}", file=file, flush=True)
