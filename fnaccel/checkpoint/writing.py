"""One save, from the state to a committed checkpoint, on any thread.

    begin    every rank: encode the tree, choose its own parts. Rank 0: make the directory to fill
    run      every rank: write its file. Rank 0: write the manifest, commit, remove old checkpoints

Ranks meet after each. A failure on one rank fails on all ranks, and nothing becomes visible.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Generator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from fnaccel.checkpoint import provenance, random_streams, stored_states
from fnaccel.checkpoint.all_ranks import together
from fnaccel.checkpoint.disk import durable, publish
from fnaccel.checkpoint.disk.durable import FileRecord
from fnaccel.checkpoint.disk.garbage import no_collection
from fnaccel.checkpoint.disk.retention import Metrics, Retention
from fnaccel.checkpoint.format.boxes import Part, whole
from fnaccel.checkpoint.format.items import of_part
from fnaccel.checkpoint.format.manifest import Manifest, Piece, Stored, file_name
from fnaccel.checkpoint.format.safetensors import widest_first, write_items
from fnaccel.checkpoint.format.values import Encoded, encode
from fnaccel.checkpoint.format.walk import shown
from fnaccel.checkpoint.hooks import Registered
from fnaccel.checkpoint.machines import Machines
from fnaccel.errors import ArgumentError, CheckpointError, NotSerializableError
from fnaccel.state import TrainState
from fnaccel.tree import Tree
from fnaccel.world.world import World

Hold = Callable[[dict[str, Part]], dict[str, Part]]
"""Gives parts of a state values that stay as they are."""


@attrs.frozen
class _WrittenFile:
    """The contents of one rank's file: pieces of tensors."""

    name: str
    record: FileRecord
    tensors: tuple[Stored, ...]


@attrs.frozen(kw_only=True)
class _Ready:
    """The message of a rank to all ranks before any write. Rank 0 adds the directory."""

    place: tuple[Path, int] | None = None
    streams: dict[str, torch.Tensor]


