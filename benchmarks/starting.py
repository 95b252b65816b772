"""How long it takes to begin: importing the library, and launching a script that does nothing."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def _turned(keys: list[str], number: int) -> list[str]:
    at = number % len(keys)
    return keys[at:] + keys[:at]


def imports(rounds: int) -> dict[str, float]:
    """Median seconds of `import X`, timed inside a new interpreter."""
    names = {"fnaccel": "fnaccel", "import torch": "torch", "import accelerate": "accelerate"}
    taken: dict[str, list[float]] = {key: [] for key in names}
    for number in range(-1, rounds):
        for key in _turned(list(names), number):
            command = [sys.executable, "-c", _IMPORT.format(names[key])]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            if number >= 0:  # the first round reads files from the disk
                taken[key].append(float(said))
    return {key: statistics.median(seconds) for key, seconds in taken.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launches(rounds: int) -> dict[str, float]:
    """Median seconds from the command to its end, for an empty script on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder) / "empty.py")
        Path(script).write_text("")
        torchrun = ["torch.distributed.run", "--nproc-per-node", "2"]
        commands = {
            "fnaccel": ["fnaccel", "launch", "-n", "2", script],
            "torchrun": [*torchrun, "--master-port", str(_free_port()), script],
            "torchrun --standalone": [*torchrun, "--standalone", script],
        }
        taken: dict[str, list[float]] = {key: [] for key in commands}
        for number in range(-1, rounds):
            for key in _turned(list(commands), number):
                began = time.perf_counter()
                subprocess.run([sys.executable, "-m", *commands[key]], check=True, capture_output=True)
                if number >= 0:
                    taken[key].append(time.perf_counter() - began)
    return {key: statistics.median(seconds) for key, seconds in taken.items()}
