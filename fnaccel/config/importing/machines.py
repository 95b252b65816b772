"""Where the ranks run: processes, machines, TPU VMs and SageMaker, as the section `launch` of a recipe."""

from __future__ import annotations

from typing import Any

from fnaccel.config.importing.draft import DEFAULT, Draft, Table, tree_of

MPI = "mpirun_config"
MPI_KEYS = {
    "mpirun_ccl": "no number is given",
    "mpirun_hostfile": "there is one machine, or no host file",
}
_LAUNCH: Table = {
    "debug": ("launch.debug", Draft.flag, "collectives are always checked. This adds PyTorch's own checks"),
    "enable_cpu_affinity": ("launch.affinity", Draft.flag, "each process on cores of its own"),
    "num_cpu_threads_per_process": ("launch.threads", Draft.whole, "the same"),
    "max_restarts": ("launch.restarts", Draft.whole, "the same"),
    "monitor_interval": ("launch.monitor_interval", Draft.number, "seconds"),
}
KEYS = {
    "num_machines": DEFAULT,
    "num_processes": "left open: a rank for each accelerator",
    "use_cpu": "it is the default: accelerators, if there are any",
    "main_process_ip": "the ranks of one machine meet at 127.0.0.1",
    "main_process_port": "left open: a free port, or 29500 on several machines",
    "machine_rank": "it is found: one machine, or a list of hosts",
    "gpu_ids": "all GPUs: it is the default",
    "rdzv_backend": "launchers always meet at the store of machine 0, with torch's elastic agent",
    "same_network": "all machines reach the address of machine 0, or they can't start",
    **dict.fromkeys(_LAUNCH, DEFAULT),
}
"""Why a key sets nothing."""


def read(draft: Draft, *, cpu: bool) -> None:
    """Set the ranks and the machines.

    Raises:
        ConfigError: processes do not divide by machines, or several machines have no address.
    """
    machines = draft.whole("num_machines")
    if machines is not None and machines < 1:
        raise draft.wrong("num_machines", "there is at least one machine", "num_machines: 1")
    machines = machines or 1
    draft.set("num_machines", "launch.machines", machines, "each gets the same number of ranks")
    if "launch.tpu" not in draft.fields:
        _read_ranks(draft, machines)
    if cpu or draft.truth("use_cpu"):
        draft.set("use_cpu", "launch.cpu", True, "the ranks compute on the CPU")
    ccl, hosts = (f"{MPI}.{name}" for name in MPI_KEYS)
    if draft.get(ccl) is not None:
        draft.set(ccl, "launch.env.CCL_WORKER_COUNT", draft.text(ccl), "oneCCL reads it")
    if machines > 1 and draft.get(hosts) is not None:
        draft.set(hosts, "launch.hosts.file", draft.text(hosts), "needs mpirun and this file")
        draft.fill("launch.carrier", "mpirun", hosts)
    _read_address(draft, machines)
    _read_gpus(draft)
    draft.read(_LAUNCH)
    draft.reasons(MPI_KEYS, MPI)
    draft.reasons(KEYS)
    _read_tpu(draft)


