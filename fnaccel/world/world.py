"""The world: which process this is, among how many, and on which device.

`start()` is the only reader of the environment besides the launcher. It returns a value. Functions that
need a world take `world=`, or the world that `start()` set in this context.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from fnaccel import _torch
from fnaccel.errors import NoWorldError, PeerLostError, WorldError, require
from fnaccel.texts import error_line
from fnaccel.world import flags, settings
from fnaccel.world._torch import let_go_of_groups
from fnaccel.world.calls import CallLog
from fnaccel.world.connections import drop_inherited
from fnaccel.world.devices import HOSTED, check_present, check_processes, open_device
from fnaccel.world.joining import JOINING, Groups, Joined, join, prefix_of
from fnaccel.world.launched import Ranks, detect
from fnaccel.world.process_control import ProcessControl
from fnaccel.world.same_order import SameOrder
from fnaccel.world.stalls import FIRST
from fnaccel.world.watcher import Watcher

R = TypeVar("R")

_RUNNING = "a running process group"
_current: ContextVar[World | None] = ContextVar("fnaccel_world", default=None)


if hasattr(os, "register_at_fork"):
    # a worker that collected a process group of its parent would wait for ever, in the group's
    # destructor, for threads that were not forked: its collector skips inherited objects
    os.register_at_fork(after_in_child=gc.freeze)
    os.register_at_fork(after_in_child=_torch.keep_inherited)
    os.register_at_fork(after_in_child=drop_inherited)


@attrs.frozen(kw_only=True)
class World(ProcessControl):
    """One process among `size`: a frozen value, and a context manager that undoes `start()`.

    Attributes:
        rank: this process, 0 to size - 1.
        size: the number of processes.
        local_rank, local_size: the same, on this machine.
        machine, machines: this machine, and how many there are.
        device: the device on which this process computes.
        backend: the name of the collective backend (`"gloo"`, `"nccl"`), or `"none"` on one rank.
        saved_by: data positions (epoch, samples) that were restored, and facts about the run of each.
        calls: the calls that need all ranks, as this rank has made them. None on one rank.
        flags: fields of a recipe that the launcher or FNACCEL_SET was given, by dotted name, for train steps.
        groups: process groups of all ranks beside the one in which train steps talk.

    Example:
        >>> world.rank, world.size, world.is_main
        (0, 1, True)
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    machine: int
    machines: int
    device: torch.device
    backend: str
    source: str = "plain python"
    calls: CallLog | None = attrs.field(default=None, repr=False, eq=False)
    flags: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)
    groups: Groups = attrs.field(factory=Groups, repr=False, eq=False)
    saved_by: dict[tuple[int, int], Mapping[str, Any]] = attrs.field(factory=dict, repr=False, eq=False)
    _watcher: Watcher | None = attrs.field(default=None, repr=False, eq=False, alias="watcher")
    _owns_group: bool = attrs.field(default=False, repr=False, alias="owns_group")
    _tokens: list[Token[World | None]] = attrs.field(factory=list, repr=False, eq=False)
    _guests: weakref.WeakSet[Any] = attrs.field(factory=weakref.WeakSet, repr=False, eq=False)
    _resources: dict[Any, Any] = attrs.field(factory=dict, repr=False, eq=False)

    def barrier(self) -> None:
        """Wait until every rank has come here.

        Raises:
            PeerLostError: a rank left, exited or made another call.
        """
        if self.calls is not None:
            self.calls.run("world.barrier", dist.barrier, group=self.groups.barrier)
        elif self.size > 1:
            dist.barrier()

    def all_come(self, limit: float) -> bool:
        """Whether all ranks come to this place within `limit` seconds. A rank that comes alone gets False."""
        return self._watcher is None or self._watcher.all_come(limit)

    def same_order(self, part: int = 0, parts: int = 1) -> SameOrder | None:
        """A new sequence of things that all ranks do in one order. Every rank makes it. None on one rank.

        Args:
            part: which of `parts` equal parts of the ranks this one is in. Those of a part compare.
            parts: the number of parts.
        """
        return None if self._watcher is None else self._watcher.same_order(part, parts)

    def abandon(self, error: Exception) -> None:
        """Tell ranks that may wait in the call of this rank that an error has ended it, until none waits."""
        if self._watcher is not None:
            self._watcher.abandon(error)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # Preempted means that all ranks leave, sys.exit on one rank does not
        clean = error is None or getattr(kind, "on_all_ranks", False)
        self._close(_LEFT if clean else _reason(error), clean=clean, follows=isinstance(error, PeerLostError))

    def enter(self) -> None:
        """Be the world of this context, until `close`."""
        self._tokens.append(_current.set(self))

    def close_with(self, guest: Any) -> None:
        """Call `guest.close()` before the process group ends: the guest communicates over it."""
        self._guests.add(guest)

    def open_meshes(self) -> list[Any]:
        """The meshes of the train steps of this world that are not closed."""
        return [guest.mesh for guest in self._guests if not getattr(guest, "closed", False)]

    def resource(self, kind: Callable[[World], R]) -> R:
        """The one `kind(self)` of this world, made when it is first asked for.

        Its `close(clean=)` is called before the processes part, and may raise.
        """
        if kind not in self._resources:
            self._resources[kind] = kind(self)
        return self._resources[kind]

    def close(self, *, clean: bool = True) -> None:
        """Leave the world. If `clean`, wait some seconds for ranks that are about to leave too.

        The other ranks learn that this one has left: a collective in which they wait for it raises.
        Train steps that span several ranks are closed with the world. Saves in the background end before.

        Raises:
            CheckpointError: such a save failed, and nobody was told.
        """
        self._close(_LEFT, clean=clean)

    def _close(self, left: str, *, clean: bool, follows: bool = False) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave, left, clean=clean, follows=follows)
            while self._resources:
                _, resource = self._resources.popitem()
                stack.callback(resource.close, clean=clean)

    def _leave(self, left: str, *, clean: bool, follows: bool) -> None:
        while self._tokens:
            token = self._tokens.pop()
            with contextlib.suppress(ValueError):  # closed in another context than it began
                _current.reset(token)
        alone = self.size == 1 and self.source != _RUNNING  # a mesh of one began its own group
        ends_group = (self._owns_group or alone) and dist.is_initialized()
        if self._watcher is not None:
            everyone = self._watcher.leave(left, clean=clean, follows=follows, wait=ends_group)
            if ends_group and not everyone:
                self._watcher.cut()
        if ends_group:
            if self.size > 1:
                for guest in list(self._guests):
                    guest.close()
            self.groups.close()
            let_go_of_groups()
            _torch.end_groups()
            # the threads of a group that outlives this run into the interpreter's end, and abort
            gc.collect()


