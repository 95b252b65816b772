"""Sets of variables: the checks of `--debug`, and NCCL on consumer cards."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from fnaccel.launch.job import Job

_PROC = Path("/proc/driver/nvidia")

DEBUG = {
    "TORCH_DISTRIBUTED_DEBUG": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "PYTHONFAULTHANDLER": "1",
}
"""The variables of `--debug`. Not DETAIL: under it, DDP ends a process by SIGSEGV on gloo (torch 2.13)."""

_CONSUMER = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def nccl_variables(preset: str | None, *, cards: Collection[str], driver: str = "") -> dict[str, str]:
    """The variables of NCCL for these cards.

    Cards of the RTX 40 series have no peer-to-peer copies. With drivers before 550.40 NCCL tries to use
    them, and hangs.

    Args:
        preset: `"consumer"`, `"default"`, or None: `"consumer"` if two or more such cards are found.
        cards: the names of the machine's cards.
        driver: the version of the driver.

    Example:
        >>> nccl_variables(None, cards=["NVIDIA GeForce RTX 4090"] * 2, driver="545.23.08")
        {'NCCL_P2P_DISABLE': '1', 'NCCL_IB_DISABLE': '1'}
    """
    if preset == "consumer":
        return dict(_CONSUMER)
    consumer = [card for card in cards if re.search(r"RTX 40\d\d", card)]
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    if preset is None and len(consumer) > 1 and numbers < (550, 40):
        return dict(_CONSUMER)
    return {}


def preset_variables(
    job: Job, environ: Mapping[str, str], *, cards: Collection[str] = (), driver: str = ""
) -> dict[str, str]:
    """The variables of `--debug` and of NCCL that a job gets on a machine.

    A variable that the user has set stays, unless an option asks for the preset by name.

    Args:
        job: the job.
        environ: of the launcher.
        cards, driver: of this machine.

    Example:
        >>> preset_variables(Job(debug=True), {"NCCL_DEBUG": "WARN"})["TORCH_DISTRIBUTED_DEBUG"]
        'INFO'
    """
    chosen = dict(DEBUG) if job.debug else {}
    chosen |= nccl_variables(job.nccl, cards=cards, driver=driver)
    named = _CONSUMER if job.nccl == "consumer" else {}
    return {name: value for name, value in chosen.items() if name in named or name not in environ}


def find_cards(root: Path = _PROC) -> tuple[list[str], str]:
    """The names of the NVIDIA cards of this machine in the order of their bus, and the version of the driver.

    The kernel's files are read, and the driver is not started.

    Args:
        root: the driver's folder of files.
    """
    cards: list[str] = []
    for path in sorted((root / "gpus").glob("*/information")):
        name = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        cards.append("" if name is None else name.group(1).strip())
    try:
        version = re.search(r"(\d+\.\d+(\.\d+)?)", (root / "version").read_text())
    except OSError:
        version = None
    return cards, "" if version is None else version.group(1)