def _read_ranks(draft: Draft, machines: int) -> None:
    total = draft.whole("num_processes") or 0
    if total <= 0:
        return
    if total % machines:
        what = f"it does not divide by num_machines: {machines}"
        raise draft.wrong("num_processes", what, "it counts all machines together")
    several = f"on each of {machines} machines"
    why = several if machines > 1 else "batch sizes are those of all ranks together here"
    draft.set("num_processes", "launch.ranks", total // machines, why)


def _read_address(draft: Draft, machines: int) -> None:
    rank, address = draft.whole("machine_rank") or 0, draft.text("main_process_ip")
    if not 0 <= rank < machines:
        raise draft.wrong("machine_rank", f"there are {machines} machines", f"0 to {machines - 1}")
    hosts = draft.get("deepspeed_config.deepspeed_hostfile"), draft.fields.get("launch.hosts.file")
    listed = hosts != (None, None) or bool(draft.get("tpu_name"))
    if machines > 1 and address is not None:
        why = "machine 0 keeps the store of all launchers"
        draft.set("main_process_ip", "launch.address", address, why)
    elif machines > 1 and not listed:
        fix = "main_process_ip: the address of machine 0"
        raise draft.wrong("main_process_ip", f"{machines} machines need an address", fix)
    if machines > 1 and "machine_rank" in draft.leaves and not listed:
        why = "differs on each machine: --node-rank. By default the machine with the address is 0"
        draft.set("machine_rank", "launch.machine", rank, why)
    if draft.get("main_process_port") not in (None, 0, "0"):
        port = draft.whole("main_process_port")
        draft.set("main_process_port", "launch.port", port, "a free port of machine 0")


def _read_gpus(draft: Draft) -> None:
    gpus, ranks = draft.get("gpu_ids"), draft.fields.get("launch.ranks")
    if str(gpus).lower() in ("all", "none", ""):
        return
    text = ",".join(map(str, gpus)) if isinstance(gpus, list) else str(gpus)
    if ranks is not None and len(text.split(",")) < ranks:
        what = f"num_processes needs {ranks} on each machine"
        raise draft.wrong("gpu_ids", what, "as many GPUs as processes")
    draft.set("gpu_ids", "launch.gpus", text, "CUDA_VISIBLE_DEVICES of the ranks")


def _commands(draft: Draft, key: str) -> Any:
    commands = draft.filled(key)
    return [commands] if isinstance(commands, str) else commands


def _workers(draft: Draft, key: str) -> str | None:
    return "all" if draft.truth(key) else None


_ON_TPU_VM = "on the TPU VM"
_TPU: Table = {
    "tpu_zone": ("launch.tpu_vm.zone", Draft.filled, _ON_TPU_VM),
    "command_file": ("launch.tpu_vm.command_file", Draft.filled, _ON_TPU_VM),
    "commands": ("launch.tpu_vm.commands", _commands, _ON_TPU_VM),
    "tpu_use_sudo": ("launch.tpu_vm.sudo", Draft.flag, _ON_TPU_VM),
    "tpu_use_cluster": ("launch.tpu_vm.workers", _workers, _ON_TPU_VM),
}
TPU_KEYS = ("tpu_name", "tpu_vm", "tpu_env", "downcast_bf16", *_TPU)


def _read_tpu(draft: Draft) -> None:
    key = "tpu_name" if draft.get("tpu_name") else "tpu_vm"
    if draft.get(key):
        draft.set(key, "launch.tpu_vm.name", draft.get(key), "needs gcloud on this machine")
        draft.read(_TPU)
    for text in draft.names("tpu_env") if "tpu_env" in draft.leaves else []:
        variable, equals, value = text.partition("=")
        if not equals:
            raise draft.wrong("tpu_env", f"{text!r} sets no variable", "write [NAME=VALUE]")
        draft.fill(f"launch.env.{variable}", value, "tpu_env")
        draft.row("tpu_env", f"launch.env: {draft.get('tpu_env')}", "variables of the ranks")
    for key in draft.below("tpu_env"):
        variable = key.removeprefix("tpu_env.")
        draft.set(key, f"launch.env.{variable}", str(draft.leaves[key]), "a variable of the ranks")
    low = "parameters and doubles keep their dtype: precision: bf16 computes in bf16"
    draft.skip(low if draft.truth("downcast_bf16") else DEFAULT, "downcast_bf16")
    draft.skip("nothing is given, or no TPU VM is named", *TPU_KEYS)


_OF_JOB = "of the job"
_OF_CONTAINER = "chooses the container"
_OF_ESTIMATOR = "an argument of the estimator"
# YAML reads the version 2.6 as a number
SAGEMAKER: Table = {
    "iam_role_name": ("launch.sagemaker.role", Draft.get, _OF_JOB),
    "profile": ("launch.sagemaker.profile", Draft.get, _OF_JOB),
    "region": ("launch.sagemaker.region", Draft.get, _OF_JOB),
    "image_uri": ("launch.sagemaker.image", Draft.get, _OF_CONTAINER),
    "ec2_instance_type": ("launch.sagemaker.instance_type", Draft.get, _OF_JOB),
    "base_job_name": ("launch.sagemaker.job_name", Draft.text, _OF_JOB),
    "py_version": ("launch.sagemaker.python", Draft.text, _OF_CONTAINER),
    "pytorch_version": ("launch.sagemaker.torch", Draft.text, _OF_CONTAINER),
    "transformers_version": ("launch.sagemaker.transformers", Draft.text, _OF_CONTAINER),
    "sagemaker_inputs_file": ("launch.sagemaker.inputs_file", Draft.get, _OF_JOB),
    "sagemaker_metrics_file": ("launch.sagemaker.metrics_file", Draft.get, _OF_JOB),
}
ARGUMENTS = "additional_args"
ESTIMATOR: Table = {
    "use_spot_instances": ("launch.sagemaker.spot", Draft.truth, _OF_ESTIMATOR),
    "max_wait": ("launch.sagemaker.max_wait", Draft.whole, _OF_ESTIMATOR),
    "max_run": ("launch.sagemaker.max_run", Draft.whole, _OF_ESTIMATOR),
    "enable_network_isolation": ("launch.sagemaker.network_isolation", Draft.truth, _OF_ESTIMATOR),
}
_TYPES = {
    "NO": "one process",
    "DATA_PARALLEL": "each rank has the whole model. NCCL sends, in the place of SageMaker's library",
    "MODEL_PARALLEL": "SageMaker's own library. Needs a strategy of fnaccel instead, such as fsdp",
}


def read_sagemaker(draft: Draft) -> str:
    """Set the fields of a job on Amazon SageMaker, and return the strategy."""
    kind = draft.choice("distributed_type", {name: name for name in _TYPES}, "NO")
    draft.read(SAGEMAKER)
    draft.skip("nothing is given", *SAGEMAKER)
    if str(draft.get("ec2_instance_type")).startswith("local"):
        draft.fill("launch.sagemaker.local", True, "ec2_instance_type")
    draft.read(ESTIMATOR, ARGUMENTS)
    others = {key.removeprefix(f"{ARGUMENTS}."): draft.leaves[key] for key in draft.below(ARGUMENTS)}
    for name in others:
        became = f"launch.sagemaker.arguments.{name.partition('.')[0]}"
        draft.row(f"{ARGUMENTS}.{name}", became, _OF_ESTIMATOR)
    if others:
        draft.fill("launch.sagemaker.arguments", tree_of(others), ARGUMENTS)
    why = "needs an account, a role and the SDK of SageMaker"
    draft.set("compute_environment", "launch.carrier", "sagemaker", why)
    strategy = "ddp" if kind == "DATA_PARALLEL" else "local"
    draft.row("distributed_type", f"strategy: {strategy}", f"{kind}: {_TYPES[kind]}")
    machines = draft.whole("num_machines") or 1
    draft.set("num_machines", "launch.machines", machines, "instances of the job")
    ranks = ("gpu_ids", "num_processes", "machine_rank")
    draft.skip("SageMaker starts a rank for each GPU of an instance", *ranks)
    draft.skip("the instances decide it", "use_cpu", "debug")
    draft.skip("SageMaker starts the ranks", *KEYS, *(f"{MPI}.{name}" for name in MPI_KEYS))
    if strategy == "local" and machines == 1:
        draft.fill("launch.ranks", 1, "distributed_type")
        return "local"
    return "ddp"
