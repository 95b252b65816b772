"""Host names, host files and filters: the machines of ssh, pdsh and mpirun, and the slots of each.

A slot is a rank. If slots are chosen by number, they are the numbers of the GPUs.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs

from fnaccel.errors import LaunchError, nearest
from fnaccel.launch.sections import HostsRecipe


@attrs.frozen(kw_only=True)
class Host:
    """One machine.

    Attributes:
        name: as ssh takes it, so `user@name` too.
        slots: how many ranks it has room for. None: unknown.
        gpus: numbers of the GPUs that are used. None: all.
    """

    name: str
    slots: int | None = None
    gpus: tuple[int, ...] | None = None

    @property
    def address(self) -> str:
        """The name without a user."""
        return self.name.rpartition("@")[2]


def read_hosts(recipe: HostsRecipe) -> list[Host]:
    """The hosts of a recipe, after its filter, in order.

    Args:
        recipe: names and a file together give all hosts.

    Raises:
        LaunchError: there are no hosts, a line can't be read, a host is named twice, or a filter names a host
            or a slot that is not there.

    Example:
        >>> [host.slots for host in read_hosts(HostsRecipe(names="a:4,b:4", include="b:0,2"))]
        [2]
    """
    hosts: dict[str, Host] = {}
    lines = [(name, "launch.hosts.names") for name in recipe.names]
    if recipe.file is not None:
        path = Path(recipe.file).expanduser()
        if not path.is_file():
            raise LaunchError(
                f"there is no host file {path}", where="launch.hosts.file", fix="check the path"
            )
        lines += [(line, str(path)) for line in path.read_text(encoding="utf-8").splitlines()]
    for line, place in lines:
        host = parse_host(line, place)
        if host is None:
            continue
        if host.name in hosts:
            raise LaunchError(
                f"the host {host.name} is named twice", where=place, fix="one line for each host"
            )
        hosts[host.name] = host
    if recipe.include:
        hosts = _included(hosts, recipe.include)
    if recipe.exclude:
        hosts = _excluded(hosts, recipe.exclude)
    if not hosts:
        raise LaunchError(
            "there are no hosts to start on",
            where="launch.hosts",
            fix="--hosts gpu1,gpu2, or --hostfile FILE with a line for each host",
        )
    return list(hosts.values())


def parse_host(line: str, place: str) -> Host | None:
    """A host of a line such as `gpu1 slots=4` or `gpu1:4`, or None if the line is empty or a comment.

    Args:
        line: Open MPI's `max_slots=` (or `max-slots=`) is read and not used.
        place: for an error.

    Raises:
        LaunchError: the line is not in one of these forms.

    Example:
        >>> parse_host("gpu1 slots=4  # the old one", "hosts.txt")
        Host(name='gpu1', slots=4, gpus=None)
    """
    text = line.partition("#")[0].strip()
    if not text:
        return None
    found = re.fullmatch(r"([^\s:=]+)(?::(\d+))?((?:\s+max[-_]slots=\d+|\s+slots=\d+)*)", text)
    if found is None:
        raise LaunchError(f"{text!r} is no host", where=place, fix="write a name, or: gpu1 slots=4")
    name, short, rest = found.groups()
    long = re.search(r"(?<![-_])slots=(\d+)", rest)
    count = int(long.group(1)) if long is not None else (None if short is None else int(short))
    if count == 0:
        raise LaunchError(f"{text!r} has no slots", where=place, fix="leave the line out")
    return Host(name=name, slots=count)


def parse_filter(text: str) -> dict[str, tuple[int, ...]]:
    """The hosts of a filter, and the slots of each (empty: all).

    Args:
        text: hosts are separated by `@`, and slots by commas after a colon: `"gpu1@gpu2:0,2"`. Slots may
            be a range: `0-3`.

    Raises:
        LaunchError: the text is not in this form.

    Example:
        >>> parse_filter("gpu1@gpu2:0,2")
        {'gpu1': (), 'gpu2': (0, 2)}
    """
    chosen: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        found = re.fullmatch(r"\s*([^\s:,]+)\s*(?::\s*(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\s*)?", part)
        if found is None:
            raise LaunchError(
                f"{text!r} chooses no hosts",
                where="launch.hosts",
                fix="write gpu1@gpu2:0,2 (host@host:slots)",
            )
        numbers: list[int] = []
        for piece in (found.group(2) or "").split(","):
            first, _, last = piece.partition("-")
            numbers += range(int(first), int(last or first) + 1) if piece else []
        chosen[found.group(1)] = tuple(dict.fromkeys(numbers))
    return chosen


def _included(hosts: dict[str, Host], text: str) -> dict[str, Host]:
    wanted = _checked(hosts, text)
    return {
        name: attrs.evolve(host, slots=len(wanted[name]), gpus=wanted[name]) if wanted[name] else host
        for name, host in hosts.items()
        if name in wanted
    }


def _excluded(hosts: dict[str, Host], text: str) -> dict[str, Host]:
    unwanted = _checked(hosts, text)
    left: dict[str, Host] = {}
    for name, host in hosts.items():
        if name not in unwanted:
            left[name] = host
        elif unwanted[name]:
            gpus = tuple(slot for slot in range(host.slots or 0) if slot not in unwanted[name])
            if gpus:
                left[name] = attrs.evolve(host, slots=len(gpus), gpus=gpus)
    return left


def _checked(hosts: dict[str, Host], text: str) -> dict[str, tuple[int, ...]]:
    """The filter, after a look whether its hosts and slots exist."""
    chosen = parse_filter(text)
    for name, slots in chosen.items():
        if name not in hosts:
            raise LaunchError(
                f"the filter {text!r} names {name}, which is no host",
                where="launch.hosts",
                fix=nearest(name, list(hosts)),
            )
        count = hosts[name].slots
        if slots and (count is None or max(slots) >= count):
            known = "has an unknown number of slots" if count is None else f"has the slots 0 to {count - 1}"
            raise LaunchError(
                f"the filter {text!r} names slot {max(slots)}, and {name} {known}",
                where="launch.hosts",
                fix=f"write the slots of the host: {name} slots={max(slots) + 1}",
            )
    return chosen


def check_count(hosts: list[Host], machines: int) -> None:
    """See that a number of machines, if there is one, is that of the hosts.

    Raises:
        LaunchError: it is another number.
    """
    if machines not in (1, len(hosts)):
        raise LaunchError(
            f"{machines} machines, and {len(hosts)} hosts",
            where="launch.machines",
            fix="leave --nnodes out: the hosts are the machines",
        )


def ranks_of_each(hosts: list[Host], ranks: int | None) -> int | None:
    """The number of ranks on each host: fnaccel starts as many on each.

    Args:
        hosts: of the job.
        ranks: the number that was asked for, or None for the slots.

    Raises:
        LaunchError: hosts have different numbers of slots, or fewer than `ranks`.
    """
    slots = {host.slots for host in hosts if host.slots is not None}
    fewest = min(slots, default=ranks)
    if ranks is not None:
        if fewest is not None and fewest < ranks:
            few = next(host for host in hosts if host.slots == fewest)
            raise LaunchError(
                f"{ranks} ranks on each host, and {few.name} has {fewest} slots",
                where="fnaccel launch -n",
                fix=f"-n {fewest}, or leave the host out: --exclude {few.name}",
            )
        return ranks
    if len(slots) > 1:
        raise LaunchError(
            f"hosts have different numbers of slots: {', '.join(map(str, sorted(slots)))}",
            where="launch.hosts",
            fix=f"as many ranks on each host: -n {fewest}",
        )
    return fewest
