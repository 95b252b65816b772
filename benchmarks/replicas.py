"""Replicas that train apart, beside ddp: losses, bytes on the wire, and time on a slow link.

    python benchmarks/replicas.py [--only learning,link] [--quick]

Two machines with a rank each are network namespaces with a cable between them (needs root, `ip` and `tc`).
All train the GPT of examples/train_gpt.py on the same rows, with the same number of steps and the same inner
rate. `learning` has losses and bytes over a fast cable, `link` the time of a step at 10 Mbit/s. Bytes are
those that the interfaces count, with the headers of TCP.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from options import begin
from report import Row, publish

SCRIPT = Path(__file__).with_name("replica_run.py")
EVERY = 16
OURS = (f"local_sgd(2, every={EVERY})", f"diloco(2, every={EVERY})")
SLOWER = f"diloco(2, every={EVERY}, outer='sgd(0.7, momentum=0.5, nesterov=True)')"
"""The default outer momentum of 0.9 is the paper's, for hundreds of steps between two averages."""
NONE = "local_sgd(2, every=1000000)"
"""Never averaged: the losses are those of two models, each with half of the rows."""


@contextlib.contextmanager
def machines(rate: str | None) -> Generator[tuple[str, str]]:
    """Two network namespaces. The first one has the address 10.78.0.1."""
    mark = uuid.uuid4().hex[:6]
    names, cables = [f"fnb{mark}{side}" for side in "ab"], [f"c{mark}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "address", "add", f"10.78.0.{number}/24", "dev", cable)
            for device in ("lo", cable):
                _ip("-n", name, "link", "set", device, "up")
            if rate is not None:
                shape = f"tc qdisc add dev {cable} root tbf rate {rate} burst 64kbit latency 400ms"
                subprocess.run(["ip", "netns", "exec", name, *shape.split()], check=True)
        yield names[0], names[1]
    finally:
        for name in names:  # and the cables with them
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def job(strategy: str, steps: int, rate: str | None) -> dict[str, Any]:
    """What the first rank of a job found."""
    with machines(rate) as names:
        started = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", name, sys.executable, "-m", "fnaccel", "launch", "-n", "1"),
                    *("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.78.0.1", "--cpu"),
                    *(str(SCRIPT), strategy, str(steps)),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]
        said = [process.communicate()[0] for process in started]
    found = [json.loads(line) for text in said for line in text.splitlines() if line.startswith("{")]
    print(
        f"{strategy}, {rate or 'a fast cable'}: {found[0] | {'seconds': len(found[0]['seconds'])}}",
        flush=True,
    )
    return found[0]


def learning(steps: int) -> list[Row]:
    """Losses after equal steps, and bytes."""
    found = {strategy: job(strategy, steps, None) for strategy in ("ddp(2)", *OURS, SLOWER, NONE)}
    peer, rows = found["ddp(2)"], []
    for strategy in (*OURS, SLOWER, NONE):
        ours, name = found[strategy], "no average at all" if strategy == NONE else strategy
        rows.append(
            Row(
                f"{name}: training loss, the last 32 of {steps} steps",
                "ddp",
                [ours["train"]],
                [peer["train"]],
                unit="nats",
            )
        )
        if "held_out" in ours:
            rows.append(
                Row(
                    f"{name}: held-out loss after {steps} steps",
                    "ddp",
                    [ours["held_out"]],
                    [peer["held_out"]],
                    unit="nats",
                )
            )
        rows.append(
            Row(
                f"{name}: bytes that a rank sends in a step",
                "ddp",
                [ours["bytes"]],
                [peer["bytes"]],
                unit="bytes",
            )
        )
    return rows  # fmt: skip


def link(steps: int) -> list[Row]:
    """The time of a step on two machines with a slow link between them."""
    found = {strategy: job(strategy, steps, "10mbit") for strategy in ("ddp(2)", *OURS)}
    # whole intervals: the mean has the steps that average, which a median leaves out
    means = {name: sum(one["seconds"]) / len(one["seconds"]) for name, one in found.items()}
    return [
        Row(f"{name}: step over 10 Mbit/s", "ddp", [means[name]], [means["ddp(2)"]], unit="ms")
        for name in OURS
    ]  # fmt: skip


def main() -> None:
    """Run what the command line names."""
    options = begin("replicas", __doc__ or "", ("learning", "link"))
    rows: list[Row] = []
    if "learning" in options.parts:
        rows += learning(options.pick(512, 64, 32))
    if "link" in options.parts:
        rows += link(options.pick(65, 33, 17))
    publish(options, rows)


if __name__ == "__main__":
    main()
