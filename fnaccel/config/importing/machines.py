"""Processes and machines of Accelerate: the section `launch` of a recipe."""

from __future__ import annotations

from typing import cast

import attrs

from fnaccel.config.importing.draft import Draft

MPI = "mpirun_config"
TPU_KEYS = (
    "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm", "commands",
    "command_file",
    "downcast_bf16",
)  # fmt: skip
KEYS = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "gpu_ids", "use_cpu",
    "enable_cpu_affinity", "rdzv_backend", "same_network", "debug", "num_cpu_threads_per_process",
    "max_restarts",
    "monitor_interval", f"{MPI}.mpirun_hostfile", f"{MPI}.mpirun_ccl",
)  # fmt: skip


@attrs.frozen
class Machines:
    """How many processes on all machines together, and how many machines.

    Attributes:
        total: None if the file leaves it open.
        count: of machines.
    """

    total: int | None
    count: int


def read(draft: Draft, *, cpu: bool, hosts: bool) -> Machines:
    """Set the ranks and the machines.

    Args:
        draft: the table.
        cpu: whether the kind of the file computes on CPUs.
        hosts: whether another section names the machines, so that no address is needed.

    Raises:
        ConfigError: processes do not divide by machines, or several machines have no address.
    """
    machines = 1 if draft.get("num_machines") is None else cast(int, draft.whole("num_machines"))
    total = draft.whole("num_processes")
    if machines < 1:
        raise draft.wrong("num_machines", "there is at least one machine", "num_machines: 1")
    draft.set("num_machines", "launch.machines", machines, "each gets the same number of ranks")
    if total is not None and total > 0:
        if total % machines:
            raise draft.wrong(
                "num_processes",
                f"it does not divide by num_machines: {machines}",
                "it counts all machines together",
            )
        why = (
            f"on each of {machines} machines"
            if machines > 1
            else "batch sizes are those of all ranks together here"
        )
        draft.set("num_processes", "launch.ranks", total // machines, why)
    draft.skip_all(["num_processes"], "left open: a rank for each accelerator")
    total = total if total is not None and total > 0 else None
    if cpu or draft.truth("use_cpu"):
        draft.fill("launch.cpu", True, "use_cpu")
        draft.row("use_cpu", "launch.cpu: True", "the ranks compute on the CPU")
    draft.skip_all(["use_cpu"], "it is the default: accelerators, if there are any")
    hosts = _mpi(draft, machines) or hosts
    _address(draft, machines, hosts=hosts)
    _options(draft, None if total is None else total // machines)
    return Machines(total, machines)


def _address(draft: Draft, machines: int, *, hosts: bool) -> None:
    rank = draft.whole("machine_rank", 0) or 0
    if not 0 <= rank < machines:
        raise draft.wrong("machine_rank", f"there are {machines} machines", f"0 to {machines - 1}")
    if machines > 1:
        if draft.get("main_process_ip") is not None:
            why = "machine 0 keeps the store of all launchers"
            draft.set("main_process_ip", "launch.address", str(draft.get("main_process_ip")), why)
        elif not hosts:
            raise draft.wrong(
                "main_process_ip",
                f"{machines} machines need an address",
                "main_process_ip: the address of machine 0",
            )
        if draft.has("machine_rank") and not hosts:
            why = "differs on each machine: --node-rank. By default the machine with the address is 0"
            draft.set("machine_rank", "launch.machine", rank, why)
    if draft.get("main_process_port") not in (None, 0, "0"):
        draft.set(
            "main_process_port", "launch.port", draft.whole("main_process_port"), "a free port of machine 0"
        )
    draft.skip_all(["machine_rank"], "it is found: one machine, or a list of hosts")
    draft.skip_all(["main_process_ip"], "the ranks of one machine meet at 127.0.0.1")
    draft.skip_all(["main_process_port"], "left open: a free port, or 29500 on several machines")


def _options(draft: Draft, ranks: int | None) -> None:
    cards = draft.get("gpu_ids")
    if cards is not None and str(cards).lower() not in ("all", "none", ""):
        text = ",".join(map(str, cards)) if isinstance(cards, list) else str(cards)
        if ranks is not None and len(text.split(",")) < ranks:
            raise draft.wrong(
                "gpu_ids", f"num_processes needs {ranks} on each machine", "as many GPUs as processes"
            )
        draft.set("gpu_ids", "launch.gpus", text, "CUDA_VISIBLE_DEVICES of the ranks")
    draft.skip_all(["gpu_ids"], "all GPUs: it is the default")
    for key, field, why in (
        ("debug", "launch.debug", "collectives are always checked. This adds PyTorch's own checks"),
        ("enable_cpu_affinity", "launch.affinity", "each process on cores of its own"),
    ):
        if draft.truth(key):
            draft.set(key, field, True, why)
        draft.skip_all([key], "it is the default")
    for key, field in (
        ("num_cpu_threads_per_process", "launch.threads"),
        ("max_restarts", "launch.restarts"),
    ):
        if draft.get(key) is not None:
            draft.set(key, field, draft.whole(key), "the same")
        draft.skip_all([key], "it is the default")
    if draft.get("monitor_interval") is not None:
        draft.set("monitor_interval", "launch.monitor_interval", draft.number("monitor_interval"), "seconds")
    draft.skip_all(["monitor_interval"], "it is the default")
    draft.skip("rdzv_backend", "launchers always meet at the store of machine 0, with torch's elastic agent")
    draft.skip("same_network", "all machines reach the address of machine 0, or they can't start")


def _mpi(draft: Draft, machines: int) -> bool:
    """Whether mpirun gets a host file."""
    file, ccl = f"{MPI}.mpirun_hostfile", f"{MPI}.mpirun_ccl"
    path = draft.get(file)
    if ccl in draft.leaves and draft.get(ccl) is not None:
        draft.set(ccl, "launch.env.CCL_WORKER_COUNT", str(draft.get(ccl)), "oneCCL reads it")
    draft.skip_all([ccl], "no number is given")
    if path is None or machines == 1:
        draft.skip_all([file], "there is one machine, or no host file")
        return False
    draft.set(file, "launch.hosts.file", str(path), "needs mpirun and this file")
    draft.fill("launch.carrier", "mpirun", file)
    return True


def read_tpu(draft: Draft) -> None:
    """Set the keys of TPUs: `tpu_*`, and the commands that run before the script."""
    name = draft.get("tpu_name") or draft.get("tpu_vm")
    key = "tpu_name" if draft.get("tpu_name") else "tpu_vm"
    if name:
        draft.set(key, "launch.tpu_vm.name", name, "needs gcloud on this machine")
        for option, field in (
            ("tpu_zone", "zone"),
            ("command_file", "command_file"),
            ("commands", "commands"),
        ):
            if draft.get(option):
                value = draft.get(option)
                commands = [value] if option == "commands" and isinstance(value, str) else value
                draft.set(option, f"launch.tpu_vm.{field}", commands, "on the TPU VM")
        for option, field, value in (("tpu_use_sudo", "sudo", True), ("tpu_use_cluster", "workers", "all")):
            if draft.truth(option):
                draft.set(option, f"launch.tpu_vm.{field}", value, "on the TPU VM")
    for text in draft.names("tpu_env") if "tpu_env" in draft.leaves else []:
        variable, equals, value = text.partition("=")
        if not equals:
            raise draft.wrong("tpu_env", f"{text!r} sets no variable", "write [NAME=VALUE]")
        draft.fill(f"launch.env.{variable}", value, "tpu_env")
        draft.row("tpu_env", f"launch.env: {draft.get('tpu_env')}", "variables of the ranks")
    for key in draft.below("tpu_env"):
        draft.set(
            key, f"launch.env.{key.partition('.')[2]}", str(draft.leaves[key]), "a variable of the ranks"
        )
    low = draft.truth("downcast_bf16")
    draft.skip(
        "downcast_bf16",
        "parameters and doubles keep their dtype: precision: bf16 computes in bf16"
        if low
        else "it is the default",
    )
    draft.skip_all(TPU_KEYS, "nothing is given, or no TPU VM is named")
