"""The peak memory of a process from a chosen moment on."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import attrs
import torch

_MIB = 2**20
_SELF = Path("/proc/self")


@attrs.frozen
class Memory:
    """The memory of a device since `watch` was called. On the CPU: the memory of the process."""

    device: torch.device
    before: int

    @staticmethod
    def watch(device: torch.device) -> Memory:
        """Start measuring: memory in use before this call does not count."""
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            return Memory(device, 0)
        with contextlib.suppress(OSError):  # Linux: reset the peak to the present size
            (_SELF / "clear_refs").write_text("5")
        return Memory(device, _resident("VmRSS"))

    def peak(self) -> float:
        """Peak since `watch`, in MiB: allocated on an accelerator, or the growth of the resident size."""
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated() / _MIB
        return max(0, _resident("VmHWM") - self.before) / _MIB


def _resident(name: str) -> int:
    """Resident bytes of this process: now (VmRSS) or the peak (VmHWM). Outside Linux always the peak."""
    with contextlib.suppress(OSError):
        for line in (_SELF / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    import resource  # noqa: PLC0415 - not on Windows

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
