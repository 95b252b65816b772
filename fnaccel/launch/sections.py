"""Sections of a recipe's `launch` that belong to one carrier each: hosts, SLURM, TPU VMs, SageMaker.

They are data. The carriers in `fnaccel.launch.carriers` turn them into commands and texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast
from unicodedata import category

import attrs

from fnaccel.errors import ConfigError
from fnaccel.launch.options import option

CARRIERS = ("local", "elastic", "mpirun", "slurm", "ssh", "pdsh", "tpu", "sagemaker")
"""The ways to start the processes of a job."""


def as_words(field: str) -> Any:
    """A converter: a comma-separated text, or a list of texts, becomes a tuple of texts.

    Args:
        field: the dotted name, for an error.
    """

    def convert(value: object) -> tuple[str, ...]:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str | int) for item in items):
            raise ConfigError(f"{value!r} is no list of names", where=field, fix="write [a, b], or text: a,b")
        words = tuple(str(item).strip() for item in cast(Iterable[Any], items) if str(item).strip())
        if items and not words and value != "":
            raise ConfigError(f"{value!r} names nothing", where=field, fix="write [a, b], or text: a,b")
        return words

    return convert


def as_version(field: str) -> Any:
    """A converter that refuses a version that YAML has read as a number: 3.10 would become 3.1.

    Args:
        field: the dotted name, for an error.
    """

    def convert(value: object) -> str | None:
        if value is not None and not isinstance(value, str):
            raise ConfigError(
                f"{value!r} is a number, and a version is text", where=field, fix='write it in quotes: "3.10"'
            )
        return value

    return convert


def as_slurm(value: object) -> dict[str, Any]:
    """The options of sbatch: their long names without dashes, and their values.

    Raises:
        ConfigError: it is no mapping, or `time` is a number. YAML reads `1:00:00` as 3600, which SLURM
            would take as minutes.

    Example:
        >>> as_slurm({"partition": "gpu", "time": "1:00:00", "setup": "module load cuda"})["setup"]
        ('module load cuda',)
    """
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{value!r} holds no options", where="launch.slurm", fix="write slurm: {partition: gpu}"
        )
    options = {
        str(name).replace("_", "-"): each for name, each in cast(Mapping[Any, Any], value).items()
    }  # fmt: skip
    if isinstance(options.get("time"), int):
        raise ConfigError(
            f"time is the number {options['time']}: YAML reads 1:00:00 as 3600, and SLURM takes minutes",
            where="launch.slurm.time",
            fix='write it in quotes: time: "1:00:00"',
        )
    if "setup" in options:
        lines = options["setup"]
        options["setup"] = tuple(lines.splitlines() if isinstance(lines, str) else lines)
    return options


_SHELL_LINES = ("launch.slurm.setup", "launch.tpu_vm.commands")
_QUOTED = ("launch.env.", "launch.tpu_vm.env.")  # values of variables: a certificate has several lines


def one_line(value: object, field: str) -> None:
    """Raise ConfigError if a text has a control character: a newline would add a line to a job script."""
    if field in _SHELL_LINES or field.startswith(_QUOTED):
        return
    if isinstance(value, Mapping):
        for name, entry in cast(Mapping[Any, Any], value).items():
            one_line(str(name), field)
            one_line(entry, f"{field}.{name}")
    elif isinstance(value, list | tuple):
        for entry in cast(Iterable[Any], value):
            one_line(entry, field)
    elif isinstance(value, str) and any(category(character) == "Cc" for character in value):
        what = f"{value!r} has a control character, which may become a line of a job script"
        raise ConfigError(what, where=field, fix=f"write it on one line, or as {' or '.join(_SHELL_LINES)}")


@attrs.frozen(kw_only=True)
class HostsRecipe:
    """The machines that ssh, pdsh and mpirun start ranks on.

    Attributes:
        names: host names, each with a number of slots if it is known: `"gpu1"`, `"gpu2:4"`. A slot is a rank.
        file: a host file: a line `gpu1 slots=4` for each host. Comments begin with `#`.
        include: hosts and slots that are used, as DeepSpeed writes them: `"gpu1@gpu2:0,2"`.
        exclude: hosts and slots that are left out, in the same grammar.

    Raises:
        ConfigError: `include` and `exclude` together.

    Example:
        >>> fa.config.HostsRecipe(names="gpu1, gpu2").names
        ('gpu1', 'gpu2')
    """

    names: Any = option(
        "--hosts", "for ssh, pdsh and mpirun: gpu1,gpu2:4", default=(), metavar="NAMES", group="carriers",
        converter=as_words("launch.hosts.names"),
    )  # fmt: skip
    file: str | None = option(
        "--hostfile", "with a line for each host: gpu1 slots=4", metavar="FILE", group="carriers"
    )
    include: str | None = option(
        "--include", "hosts and GPUs that are used: gpu1@gpu2:0,2", metavar="FILTER", group="carriers"
    )
    exclude: str | None = option(
        "--exclude", "hosts and GPUs that are left out", metavar="FILTER", group="carriers"
    )

    def __attrs_post_init__(self) -> None:
        if self.include and self.exclude:
            raise ConfigError(
                "include and exclude can't be used together", where="launch.hosts", fix="one of the two"
            )
        if (self.include or self.exclude) and not self.given:
            raise ConfigError(
                "include and exclude choose among hosts, and there are none",
                where="launch.hosts",
                fix="--hosts gpu1,gpu2, or --hostfile FILE",
            )

    @property
    def given(self) -> bool:
        """Whether there are hosts."""
        return bool(self.names or self.file)


@attrs.frozen(kw_only=True)
class TpuVmRecipe:
    """TPU VMs that are reached from this machine, through gcloud.

    Attributes:
        name: of the TPU VM or the pod. Several names: the same command on each.
        zone: its zone.
        folder: the working folder there. None: the home folder.
        sudo: run as root there.
        workers: `"all"`, or the number of a worker of a pod.
        commands: shell lines that run before the script, on each worker.
        command_file: a file of such lines. They run before `commands`.
        env: variables of the commands and of the ranks there.
        install: the arguments of `pip install`, which runs first, such as `"fnaccel==0.1.0"`.

    Example:
        >>> fa.config.TpuVmRecipe(name="pod", zone="us-central2-b", install="fnaccel").workers
        'all'
    """

    name: Any = option(
        "--tpu-name", "start on this TPU VM or pod, through gcloud", default=(), metavar="NAME", group="TPU",
        converter=lambda value: as_words("launch.tpu_vm.name")(value or ()),
    )  # fmt: skip
    zone: str | None = option("--tpu-zone", "its zone", metavar="ZONE", group="TPU")
    folder: str | None = option(
        "--tpu-folder", "the working folder there (default: the home folder)", metavar="PATH", group="TPU"
    )
    sudo: bool = option("--tpu-sudo", "run as root there", default=False, group="TPU")
    workers: str = attrs.field(default="all", converter=str)
    commands: Any = attrs.field(
        default=(), converter=lambda value: (value,) if isinstance(value, str) else tuple(value)
    )
    command_file: str | None = None
    env: dict[str, Any] = attrs.field(factory=dict)
    install: str | None = None


@attrs.frozen(kw_only=True)
class SageMakerRecipe:
    """A training job of Amazon SageMaker.

    Attributes:
        role: the name or ARN of the IAM role of the job.
        profile, region: of the AWS account. None: those of the AWS command line.
        image: the URI of the container. None: the container of Hugging Face for these versions.
        instance_type: such as `"ml.g5.12xlarge"`.
        job_name: the beginning of the name of the job.
        spot: use spot instances.
        max_wait: seconds to wait for spot instances, the time of the job included.
        max_run: seconds that the job may run.
        python, torch, transformers: versions, which choose the container. Texts: `"py312"`, `"2.6.0"`.
        inputs_file: a table of two columns, `channel_name` and `data_location`, with tabs between them.
        metrics_file: a table of two columns, `metric_name` and `metric_regex`.
        network_isolation: the container gets no network.
        local: run the container on this machine.
        arguments: further arguments of the SDK's estimator.

    Raises:
        ConfigError: spot instances without `max_wait`, or `max_wait` below `max_run`. A version that YAML
            has read as a number.

    Example:
        >>> job = fa.config.SageMakerRecipe(role="trainer", instance_type="ml.g5.12xlarge", torch="2.6.0")
        >>> job.spot
        False
    """

    role: str | None = None
    profile: str | None = None
    region: str | None = None
    image: str | None = None
    instance_type: str | None = None
    job_name: str | None = None
    spot: bool = False
    max_wait: int | None = None
    max_run: int | None = None
    python: Any = attrs.field(default=None, converter=as_version("launch.sagemaker.python"))
    torch: Any = attrs.field(default=None, converter=as_version("launch.sagemaker.torch"))
    transformers: Any = attrs.field(default=None, converter=as_version("launch.sagemaker.transformers"))
    inputs_file: str | None = None
    metrics_file: str | None = None
    network_isolation: bool = False
    local: bool = False
    arguments: dict[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.spot and (self.max_wait is None or (self.max_run or 86_400) > self.max_wait):
            raise ConfigError(
                f"spot instances with max_wait={self.max_wait}",
                where="launch.sagemaker",
                fix="max_wait in seconds, and at least max_run (86400 if it is not given)",
            )
