"""Kinds of devices: the precisions, backend and package of each, and the processes that share one.

A small table and the checks that use it. CPUs and CUDA are tested. The other rows come from the
documentation of their makers and were not run on hardware, except for XLA's CPU client.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable
from typing import Any

import attrs
import torch

from fnaccel.errors import CapabilityError, MissingBackendError, WorldError

_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of device.

    Attributes:
        name: torch's device type.
        backend: the collective backend between its processes, or None if there is one process only.
        precisions: the dtypes that a step may compute in.
        package: the package that provides the device, if torch itself does not.
        install: how to get that package.
    """

    name: str
    backend: str | None
    precisions: tuple[str, ...]
    package: str | None = None
    install: str = ""


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(name="cpu", backend="gloo", precisions=("fp64", "fp32", "bf16", "fp16", "fp8")),
        Kind(name="cuda", backend="nccl", precisions=("fp64", "fp32", "bf16", "fp16", "fp8")),
        Kind(name="xpu", backend="xccl", precisions=("fp64", "fp32", "bf16", "fp16")),
        # no loss scale: torch has no kernel that moves one there, and fp16 needs it
        Kind(name="mps", backend=None, precisions=("fp32", "bf16")),
        Kind(
            name="npu",
            backend="hccl",
            precisions=("fp32", "bf16", "fp16"),
            package="torch_npu",
            install="pip install torch-npu, of the same release as torch",
        ),
        Kind(
            name="hpu",
            backend="hccl",
            precisions=("fp32", "bf16"),
            package="habana_frameworks.torch",
            install="pip install habana-torch-plugin, with the torch that it was built for",
        ),
        Kind(
            name="mlu",
            backend="cncl",
            precisions=("fp32", "bf16", "fp16"),
            package="torch_mlu",
            install="Cambricon's wheel of torch_mlu, of the same release as torch",
        ),
        Kind(
            name="musa",
            backend="mccl",
            precisions=("fp32", "bf16", "fp16"),
            package="torch_musa",
            install="Moore Threads' wheel of torch_musa, of the same release as torch",
        ),
        Kind(
            name="xla",
            backend=None,
            precisions=("fp32", "bf16"),
            package="torch_xla",
            install="pip install torch==2.9.0 torch_xla==2.9.0 (they go together. 2.9 is the last)",
        ),
    )
}
"""The known kinds by torch's device type. A type that is not listed is not checked."""


HOSTED = ("cpu", "xla")
"""Types that are one device to a process, and that torch.accelerator does not know."""


def check_precision(device: torch.device, compute: torch.dtype) -> None:
    """See that a kind of device can compute in a dtype.

    Args:
        device: the device of the step.
        compute: the dtype of its matrix products.

    Raises:
        CapabilityError: it can't. Names the dtypes that it can.

    Example:
        >>> check_precision(torch.device("mps"), torch.bfloat16)
    """
    kind = KINDS.get(device.type)
    dtype_name = _SHORT.get(compute, str(compute))
    if kind is None or dtype_name in kind.precisions:
        return
    why = {
        ("mps", "fp16"): "fp16 needs a loss scale, and torch has none on mps",
        ("xla", "fp16"): "TPUs compute in bf16, and fp16 would need a loss scale",
    }.get((device.type, dtype_name), f"no step can compute in {dtype_name} on {device.type}")
    raise CapabilityError(
        why,
        where=f"fa.with_precision on {device.type}",
        fix=f"choose one of: {', '.join(kind.precisions)}",
    )


def check_processes(device: torch.device, size: int) -> None:
    """See that `size` processes can share a run on a kind of device.

    Args:
        device: the device of each process.
        size: the number of processes.

    Raises:
        WorldError: there can be one only.

    Example:
        >>> check_processes(torch.device("mps"), 1)
    """
    kind = KINDS.get(device.type)
    if kind is None or kind.backend is not None or size == 1:
        return
    why = {
        "mps": "a Mac has one GPU, and torch has no collectives for it",
        "xla": "one process drives all XLA devices of its machine, through SPMD",
    }[device.type]
    raise WorldError(
        f"{size} processes were started on {device.type}: {why}",
        where="fa.start",
        fix="start one process" + (": fnaccel launch --tpu train.py" if device.type == "xla" else ""),
    )


