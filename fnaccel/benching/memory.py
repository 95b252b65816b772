"""How much memory a process needs at most, from a moment on."""

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
    """Watches a device's memory from when it is made; on the CPU that of the process."""

    device: torch.device
    before: int

    @staticmethod
    def watch(device: torch.device) -> Memory:
        """Begin here: what was needed before does not count."""
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            return Memory(device, 0)
        with contextlib.suppress(OSError):  # Linux: let the highest size begin again at the present one
            (_SELF / "clear_refs").write_text("5")
        return Memory(device, _resident("VmRSS"))

    def peak(self) -> float:
        """MiB at most since: allocated on an accelerator, or resident above what was there before."""
        if self.device.type != "cpu":
            return torch.accelerator.max_memory_allocated() / _MIB
        return max(0, _resident("VmHWM") - self.before) / _MIB


def _resident(name: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most (VmHWM); elsewhere always the latter."""
    with contextlib.suppress(OSError):
        for line in (_SELF / "status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    import resource  # noqa: PLC0415 - not on Windows

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
