"""The carrier `pdsh`: as `ssh`, by one command that pdsh repeats on each host."""

from __future__ import annotations

from fnaccel.errors import LaunchError
from fnaccel.launch.carriers.hosts import read_hosts
from fnaccel.launch.carriers.ssh import remote_lines
from fnaccel.launch.request import Command, Plan, Request

_NUMBER = "@number@"


def plan(request: Request) -> Plan:
    """One pdsh command for all hosts. pdsh writes the number of each host in the place of `%n`.

    Raises:
        LaunchError: there are no hosts, or they would need different commands.

    Example:
        >>> hosts = fa.config.HostsRecipe(names="gpu1,gpu2")
        >>> result = plan(Request(job=Job(script="t.py", ranks=2, hosts=hosts)))
        >>> result.commands[0].words[:6]
        ('pdsh', '-S', '-b', '-f', '1024', '-w')
    """
    hosts = read_hosts(request.job.hosts)
    lines = set(remote_lines(request, hosts, number=_NUMBER))
    if len(lines) > 1:
        raise LaunchError(
            "pdsh runs one command on all hosts, and these use different GPUs",
            where="launch.hosts",
            fix="--carrier ssh",
        )
    line = lines.pop().replace("%", "%%").replace(_NUMBER, "%n")
    remote = {} if "PDSH_RCMD_TYPE" in request.environ else {"PDSH_RCMD_TYPE": "ssh"}
    names = ",".join(host.name for host in hosts)
    # -S: the largest exit code of the hosts. -b: the first Ctrl-C ends pdsh
    command = Command(words=("pdsh", "-S", "-b", "-f", "1024", "-w", names, line), env=remote)
    summary = f"a launcher on each of {len(hosts)} hosts, in {request.folder}. pdsh numbers them"
    return Plan(carrier="pdsh", summary=summary, commands=(command,))
