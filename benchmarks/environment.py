"""Where figures were taken: processor, versions, commit, and which of the peers are installed."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parents[1]
PEERS = {
    "Accelerate": "accelerate",
    "Lightning Fabric": "lightning_fabric",
    "Opacus": "opacus",
    "TorchOpt": "torchopt",
}
"""The libraries that a benchmark leaves out if they are not installed, with the modules to import."""
_PACKAGES = (
    "fnaccel", "torch", "accelerate", "lightning-fabric", "transformers", "optree", "opacus", "torchopt",
)  # fmt: skip
_MEASURED = ("fnaccel", "benchmarks/*.py")
_T = TypeVar("_T")


def is_installed(peer: str) -> bool:
    """Whether a library of `PEERS` can be imported."""
    return importlib.util.find_spec(PEERS[peer]) is not None


def present(contestants: Mapping[str, _T]) -> dict[str, _T]:
    """The contestants whose library is installed. Their names contain the name of the library."""
    absent = [peer.lower() for peer in PEERS if not is_installed(peer)]
    return {
        name: value for name, value in contestants.items() if not any(peer in name.lower() for peer in absent)
    }


def environment(versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a reader needs to judge the figures by. `versions` adds packages of another environment."""
    installed = {
        name: importlib.metadata.version(name)
        for name in _PACKAGES
        if list(importlib.metadata.distributions(name=name))
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        **({"accelerator": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
        "threads_per_process": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **installed, **(versions or {})},
    }


def commit() -> str:
    """The commit of the code that runs, with a `+` if the package or the benchmarks were changed since."""
    try:
        name = _git("rev-parse", "--short=9", "HEAD").strip()
        return name + ("+" if _git("status", "--porcelain", "--", *_MEASURED).strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def processor() -> str:
    """The model of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"
