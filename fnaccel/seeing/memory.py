"""Memory: the peak of each phase, and the tensors that filled it if it runs out."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import torch

from fnaccel.errors import FnaccelError
from fnaccel.world.progress_marks import NOW, Mark, listening
from fnaccel.world.world import find_current

MIB = 1024.0 * 1024.0
_ROWS = 12
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SAYINGS = (
    "out of memory",
    "can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, FnaccelError):  # it may quote the error of another rank
        return False
    return isinstance(error, RuntimeError) and any(saying in str(error) for saying in _SAYINGS)


class Peaks(contextlib.AbstractContextManager["Peaks"]):
    """In the body, the peak of memory in each phase of a step.

    On a device it is the peak that torch allocated. On the CPU it is the peak of resident memory, which Linux
    counts for the whole process: about 0.1 ms for each phase.

    Args:
        device: the compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[str, float] = {}
        self._phase = ""
        self._listening = listening(self._enter)

    def __enter__(self) -> Peaks:
        self._begin()
        self._listening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.__exit__(kind, error, trace)

    def taken(self) -> dict[str, float]:
        """Peaks in MiB since the last call: `peak_mib`, and those of phases, such as `peak_mib/forward`."""
        self._end()
        peaks, self._peaks = self._peaks, {}
        self._begin()
        return {"peak_mib": max(peaks.values(), default=0.0)} | {
            f"peak_mib/{phase.replace(' ', '_')}": peak for phase, peak in peaks.items()
        }

    def _enter(self, mark: Mark) -> None:
        self._end()
        self._begin()
        self._phase = mark.phase

    def _begin(self) -> None:
        self._phase = NOW.phase
        if self._device.type == "cpu":
            with contextlib.suppress(OSError):
                _CLEAR.write_text("5")
        else:
            torch.get_device_module(self._device).reset_peak_memory_stats(self._device)

    def _end(self) -> None:
        peak = _peak(self._device)
        if peak is not None:
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0.0))


def _peak(device: torch.device) -> float | None:
    """In MiB. None if the system does not say."""
    if device.type != "cpu":
        return float(torch.get_device_module(device).max_memory_allocated(device)) / MIB
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), None)


@attrs.frozen
class Live:
    """Live storages of one kind: device, dtype and shape (of the largest tensor on each), and names."""

    device: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    bytes: int
    names: tuple[str, ...]


def live_storages(names: Mapping[int, str] | None = None) -> list[Live]:
    """The storages that hold memory now, largest first: each storage once, those that look alike in one row.

    Args:
        names: of tensors, by the address of their storage, such as `"params/head.weight"`. Those that begin
            alike share rows.
    """
    largest: dict[tuple[str, int], torch.Tensor] = {}
    for tensor in _tensors():
        key = str(tensor.device), tensor.untyped_storage().data_ptr()
        if key[1] and (key not in largest or largest[key].numel() < tensor.numel()):
            largest[key] = tensor
    rows: dict[Any, list[tuple[int, str]]] = {}
    for (device, address), tensor in largest.items():
        name = (names or {}).get(address, "")
        kind = name.partition("/")[0]
        alike = device, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), kind
        rows.setdefault(alike, []).append((tensor.untyped_storage().nbytes(), name))
    found = [
        Live(
            device=device,
            dtype=dtype,
            shape=shape,
            count=len(each),
            bytes=sum(size for size, _ in each),
            names=tuple(name for _, name in each if name),
        )
        for (device, dtype, shape, _), each in rows.items()
    ]
    return sorted(found, key=lambda row: -row.bytes)


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # `isinstance` asks objects for their class, and some answer by running code
        if not issubclass(type(thing), torch.Tensor):
            continue
        with contextlib.suppress(Exception):  # tensors of other libraries without storage
            local: Any = getattr(thing, "_local_tensor", thing)
            if local.device.type != "meta":
                local.untyped_storage().data_ptr()
                yield local


def explain_out_of_memory(error: BaseException, named: Callable[[], Mapping[str, Any]]) -> None:
    """Write the storages that hold memory to a file, and a note to an error that says that memory ran out.

    Args:
        error: of a step. Others than those that say so, and those with a note already, are left alone.
        named: returns tensors by name.
    """
    if not is_out_of_memory(error) or getattr(error, "__notes__", None):
        return
    world = find_current()
    rank = 0 if world is None else world.rank
    names: dict[int, str] = {}
    for name, value in named().items():
        local: Any = getattr(value, "_local_tensor", value)
        if isinstance(local, torch.Tensor):
            names[local.untyped_storage().data_ptr()] = name
    storages = live_storages(names)
    del names
    text = f"memory ran out in {NOW}, on rank {rank}\n\n{table(storages)}\n"
    folder = Path(tempfile.gettempdir()) / f"fnaccel-out-of-memory-{os.getpid()}"
    files: list[Path] = []
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        listing = folder / f"rank{rank}.txt"
        listing.write_text(text)
        files.append(listing)
        if torch.cuda.is_initialized():
            snapshot = folder / f"rank{rank}.pickle"
            snapshot.write_bytes(
                pickle.dumps({"segments": torch.cuda.memory_snapshot(), "device_traces": []})
            )
            files.append(snapshot)
    error.add_note(
        f"memory ran out in {NOW}, on rank {rank}. Live tensors:\n{table(storages[:_ROWS])}\n"
        f"  written: {', '.join(map(str, files)) or 'nothing, the folder for temporary files is full'}\n"
        "  fix: smaller micro-batches (fa.accumulate), fa.remat, a sharded strategy (fa.fsdp), or bf16"
    )


def table(storages: list[Live]) -> str:
    """Lines for a list of live storages."""
    total = sum(row.bytes for row in storages)
    lines = [f"  {total / MIB:10.1f} MiB in {sum(row.count for row in storages)} storages"]
    for row in storages:
        named = ", ".join(row.names[:2]) + (f" and {len(row.names) - 2} more" if len(row.names) > 2 else "")
        lines.append(
            f"  {row.bytes / MIB:10.1f} MiB  {row.count} x {row.dtype} {list(row.shape)} on {row.device}"
            + (f": {named}" if named else "")
        )
    return "\n".join(lines)
