"""A program that has fnaccel loaded, and forks itself into `fnaccel ...`: seconds less for each test.

Orders and answers are lines of JSON; `null` ends it. A fork ends as the console script does, by `sys.exit(main())`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import time
from typing import Any

# for the forks: a rank that trains imports 800 modules, and would import them in each test
import torch._dynamo  # noqa: F401

import fnaccel.checkpoint
import fnaccel.cli.launch  # noqa: F401
from fnaccel.cli import main


def serve() -> list[str]:
    """Answer orders; returns, in a fork, the arguments it is to run."""
    for line in sys.stdin:
        order = json.loads(line)
        if order is None:
            break
        if "wait" in order:
            answer(wait(order["wait"], order["limit"]))
            continue
        pid = os.fork()
        if pid == 0:
            become(order)
            return order["argv"]
        answer(pid)
    sys.exit(0)


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def wait(pid: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


def become(order: dict[str, Any]) -> None:
    for fd, path in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, fd)
        os.close(opened)
    os.setsid()  # no terminal: what a test sends reaches whom it names only
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for name, value in order["constants"].items():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
        setattr(sys.modules[module], attribute, value)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as the examples set it, before they import transformers
    for module in sys.argv[1:]:  # what the scripts to run import, if it is installed
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # worlds collect as they end, and would look at all that was imported here
    argv = serve()
    sys.argv = ["fnaccel", *argv]
    sys.exit(main.main(argv))
