"""`fnaccel launch`: parses options into a `Job`. `fnaccel.launch` runs the job."""

from __future__ import annotations

# argparse: no dependency, and with REMAINDER all arguments after the script's name are the script's,
# even if they look like an option of the launcher
import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs

import fnaccel
from fnaccel.cli.overriding import check_overrides, gather_overrides, layers, notices
from fnaccel.cli.terminal import Parser
from fnaccel.config import LaunchRecipe
from fnaccel.errors import LaunchError, nearest
from fnaccel.launch import Job, launch, tpu
from fnaccel.launch.accelerators import count_accelerators
from fnaccel.launch.ending import leave

_HELP = """Run a script as several processes that find each other through fa.start().

Options come before the script. Arguments after the script's name are the script's own.
The options under "recipe" change the result of fa.config.recipe() in the script."""


@contextlib.contextmanager
def _searching(folder: Path) -> Generator[None]:
    """Import as the script will: its folder comes first. The text of a strategy may name a module."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.pop(0)


class _Parser(Parser):
    failure = LaunchError


def parser() -> Parser:
    """The options of `fnaccel launch`."""
    usage = "fnaccel launch [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENT ...]"
    options = _Parser("fnaccel launch", _HELP, usage)
    options.add_argument("-m", "--module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    options.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options.add_argument(
        "-n", "--nproc", type=int, help="processes on this machine (default: its accelerators, or 1)"
    )
    options.add_argument(
        "--cpu", action="store_true", default=None, help="compute on the CPU, whatever else there is"
    )
    options.add_argument(
        "--cpu-affinity", action="store_true", default=None,
        help="keep each process, and its threads, on cores of its own, in one NUMA node (Linux)",
    )  # fmt: skip
    options.add_argument("--threads", type=int, help="of each process (default: OMP_NUM_THREADS, or a part)")
    options.add_argument(
        "--timeout-grace", type=float, metavar="SECONDS",
        help="for ranks to save in, between SIGTERM and SIGKILL (default: 30)",
    )  # fmt: skip
    options.add_argument(
        "--max-restarts", type=int, metavar="N",
        help="start the ranks again after a failure, N times in all (default: 0)",
    )  # fmt: skip
    options.add_argument(
        "--min-ranks", type=int, metavar="M",
        help="go on with as few as M ranks if some were killed (default: all)",
    )  # fmt: skip
    options.add_argument(
        "--watchdog", type=float, metavar="SECONDS",
        help="end ranks that wait for each other for so long, and show why (default: 120, 0: never)",
    )  # fmt: skip
    options.add_argument("--gpus", metavar="NUMBERS", help="such as 0,1 (default: all)")
    options.add_argument(
        "--env", action="append", metavar="NAME=VALUE", help="a variable of the ranks. May be repeated"
    )
    add_recipe_options(options)
    several = options.add_argument_group(
        "several machines",
        "the same command on each. gloo uses the interface to machine 0, or GLOO_SOCKET_IFNAME",
    )
    several.add_argument(
        "--nnodes", metavar="N | MIN:MAX",
        help="the number of machines. MIN:MAX: go on with the remaining machines, and let more join",
    )  # fmt: skip
    several.add_argument(
        "--node-rank", type=int,
        help="number of this machine, from 0, which keeps the store (default: the machine that has "
        "--master-addr is number 0, the others in any order)",
    )  # fmt: skip
    several.add_argument("--master-addr", help="a name or address of machine 0 that all reach")
    several.add_argument("--master-port", type=int, help="a free port there (default: 29500)")
    chips = options.add_argument_group("TPU", "one process drives all chips of a TPU VM: fa.xla()")
    chips.add_argument(
        "--tpu", action="store_true", default=None, help="use XLA devices (default if PJRT_DEVICE=TPU)"
    )
    chips.add_argument("--tpu-name", metavar="NAME", help="start on this TPU VM, through gcloud")
    chips.add_argument("--tpu-zone", metavar="ZONE", help="its zone")
    chips.add_argument(
        "--tpu-folder", metavar="PATH", help="the working folder there (default: the home folder)"
    )
    chips.add_argument("--tpu-sudo", action="store_true", help="run as root there")
    return options


def add_recipe_options(options: argparse.ArgumentParser) -> None:
    """Add the options that set fields of the recipe."""
    recipe = options.add_argument_group("recipe")
    recipe.add_argument(
        "--config", metavar="FILE",
        help="a recipe in YAML (default: ./fnaccel.yaml if it exists). All options go over it",
    )  # fmt: skip
    recipe.add_argument("--strategy", help='such as fsdp, or "ddp(2) * fsdp(4)"')
    recipe.add_argument("--precision", help="fp32, bf16, fp16 or fp8")
    recipe.add_argument("--accumulate", type=int, help="micro-batches in an update")
    recipe.add_argument("--clip-norm", type=float, help="the largest norm of the gradient")
    recipe.add_argument("--compile", metavar="SCOPE", help="auto, block, loss or step")
    recipe.add_argument("--compile-backend", metavar="NAME", help="of torch.compile (default: inductor)")
    recipe.add_argument("--compile-mode", metavar="MODE", help="such as reduce-overhead or max-autotune")
    recipe.add_argument("--attention", metavar="KERNEL", help="flash, efficient, cudnn or math")
    recipe.add_argument("--fp8-backend", metavar="NAME", help="torchao or transformer_engine")
    recipe.add_argument("--fp8-recipe", metavar="NAME", help="such as tensorwise or rowwise, hybrid or mxfp8")
    recipe.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="fields",
        help="any field of the recipe, such as optimizer.lr=1e-4. May be repeated",
    )  # fmt: skip


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
    options = parser()
    parsed, unknown = options.parse_known_args(arguments)
    if unknown:
        flags = [name for name in options.format_help().replace(",", " ").split() if name.startswith("--")]
        raise LaunchError(
            f"there is no option {unknown[0]}", where="fnaccel launch", fix=nearest(unknown[0], flags)
        )
    if parsed.module is not None and not parsed.module:
        options.error("-m needs the name of a module")
    program: list[str] = parsed.module or parsed.script
    name = program[0] if program else None
    sources = layers(parsed, os.environ)
    with _searching(Path(name or "").parent if parsed.module is None else Path()):
        recipe = check_overrides(sources).launch
    # the launcher itself uses the section `launch`: no script has to
    fields = {field: value for field, value in gather_overrides(sources).items() if field[:7] != "launch."}
    return job_of(
        recipe,
        script=name if parsed.module is None else None,
        module=name if parsed.module is not None else None,
        args=tuple(program[1:]),
        overrides=fields,
    )


def job_of(recipe: LaunchRecipe, **program: Any) -> Job:
    """The job of the section `launch` of a recipe on this machine.

    Args:
        recipe: the section.
        program: the remaining fields of the job.

    Raises:
        LaunchError: more ranks than accelerators, or machines without an address.
    """
    _check_machines(recipe)
    chips = recipe.tpu or (tpu.is_tpu(os.environ) and not recipe.cpu)
    job = Job(
        machines=recipe.machines,
        min_machines=recipe.min_machines,
        machine=0 if recipe.machines == 1 else recipe.machine,
        address=recipe.address or "127.0.0.1",
        port=recipe.port,
        cpu=recipe.cpu,
        tpu=chips,
        affinity=recipe.affinity,
        threads=recipe.threads,
        grace=recipe.grace,
        restarts=recipe.restarts,
        watchdog=recipe.watchdog,
        min_ranks=recipe.min_ranks,
        gpus=recipe.gpus,
        env=recipe.env,
        **program,
    )
    return attrs.evolve(job, processes=_processes(recipe.ranks, job))


def run(arguments: Sequence[str]) -> NoReturn:
    """Start the job of the arguments, wait for it, and exit with its exit code.

    Raises:
        FnaccelError: as `read`, or not all processes can be started.
    """
    job = read(arguments)
    for line in notices(parser().parse_known_args(arguments)[0], os.environ):
        print(line, file=sys.stderr, flush=True)
    command = _elsewhere(arguments)
    if command is None:
        for name in dir(fnaccel):  # the ranks are forks: all of them use these modules
            getattr(fnaccel, name)
        leave(launch(job))
    try:
        leave(subprocess.run(command, check=False).returncode)
    except FileNotFoundError:
        raise LaunchError(
            "gcloud is not installed, and a TPU VM is reached with it",
            where="fnaccel launch --tpu-name",
            fix="install the Google Cloud CLI, or log in on the TPU VM and start with: fnaccel launch --tpu",
        ) from None


def _elsewhere(arguments: Sequence[str]) -> list[str] | None:
    """The command that starts the job on a TPU VM, or None if the job runs on this machine."""
    parsed, _ = parser().parse_known_args(arguments)
    if parsed.tpu_name is None:
        stray = [flag for flag in tpu.FLAGS if getattr(parsed, flag.removeprefix("--").replace("-", "_"))]
        if stray:
            raise LaunchError(
                f"{stray[0]} without --tpu-name",
                where="fnaccel launch",
                fix="--tpu-name NAME, or leave it out on the TPU VM itself",
            )
        return None
    return tpu.remote_command(
        arguments,
        parsed.module or parsed.script,
        name=parsed.tpu_name,
        zone=parsed.tpu_zone,
        folder=parsed.tpu_folder,
        sudo=parsed.tpu_sudo,
    )


def _processes(count: int | None, job: Job) -> int:
    accelerators = 0 if job.cpu or job.tpu else count_accelerators(job.visible)
    if job.gpus is not None and not (job.cpu or job.tpu or accelerators):
        raise LaunchError(
            f"no GPU of this machine is among --gpus {job.gpus}",
            where="fnaccel launch --gpus",
            fix="numbers from `nvidia-smi -L`, or leave it out",
        )
    if count is None:
        return max(1, accelerators)
    if 0 < accelerators < count:
        raise LaunchError(
            f"{count} processes need an accelerator each, and there are {accelerators}",
            where=f"fnaccel launch -n {count}",
            fix=f"-n {accelerators}, or --cpu to compute without",
        )
    return count


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
