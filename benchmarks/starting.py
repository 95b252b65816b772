"""How long it takes to begin: importing the library, and launching a script that does nothing.

    OMP_NUM_THREADS=1 python benchmarks/starting.py [--only import,launch] [--quick]

Each measurement is a new process. fnaccel imports its parts and torch when a name is first used, so its time
is that of the import and of the names of a training script.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from environment import present
from interleave import Samples, turns
from options import begin
from report import Row, compare, publish

PARTS = ("import", "launch")
SCRIPT = "import fnaccel as fa; fa.start, fa.distribute, fa.train_step, fa.adamw, fa.shard, fa.scan, fa.save"
TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def imports(rounds: int) -> Samples:
    """Seconds of an import, timed inside a new interpreter."""
    lines = {"fnaccel": SCRIPT, "import torch": "import torch", "import accelerate": "import accelerate"}
    taken: Samples = {name: [] for name in present(lines)}
    # the first round reads files from the disk
    for counts, name in turns(list(taken), rounds, warmup=min(1, rounds - 1)):
        command = [sys.executable, "-c", TIMED.format(lines[name])]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        if counts:
            taken[name].append(float(printed))
    return taken


def launches(rounds: int) -> Samples:
    """Seconds from the command to its end, for an empty script on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        script = str(Path(folder) / "empty.py")
        Path(script).write_text("")
        torchrun = ["torch.distributed.run", "--nproc-per-node", "2"]
        commands = {
            "fnaccel": ["fnaccel", "launch", "-n", "2", script],
            "torchrun": [*torchrun, "--master-port", str(_free_port()), script],
            "torchrun --standalone": [*torchrun, "--standalone", script],
        }
        taken: Samples = {name: [] for name in commands}
        for counts, name in turns(list(commands), rounds, warmup=min(1, rounds - 1)):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-m", *commands[name]], check=True, capture_output=True)
            if counts:
                taken[name].append(time.perf_counter() - began)
    return taken


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Run the parts asked for."""
    options = begin("starting", str(__doc__), PARTS, ("Accelerate",))
    rounds = options.pick(15, 3, 1)
    table: list[Row] = []
    if "import" in options.parts:
        what = "import fnaccel, with the names of a training script"
        table += compare(what, imports(rounds), {"import torch": 1.1}, "ms")
    if "launch" in options.parts:
        table += compare("launch an empty script, 2 ranks", launches(rounds), {"torchrun": 1.0}, "ms")
    publish(options, table)


if __name__ == "__main__":
    main()
