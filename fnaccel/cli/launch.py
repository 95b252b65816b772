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
from typing import NoReturn

import fnaccel
from fnaccel.cli.overriding import check_overrides, gather_overrides
from fnaccel.cli.terminal import Parser
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
    options.add_argument("--cpu", action="store_true", help="compute on the CPU, whatever else there is")
    options.add_argument(
        "--cpu-affinity", action="store_true",
        help="keep each process, and its threads, on cores of its own, in one NUMA node (Linux)",
    )  # fmt: skip
    options.add_argument("--threads", type=int, help="of each process (default: OMP_NUM_THREADS, or a part)")
    options.add_argument(
        "--timeout-grace", type=float, default=30.0, metavar="SECONDS",
        help="for ranks to save in, between SIGTERM and SIGKILL (default: 30)",
    )  # fmt: skip
    options.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="start the ranks again after a failure, N times in all (default: 0)",
    )  # fmt: skip
    options.add_argument(
        "--min-ranks", type=int, metavar="M",
        help="go on with as few as M ranks if some were killed (default: all)",
    )  # fmt: skip
    options.add_argument(
        "--watchdog", type=float, default=120.0, metavar="SECONDS",
        help="end ranks that wait for each other for so long, and show why (default: 120, 0: never)",
    )  # fmt: skip
    recipe = options.add_argument_group("recipe")
    recipe.add_argument("--config", metavar="FILE", help="a recipe in YAML. The options below go over it")
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
    several = options.add_argument_group(
        "several machines",
        "the same command on each. gloo uses the interface to machine 0, or GLOO_SOCKET_IFNAME",
    )
    several.add_argument(
        "--nnodes", default="1", metavar="N | MIN:MAX",
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
    chips.add_argument("--tpu", action="store_true", help="use XLA devices (default if PJRT_DEVICE=TPU)")
    chips.add_argument("--tpu-name", metavar="NAME", help="start on this TPU VM, through gcloud")
    chips.add_argument("--tpu-zone", metavar="ZONE", help="its zone")
    chips.add_argument(
        "--tpu-folder", metavar="PATH", help="the working folder there (default: the home folder)"
    )
    chips.add_argument("--tpu-sudo", action="store_true", help="run as root there")
    return options


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
    overrides = gather_overrides(parsed)
    with _searching(Path(name or "").parent if parsed.module is None else Path()):
        check_overrides(overrides)
    fewest, most = _machine_limits(parsed.nnodes)
    _check_machines(parsed, most)
    chips: bool = parsed.tpu or (tpu.is_tpu(os.environ) and not parsed.cpu)
    return Job(
        script=name if parsed.module is None else None,
        module=name if parsed.module is not None else None,
        args=tuple(program[1:]),
        processes=_processes(parsed.nproc, cpu=parsed.cpu or chips),
        machines=most,
        min_machines=None if fewest == most else fewest,
        machine=0 if most == 1 else parsed.node_rank,
        address=parsed.master_addr or "127.0.0.1",
        port=parsed.master_port,
        cpu=parsed.cpu,
        tpu=chips,
        affinity=parsed.cpu_affinity,
        threads=parsed.threads,
        grace=parsed.timeout_grace,
        restarts=parsed.max_restarts,
        watchdog=parsed.watchdog,
        min_ranks=parsed.min_ranks,
        overrides=overrides,
    )


def run(arguments: Sequence[str]) -> NoReturn:
    """Start the job of the arguments, wait for it, and exit with its exit code.

    Raises:
        FnaccelError: as `read`, or not all processes can be started.
    """
    job = read(arguments)
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


def _processes(count: int | None, *, cpu: bool) -> int:
    accelerators = 0 if cpu else count_accelerators()
    if count is None:
        return max(1, accelerators)
    if 0 < accelerators < count:
        raise LaunchError(
            f"{count} processes need an accelerator each, and there are {accelerators}",
            where=f"fnaccel launch -n {count}",
            fix=f"-n {accelerators}, or --cpu to compute without",
        )
    return count


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


def _check_machines(parsed: argparse.Namespace, machines: int) -> None:
    if machines > 1 and parsed.master_addr is None:
        raise LaunchError(
            f"{machines} machines need --master-addr",
            where="fnaccel launch --nnodes",
            fix="--master-addr with the address of the first machine, on all machines",
        )
    options = (("--node-rank", parsed.node_rank), ("--master-addr", parsed.master_addr))
    stray = [flag for flag, value in options if value]
    if machines <= 1 and stray:  # 0 is an error of its own
        raise LaunchError(
            f"{' and '.join(stray)} without --nnodes",
            where="fnaccel launch",
            fix="give the number of machines: --nnodes 2. On one machine leave it out",
        )
