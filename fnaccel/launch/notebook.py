"""`notebook_launch` and `debug_launch`: run a function as several ranks, from a notebook or a test."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from fnaccel.errors import ArgumentError, LaunchError, Preempted, require
from fnaccel.launch.accelerator_use import first_use
from fnaccel.launch.accelerators import count_processes
from fnaccel.launch.failure import Failure, cause, follows
from fnaccel.launch.job import Job
from fnaccel.launch.relay import Relay
from fnaccel.launch.supervise import supervise
from fnaccel.launch.watch import TO_END

R = TypeVar("R")
_WHERE = "fa.notebook_launch"


def notebook_launch(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    processes: int | None = None,
    *,
    nodes: int = 1,
    node_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
    max_restarts: int = 0,
    cpu: bool = False,
    gpus: str | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    watchdog: float = 120.0,
    rdzv: Mapping[str, float] | None = None,
) -> list[R]:
    """Run a function as several ranks, and return its results. For notebooks and tests.

    The ranks are forks of this process: the function may be a cell's, and sees the variables of the notebook.
    Its changes to them stay in the ranks. It calls `fa.start()` itself. The output of all ranks is shown
    as it comes.

    Args:
        fn: called in each rank.
        args: its arguments.
        processes: the number of ranks on this machine. By default its accelerators, or 1.
        nodes: the number of machines. Call it with the same values on each.
        node_rank: the number of this machine, from 0. By default the machine that has `address` is number 0.
        address: a name or address of machine 0 that all machines reach.
        port: a free port there. By default 29500 on several machines, any port on one.
        max_restarts: how often all ranks are started again after a failure.
        cpu: compute on the CPU, whatever else there is.
        gpus: the GPUs that the ranks use, such as `"0,1"`. By default all.
        threads: of each rank. More than one raises if this process computes with several threads: OpenMP's
            threads do not survive a fork.
        env: environment variables of the ranks.
        watchdog: seconds for which ranks may wait for each other. 0: for ever.
        rdzv: limits of the meeting of several machines, in seconds, as `--rdzv-conf` of `fnaccel launch`:
            `{"join_timeout": 60}`.

    Returns:
        The results of this machine's ranks, in the order of their ranks. Tensors are on the CPU.

    Raises:
        ArgumentError: `fn` can't be called, or `args` is no sequence.
        LaunchError: the ranks can't be started, or CUDA was used in this process before. Or a rank failed,
            or returned a value that can't be pickled: its traceback was printed.
        KeyboardInterrupt: the ranks were interrupted.

    Example:
        >>> def train(lr):
        ...     with fa.start() as world:
        ...         return world.rank, lr
        >>> fa.notebook_launch(train, (0.1,), processes=2, cpu=True)
        [(0, 0.1), (1, 0.1)]
    """
    require(callable(fn), f"{fn!r} can't be called", _WHERE, "give a function of the notebook")
    require(
        isinstance(args, Sequence) and not isinstance(args, str),  # pyright: ignore[reportUnnecessaryIsInstance]
        f"args={args!r} is no sequence",
        _WHERE,
        "args=(value,) for one argument",
    )
    for name, count in {"processes": processes, "nodes": nodes}.items():
        whole = count is None or type(count) is int
        require(whole, f"{name}={count!r} is no whole number", _WHERE, "write a number: 2")
    _check_process(threads)
    _check_machines(nodes, node_rank, address)
    job = Job(
        function=lambda: None,
        ranks=processes,
        machines=nodes,
        machine=node_rank,
        address=address,
        port=port,
        cpu=cpu,
        gpus=gpus,
        threads=threads,
        restarts=max_restarts,
        watchdog=watchdog,
        env=dict(env or {}),
        rdzv=dict(rdzv or {}),
    )
    job = attrs.evolve(job, processes=count_processes(job, where=_WHERE))
    with tempfile.TemporaryDirectory(prefix="fnaccel-") as name, Relay() as relay, warnings.catch_warnings():
        folder = Path(name)
        # the kernel of a notebook always has threads. The ranks use none of them
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
        function = functools.partial(_call, fn, args, folder, relay, threads)
        functools.update_wrapper(function, fn)  # machines compare its name and its code
        code, outcome = supervise(attrs.evolve(job, function=function))
        if code != 0:
            _raise_for(code, folder, told=outcome is not None and outcome.told)
        files = sorted(folder.glob("*.pt"), key=lambda file: int(file.stem))
        if len(files) < job.processes:
            returned = ", ".join(file.stem for file in files)
            raise LaunchError(
                f"only {len(files)} of {job.processes} ranks returned ({returned}): the others have exited",
                where=_WHERE,
                fix="return from the function, without sys.exit() and os._exit()",
            )
        return [torch.load(file, map_location="cpu", weights_only=False) for file in files]


def debug_launch(fn: Callable[..., R], args: Sequence[Any] = (), processes: int = 2) -> list[R]:
    """Run a function as several ranks on the CPU, and return its results. For tests of a training function.

    Args:
        fn: called in each rank.
        args: its arguments.
        processes: the number of ranks.

    Returns:
        The results of the ranks, in order. Tensors are on the CPU.

    Raises:
        LaunchError: as `notebook_launch`.

    Example:
        >>> def total():
        ...     with fa.start() as world:
        ...         return int(fa.reduce(torch.tensor(world.rank), "sum"))
        >>> fa.debug_launch(total)
        [1, 1]
    """
    return notebook_launch(fn, args, processes, cpu=True)


def _check_process(threads: int) -> None:
    """See that this process can be forked, and that the ranks can work afterwards."""
    used = first_use()
    if used is not None:
        raise LaunchError(
            f"{used} was used in this process, and a driver in use does not survive the fork of the ranks",
            where=_WHERE,
            fix="restart the kernel, and use the accelerator in the function only",
        )
    if dist.is_initialized():
        raise LaunchError(
            "this process is a rank already: its world is running",
            where=_WHERE,
            fix="leave it first: call its shutdown(), or use `with fa.start() as world:`",
        )
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            f"this is the thread {threading.current_thread().name}, and signals reach the main thread only",
            where=_WHERE,
            fix="call it from the main thread, which runs the cells of a notebook",
        )
    threads_here = torch.get_num_threads()
    if threads > 1 and threads_here > 1:
        raise LaunchError(
            f"threads={threads}, and this process computes with {threads_here} threads, which a fork loses",
            where=_WHERE,
            fix="call torch.set_num_threads(1) in the first cell, or leave threads= out",
        )


def _check_machines(nodes: int, node_rank: int | None, address: str | None) -> None:
    stray = {"node_rank": node_rank, "address": address}
    names = [name for name, value in stray.items() if value]
    if nodes == 1 and names:
        raise LaunchError(
            f"{names[0]} without nodes", where=_WHERE, fix="give the number of machines: nodes=2"
        )
    if nodes > 1 and address is None:
        raise LaunchError(
            f"{nodes} machines need an address",
            where=_WHERE,
            fix="address= of the first machine, on all machines",
        )


def _call(fn: Callable[..., Any], args: Sequence[Any], folder: Path, relay: Relay, threads: int) -> None:
    """In a rank: call the function, and leave its result or its error in the folder."""
    if "ipykernel" in sys.modules:
        os.setpgid(0, 0)  # a notebook's interrupt goes to the group of the kernel, which passes it on once
    relay.enter()
    torch.set_num_threads(threads)
    rank = int(os.environ["RANK"])
    failed = folder / f"{rank}.failed"
    failed.unlink(missing_ok=True)
    try:
        _save(fn(*args), folder / f"{rank}.pt", rank)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        failure = Failure(rank=rank, code=1, when=time.monotonic(), text=text, follows=follows(error))
        with contextlib.suppress(OSError):  # a full disk
            failed.write_bytes(failure.line())
        raise


def _save(value: Any, file: Path, rank: int) -> None:
    try:
        torch.save(value, file)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ArgumentError(
            f"rank {rank} returned a {type(value).__name__} that can't be pickled: {error}",
            where=_WHERE,
            fix="return numbers, text, tensors, or lists and dicts of them",
        ) from error


def _raise_for(code: int, folder: Path, *, told: bool) -> None:
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if told and code - 128 in TO_END:  # the signal was for this process, which has ended its ranks first
        os.kill(os.getpid(), code - 128)
    if code == Preempted.CODE:
        raise LaunchError(
            "the ranks have saved and ended because of a stop request",
            where=_WHERE,
            fix="call it again to go on",
        )
    failures = Failure.read(folder.glob("*.failed"))
    first = cause(failures) if failures else None
    what = (
        f"the ranks ended with exit code {code}"
        if first is None
        else f"rank {first.rank} raised {first.text}"
    )
    raise LaunchError(what, where=_WHERE, fix="read the failure above")
