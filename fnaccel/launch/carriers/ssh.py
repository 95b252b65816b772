"""The carrier `ssh`: one launcher on each host, started and ended from this machine.

ssh passes no signals on, and a remote command outlives its connection. So a launcher on a host ends with its
standard input (`--end-with-input`), which this machine keeps open.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import attrs

from fnaccel.launch.carriers.command_line import launch_command
from fnaccel.launch.carriers.environment import carried
from fnaccel.launch.carriers.hosts import Host, check_count, ranks_of_each, read_hosts
from fnaccel.launch.request import Command, Plan, Request

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
"""No questions for passwords, whose answer nobody would read, and an error if the host is gone."""


def plan(request: Request) -> Plan:
    """One ssh command for each host.

    Raises:
        LaunchError: there are no hosts, or they have different numbers of slots.

    Example:
        >>> hosts = fa.config.HostsRecipe(names="gpu1,gpu2")
        >>> result = plan(Request(job=Job(script="t.py", ranks=2, hosts=hosts)))
        >>> [command.label for command in result.commands]
        ['gpu1', 'gpu2']
    """
    hosts = read_hosts(request.job.hosts)
    commands = tuple(
        Command(words=(*SSH, host.name, line), label=host.name)
        for host, line in zip(hosts, remote_lines(request, hosts), strict=True)
    )
    summary = f"a launcher on each of {len(hosts)} hosts, in {request.folder}. To paste: a terminal for each"
    elastic = request.job.min_machines is not None
    return Plan(carrier="ssh", summary=summary, commands=commands, together=True, all_or_none=not elastic)


def remote_lines(request: Request, hosts: Sequence[Host], *, number: str | None = None) -> list[str]:
    """The shell text that each host runs.

    Args:
        request: the job.
        hosts: the machines, number 0 first.
        number: a text in the place of the number of the machine, which pdsh fills in.
    """
    check_count(list(hosts), request.job.machines)
    ranks = ranks_of_each(list(hosts), request.job.ranks)
    address = request.job.address or hosts[0].address
    lines: list[str] = []
    for index, host in enumerate(hosts):
        machine = index if number is None else number
        job = attrs.evolve(request.job, ranks=ranks, machines=len(hosts), machine=machine, address=address)
        if host.gpus is not None and not job.cpu:
            job = attrs.evolve(job, gpus=",".join(map(str, host.gpus)))
        words = launch_command(job, request.python)
        words.insert(4, "--end-with-input")
        lines.append(shell_line(words, folder=request.folder, env=carried(request.environ)))
    return lines


def shell_line(words: Sequence[str], *, folder: str, env: Mapping[str, str]) -> str:
    """A line for any login shell that runs a command in a folder.

    Args:
        words: the command.
        folder: where it runs.
        env: variables that are set first.

    Example:
        >>> print(shell_line(["a", "b c"], folder="/data", env={"X": "1"}))
        cd /data && exec env X=1 a 'b c'
    """
    pairs = [f"{name}={value}" for name, value in env.items()]
    return f"cd {shlex.quote(folder)} && exec {shlex.join(['env', *pairs, *words] if pairs else [*words])}"
