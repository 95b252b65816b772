"""TPU VMs: the variables of the one process that drives the chips, and the command that starts it from afar.

torch_xla's own launcher starts one process per chip, and refuses the SPMD mode that `fa.xla` uses.
Not run on hardware: the variables are those that PJRT's client reads, tested with its CPU client.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from fnaccel.errors import LaunchError

FLAGS = {"--tpu-name": 1, "--tpu-zone": 1, "--tpu-folder": 1, "--tpu-sudo": 0}
"""Options that are for the machine that asks, and how many values each takes."""


def is_tpu(environ: Mapping[str, str]) -> bool:
    """Whether the environment says that PJRT's client drives TPUs."""
    return environ.get("PJRT_DEVICE") == "TPU"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a rank, so that `fa.start()` takes the XLA devices.

    Args:
        environ: the launcher's own. A PJRT_DEVICE in it stays (`CPU` rehearses on the CPU).

    Example:
        >>> variables({})
        {'FNACCEL_DEVICE': 'xla', 'PJRT_DEVICE': 'TPU'}
    """
    return {"FNACCEL_DEVICE": "xla", "PJRT_DEVICE": environ.get("PJRT_DEVICE", "TPU")}


def remote_command(
    arguments: Sequence[str], program: Sequence[str], *, name: str, zone: str, folder: str | None, sudo: bool
) -> list[str]:
    """The command that runs `fnaccel launch --tpu` on a TPU VM, through gcloud.

    Args:
        arguments: all that `fnaccel launch` was given.
        program: the last of them: the script, or the module, and its own arguments.
        name, zone: of the TPU VM.
        folder: the working folder on it. By default its home folder.
        sudo: whether to run as root there.

    Raises:
        LaunchError: no zone.

    Example:
        >>> place = {"name": "vm", "zone": "us-central2-b", "folder": "~/gpt", "sudo": False}
        >>> remote_command(["t.py"], ["t.py"], **place)[-1]
        'cd ~/gpt && fnaccel launch --tpu t.py'
    """
    if not zone:
        raise LaunchError(
            f"the TPU VM {name!r} is in no zone",
            where="fnaccel launch --tpu-name",
            fix="--tpu-zone us-central2-b",
        )
    options = list(arguments[: len(arguments) - len(program)])
    for flag, values in FLAGS.items():
        for index in reversed(range(len(options))):
            if options[index] == flag:
                del options[index : index + 1 + values]
            elif options[index].startswith(f"{flag}="):
                del options[index]
    if "--tpu" not in options:
        options.insert(0, "--tpu")
    command = shlex.join(["fnaccel", "launch", *options, *program])
    command = f"sudo {command}" if sudo else command
    if folder is not None:
        home, slash, subfolder = folder.partition("/")
        # which folder ~ is, only the VM knows
        place = (
            f"~{slash}{shlex.quote(subfolder) if subfolder else ''}" if home == "~" else shlex.quote(folder)
        )
        command = f"cd {place} && {command}"
    return [
        "gcloud", "compute", "tpus", "tpu-vm", "ssh", name, "--zone", zone, "--worker", "all",
        "--command", command,
    ]  # fmt: skip
