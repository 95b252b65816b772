"""The carrier `ray`: the text of a Ray Train job, for `python` or `ray job submit`.

Ray begins the process group, and `fa.start` uses it.
"""

from __future__ import annotations

from typing import Any

from fnaccel.errors import LaunchError, nearest
from fnaccel.launch.carriers.command_line import refuse
from fnaccel.launch.carriers.environment import of_all_ranks
from fnaccel.launch.carriers.request import Plan, Request

KEYS = ("address", "max_failures", "name", "resources_per_worker", "runtime_env", "storage_path", "use_gpu")
"""Keys of the section `launch.ray`."""

_TEXT = '''"""A Ray Train job, printed by fnaccel launch --carrier ray.

Save it beside the script, and run it: python ray_job.py
Or: ray job submit --working-dir . -- python ray_job.py
"""

import os
import runpy
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

VARIABLES = {variables!r}
PROGRAM = {program!r}


def train_on_a_worker():
    os.environ.update(VARIABLES)
    sys.argv = list(PROGRAM)
    sys.path.insert(0, {path})
    {run}


if __name__ == "__main__":
    ray.init({init})
    trainer = TorchTrainer(
        train_on_a_worker,
        torch_config=TorchConfig(backend={backend!r}),
        scaling_config=ScalingConfig({scaling}),
        run_config=RunConfig({running}),
    )
    trainer.fit()
'''


def plan(request: Request) -> Plan:
    """The text of the job.

    Raises:
        LaunchError: an unknown key, or options that only fnaccel's launcher has.

    Example:
        >>> text = plan(Request(job=Job(script="t.py", ranks=4, ray={"use_gpu": True}))).output
        >>> "num_workers=4, use_gpu=True" in text
        True
    """
    job, section = request.job, request.job.ray
    for key in section:
        if key not in KEYS:
            raise LaunchError(f"no key {key!r}", where="launch.ray", fix=nearest(key, KEYS))
    refuse(job, "ray", "leave it out: Ray starts the ranks, and has its own options")
    gpu = bool(section.get("use_gpu", not job.cpu))
    scaling: dict[str, Any] = {"num_workers": job.processes * job.machines, "use_gpu": gpu}
    if "resources_per_worker" in section:
        scaling["resources_per_worker"] = dict(section["resources_per_worker"])
    running = {name: section[name] for name in ("name", "storage_path") if name in section}
    failures = section.get("max_failures", job.restarts)
    init = {"runtime_env": section["runtime_env"]} if "runtime_env" in section else {}
    if "address" in section:
        init["address"] = section["address"]
    name = job.script if job.module is None else job.module
    text = _TEXT.format(
        variables=of_all_ranks(job),
        program=[str(name), *job.args],
        path="os.getcwd()" if job.module is not None else f"os.path.dirname(os.path.abspath({job.script!r}))",
        run=(
            f"runpy.run_path({job.script!r}, run_name='__main__')"
            if job.module is None
            else f"runpy.run_module({job.module!r}, run_name='__main__', alter_sys=True)"
        ),
        init=_arguments(init),
        backend="nccl" if gpu else "gloo",
        scaling=_arguments(scaling),
        running=", ".join(
            [*filter(None, [_arguments(running)]), f"failure_config=FailureConfig(max_failures={failures})"]
        ),
    )
    return Plan(carrier="ray", summary="a Ray Train job", output=text)


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