_LEFT = "left the world"


def _reason(error: BaseException | None) -> str:
    """Why a rank leaves, as the predicate of a sentence."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return f"ended with exit code {code}"
    return f"ended with {error_line(error)}"


def current(world: World | None = None) -> World:
    """`world` itself, or the one that `start()` set in this context.

    Raises:
        NoWorldError: there is none (threads start with an empty context).
    """
    active = world if world is not None else _current.get()
    if active is None:
        raise NoWorldError(
            "no world was started in this context",
            where="a function that needs to know the ranks",
            fix="call it inside `with fa.start() as world:`, or pass world=",
        )
    return active


def find_current() -> World | None:
    """The world of this context, or None."""
    return _current.get()


def announce(world: World) -> None:
    """Set LOCAL_RANK in the environment for runtimes that read it."""
    os.environ["LOCAL_RANK"] = str(world.local_rank)


def start(
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    watchdog: float = 120.0,
    compile_cache: str | os.PathLike[str] | None = None,
) -> World:
    """Join the other processes and return the `World`. Use it as a context manager.

    Reads the variables of `fnaccel launch`, torchrun, mpirun, SLURM or plain `python`. A process group
    that already runs is used, and left running.

    Without `fnaccel launch`, two fields of the variable FNACCEL_SET are used: `launch.cpu=true` if no device
    is given, and `launch.watchdog` instead of `watchdog`.

    Args:
        device: the device to compute on. By default the accelerator of this local rank, or the CPU.
        backend: collective backend. By default the device decides.
        timeout: seconds that a collective may take, and that ranks wait for each other here. By default a
            collective may take longer than all limits of the watchdog, which shows the stack of each rank,
            and ranks wait 600 seconds here.
        watchdog: seconds for which ranks may wait for each other in one phase of a step. Then the job ends
            with exit code 76, and the place and the stack of each rank. 0: never. Under `fnaccel launch`
            its option `--watchdog` is used.
        compile_cache: folder for the compiled code of torch.compile, for this and later processes. By
            default a folder in the temporary files. Ranks may share it.

    Raises:
        WorldError: the environment contradicts itself, or has fewer devices than processes.
        ArgumentError: `watchdog` is negative, or `timeout` is not above 0.
        ConfigError: FNACCEL_SET is not a list of `KEY=VALUE`.

    Example:
        >>> with fa.start() as world:
        ...     world.print(f"{world.size} rank on {world.device}")
        1 rank on cpu
    """
    require(timeout is None or timeout > 0, f"timeout={timeout!r}", "fa.start", "seconds, such as 600")
    require(watchdog >= 0, f"watchdog={watchdog!r}", "fa.start", "seconds, such as 120, or 0 for none")
    if compile_cache is not None:
        folder = Path(compile_cache).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Inductor and Triton read them when they need them
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    ranks = _ranks_of_running_group() if dist.is_initialized() else detect(os.environ)
    fields = settings.for_start(os.environ)
    chosen = _choose_device("cpu" if device is None and fields.get("launch.cpu") else device, ranks)
    limit = float(os.environ.get("FNACCEL_WATCHDOG") or fields.get("launch.watchdog", watchdog))
    joined: Joined | None = None
    if not dist.is_initialized() and ranks.size > 1:
        longest = 2 * FIRST * max(limit, float(os.environ.get("FNACCEL_LAUNCHER_WATCHDOG", "0")))
        collective = max(JOINING, longest) if timeout is None else timeout
        joining = JOINING if timeout is None else timeout
        joined = join(ranks, chosen, backend, collective, os.environ, joining=joining)
    if chosen.type not in HOSTED:
        torch.accelerator.set_device_index(chosen.index or 0)
    outer = _current.get() if joined is None else None
    if outer is not None and outer.size == ranks.size:  # a world inside of another one, with the same ranks
        calls, watcher, groups = outer.calls, None, outer.groups
    else:
        calls, watcher = _watched(ranks, joined, limit)
        groups = Groups() if joined is None else joined.groups
    world = World(
        rank=ranks.rank,
        size=ranks.size,
        local_rank=ranks.local_rank,
        local_size=ranks.local_size,
        machine=ranks.machine,
        machines=ranks.machines,
        device=chosen,
        backend=str(dist.get_backend()) if dist.is_initialized() else "none",
        source=ranks.source,
        calls=calls,
        flags=flags.for_steps(),
        groups=groups,
        watcher=watcher,
        owns_group=joined is not None,
    )
    world.enter()
    return world


def _ranks_of_running_group() -> Ranks:
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        launched = detect(os.environ)
    except WorldError:
        launched = Ranks()
    if (launched.rank, launched.size) == (rank, size):
        return attrs.evolve(launched, source=_RUNNING)
    return Ranks(rank=rank, size=size, local_rank=rank, local_size=size, source=_RUNNING)


def _choose_device(device: torch.device | str | None, ranks: Ranks) -> torch.device:
    device_name = device if device is not None else os.environ.get("FNACCEL_DEVICE") or None
    if device_name is not None:
        chosen = open_device(device_name)
    else:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        chosen = accelerator if accelerator is not None else torch.device("cpu")
    check_processes(chosen, ranks.size)
    if chosen.type in HOSTED:
        return chosen if chosen.type != "cpu" else torch.device("cpu")
    check_present(chosen)
    count = torch.accelerator.device_count()
    named: Any = chosen.index  # None if the device has no number, despite torch's stub
    index: int = ranks.local_rank if named is None else named
    if index >= count:
        raise WorldError(
            f"local rank {ranks.local_rank} needs {chosen.type}:{index}, and there are {count}",
            where="fa.start",
            fix=f"start at most {count} processes on this machine, or pass device='cpu'",
        )
    return torch.device(chosen.type, index)


_worlds: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _watched(ranks: Ranks, joined: Joined | None, limit: float) -> tuple[CallLog | None, Watcher | None]:
    """The log of this rank's calls and the watcher of the other ranks, or None on one rank."""
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    if (
        ranks.size == 1
        or group is None
        or not {"gloo", "nccl"} & {*re.split("[:,]", str(dist.get_backend_config()))}
    ):
        return None, None
    number = _worlds[group] = _worlds.get(group, 0) + 1
    store = _torch.PrefixStore(prefix_of(number), _torch.default_store() if joined is None else joined.store)
    log = CallLog()
    watcher = Watcher(
        store,
        log,
        rank=ranks.rank,
        size=ranks.size,
        host=None if joined is None else joined.host,
        keep=frozenset() if joined is None else joined.other_ports,
        limit=0.0 if joined is None else limit,  # the owner of a group ends its processes itself
        kills=ranks.source != "fnaccel launch",
    )
    return log, watcher
