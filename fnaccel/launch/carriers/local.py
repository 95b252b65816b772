"""The carrier `local`: the ranks of this machine, each with the variables that it gets."""

from __future__ import annotations

from fnaccel.launch.carriers.command_line import python_command
from fnaccel.launch.request import Command, Plan, Request
from fnaccel.launch.variables import variables


def plan(request: Request) -> Plan:
    """The command of each rank. The launcher itself forks the ranks, with the same variables.

    Example:
        >>> result = plan(Request(job=Job(script="t.py", ranks=2, cpu=True)))
        >>> result.commands[1].env["RANK"]
        '1'
    """
    job = request.job
    commands: list[Command] = []
    for local_rank in range(job.processes):
        whole = variables(
            job, local_rank, port=job.port or request.port, environ=request.environ, presets=request.presets
        )
        new = {name: value for name, value in whole.items() if request.environ.get(name) != value}
        commands.append(
            Command(
                words=tuple(python_command(job, request.python)),
                env=new,
                label=f"rank {job.rank(local_rank)}",
            )
        )
    ranks = "1 rank" if job.processes == 1 else f"{job.processes} ranks"
    restarts = f", {job.restarts} restarts" if job.restarts else ""
    summary = f"{ranks} on this machine, forked by the launcher{restarts}. Their variables:"
    return Plan(carrier="local", summary=summary, commands=tuple(commands), together=True)
