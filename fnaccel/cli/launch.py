"""`fnaccel launch`: parses options into a `Job` and its carrier. `fnaccel.launch` runs the job."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import attrs

import fnaccel
from fnaccel import _lazy
from fnaccel.cli.options.launch import add_recipe_options as add_recipe_options
from fnaccel.cli.options.launch import parser
from fnaccel.cli.overriding import check_overrides, gather_overrides, layers, notices
from fnaccel.cli.terminal import print_json
from fnaccel.config import LaunchRecipe
from fnaccel.errors import LaunchError, MissingBackendError, nearest
from fnaccel.launch import tpu
from fnaccel.launch.accelerators import count_processes
from fnaccel.launch.carrier import IN_THE_LAUNCHER, choose, plan
from fnaccel.launch.ending import leave
from fnaccel.launch.input_end import end_with_input
from fnaccel.launch.job import Job, check_values
from fnaccel.launch.network import free_port
from fnaccel.launch.options import flags_of
from fnaccel.launch.presets import find_cards, preset_variables
from fnaccel.launch.request import Request
from fnaccel.launch.sections import TpuVmRecipe
from fnaccel.launch.supervise import launch


@contextlib.contextmanager
def _searching(folder: Path) -> Generator[None]:
    """Import as the script will: its folder comes first. The text of a strategy may name a module."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.pop(0)


@attrs.frozen
class Order:
    """The job of a command line, and its carrier.

    Attributes:
        request: the job, and everything that its carrier may read.
        carrier: the name of the carrier.
        options: as argparse has read them.
    """

    request: Request
    carrier: str
    options: argparse.Namespace


def read(arguments: Sequence[str]) -> Job:
    """The job that the arguments of `fnaccel launch` describe. Nothing is started.

    Raises:
        LaunchError: an option does not exist, or can't be combined with another.
        ConfigError: an override is not a field of a recipe.
        UnknownNameError: a strategy or precision does not exist.

    Example:
        >>> read(["-n", "2", "train.py", "--lr", "0.1"]).args
        ('--lr', '0.1')
    """
    return read_order(arguments).request.job


def read_order(arguments: Sequence[str]) -> Order:
    """The job that the arguments describe, and its carrier. Nothing is started.

    Raises:
        LaunchError, ConfigError, UnknownNameError: as `read`.

    Example:
        >>> read_order(["--carrier", "slurm", "-n", "8", "--nnodes", "4", "train.py"]).carrier
        'slurm'
    """
    options = parser()
    parsed, unknown = options.parse_known_args(arguments)
    if unknown:
        flags = [name for name in options.option_names() if name.startswith("--")]
        raise LaunchError(
            f"there is no option {unknown[0]}", where="fnaccel launch", fix=nearest(unknown[0], flags)
        )
    if parsed.module is not None and not parsed.module:
        options.error("-m needs the name of a module")
    _check_stray(parsed)
    program: list[str] = parsed.module or parsed.script
    name = program[0] if program else None
    sources = layers(parsed, os.environ)
    with _searching(Path(name or "").parent if parsed.module is None else Path()):
        recipe = check_overrides(sources)
    # the launcher itself uses the section `launch`: no script has to
    fields = {field: value for field, value in gather_overrides(sources).items() if field[:7] != "launch."}
    job = job_of(
        recipe.launch,
        script=name if parsed.module is None else None,
        module=name if parsed.module is not None else None,
        args=tuple(program[1:]),
        overrides=fields,
    )
    folder = str(Path.cwd())
    request = Request(job=job, python=sys.executable, folder=folder, environ=dict(os.environ))
    return Order(request, choose(job), parsed)


