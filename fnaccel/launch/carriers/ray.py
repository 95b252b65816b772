"""The carrier `ray`: the text of a Ray Train job, for `python` or `ray job submit`.

Ray begins the process group, and `fa.start` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fnaccel.launch.carriers.command_line import refuse
from fnaccel.launch.carriers.environment import of_all_ranks
from fnaccel.launch.request import Plan, Request, check_keys

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
        run_config=RunConfig({running}failure_config=FailureConfig(max_failures={failures})),
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
    check_keys(section, KEYS, "launch.ray")
    refuse(job, "ray", "leave it out: Ray starts the ranks, and has its own options")
    gpu = bool(section.get("use_gpu", not job.cpu))
    if job.module is None:
        path = f"os.path.dirname(os.path.abspath({job.script!r}))"
        run = f"runpy.run_path({job.script!r}, run_name='__main__')"
    else:
        path, run = "os.getcwd()", f"runpy.run_module({job.module!r}, run_name='__main__', alter_sys=True)"
    scaling = {"num_workers": job.processes * job.machines, "use_gpu": gpu}
    text = _TEXT.format(
        variables=of_all_ranks(job),
        program=[str(job.script or job.module), *job.args],
        path=path,
        run=run,
        init=", ".join(_arguments(section, "runtime_env", "address")),
        backend="nccl" if gpu else "gloo",
        scaling=", ".join([*_arguments(scaling, *scaling), *_arguments(section, "resources_per_worker")]),
        running="".join(f"{pair}, " for pair in _arguments(section, "name", "storage_path")),
        failures=section.get("max_failures", job.restarts),
    )
    return Plan(carrier="ray", summary="a Ray Train job", output=text)


def _arguments(values: Mapping[str, Any], *names: str) -> list[str]:
    """Keyword arguments in Python, for the names that have a value."""
    return [f"{name}={values[name]!r}" for name in names if name in values]
