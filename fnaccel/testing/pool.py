"""Real gloo ranks that are forked once and then fed functions, so that a test costs milliseconds.

Only processes live here. The caller chooses the functions to run and compares the results.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from fnaccel.errors import ArgumentError, LaunchError
from fnaccel.texts import ranks_of
from fnaccel.world import world

R = TypeVar("R")

RUNS_PER_GROUP = 64
"""Runs after which the ranks begin a new process group: subgroups that tests made pile up in one."""

_STOP = b"stop"
_GRACE = 5.0  # seconds that ranks get to answer once another one has failed
# asks a rank for its stacks. A loop that saves takes SIGUSR1 for itself
_STACKS = getattr(signal, "SIGRTMAX", signal.SIGUSR1)


@attrs.frozen
class _Order:
    """A task of a rank: join a new group at `store` if there is one, then call the function."""

    store: str | None
    call: bytes


@attrs.frozen
class _Answer:
    """The answer of a rank: its result pickled, or its error and the text of the traceback."""

    result: bytes | None = None
    error: bytes | None = None
    text: str = ""


class RankPool:
    """`size` processes that are the ranks of one gloo world. Use it as a context manager.

    The processes are forked on the first `run` (or `start`) and know every module that the parent
    has imported. Fork before the parent runs anything on an accelerator. A pool whose ranks died
    or hung starts again on its next use.

    Args:
        size: how many ranks.
        timeout: seconds that one `run` may take before the processes of this pool are killed.

    Raises:
        ArgumentError: `size` is below one.

    Example:
        >>> import operator
        >>> from fnaccel.testing import RankPool
        >>> with RankPool(2) as pool:
        ...     pool.run(operator.add, 1, 2)
        [3, 3]
    """

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        if size < 1:
            raise ArgumentError(
                f"a pool of {size} ranks has nobody in it", where="RankPool", fix="ask for one rank or more"
            )
        self.size = size
        self.timeout = timeout
        self._folder: Path | None = None
        self._ranks: list[ForkProcess] = []
        self._pipes: list[Connection] = []
        self._groups = 0
        self._runs = 0
        self._renew = True

    def __enter__(self) -> RankPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks. Empty before the first use."""
        return [process.pid for process in self._ranks if process.pid is not None]

    def start(self) -> None:
        """Fork the ranks, if they do not run already.

        Raises:
            LaunchError: the parent is itself part of a process group, which a fork would copy.
        """
        if self._ranks and all(process.is_alive() for process in self._ranks):
            return
        self._kill()
        if dist.is_initialized():
            raise LaunchError(
                "ranks can't be forked from a process that is part of a process group",
                where=f"RankPool({self.size})",
                fix="start the pool before the group, or call torch.distributed.destroy_process_group()",
            )
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="fnaccel_ranks_"))
            # before multiprocessing's own exit hook, which would wait for these processes for ever
            atexit.register(self.close)
        context = multiprocessing.get_context("fork")
        pairs = [context.Pipe() for _ in range(self.size)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            for rank, (_, pipe) in enumerate(pairs):
                other_ends = [end for pair in pairs for end in pair if end is not pipe]
                process = context.Process(
                    target=_serve,
                    args=(rank, self.size, self.timeout, self._folder, pipe, other_ends),
                    name=f"rank{rank}",
                )
                process.start()
                self._ranks.append(process)
        for _, pipe in pairs:
            pipe.close()
        self._pipes = [pipe for pipe, _ in pairs]
        self._renew = True

    def run(self, fn: Callable[..., R], *args: Any, **kwargs: Any) -> list[R]:
        """Call `fn(*args, **kwargs)` on every rank inside its `World`. Returns the results in rank order.

        Args:
            fn: a function at the top of a module (it is pickled by name).
            args, kwargs: its arguments, the same on every rank.

        Raises:
            Exception: the error of the lowest rank that failed, with its traceback as a note.
            LaunchError: a rank died, or did not answer in time, or its error can't be pickled.
        """
        call = pickle.dumps((fn, args, kwargs))
        self.start()
        store = None
        if self._renew or self._runs >= RUNS_PER_GROUP:
            self._groups += 1
            self._runs = 0
            store = str((self._folder or Path()) / f"group{self._groups}")
        self._runs += 1
        # a failed run may leave one rank a collective ahead of another: the next begins afresh
        self._renew = True
        order = pickle.dumps(_Order(store, call))
        with contextlib.suppress(BrokenPipeError):  # a rank that died is found below
            for pipe in self._pipes:
                pipe.send_bytes(order)
        answers = self._collect(getattr(fn, "__qualname__", repr(fn)))
        for rank, answer in enumerate(answers):
            if answer is not None and answer.result is None:
                raise _error_of(rank, answer)
        self._renew = False
        return [pickle.loads(answer.result) for answer in answers if answer and answer.result is not None]

    def _collect(self, name: str) -> list[_Answer | None]:
        answers: list[_Answer | None] = [None] * self.size
        deadline = time.monotonic() + self.timeout
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        failed = False
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                stacks = "" if failed else self._stacks(late)
                self._kill()
                if failed:
                    return answers
                error = LaunchError(
                    f"{ranks_of(late)} did not return from {name} within {self.timeout:g} s and was killed",
                    where=f"RankPool({self.size}).run",
                    fix="look for a collective that not all ranks reach, or raise timeout=",
                )
                error.add_note(stacks)
                raise error
            for pipe in [end for end in waiting if end in ready]:
                rank = waiting.pop(pipe)
                try:
                    answer: _Answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise self._death(rank, name) from None
                answers[rank] = answer
                if answer.result is None and not failed:
                    failed = True  # the others may wait for this one in a collective: not for long
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _death(self, rank: int, name: str) -> LaunchError:
        """What ended this rank, with the stacks that its fault handler wrote. Ends the other ranks."""
        process = self._ranks[rank]
        process.join(_GRACE)
        code = process.exitcode
        by = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        error = LaunchError(
            f"rank {rank} died in {name}: {by}",
            where=f"RankPool({self.size}).run",
            fix="run the function in one process to see why it ends",
        )
        if stacks := _stack_file(self._folder or Path(), rank).read_text():
            error.add_note(f"rank {rank} was in:\n{_above_the_pool(stacks)}")
        self._kill()
        return error

    def _stacks(self, ranks: list[int]) -> str:
        """The Python stacks of the threads of each of these ranks."""
        texts: list[str] = []
        for rank in ranks:
            path = _stack_file(self._folder or Path(), rank)
            with contextlib.suppress(OSError):
                os.kill(self.pids[rank], _STACKS)
                end = time.monotonic() + _GRACE
                while not (text := path.read_text()) and time.monotonic() < end:
                    time.sleep(0.01)
                time.sleep(0.05)  # the rest of a long text
                texts.append(f"rank {rank} was in:\n{_above_the_pool(path.read_text() or text)}")
        return "\n".join(texts)

    def close(self) -> None:
        """End the ranks. The pool may be used again."""
        # closing the pipes would not do: the ranks of younger pools hold copies of these ends
        with contextlib.suppress(OSError):
            for pipe in self._pipes:
                pipe.send_bytes(_STOP)
        for process in self._ranks:
            process.join(_GRACE)
        self._kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            atexit.unregister(self.close)

    def _kill(self) -> None:
        for process in self._ranks:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._ranks, self._pipes = [], []


class RankPools:
    """One `RankPool` for each number of ranks that is asked for. Use it as a context manager.

    Args:
        sizes: the pools to start at once. Other pools start on first use.
        timeout: as in `RankPool`.

    Example:
        >>> import operator
        >>> from fnaccel.testing import RankPools
        >>> with RankPools([2]) as pools:
        ...     pools.run(2, operator.add, 1, 2), pools.run(1, operator.add, 1, 2)
        ([3, 3], [3])
    """

    def __init__(self, sizes: Sequence[int] = (), *, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._pools: dict[int, RankPool] = {}
        for size in sizes:
            self.pool(size).start()

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pool(self, size: int) -> RankPool:
        """The pool of `size` ranks."""
        if size not in self._pools:
            self._pools[size] = RankPool(size, timeout=self.timeout)
        return self._pools[size]

    def run(self, ranks: int, fn: Callable[..., R], *args: Any, **kwargs: Any) -> list[R]:
        """`RankPool.run` on a world of `ranks` ranks."""
        return self.pool(ranks).run(fn, *args, **kwargs)

    def close(self) -> None:
        """End all ranks of all pools."""
        for pool in self._pools.values():
            pool.close()


def _error_of(rank: int, answer: _Answer) -> Exception:
    note = f"on rank {rank}:\n{answer.text}"
    if answer.error is not None:
        error: Exception = pickle.loads(answer.error)
        error.add_note(note)
        return error
    return LaunchError(f"a rank failed {note}", where="RankPool.run", fix="see the traceback above")


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stacks"


def _above_the_pool(stacks: str) -> str:
    """Stacks without the frames of the pool and of what forked it, which are the same on every rank."""
    threads = stacks.split("\n\n")
    return "\n\n".join(thread.split(f'  File "{__file__}"')[0].rstrip() for thread in threads)


def _serve(
    rank: int, size: int, timeout: float, folder: Path, pipe: Connection, other_ends: list[Connection]
) -> None:
    # inherited ends would keep the pipes of a parent that is gone from closing
    for end in other_ends:
        end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    stacks = _stack_file(folder, rank).open("w")
    faulthandler.enable(stacks)  # of a crash
    faulthandler.register(_STACKS, stacks)  # of a rank that hangs
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (order := pipe.recv_bytes()) != _STOP:
            pipe.send_bytes(pickle.dumps(_obey(pickle.loads(order), rank, size, timeout)))


def _obey(order: _Order, rank: int, size: int, timeout: float) -> _Answer:
    try:
        if order.store is not None or not dist.is_initialized():
            if dist.is_initialized():
                dist.destroy_process_group()
                gc.collect()  # threads of the old group end here, and not within a later job
            dist.init_process_group(
                "gloo",
                init_method=f"file://{order.store}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )
        fn, args, kwargs = pickle.loads(order.call)
        with world.start(device="cpu"):
            return _Answer(result=pickle.dumps(fn(*args, **kwargs)))
    except BaseException as error:  # pytest.fail is no Exception, and must not end the rank
        return _Answer(error=_pickled(error), text=traceback.format_exc())


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions pickle and then can't be built again
    except Exception:
        return None
    return data
