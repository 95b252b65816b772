"""The carrier `ssh`: one launcher on each host, started and ended from this machine.

ssh passes no signals on, and a remote command outlives its connection. So a launcher on a host ends with its
standard input (`--end-with-input`), which this machine keeps open.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import attrs

from fnaccel.launch.carriers.command_line import at_address, launch_command
from fnaccel.launch.carriers.environment import carried
from fnaccel.launch.carriers.hosts import Host, check_count, ranks_of_each, read_hosts
from fnaccel.launch.carriers.request import Command, Plan, Request

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
"""No questions for passwords, whose answer nobody would read, and an error if the host is gone."""


def plan(request: Request) -> Plan:
    """One ssh command for each host.

    Raises:
        LaunchError: there are no hosts, or they have different numbers of slots.

    Example:
        >>> result = plan(Request(job=Job(script="t.py"), ranks=2, hosts=HostsRecipe(names="gpu1,gpu2")))
        >>> [command.label for command in result.commands]
        ['gpu1', 'gpu2']
    """
    hosts = read_hosts(request.hosts)
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
    ranks = ranks_of_each(list(hosts), request.ranks)
    address = request.address or hosts[0].address
    lines: list[str] = []
    for index, host in enumerate(hosts):
        job = at_address(request.job, machines=len(hosts), machine=index, address=address)
        if request.job.min_machines is not None:
            job = attrs.evolve(job, min_machines=request.job.min_machines)
        if host.gpus is not None and not job.cpu:
            job = attrs.evolve(job, gpus=",".join(map(str, host.gpus)))
        carrier = "elastic" if job.several else "local"
        words = launch_command(job, request.python, ranks=ranks, carrier=carrier)
        words.insert(4, "--end-with-input")
        if number is not None and "--node-rank" in words:
            words[words.index("--node-rank") + 1] = number
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
