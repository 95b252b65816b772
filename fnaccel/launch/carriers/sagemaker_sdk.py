"""A training job handed to `ModelTrainer` of the sagemaker package, version 3.

The packages are imported here and nowhere else: boto3 takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnaccel.errors import LaunchError


def start(data: Mapping[str, Any]) -> None:
    """Start a training job, and wait for its end.

    Args:
        data: the request of a plan of `carriers/sagemaker.py`.

    Raises:
        LaunchError: the sagemaker package is not installed, or it can't run the job.
    """
    boto3 = _package("boto3")
    session: Any = boto3.Session(
        profile_name=data["session"].get("profile"), region_name=data["session"].get("region")
    )
    if session.region_name is None:
        raise LaunchError(
            "there is no region", where="launch.sagemaker.region", fix="region: eu-west-1, or aws configure"
        )
    _train(data, session)


def _train(data: Mapping[str, Any], boto: Any) -> None:
    estimator = dict(data["estimator"])
    module: Any = _package("sagemaker.train.model_trainer")
    configs: Any = _package("sagemaker.core.training.configs")
    shapes: Any = _package("sagemaker.core.shapes")
    sessions: Any = _package("sagemaker.core.helper.session_helper").Session(boto_session=boto)
    kind = str(estimator.pop("instance_type"))
    entry, folder = estimator.pop("entry_point"), estimator.pop("source_dir")
    requirements = "requirements.txt" if (Path(folder) / "requirements.txt").is_file() else None
    # a field that is None is a mistake for the package: only what is given
    compute: dict[str, Any] = {"instance_type": kind, "instance_count": estimator.pop("instance_count")}
    if "volume_size" in estimator:
        compute["volume_size_in_gb"] = estimator.pop("volume_size")
    if estimator.pop("use_spot_instances", False):
        compute["enable_managed_spot_training"] = True
    image = estimator.pop("image_uri", None) or _image(estimator, kind, boto.region_name)
    arguments: dict[str, Any] = {
        "sagemaker_session": sessions,
        "role": _role(estimator.pop("role"), boto),
        "training_image": image,
        "source_code": configs.SourceCode(source_dir=folder, entry_script=entry, requirements=requirements),
        "compute": configs.Compute(**compute),
        "hyperparameters": estimator.pop("hyperparameters"),
        "environment": estimator.pop("environment"),
    }
    limits = {
        "max_runtime_in_seconds": estimator.pop("max_run", None),
        "max_wait_time_in_seconds": estimator.pop("max_wait", None),
    }
    given = {name: value for name, value in limits.items() if value is not None}
    if given:
        arguments["stopping_condition"] = configs.StoppingCondition(**given)
    if estimator.pop("enable_network_isolation", False):
        arguments["networking"] = configs.Networking(enable_network_isolation=True)
    if estimator.pop("distribution", None):
        arguments["distributed"] = _package("sagemaker.train.distributed").Torchrun()
    if "checkpoint_local_path" in estimator:
        place = estimator.pop("checkpoint_s3_uri", None) or _checkpoints(estimator, sessions)
        local_path = estimator.pop("checkpoint_local_path")
        arguments["checkpoint_config"] = shapes.CheckpointConfig(s3_uri=place, local_path=local_path)
    if "base_job_name" in estimator:
        arguments["base_job_name"] = estimator.pop("base_job_name")
    if kind.startswith("local"):
        arguments["training_mode"] = module.Mode.LOCAL_CONTAINER
    metrics = estimator.pop("metric_definitions", [])
    trainer: Any = module.ModelTrainer(**arguments, **estimator)
    if metrics:
        found = [shapes.MetricDefinition(name=one["Name"], regex=one["Regex"]) for one in metrics]
        trainer = trainer.with_metric_definitions(found)
    channels = [
        configs.InputData(channel_name=name, data_source=place) for name, place in data["inputs"].items()
    ]
    trainer.train(input_data_config=channels or None)


def _image(estimator: dict[str, Any], kind: str, region: str) -> str:
    """The container of Hugging Face for the versions of the recipe."""
    versions = [estimator.pop(f"{name}_version") for name in ("transformers", "pytorch", "py")]
    return _package("sagemaker.core.image_uris").retrieve(
        framework="huggingface",
        region=region,
        version=versions[0],
        base_framework_version=f"pytorch{versions[1]}",
        py_version=versions[2],
        instance_type="ml.c5.xlarge" if kind == "local" else "ml.p3.2xlarge" if kind == "local_gpu" else kind,
        image_scope="training",
    )


def _checkpoints(estimator: Mapping[str, Any], sessions: Any) -> str:
    """The folder of checkpoints in S3. A later job with the same `job_name` goes on from there."""
    return f"s3://{sessions.default_bucket()}/{estimator.get('base_job_name', 'fnaccel')}/checkpoints"


def _role(name: str, boto: Any) -> str:
    """The ARN of a role. A name is looked up in the account."""
    return name if name.startswith("arn:") else boto.client("iam").get_role(RoleName=name)["Role"]["Arn"]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise LaunchError(
            f"{name} can't be imported: {error}",
            where="fnaccel launch --carrier sagemaker",
            fix='pip install "sagemaker>=3", or look at the request with --dry-run',
        ) from error
