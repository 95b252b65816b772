"""`fnaccel launch`: options to a `Job`. How it is run is in `fnaccel.launch`."""

from __future__ import annotations

# argparse: no dependency, and with REMAINDER all that stands after the script's name is the script's,
# also where it looks like an option of ours
import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NoReturn

from fnaccel.cli.overriding import check_overrides, gather_overrides
from fnaccel.errors import LaunchError, nearest
from fnaccel.launch import Job, launch, tpu
from fnaccel.launch.accelerators import count_accelerators
from fnaccel.launch.ending import leave

_HELP = """Run a script as several processes that find each other through fa.start().

Options come before the script; what follows the script's name is the script's own.
The options under "recipe" change what fa.config.recipe() returns in the script."""


@contextlib.contextmanager
def _searching(folder: Path) -> Generator[None]:
    """In the body modules are found where the script will find them: a strategy's text may name one."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.pop(0)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: what, where, fix."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message, where=self.prog, fix=f"{self.prog} --help shows the options")


def parser() -> argparse.ArgumentParser:
    """The options of `fnaccel launch`."""
    made = _Parser(
        prog="fnaccel launch",
        usage="fnaccel launch [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("-m", "--module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    made.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    made.add_argument(
        "-n", "--nproc", type=int, help="processes on this machine (default: its accelerators, or 1)"
    )
    made.add_argument("--cpu", action="store_true", help="compute on the CPU, whatever else there is")
    made.add_argument(
        "--cpu-affinity", action="store_true",
        help="keep each process, and its threads, on cores of its own, in one NUMA node (Linux)",
    )  # fmt: skip
    made.add_argument("--threads", type=int, help="of each process (default: OMP_NUM_THREADS, or a part)")
    made.add_argument(
        "--timeout-grace", type=float, default=30.0, metavar="SECONDS",
        help="for ranks to save in, between SIGTERM and SIGKILL (default: 30)",
    )  # fmt: skip
    made.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="start the ranks again after a failure, N times in all (default: 0)",
    )  # fmt: skip
    made.add_argument(
        "--min-ranks", type=int, metavar="M",
        help="go on with as few as M ranks where some were killed (default: all)",
    )  # fmt: skip
    recipe = made.add_argument_group("recipe")
    recipe.add_argument("--config", metavar="FILE", help="a recipe in YAML; the options below go over it")
    recipe.add_argument("--strategy", help='such as fsdp, or "ddp(2) * fsdp(4)"')
    recipe.add_argument("--precision", help="fp32, bf16, fp16 or fp8")
    recipe.add_argument("--accumulate", type=int, help="micro-batches in an update")
    recipe.add_argument("--clip-norm", type=float, help="the largest norm of the gradient")
    recipe.add_argument("--compile", metavar="SCOPE", help="auto, block, loss or step")
    recipe.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="fields",
        help="any field of the recipe, such as optimizer.lr=1e-4; may be repeated",
    )  # fmt: skip
    several = made.add_argument_group(
        "several machines",
        "the same command on each; gloo uses the interface to machine 0, or what GLOO_SOCKET_IFNAME says",
    )
    several.add_argument(
        "--nnodes", default="1", metavar="N | MIN:MAX",
        help="how many machines; MIN:MAX: go on with those that are left, and let others join",
    )  # fmt: skip
    several.add_argument(
        "--node-rank", type=int,
        help="number of this machine, from 0, which keeps the store (default: the machine that has "
        "--master-addr is number 0, the others in any order)",
    )  # fmt: skip
    several.add_argument("--master-addr", help="a name or address of machine 0 that all reach")
    several.add_argument("--master-port", type=int, help="a free port there (default: 29500)")
    chips = made.add_argument_group("TPU", "one process drives all chips of a TPU VM: fa.xla()")
    chips.add_argument("--tpu", action="store_true", help="use XLA devices (default if PJRT_DEVICE=TPU)")
    chips.add_argument("--tpu-name", metavar="NAME", help="start on this TPU VM, through gcloud")
    chips.add_argument("--tpu-zone", metavar="ZONE", help="where it is")
    chips.add_argument("--tpu-folder", metavar="PATH", help="where to run there (default: the home folder)")
    chips.add_argument("--tpu-sudo", action="store_true", help="run as root there")
    return made


def read(arguments: Sequence[str]) -> Job:
    """The job that the arguments of `fnaccel launch` describe. Nothing is started.

    Raises:
        LaunchError: options that do not exist, or not together.
        ConfigError: an override that a recipe has no place for.
        UnknownNameError: a strategy or precision that does not exist.

    Example:
        >>> read(["-n", "2", "train.py", "--lr", "0.1"]).args
        ('--lr', '0.1')
    """
    options = parser()
    found, unknown = options.parse_known_args(arguments)
    if unknown:
        known = [name for name in options.format_help().replace(",", " ").split() if name.startswith("--")]
        raise LaunchError(
            f"there is no option {unknown[0]}", where="fnaccel launch", fix=nearest(unknown[0], known)
        )
    if found.module is not None and not found.module:
        options.error("-m needs the name of a module")
    program: list[str] = found.module or found.script
    name = program[0] if program else None
    overrides = gather_overrides(found)
    with _searching(Path(name or "").parent if found.module is None else Path()):
        check_overrides(overrides)
    fewest, most = _machine_limits(found.nnodes)
    _check_machines(found, most)
    chips: bool = found.tpu or (tpu.is_tpu(os.environ) and not found.cpu)
    return Job(
        script=name if found.module is None else None,
        module=name if found.module is not None else None,
        args=tuple(program[1:]),
        processes=_processes(found.nproc, cpu=found.cpu or chips),
        machines=most,
        min_machines=None if fewest == most else fewest,
        machine=0 if most == 1 else found.node_rank,
        address=found.master_addr or "127.0.0.1",
        port=found.master_port,
        cpu=found.cpu,
        tpu=chips,
        affinity=found.cpu_affinity,
        threads=found.threads,
        grace=found.timeout_grace,
        restarts=found.max_restarts,
        min_ranks=found.min_ranks,
        overrides=overrides,
    )


def run(arguments: Sequence[str]) -> NoReturn:
    """Start what the arguments describe, wait for it, and end with its exit code.

    Raises:
        FnaccelError: as `read`, or not all processes can be started.
    """
    job = read(arguments)
    command = _elsewhere(arguments)
    if command is None:
        leave(launch(job))
    try:
        leave(subprocess.run(command, check=False).returncode)
    except FileNotFoundError:
        raise LaunchError(
            "gcloud is not installed, and it is what reaches a TPU VM",
            where="fnaccel launch --tpu-name",
            fix="install the Google Cloud CLI; or log in on the TPU VM and start with: fnaccel launch --tpu",
        ) from None


def _elsewhere(arguments: Sequence[str]) -> list[str] | None:
    """The command that starts the job on a TPU VM; None where it runs here."""
    found, _ = parser().parse_known_args(arguments)
    if found.tpu_name is None:
        stray = [flag for flag in tpu.FLAGS if getattr(found, flag.removeprefix("--").replace("-", "_"))]
        if stray:
            raise LaunchError(
                f"{stray[0]} without --tpu-name",
                where="fnaccel launch",
                fix="--tpu-name NAME; or leave it out on the TPU VM itself",
            )
        return None
    return tpu.remote_command(
        arguments,
        found.module or found.script,
        name=found.tpu_name,
        zone=found.tpu_zone,
        folder=found.tpu_folder,
        sudo=found.tpu_sudo,
    )


def _processes(asked: int | None, *, cpu: bool) -> int:
    there = 0 if cpu else count_accelerators()
    if asked is None:
        return max(1, there)
    if 0 < there < asked:
        raise LaunchError(
            f"{asked} processes need an accelerator each, and there are {there}",
            where=f"fnaccel launch -n {asked}",
            fix=f"-n {there}, or --cpu to compute without",
        )
    return asked


def _machine_limits(text: str) -> tuple[int, int]:
    """The fewest and the most machines that --nnodes asks for."""
    fewest, colon, most = text.partition(":")
    if not fewest.isdecimal() or (colon and not most.isdecimal()):
        raise LaunchError(
            f"{text!r} is no number of machines",
            where="fnaccel launch --nnodes",
            fix="--nnodes 2, or --nnodes 2:4 for 2 to 4 machines",
        )
    return int(fewest), int(most if colon else fewest)


def _check_machines(found: argparse.Namespace, machines: int) -> None:
    if machines > 1 and found.master_addr is None:
        raise LaunchError(
            f"{machines} machines need --master-addr",
            where="fnaccel launch --nnodes",
            fix="--master-addr with the address of the first machine, on all machines",
        )
    given = (("--node-rank", found.node_rank), ("--master-addr", found.master_addr))
    stray = [flag for flag, value in given if value]
    if machines <= 1 and stray:  # 0 is an error of its own
        raise LaunchError(
            f"{' and '.join(stray)} without --nnodes",
            where="fnaccel launch",
            fix="say how many machines there are: --nnodes 2; or leave it out on one",
        )
