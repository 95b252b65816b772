"""The carrier `elastic`: the same command on each of several machines, which meet by themselves."""

from __future__ import annotations

import attrs

from fnaccel.launch.carriers.command_line import launch_command
from fnaccel.launch.request import Command, Plan, Request


def plan(request: Request) -> Plan:
    """The command of each machine, or of this machine if it has a number.

    Example:
        >>> job = Job(script="t.py", ranks=4, machines=2, address="10.0.0.1")
        >>> result = plan(Request(job=job))
        >>> " ".join(result.commands[1].words[7:])
        '-n 4 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 t.py'
    """
    job = request.job
    numbers = range(job.machines) if job.machine is None else [job.machine]
    commands = tuple(
        Command(
            words=tuple(launch_command(attrs.evolve(job, machine=number), request.python)),
            label=f"machine {number}",
        )
        for number in numbers
    )
    count = str(job.machines)
    if job.least_machines < job.machines:
        count = f"{job.least_machines} to {job.machines}"
    summary = f"{count} machines. Start one command on each:"
    return Plan(carrier="elastic", summary=summary, commands=commands)
