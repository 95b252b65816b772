"""The options of `fnaccel launch`."""

from __future__ import annotations

# argparse: no dependency, and with REMAINDER all arguments after the script's name are the script's,
# even if they look like an option of the launcher
import argparse

from fnaccel.cli.terminal import Parser
from fnaccel.errors import LaunchError

CARRIERS = "local, elastic, mpirun, slurm, ssh, pdsh, tpu, sagemaker, ray, kubernetes"
_HELP = """Run a script as several processes that find each other through fa.start().

Options come before the script. Arguments after the script's name are the script's own.
The options under "recipe" change the result of fa.config.recipe() in the script."""


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
    chips.add_argument("--tpu-name", metavar="NAME", help="start on this TPU VM or pod, through gcloud")
    chips.add_argument("--tpu-zone", metavar="ZONE", help="its zone")
    chips.add_argument(
        "--tpu-folder", metavar="PATH", help="the working folder there (default: the home folder)"
    )
    chips.add_argument("--tpu-sudo", action="store_true", default=None, help="run as root there")
    _add_carrier_options(options)
    _add_output_options(options)
    return options


def _add_carrier_options(options: argparse.ArgumentParser) -> None:
    """The options that choose who starts the processes."""
    carriers = options.add_argument_group(
        "carriers",
        "who starts the processes. Their options are sections of the recipe: --set launch.slurm.time=2:00:00",
    )
    carriers.add_argument("--carrier", metavar="NAME", help=CARRIERS)
    carriers.add_argument(
        "--dry-run", action="store_true", help="print the commands of any carrier, and start nothing"
    )
    carriers.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    carriers.add_argument("--hosts", metavar="NAMES", help="for ssh, pdsh and mpirun: gpu1,gpu2:4")
    carriers.add_argument("--hostfile", metavar="FILE", help="with a line for each host: gpu1 slots=4")
    carriers.add_argument("--include", metavar="FILTER", help="hosts and GPUs that are used: gpu1@gpu2:0,2")
    carriers.add_argument("--exclude", metavar="FILTER", help="hosts and GPUs that are left out")


def _add_output_options(options: argparse.ArgumentParser) -> None:
    """The options about processes and their output."""
    more = options.add_argument_group("more about the processes")
    more.add_argument(
        "--no-python", action="store_false", default=None, dest="python",
        help="the script is a program of its own, and is not run by Python",
    )  # fmt: skip
    more.add_argument(
        "--numa", action="store_true", default=None,
        help="keep each process on the cores of the NUMA node of its GPU (Linux)",
    )  # fmt: skip
    more.add_argument(
        "--nccl", metavar="PRESET",
        help="consumer: no peer-to-peer copies, no InfiniBand (default if RTX 40 cards need it), or default",
    )  # fmt: skip
    more.add_argument("--role", metavar="NAME", help="of these ranks, in the variable ROLE_NAME")
    more.add_argument(
        "--rdzv-conf", metavar="PAIRS", help="limits of the meeting in seconds: join_timeout=60,..."
    )
    more.add_argument(
        "--monitor-interval", type=float, metavar="SECONDS",
        help="between two looks of the watchdog (default: 1). The end of a process is seen at once",
    )  # fmt: skip
    more.add_argument(
        "--tee", metavar="FOLDER", help="write the output of each rank to rank0.log, ... and show it"
    )
    more.add_argument(
        "--end-with-input", action="store_true",
        help="end the ranks when standard input is closed, as SIGTERM does. For a launcher that ssh starts",
    )  # fmt: skip
    more.add_argument("-q", "--quiet", action="store_true", default=None, help="print failures only")
    more.add_argument(
        "--debug", action="store_true", default=None, help="check collectives, and show C++ stacks"
    )


def add_recipe_options(options: argparse.ArgumentParser) -> None:
    """Add the options that set fields of the recipe."""
    recipe = options.add_argument_group("recipe")
    recipe.add_argument(
        "--config", metavar="FILE",
        help="a recipe in YAML (default: ./fnaccel.yaml if it exists). All options go over it",
    )  # fmt: skip
    recipe.add_argument(
        "--no-config", action="store_const", const="", dest="config", help="use no recipe file"
    )
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
