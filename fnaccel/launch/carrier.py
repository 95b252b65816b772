"""Which carrier a recipe asks for, and its plan."""

from __future__ import annotations

from fnaccel import _lazy
from fnaccel.errors import LaunchError
from fnaccel.launch.recipe import LaunchRecipe
from fnaccel.launch.request import Carrier, Plan, Request
from fnaccel.launch.sections import SageMakerRecipe

IN_THE_LAUNCHER = ("local", "elastic")
"""Carriers whose ranks are forks of this process."""


def choose(launch: LaunchRecipe) -> str:
    """The name of the carrier: the one that was named, or the one that the other fields imply.

    Args:
        launch: the options, or a job.

    Raises:
        LaunchError: the sections of two carriers are filled in, and neither was named. Several machines on
            the carrier `local`.

    Example:
        >>> choose(LaunchRecipe(slurm={"partition": "gpu"}))
        'slurm'
    """
    if launch.carrier == "local" and launch.several:
        raise LaunchError(
            f"the carrier local, and {launch.machines} machines",
            where="fnaccel launch --carrier",
            fix="--carrier elastic and the same command on each machine, or --nnodes 1",
        )
    if launch.carrier is not None:
        return launch.carrier
    sections = {
        "tpu": launch.tpu_vm.name,
        "sagemaker": launch.sagemaker != SageMakerRecipe(),
        "ssh": launch.hosts.given,
        "slurm": launch.slurm,
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
    return "elastic" if launch.several else "local"


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
    chosen: Carrier = _lazy.load(f"fnaccel.launch.carriers.{carrier}").plan
    return chosen(request)