class Writing:
    """One save under way.

    Args:
        root: the directory of all checkpoints.
        retention: which of them stay.
        world: the ranks.
        where: the public function, for messages.
        metrics: of this checkpoint, if there are any.
        each_machine: whether machines do not share the directory.

    Attributes:
        parts: the blocks of tensors that this rank writes, by their names in its file.
        over: the group in which ranks meet after `begin`. None: the world's group.
    """

    def __init__(
        self,
        root: Path,
        retention: Retention,
        world: World,
        where: str,
        *,
        metrics: Metrics | None,
        each_machine: bool = False,
    ) -> None:
        self.parts: dict[str, Part] = {}
        self._paths: dict[str, str] = {}
        self.over: dist.ProcessGroup | None = None
        self._root = root
        self._retention = retention
        self._world = world
        self._where = where
        self._metrics = metrics
        self._machines = Machines.found(world, apart=each_machine)
        self._lock = contextlib.ExitStack()
        self._staged: Path | None = None
        self._number = 0

    def begin(
        self,
        state: Tree,
        step: int | None,
        metadata: Tree,
        *,
        replica: stored_states.Replica | None = None,
        hold: Hold | None = None,
    ) -> None:
        """Choose the parts to write, and make the directory. Only `hold` reads a tensor.

        Args:
            state, step, metadata: see `fa.save`.
            replica: this rank's, if replicas hold values of their own.
            hold: replaces this rank's parts by copies, if training goes on during the save.

        Raises:
            NotSerializableError, StaleStateError, ArgumentError, CheckpointError: see `fa.save`.
        """
        machines = self._machines
        numbered = functools.partial(_number, self._root, state, step, self._where)
        # rank 0's number, and not one of each machine
        number = together(self._world, self._where, numbered)[0] if machines.several else None

        def prepare() -> _Ready:
            ready = self._choose_parts(state, metadata, replica)
            if hold is not None:
                self.parts = hold(self.parts)
            if not machines.leads:
                return ready
            return attrs.evolve(ready, place=self._stage(numbered() if number is None else number))

        with self._undone() as lock:
            ranks = together(self._world, self._where, prepare)
            self._lock = lock.pop_all()
        place = ranks[machines.lead()].place
        assert place is not None
        self._staged, self._number = place
        self._root = self._staged.parent  # the one that is written, if ranks were given several
        self._save_id = ranks[0].place[0].name if ranks[0].place is not None else ""
        self._call_hooks("before_save", self._staged, state)
        if machines.leads:
            for rank, ready in enumerate(ranks):
                if machines.lead(rank) == machines.rank:
                    self.parts.update(_stream_parts(rank, ready.streams))

    def _stage(self, number: int) -> tuple[Path, int]:
        """Make the directory to fill, and hold its lock until the end of the save."""
        publish.check_free(self._root, number, self._where)
        self._staged = publish.stage(self._root, number)
        self._lock.enter_context(publish.held(self._staged))
        publish.check_alone(self._staged, self._where)
        return self._staged, number

    def run(self) -> Path:
        """Write, commit and remove old checkpoints. Returns the directory of the checkpoint.

        Raises:
            CheckpointError: a rank failed. Raised on every rank, and nothing is visible.
        """
        with self._undone(), no_collection():
            written = together(self._world, self._where, self._write, over=self.over)
            together(self._world, self._where, functools.partial(self._finish, written), over=self.over)
            if self._machines.several:
                together(self._world, self._where, self._retain, over=self.over)
        path = self._root / publish.name_of(self._number)
        self._call_hooks("after_save", path)
        return path

    def _call_hooks(self, name: str, *args: Any) -> None:
        registered = self._world.resource(Registered)
        if registered.hooks:
            with self._undone() as lock:
                together(self._world, self._where, lambda: self._run_hooks(name, *args), over=self.over)
                self._lock = lock.pop_all()

    def _run_hooks(self, name: str, *args: Any) -> None:
        self._world.resource(Registered).run(name, *args)
        if name == "before_save" and self._staged is not None:
            taken = publish.taken_names(self._staged)
            if taken:
                raise CheckpointError(
                    f"a before_save hook wrote or removed {taken[0]}, which belongs to the save",
                    where=self._where,
                    fix="let the hook write files with other names into the directory",
                )

    @contextlib.contextmanager
    def _undone(self) -> Generator[contextlib.ExitStack]:
        """Remove the directory if the body fails: all ranks have met, so none still writes into it."""
        with self._lock as lock:
            try:
                yield lock
            except Exception:
                if self._machines.leads and self._staged is not None:
                    with contextlib.suppress(OSError):
                        durable.remove(self._staged)
                raise

    def _choose_parts(self, state: Tree, metadata: Tree, replica: stored_states.Replica | None) -> _Ready:
        """Choose the parts that this rank writes. Its random streams go to another rank if it has no file."""
        tree, notes = encode(state, self._where), _encoded_metadata(metadata, self._where)
        self.parts, self._paths = {}, {}
        # the tensors themselves are not kept: a state may be donated while it is written
        self._tensors = {path: _stored(path, value) for path, value in tree.tensors.items()}
        for path, value in tree.tensors.items():
            place = path if replica is None else replica.place(path, value)
            if place != path:
                self._tensors[place] = _stored(place, value)
            for number, part in enumerate(self._machines.parts_of(value)):
                writes = part.writes if replica is None or place == path else replica.writes(value)
                if writes and part.box.numel:
                    name = place if number == 0 else _free_name(place, number, tree.tensors)
                    self.parts[name], self._paths[name] = part, place
        self._tree, self._metadata = tree.structure, notes.structure
        # one rank writes it, so the other ranks do not format the plan or walk the modules
        self._written_by = provenance.describe(state, self._world.size) if self._machines.leads else {}
        if replica is not None and replica.count > 1:
            self._written_by["replicas"] = replica.count
        captured = random_streams.capture(self._world.device) if tree.has_state else {}
        if not self.parts:
            return _Ready(streams=captured)
        self.parts.update(_stream_parts(self._world.rank, captured))
        return _Ready(streams={})

    def _write(self) -> _WrittenFile | None:
        """Write this rank's file. None if it has nothing to write."""
        if not self.parts or self._staged is None:
            return None
        name = file_name(self._world.rank, self._world.size)
        items = [of_part(entry, self.parts[entry].local) for entry in sorted(self.parts)]
        record = write_items(self._staged / name, widest_first(items))
        pieces: list[Stored] = []
        for entry, part in self.parts.items():
            path = self._paths.get(entry, entry)
            tensor = self._tensors.get(path) or _stored(path, part.local)
            piece = Piece(name, part.box, "" if entry == path else entry)
            pieces.append(Stored(path, tensor.dtype, tensor.shape, (piece,)))
        return _WrittenFile(name, record, tuple(pieces))

    def _finish(self, written: Sequence[_WrittenFile | None]) -> None:
        if self._machines.leads and self._staged is not None:
            described = self._describe(written)
            if self._world.resource(Registered).hooks:
                durable.sync_files(self._staged)
            publish.commit(self._staged, self._root, described, self._where)
            publish.sweep(self._root)
            if not self._machines.several:
                self._retention.apply(self._root, self._number)

    def _retain(self) -> None:
        """Remove old checkpoints, once all machines have the new one."""
        if self._machines.leads:
            self._retention.apply(self._root, self._number)

    def _describe(self, written: Sequence[_WrittenFile | None]) -> Manifest:
        tensors = dict(self._tensors)
        files = {file.name: file for file in written if file is not None}
        writer = {file.name: rank for rank, file in enumerate(written) if file is not None}
        for stored in (stored for file in files.values() for stored in file.tensors):
            path, tensor = stored.path, tensors.get(stored.path)
            if tensor is None and path.startswith((f"{random_streams.ROOT}/", f"{stored_states.ROOT}/")):
                tensor = attrs.evolve(stored, pieces=())
            if tensor is None or (tensor.dtype, tensor.shape) != (stored.dtype, stored.shape):
                raise CheckpointError(
                    f"{path} is {stored} on one rank, and {tensor or 'missing'} on rank 0",
                    where=self._where,
                    fix="save the same tree on every rank",
                )
            tensors[path] = attrs.evolve(tensor, pieces=tensor.pieces + stored.pieces)
        own: dict[str, Any] = {}
        if self._machines.several:
            own = {
                "machine": self._machines.here,
                "machines": len(set(self._machines.of)),
                "save": self._save_id,
            }
            tensors = {
                path: attrs.evolve(
                    stored,
                    pieces=self._machines.own_copies((writer[piece.file], piece) for piece in stored.pieces),
                )
                for path, stored in tensors.items()
            }
        named = {piece.file for stored in tensors.values() for piece in stored.pieces}
        return Manifest(
            step=self._number,
            tree=self._tree,
            metadata=self._metadata,
            tensors=tensors,
            files={name: file.record for name, file in files.items() if name in named},
            written_by={**self._written_by, "git": provenance.commit_of_program(), **own},
            metrics={} if self._metrics is None else attrs.asdict(self._metrics),
        )


