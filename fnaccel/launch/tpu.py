"""TPU VMs: the variables of the one process that drives the chips. `carriers/tpu.py` reaches it from afar.

torch_xla's own launcher starts one process per chip, and refuses the SPMD mode that `fa.xla` uses.
Not run on hardware: the variables are those that PJRT's client reads, tested with its CPU client.
"""

from __future__ import annotations

from collections.abc import Mapping


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