def job_of(recipe: LaunchRecipe, **program: Any) -> Job:
    """The job of the section `launch` of a recipe on this machine.

    Args:
        recipe: the section.
        program: the remaining fields of the job.

    Raises:
        LaunchError: more ranks than accelerators, or machines without an address. The carriers `local`,
            `elastic` and mpirun without hosts count the accelerators of this machine. Only `elastic` needs an
            address.
    """
    job = Job(**attrs.asdict(recipe, recurse=False), **program)
    job = attrs.evolve(job, tpu=job.tpu or (tpu.is_tpu(os.environ) and not job.cpu))
    carrier = choose(job)
    if carrier in IN_THE_LAUNCHER:
        _check_machines(recipe)
    elif carrier != "mpirun" or job.hosts.given:
        return job
    where = "fnaccel launch" if job.ranks is None else f"fnaccel launch -n {job.ranks}"
    return attrs.evolve(job, processes=count_processes(job, where=where))


def run(arguments: Sequence[str]) -> int:
    """Start the job of the arguments, wait for it, and exit with its exit code.

    Returns:
        0 after `--dry-run`, and if a text was printed for another tool.

    Raises:
        FnaccelError: as `read`, or not all processes can be started.
    """
    order = read_order(arguments)
    request, carrier = order.request, order.carrier
    if not request.job.quiet:
        for line in notices(order.options, os.environ):
            print(line, file=sys.stderr, flush=True)
    if order.options.dry_run:
        check_values(request.job)
        result = plan(_with_facts(request, carrier), carrier)
        if order.options.json:
            print_json(attrs.asdict(result))
        else:
            print(result.text)
        return 0
    if order.options.json:
        raise LaunchError(
            "--json without --dry-run",
            where="fnaccel launch",
            fix="leave it out: the script prints",
        )
    if carrier in IN_THE_LAUNCHER:
        for name in dir(fnaccel):  # the ranks are forks: all of them use these modules
            with contextlib.suppress(MissingBackendError):  # a copy of fnaccel without it
                getattr(fnaccel, name)
        if order.options.end_with_input:
            end_with_input()
        leave(launch(request.job))
    return _carry(_with_facts(request, carrier), carrier)


def _with_facts(request: Request, carrier: str) -> Request:
    """The request with facts about this machine that the carrier needs."""
    if carrier == "mpirun":
        return attrs.evolve(request, mpi=_lazy.load("fnaccel.launch.carriers.mpirun").ask_version())
    if carrier == "local":
        cards, driver = find_cards()
        presets = preset_variables(request.job, os.environ, cards=cards, driver=driver)
        return attrs.evolve(request, port=free_port(), presets=presets)
    return request


def _carry(request: Request, carrier: str) -> int:
    """Start a job by a carrier outside of this launcher, and wait for it."""
    check_values(attrs.evolve(request.job, processes=1, min_ranks=None))
    result = plan(request, carrier)
    if result.request is not None:
        return int(_lazy.load("fnaccel.launch.carriers.sagemaker").submit(result.request))
    return int(_lazy.load("fnaccel.launch.carriers.execution").execute(result, grace=request.job.grace))


def _check_stray(parsed: argparse.Namespace) -> None:
    """See that options for a TPU VM come with its name."""
    values = vars(parsed)
    of_vm = {option.name: values[name] for name, option, _ in flags_of(TpuVmRecipe, "launch.tpu_vm.")}
    if of_vm["--tpu-name"] is None and values["launch.carrier"] != "tpu":
        stray = [flag for flag, value in of_vm.items() if value]
        if stray:
            raise LaunchError(
                f"{stray[0]} without --tpu-name",
                where="fnaccel launch",
                fix="--tpu-name NAME, or leave it out on the TPU VM itself",
            )


def _check_machines(recipe: LaunchRecipe) -> None:
    if recipe.machines > 1 and recipe.address is None:
        raise LaunchError(
            f"{recipe.machines} machines need --master-addr",
            where="fnaccel launch --nnodes",
            fix="--master-addr with the address of the first machine, on all machines",
        )
    options = (("--node-rank", recipe.machine), ("--master-addr", recipe.address))
    stray = [flag for flag, value in options if value]
    if recipe.machines == 1 and stray:
        raise LaunchError(
            f"{' and '.join(stray)} without --nnodes",
            where="fnaccel launch",
            fix="give the number of machines: --nnodes 2. On one machine leave it out",
        )