def _stream_parts(rank: int, captured: dict[str, torch.Tensor]) -> dict[str, Part]:
    return {
        f"{random_streams.ROOT}/{rank}/{kind}": Part(whole(tuple(value.shape)), value, True)
        for kind, value in captured.items()
    }


def _free_name(path: str, number: int, taken: Container[str]) -> str:
    """The name in a file of a further block of one tensor."""
    name = f"{path}#{number}"
    return name if name not in taken else _free_name(f"{path}#", number, taken)


def _stored(path: str, value: torch.Tensor) -> Stored:
    return Stored(path, value.dtype, tuple(value.shape), ())


def _encoded_metadata(metadata: Tree, where: str) -> Encoded:
    notes = encode(metadata)
    if notes.tensors:
        raise NotSerializableError(
            f"metadata holds a tensor: {shown(next(iter(notes.tensors)))}",
            where=where,
            fix="put tensors in the state, or numbers in metadata: x.tolist()",
        )
    return notes


def _number(root: Path, state: Tree, step: int | None, where: str) -> int:
    if step is None and isinstance(state, TrainState):
        step = state.step
    if step is None:
        newest = publish.checkpoints(root)
        return newest[-1].step + 1 if newest else 0
    if type(step) is not int or not 0 <= step < 10**19:
        raise ArgumentError(f"step={step!r} can't number a checkpoint", where=where, fix="an int from 0 on")
    return step
