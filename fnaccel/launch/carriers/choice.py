"""Which carrier a recipe asks for, and its plan."""

from __future__ import annotations

import importlib

from fnaccel.errors import LaunchError
from fnaccel.launch.carriers.request import Carrier, Plan, Request
from fnaccel.launch.sections import SageMakerRecipe

IN_THE_LAUNCHER = ("local", "elastic")
"""Carriers whose ranks are forks of this process."""


def choose(request: Request, carrier: str | None) -> str:
    """The name of the carrier: the one that was named, or the one that the other fields imply.

    Args:
        request: the job and its sections.
        carrier: the field `launch.carrier`.

    Raises:
        LaunchError: the sections of two carriers are filled in, and neither was named. Several machines on
            the carrier `local`.

    Example:
        >>> choose(Request(job=Job(script="train.py"), slurm={"partition": "gpu"}), None)
        'slurm'
    """
    if carrier == "local" and request.job.several:
        raise LaunchError(
            f"the carrier local, and {request.job.machines} machines",
            where="fnaccel launch --carrier",
            fix="--carrier elastic and the same command on each machine, or --nnodes 1",
        )
    if carrier is not None:
        return carrier
    sections = {
        "tpu": bool(request.tpu_vm.name),
        "sagemaker": request.sagemaker != SageMakerRecipe(),
        "ssh": bool(request.hosts.names or request.hosts.file),
        "slurm": bool(request.slurm),
        "kubernetes": bool(request.kubernetes),
        "ray": bool(request.ray),
    }
    filled = [name for name, given in sections.items() if given]
    if len(filled) > 1:
        raise LaunchError(
            f"the recipe has options of several carriers: {', '.join(filled)}",
            where="fnaccel launch",
            fix=f"name one of them: --carrier {filled[0]}",
        )
    if filled:
        return filled[0]
    return "elastic" if request.job.several else "local"


def plan(request: Request, carrier: str) -> Plan:
    """The plan of a carrier for a job. Nothing is started.

    Args:
        request: the job and its sections.
        carrier: one of `fnaccel.launch.sections.CARRIERS`.

    Raises:
        LaunchError: the job has options that the carrier can't carry, or a section lacks a value.

    Example:
        >>> print(plan(Request(job=Job(script="t.py")), "local").commands[0].words)
        ('python', 't.py')
    """
    # by name: a launch on this machine does not pay for the other carriers
    chosen: Carrier = importlib.import_module(f"fnaccel.launch.carriers.{carrier}").plan
    return chosen(request)
