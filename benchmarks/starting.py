"""How long it takes to begin: importing the library, an empty script, and losses while a step compiles.

    OMP_NUM_THREADS=1 python benchmarks/starting.py [--only import,launch,background] [--quick]

Each measurement is a new process. fnaccel imports its parts and torch when a name is first used, so its time
is that of the import and of the names of a training script.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import first_step
from environment import present
from interleave import Samples, turns
from options import begin
from report import Row, compare, publish

PARTS = ("import", "launch", "background")
LAYERS, STEPS = (2, 8), (1, 10, 100)
GOALS = {1: 1.1, 10: 1.5, 100: 1.5}  # of the losses of these steps, against eager steps
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


def background(layers: int, rounds: int, steps: tuple[int, ...], names: dict[str, str]) -> list[Row]:
    """The time to losses while another process compiles, and of the step that goes over to its code."""
    taken: list[Samples] = [{name: [] for name in names} for _ in steps]
    over: Samples = {"fnaccel": [], "a warm start": []}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, contestant) in itertools.product(range(rounds), names.items()):
            place = Path(folder) / f"{number}{name}".replace(" ", "").replace(",", "")
            seconds = first_step.seconds_to(place, steps, contestant=contestant, rows=2, layers=layers)
            for samples, found in zip(taken, seconds, strict=False):
                samples[name].append(found)
            if name == "fnaccel":
                over[name].append(seconds[-1])
                over["a warm start"] += first_step.seconds_to(
                    place, contestant="fnaccel", rows=2, layers=layers
                )
    what = f"{layers} layers, background=True, nothing cached"
    table: list[Row] = []
    for step, samples in zip(steps, taken, strict=True):
        table += compare(f"{what}: loss of step {step}", samples, {"fnaccel, eager": GOALS[step]}, unit="s")
    return table + compare(f"{what}: the step that goes over", over, {"a warm start": 1.0}, unit="s")


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
    if "background" in options.parts:
        names = {"fnaccel": first_step.BACKGROUND, "fnaccel, eager": first_step.EAGER}
        at_once = {"fnaccel, compiled at once": "fnaccel", first_step.BY_HAND: first_step.BY_HAND}
        names |= options.pick(at_once, at_once, {})
        for layers in options.pick(LAYERS, LAYERS[:1], (1,)):
            table += background(layers, options.pick(2, 1, 1), options.pick(STEPS, STEPS, (1,)), names)
    publish(options, table)


if __name__ == "__main__":
    main()
