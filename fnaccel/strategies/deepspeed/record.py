"""`deepspeed(...)`: the options of the strategy. `config` has the configuration, `runtime` the engine."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar, Literal, get_args

import attrs

from fnaccel.errors import (
    ArgumentError,
    ConfigError,
    UnknownNameError,
    as_names,
    moved_arguments,
    nearest,
    require,
)
from fnaccel.extend import Axis, Capability, Strategy, maker
from fnaccel.world.paths import local_path
from fnaccel.world.plain_data import load_json

Offload = Literal["cpu", "nvme"]

_WHERE = "fa.deepspeed"
_PARTITIONED = frozenset({Capability.MODULES})
_WHOLE = _PARTITIONED | {Capability.PARAMETERS, Capability.COMPILE_BLOCK, Capability.COMPILE_LOSS}


@attrs.frozen(repr=False)
class Written:
    """A configuration as text, so that it can be compared and hashed, and its origin."""

    text: str
    path: str | None = None

    def __repr__(self) -> str:
        return repr(self.path) if self.path is not None else repr(self.value())

    @property
    def origin(self) -> str:
        """Its name in error messages."""
        return "config={...}" if self.path is None else self.path

    def value(self) -> dict[str, Any]:
        """The configuration."""
        return json.loads(self.text)


@attrs.frozen
class Deepspeed(Axis):
    """The runtime that owns the axis `dp_shard`: see `deepspeed`."""

    mesh_axis: ClassVar[str] = "dp_shard"
    maker: ClassVar[str] = "deepspeed"

    stage: int | None = None
    offload_optimizer: Offload | None = None
    offload_params: Offload | None = None
    nvme_path: str | None = None
    zero3_init: bool = False
    moe_layers: tuple[str, ...] = ()
    hidden_size: int | None = None
    config: Written | None = None
    degree: int = -1

    @property
    def written(self) -> dict[str, Any]:
        """The contents of the file: empty without a file."""
        return {} if self.config is None else self.config.value()

    @property
    def level(self) -> int:
        """The ZeRO stage that will run: the argument, or the file's, or 2."""
        if self.stage is not None:
            return self.stage
        section: Any = self.written.get("zero_optimization")
        stage: Any = section.get("stage") if isinstance(section, dict) else None
        return stage if isinstance(stage, int) else 0 if self.config is not None and section is None else 2

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Capabilities for transforms: up to stage 2 parameters are whole, and no module has hooks."""
        return _WHOLE if self.level < 3 else _PARTITIONED


_FORMER = {
    "hpz": '"zero_hpz_partition_size": 8',
    "quantized_weights": '"zero_quantized_weights": True',
    "quantized_gradients": '"zero_quantized_gradients": True',
    "contiguous_gradients": '"contiguous_gradients": True',
    "overlap_comm": '"overlap_comm": True',
    "reduce_scatter": '"reduce_scatter": True',
    "reduce_bucket_size": '"reduce_bucket_size": "auto"',
    "allgather_bucket_size": '"allgather_bucket_size": 500_000_000',
    "prefetch_bucket_size": '"stage3_prefetch_bucket_size": "auto"',
    "param_persistence_threshold": '"stage3_param_persistence_threshold": "auto"',
    "sub_group_size": '"sub_group_size": 1_000_000_000',
    "max_live_parameters": '"stage3_max_live_parameters": 1_000_000_000',
    "max_reuse_distance": '"stage3_max_reuse_distance": 1_000_000_000',
    "save_16bit": '"stage3_gather_16bit_weights_on_model_save": True',
}
"""Arguments that became keys of `config`."""


@maker
@moved_arguments(
    _WHERE, **{name: f'config={{"zero_optimization": {{{key}}}}}' for name, key in _FORMER.items()}
)
def deepspeed(
    stage: int | None = None,
    *,
    config: str | os.PathLike[str] | dict[str, Any] | None = None,
    offload_optimizer: Offload | None = None,
    offload_params: Offload | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    zero3_init: bool = False,
    moe_layers: Any = (),
    hidden_size: int | None = None,
) -> Strategy:
    """Train on DeepSpeed's ZeRO engine (Rajbhandari et al. 2020): same step, same transforms, same state.

    DeepSpeed averages, clips and updates by itself, which the plan shows. `train_step.plan.deepspeed` is the
    configuration that it gets. If the step and `config` both set a value, they have to agree. Arguments
    that are None leave a value to the file, or else to DeepSpeed's default
    (https://www.deepspeed.ai/docs/config-json/).

    Args:
        stage: 0 partitions nothing, 1 optimizer slots, 2 gradients too, 3 parameters too.
            the file's by default (0 if it has no section `zero_optimization`), or 2.
        config: a DeepSpeed JSON file, or a dict like one, for all other options. `"auto"` in it is filled
            from the step, the optimizer and the model.
        offload_optimizer: keep optimizer slots and fp32 parameters on `"cpu"` or `"nvme"` (stage 3).
        offload_params: keep parameters there (stage 3).
        nvme_path: the folder that `"nvme"` writes to.
        zero3_init: partition each parameter as it is made, so that no rank ever holds the whole model
            (stage 3, needs a factory).
        moe_layers: class names of mixture-of-experts layers that are gathered as one (stage 3).
        hidden_size: for `"auto"`, if the model has no `config.hidden_size`.

    Raises:
        ArgumentError: a stage that is none, or options that need another stage.
        ConfigError: the file can't be read, or says otherwise than an argument.

    Example:
        >>> model = fa.distribute(GPT, fa.deepspeed(stage=3, offload_optimizer="cpu"))
        >>> train_step = fa.train_step(loss_fn, model=model, optimizer=fa.adamw(3e-4))
        >>> train_step.plan.deepspeed["zero_optimization"]["stage"]
        3
    """
    record = Deepspeed(
        stage=stage,
        offload_optimizer=offload_optimizer,
        offload_params=offload_params,
        nvme_path=None if nvme_path is None else str(local_path(nvme_path, _WHERE)),
        zero3_init=zero3_init,
        moe_layers=as_names(moe_layers),
        hidden_size=hidden_size,
        config=None if config is None else _read(config),
    )
    _check(record)
    return Strategy((record,))


def _read(config: Any) -> Written:
    if isinstance(config, dict):
        try:
            return _written(config, None)
        except TypeError as error:
            raise ConfigError(
                f"the configuration is not JSON: {error}", where=_WHERE, fix="numbers, text, lists and dicts"
            ) from error
    path = local_path(config, f"{_WHERE}(config=)")
    try:
        # editors on Windows begin a file with a mark
        contents = load_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}",
            where=f"{_WHERE}(config=)",
            fix="give the path of a file",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON: {error}", where=f"{_WHERE}(config=)", fix="correct it"
        ) from error
    if not isinstance(contents, dict):
        raise ConfigError(
            f"{path} holds a {type(contents).__name__}, not an object",
            where=f"{_WHERE}(config=)",
            fix="{...}",
        )
    return _written(contents, str(config))


def _written(config: dict[str, Any], path: str | None) -> Written:
    # DeepSpeed takes both names of this section
    named = {"bf16" if name == "bfloat16" else name: value for name, value in config.items()}
    return Written(json.dumps(named, sort_keys=True), path)


_STAGE_3 = ("offload_params", "zero3_init", "moe_layers")


def _check(record: Deepspeed) -> None:
    stage = record.stage
    require(
        stage is None or (type(stage) is int and 0 <= stage <= 3),
        f"stage={stage!r}",
        _WHERE,
        "stage is 0, 1, 2 or 3",
    )
    for name in ("offload_optimizer", "offload_params"):
        value = getattr(record, name)
        if value is not None and value not in get_args(Offload):
            raise UnknownNameError(
                f"{name} has no place called {value!r}",
                where=_WHERE,
                fix=nearest(str(value), get_args(Offload)),
            )
    if record.level < 3:
        chosen = [name for name in _STAGE_3 if getattr(record, name)]
        if chosen:
            raise ArgumentError(
                f"{', '.join(chosen)} partition or gather parameters, which stage {record.level} does not",
                where=_WHERE,
                fix=f"fa.deepspeed(stage=3, {chosen[0]}=...), or leave it out",
            )
        require(record.offload_optimizer != "nvme", f"stage {record.level} can't offload to NVMe", _WHERE,
                'stage=3, or offload_optimizer="cpu"')  # fmt: skip
    if record.level == 0:
        require(record.offload_optimizer is None, "stage 0 offloads nothing", _WHERE, "stage=1, 2 or 3")
    if "nvme" in (record.offload_optimizer, record.offload_params):
        require(record.nvme_path is not None, "NVMe offload has no path to write to", _WHERE,
                'nvme_path="/local_nvme"')  # fmt: skip
