"""Accelerate's files for Amazon SageMaker: the record `launch.sagemaker` of a recipe."""

from __future__ import annotations

from typing import Any

from fnaccel.config.importing.draft import Draft

_FIELDS = {
    "iam_role_name": "role",
    "profile": "profile",
    "region": "region",
    "image_uri": "image",
    "ec2_instance_type": "instance_type",
    "base_job_name": "job_name",
    "py_version": "python",
    "pytorch_version": "torch",
    "transformers_version": "transformers",
    "sagemaker_inputs_file": "inputs_file",
    "sagemaker_metrics_file": "metrics_file",
}
_ARGUMENTS = {
    "use_spot_instances": "spot",
    "max_wait": "max_wait",
    "max_run": "max_run",
    "enable_network_isolation": "network_isolation",
}
_TYPES = {"NO": False, "DATA_PARALLEL": True, "MODEL_PARALLEL": False}
ARGUMENTS = "additional_args"
KEYS = (*_FIELDS, *(f"{ARGUMENTS}.{name}" for name in _ARGUMENTS))


def read(draft: Draft) -> str:
    """Set the fields of the job, and return the strategy.

    Raises:
        ConfigError: spot instances without `max_wait`, or a kind of job that does not exist.
    """
    parallel = draft.choice("distributed_type", _TYPES, "NO")
    for key, field in _FIELDS.items():
        value = draft.get(key)
        if value is not None:
            # YAML reads the version 2.6 as a number
            text = str(value) if field in ("python", "torch", "transformers", "job_name") else value
            draft.set(key, f"launch.sagemaker.{field}", text, _why(field))
    draft.skip_all(_FIELDS, "nothing is given")
    if str(draft.get("ec2_instance_type", "")).startswith("local"):
        draft.fill("launch.sagemaker.local", True, "ec2_instance_type")
    _arguments(draft)
    draft.fill("launch.carrier", "sagemaker", "compute_environment")
    kind = draft.choice("distributed_type", {name: name for name in _TYPES}, "NO")
    if parallel:
        draft.set(
            "distributed_type",
            "launch.sagemaker.data_parallel",
            True,
            "SageMaker's library under torch.distributed",
        )
    draft.row(
        "distributed_type",
        "launch.sagemaker.data_parallel: True" if parallel else "strategy: local",
        f"{kind}: {_KINDS[kind]}",
    )
    machines = draft.whole("num_machines", 1) or 1
    draft.set("num_machines", "launch.machines", machines, "instances of the job")
    draft.skip_all(
        ["gpu_ids", "num_processes", "machine_rank"], "SageMaker starts a rank for each GPU of an instance"
    )
    if not parallel and machines == 1:
        draft.fill("launch.ranks", 1, "distributed_type")
        return "local"
    return "ddp"


_KINDS = {
    "NO": "one process",
    "DATA_PARALLEL": "each rank has the whole model",
    "MODEL_PARALLEL": "SageMaker's own library. Needs a strategy of fnaccel instead, such as fsdp",
}


def _why(field: str) -> str:
    return "chooses the container" if field in ("python", "torch", "transformers", "image") else "of the job"


def _arguments(draft: Draft) -> None:
    further: dict[str, Any] = {}
    for name, field in _ARGUMENTS.items():
        key = f"{ARGUMENTS}.{name}"
        if draft.has(key) and draft.get(key) is not None:
            value = draft.truth(key) if field in ("spot", "network_isolation") else draft.whole(key)
            draft.set(key, f"launch.sagemaker.{field}", value, "an argument of the estimator")
    for key in draft.below(ARGUMENTS):
        name, _, inner = key[len(ARGUMENTS) + 1 :].partition(".")
        draft.row(key, f"launch.sagemaker.arguments.{name}", "an argument of the estimator")
        if inner:
            branch = further.setdefault(name, {})
            *parents, last = inner.split(".")
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[last] = draft.leaves[key]
        else:
            further[name] = draft.leaves[key]
    if further:
        draft.fill("launch.sagemaker.arguments", further, ARGUMENTS)
