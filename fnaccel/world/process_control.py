"""Code for some ranks only: the main rank, the last, one by number, the first of each machine."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

from fnaccel.errors import WorldError

P = ParamSpec("P")
R = TypeVar("R")


class ProcessControl:
    """The part of a `World` that runs code on some of the ranks."""

    __slots__ = ()

    rank: int
    size: int
    local_rank: int
    local_size: int

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        raise NotImplementedError

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank, which often has a shorter share of the data."""
        return self.rank == self.size - 1

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0 only. `fa.print_in_order` prints the line of every rank."""
        if self.is_main:
            builtins.print(*values, **options)

    @contextlib.contextmanager
    def main_first(self, *, local: bool = False) -> Generator[None]:
        """Rank 0 runs the body before the others (`local=True`: the first of each machine).

        Example:
            >>> with world.main_first():  # rank 0 downloads, the others read the file
            ...     dataset = torch.utils.data.TensorDataset(torch.ones(8, 3))
        """
        first = self.is_local_main if local else self.is_main
        if not first:
            self.barrier()
        try:
            yield
        finally:
            if first:
                self.barrier()

    def on_main(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: run on rank 0 only. The other ranks get None."""
        return _only(fn, self.is_main)

    def on_local_main(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: run on the first process of each machine only."""
        return _only(fn, self.is_local_main)

    def on_last(self, fn: Callable[P, R]) -> Callable[P, R | None]:
        """Decorator: run on the last rank only. The other ranks get None.

        Example, on 2 ranks:
            >>> @world.on_last
            ... def where():
            ...     return world.rank
            >>> fa.collectives.gather_objects(where())
            [None, 1]
        """
        return _only(fn, self.is_last)

    def on_process(self, rank: int) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Decorator: run on one rank only. The other ranks get None.

        Raises:
            WorldError: there is no such rank.
        """
        _check(rank, self.size, "rank", "world.on_process")
        return lambda fn: _only(fn, self.rank == rank)

    def on_local_process(self, local_rank: int) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Decorator: run on one process of each machine only. The others get None.

        Raises:
            WorldError: this machine has no such process.

        Example, on 2 ranks:
            >>> @world.on_local_process(1)
            ... def download():
            ...     return "done"
            >>> fa.collectives.gather_objects(download())
            [None, 'done']
        """
        _check(local_rank, self.local_size, "local rank", "world.on_local_process")
        return lambda fn: _only(fn, self.local_rank == local_rank)


def _check(number: int, size: int, kind: str, where: str) -> None:
    if not 0 <= number < size:
        raise WorldError(
            f"there is no {kind} {number} among {size}",
            where=where,
            fix=f"choose a {kind} from 0 to {size - 1}",
        )


def _only(fn: Callable[P, R], here: bool) -> Callable[P, R | None]:
    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if here else None

    return run