def check_present(device: torch.device) -> None:
    """Check that this process has a device of this kind.

    Raises:
        WorldError: torch finds another accelerator, or none.
    """
    present = torch.accelerator.current_accelerator(check_available=True)
    seen = "no accelerator" if present is None else present.type
    if seen != device.type:
        raise WorldError(
            f"this process has no {device.type}: torch finds {seen}",
            where="fa.start(device=)",
            fix="leave device out to take the device of this machine, or pass device='cpu'",
        )


def open_device(name: torch.device | str) -> torch.device:
    """A device by its name, once the package that brings it is imported.

    Args:
        name: such as `"cuda:1"`, `"xla"`, `"npu"`.

    Raises:
        MissingBackendError: the package is not installed, lacks its driver, or was built for another torch.
        WorldError: torch knows no such device, the device can't have a number, or XLA has begun already.

    Example:
        >>> open_device("cpu")
        device(type='cpu')
    """
    kind = KINDS.get(str(name).partition(":")[0])
    if kind is not None and kind.package is not None:
        _import(kind)
    try:
        device = torch.device(str(name))
    except RuntimeError as error:
        raise WorldError(
            f"torch knows no device {str(name)!r}",
            where="fa.start(device=)",
            fix=f"choose one of: {', '.join(KINDS)}",
        ) from error
    if device.type in HOSTED and device.index:
        raise WorldError(
            f"{device.type} is one device to a process, so there is no {device}",
            where="fa.start(device=)",
            fix=f"device={device.type!r}",
        )
    return _begin_xla() if device.type == "xla" else device


def _import(kind: Kind) -> None:
    if kind.name == "xla":
        _check_xla_version()
    try:
        importlib.import_module(str(kind.package))
    except (ImportError, OSError) as error:
        lines = str(error).splitlines()
        raise MissingBackendError(
            f"the package {kind.package} can't be imported: {lines[0] if lines else type(error).__name__}",
            where=f"fa.start(device={kind.name!r})",
            fix=kind.install,
        ) from error


def _check_xla_version() -> None:
    """torch_xla links against one release of torch: beside another it fails with a missing symbol."""
    try:
        xla_version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return  # importing it says so
    torch_version = torch.__version__
    if xla_version.split(".")[:2] != torch_version.split(".")[:2]:
        raise MissingBackendError(
            f"torch_xla {xla_version} was not built for torch {torch_version}",
            where="fa.start(device='xla')",
            fix="an environment of its own: pip install torch==2.9.0 torch_xla==2.9.0 (they go together)",
        )


def _begin_xla() -> torch.device:
    """The one virtual device behind which XLA spreads tensors over all real ones."""
    import torch_xla  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    import torch_xla.runtime as xr  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    if not xr.is_spmd():
        # torch_xla would move them over with a warning, and was seen to crash the process at their next use
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():  # noqa: SLF001 - there is no public name
            raise WorldError(
                "something used an XLA device before, and SPMD has to be chosen before that",
                where="fa.start(device='xla')",
                fix="start the world first. After that, make tensors and ask torch_xla for devices",
            )
        xr.use_spmd()
    try:
        processes = xr.process_count()
    except (OSError, RuntimeError) as error:
        kind = xr.device_type()
        raise MissingBackendError(
            f"XLA's client for {kind} does not begin: {str(error).splitlines()[0]}",
            where="fa.start(device='xla')",
            fix="on a TPU VM: pip install 'torch_xla[tpu]==2.9.0'. PJRT_DEVICE=CPU rehearses on the CPU",
        ) from error
    if processes > 1:
        raise WorldError(
            f"{processes} hosts of a TPU slice run together, and this process feeds one of them",
            where="fa.start(device='xla')",
            fix="use a slice with one host (v5litepod-8, v6e-8 and smaller)",
        )
    return torch_xla.device()


def run_recorded(values: Iterable[Any]) -> None:
    """Let the tensors among `values` have memory of their own.

    XLA records a copy and runs it later. If the copy is read alone, before all recorded operations have run,
    it shares its source's memory, and the next step gives that memory away.

    Args:
        values: any leaves. Nothing happens if none is on an XLA device.
    """
    if any(isinstance(value, torch.Tensor) and value.device.type == "xla" for value in values):
        import torch_xla  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

        torch_xla.sync()
