"""The carrier `sagemaker`: a training job of Amazon SageMaker as plain data, and its hand-over to the SDK.

The data are the arguments and the inputs of an estimator. `sagemaker_sdk.py` hands them to the SDK.
Not run in an account: the tests record what would reach the service.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fnaccel.errors import LaunchError
from fnaccel.launch.carriers.command_line import refuse
from fnaccel.launch.carriers.environment import of_all_ranks
from fnaccel.launch.carriers.tables import read_table
from fnaccel.launch.request import Plan, Request
from fnaccel.launch.sections import SageMakerRecipe

MODEL_FOLDER = "/opt/ml/model"
"""SM_MODEL_DIR of a container. SageMaker puts its files into S3 when the job ends."""
CHECKPOINT_FOLDER = "/opt/ml/checkpoints"
"""SageMaker copies its files to S3 all the time, and back when a spot instance is replaced."""
TORCH = (2, 9)
"""The oldest release of torch that the package runs with."""
_FIX = "leave it out: SageMaker starts the ranks, and has its own restarts"


def plan(request: Request) -> Plan:
    """The request of a training job.

    Raises:
        LaunchError: no role, no instance type, no container, or arguments that SageMaker can't pass.

    Example:
        >>> section = SageMakerRecipe(role="trainer", instance_type="ml.g5.xlarge", image="my/image:1")
        >>> result = plan(Request(job=Job(script="t.py", args=("--lr", "0.1"), sagemaker=section)))
        >>> result.request["estimator"]["hyperparameters"]
        {'lr': '0.1'}
    """
    job, section = request.job, request.job.sagemaker
    refuse(job, "sagemaker", _FIX, also=() if job.module is None else ("-m",))
    _check(section)
    _check_torch(section)
    estimator: dict[str, Any] = {
        "entry_point": str(job.script),
        "source_dir": ".",
        "role": section.role,
        "instance_type": section.instance_type or "local",
        "instance_count": job.machines,
        "hyperparameters": hyperparameters(job.args),
        "environment": _variables(request),
    }
    if section.local and not estimator["instance_type"].startswith("local"):
        estimator["instance_type"] = "local" if job.cpu else "local_gpu"
    if job.machines > 1 or job.ranks != 1:  # torchrun, with a rank for each GPU
        estimator["distribution"] = {"torch_distributed": {"enabled": True}}
    if section.image is not None:
        estimator["image_uri"] = section.image
    else:
        versions = {"pytorch": section.torch, "transformers": section.transformers, "py": section.python}
        estimator |= {f"{name}_version": version for name, version in versions.items() if version is not None}
    optional = {
        "base_job_name": section.job_name,
        "max_run": section.max_run,
        "use_spot_instances": section.spot or None,
        "max_wait": section.max_wait if section.spot else None,
        "enable_network_isolation": section.network_isolation or None,
        "checkpoint_local_path": CHECKPOINT_FOLDER if section.spot else None,
        "metric_definitions": _metrics(section),
    }
    estimator |= {name: value for name, value in optional.items() if value is not None}
    estimator |= section.arguments
    session = {"profile": section.profile, "region": section.region}
    data = {
        "estimator": estimator,
        "inputs": _inputs(section),
        "session": {name: value for name, value in session.items() if value is not None},
    }
    summary = "a training job, by the sagemaker package. Its request:"
    return Plan(carrier="sagemaker", summary=summary, request=data)


def _check_torch(section: SageMakerRecipe) -> None:
    """Check that a container of SageMaker has the torch that the package needs."""
    numbers = re.findall(r"\d+", section.torch or "")
    version = tuple(int(number) for number in numbers[:2])
    if section.image is None and version and version < TORCH:
        raise LaunchError(
            f"the container has torch {section.torch}, and fnaccel needs {TORCH[0]}.{TORCH[1]} or later",
            where="launch.sagemaker.torch",
            fix="a later version, or image: with the URI of a container that has it",
        )


def hyperparameters(arguments: Sequence[str]) -> dict[str, str]:
    """The arguments of a script as SageMaker passes them: each has a name and one value.

    Raises:
        LaunchError: an argument without a name or without a value, or a name that comes twice.

    Example:
        >>> hyperparameters(["--lr", "0.1", "--name=x"])
        {'lr': '0.1', 'name': 'x'}
    """
    pairs: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            _refuse_argument(f"{word!r} has no name", "name it: --file data.txt")
        if not equals:
            if not words or words[0].startswith("--"):
                _refuse_argument(f"{word} has no value", f"{word} True, and read the text in the script")
            value = words.pop(0)
        if name in pairs:
            _refuse_argument(f"--{name} comes twice", "give one value, such as a comma-separated list")
        pairs[name] = value
    return pairs


def submit(data: Mapping[str, Any]) -> int:
    """Start a training job by the SDK that is installed, and wait for its end.

    Returns:
        0 if the job has succeeded.

    Raises:
        LaunchError: the sagemaker package is not installed.
    """
    from fnaccel.launch.carriers import sagemaker_sdk  # noqa: PLC0415 - imports boto3: seconds

    print("fnaccel launch: starting a training job of SageMaker", file=sys.stderr, flush=True)
    sagemaker_sdk.start(data)
    return 0


def _check(section: SageMakerRecipe) -> None:
    def require(condition: object, what: str, fix: str) -> None:
        if not condition:
            raise LaunchError(what, where="launch.sagemaker", fix=fix)

    require(section.role, "a training job needs a role", "role: the name or the ARN of an IAM role")
    require(section.instance_type or section.local, "no instance type", "instance_type: ml.g5.12xlarge")
    versions = (section.torch, section.transformers, section.python)
    named = section.image or all(versions) or "image_uri" in section.arguments
    fix = "image: the URI of a container, or the versions torch, transformers and python of Hugging Face's"
    require(named, "no container", fix)


def _refuse_argument(what: str, fix: str) -> None:
    raise LaunchError(f"SageMaker can't pass the script's arguments: {what}", where="fnaccel launch", fix=fix)


def _variables(request: Request) -> dict[str, str]:
    """The variables of the ranks. A recipe without a folder for checkpoints gets that of the job."""
    job = request.job
    folder = CHECKPOINT_FOLDER if request.job.sagemaker.spot else MODEL_FOLDER
    if "checkpoint.directory" not in job.overrides:
        job = attrs.evolve(job, overrides={**job.overrides, "checkpoint.directory": folder})
    return of_all_ranks(job)


def _inputs(section: SageMakerRecipe) -> dict[str, str]:
    if section.inputs_file is None:
        return {}
    rows = read_table(
        Path(section.inputs_file), ("channel_name", "data_location"), "launch.sagemaker.inputs_file"
    )
    return dict(rows)


def _metrics(section: SageMakerRecipe) -> list[dict[str, str]] | None:
    if section.metrics_file is None:
        return None
    rows = read_table(
        Path(section.metrics_file), ("metric_name", "metric_regex"), "launch.sagemaker.metrics_file"
    )
    return [{"Name": name, "Regex": regex} for name, regex in rows]
