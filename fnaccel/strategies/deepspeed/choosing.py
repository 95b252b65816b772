"""The optimizer and the schedule: ours, or those that the file names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from fnaccel.errors import CapabilityError, ConfigError
from fnaccel.extend import Optimizer, Spec
from fnaccel.optim.deepspeed import DeepspeedKernel, DeepspeedRate
from fnaccel.optim.schedules import constant
from fnaccel.optim.several import OptimizerGroups
from fnaccel.strategies.deepspeed.draft import Draft
from fnaccel.strategies.deepspeed.record import Deepspeed

# arguments of deepspeed_lr, by each schedule's name for them. WarmupCosineLR starts at the optimizer's rate
_SCHEDULES: dict[str, dict[str, str]] = {
    "WarmupLR": {"lr": "warmup_max_lr", "low": "warmup_min_lr", "warmup": "warmup_num_steps"},
    "WarmupDecayLR": {
        "lr": "warmup_max_lr",
        "low": "warmup_min_lr",
        "warmup": "warmup_num_steps",
        "total": "total_num_steps",
    },
    "WarmupCosineLR": {"warmup": "warmup_num_steps", "total": "total_num_steps"},
    "OneCycle": {"lr": "cycle_max_lr", "low": "cycle_min_lr"},
    "LRRangeTest": {"low": "lr_range_test_min_lr"},
}


def choose_update(spec: Spec, draft: Draft, record: Deepspeed) -> None:
    """Choose the optimizer and the schedule, ours or the file's, and fill in the arguments of the file's.

    Raises:
        CapabilityError: a pair that DeepSpeed can't run.
        ConfigError: the train step leaves the optimizer or schedule to the file, which has none.
    """
    if spec.optimizers is None:
        draft.drop("optimizer")
        draft.drop("scheduler")
        if record.level in (1, 2):
            raise CapabilityError(
                f"stage {record.level} partitions the optimizer's state, and there is no optimizer",
                where="fa.train_step(optimizer=None)",
                fix="fa.deepspeed(stage=3) for inference; or give an optimizer",
            )
        return
    optimizer = _only(cast("Iterable[Optimizer | OptimizerGroups]", spec.optimizers.values()))
    _check_types(draft)
    _check_optimizer(draft, optimizer)
    _check_schedule(draft, optimizer)
    if isinstance(optimizer.kernel, DeepspeedKernel):
        _fill_optimizer(draft, optimizer)
    if isinstance(optimizer.lr, DeepspeedRate):
        _fill_schedule(draft, optimizer.lr)


def _only(optimizers: Iterable[Optimizer | OptimizerGroups]) -> Optimizer:
    first, *later = optimizers
    if any(other != first for other in later) or isinstance(first, OptimizerGroups):
        raise CapabilityError(
            "one DeepSpeed engine has one optimizer, and several were given",
            where="fa.train_step(optimizer=)",
            fix="give one optimizer, or one train step to each model, or choose fa.fsdp()",
        )
    if first.starts:
        raise CapabilityError(
            f"fa.optim.starting_at({first.starts}, ...): a DeepSpeed engine updates from the first step",
            where="fa.train_step(optimizer=)",
            fix="train the first part with frozen=, or choose fa.fsdp()",
        )
    if first.scheduled:
        raise CapabilityError(
            f"{first.scheduled[0].option} has a schedule, and under DeepSpeed the rate alone may have one",
            where="fa.train_step(optimizer=)",
            fix="give a number, or choose fa.fsdp()",
        )
    if hasattr(first.kernel, "chain"):
        raise CapabilityError(
            f"DeepSpeed takes an optimizer of torch, and {first.describe()} is made of parts",
            where="fa.train_step(optimizer=)",
            fix="fa.sgd, fa.adam, fa.adamw, fa.optim.from_torch(...); or fa.fsdp()",
        )
    return first


def _named(draft: Draft, section: str) -> Any:
    """The type that a section names: `"?"` if the type is missing, None if the section is missing."""
    contents = draft.written(section)
    return contents.get("type") or "?" if isinstance(contents, dict) else contents


def _check_types(draft: Draft) -> None:
    for section, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        value = draft.written(section)
        if isinstance(value, dict) and not isinstance(value.get("type"), str):
            draft.object_to(f"{section} in {draft.origin} has no type, such as {example!r}")


def _check_optimizer(draft: Draft, optimizer: Optimizer) -> None:
    kind = _named(draft, "optimizer")
    from_file = isinstance(optimizer.kernel, DeepspeedKernel)
    if kind is None and from_file:
        raise ConfigError(
            f"fa.optim.from_deepspeed() takes the file's optimizer, and {draft.origin} names none",
            where="fa.train_step(optimizer=)",
            fix='config={"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, or fa.adamw(...)',
        )
    if kind is not None and not from_file:
        draft.object_to(
            f"optimizer is {kind!r} in {draft.origin}, and fa.{optimizer.name} in fa.train_step(optimizer=)"
        )
    if from_file and str(kind).lower() == "muon":
        draft.object_to(f"optimizer is {kind!r} in {draft.origin}, which goes by matrices marked for it")
    if from_file and draft.written("optimizer.params.dampening"):
        draft.object_to(
            f"optimizer.params.dampening in {draft.origin} treats the first update apart, which a state "
            "made before step 0 can't tell"
        )


def _check_schedule(draft: Draft, optimizer: Optimizer) -> None:
    kind, rate = _named(draft, "scheduler"), optimizer.lr
    from_file = isinstance(rate, DeepspeedRate)
    if from_file and kind is None:
        raise ConfigError(
            f"fa.optim.deepspeed_lr() takes the schedule that the file names, and {draft.origin} names none",
            where=f"fa.{optimizer.name}(lr=)",
            fix='config={"scheduler": {"type": "WarmupLR", "params": {...}}}, or another schedule',
        )
    if from_file and any("lr" in dict(extra) for _, extra in optimizer.groups):
        raise CapabilityError(
            "a group has a rate of its own, and DeepSpeed's schedule sets one rate for all",
            where=f"fa.{optimizer.name}(groups=)",
            fix='leave "lr" out of the groups, or use a schedule of fnaccel: fa.warmup_cosine(...)',
        )
    if kind is not None and not from_file:
        draft.object_to(f"scheduler is {kind!r} in {draft.origin}, and lr={rate!r} in fa.{optimizer.name}")
    if isinstance(optimizer.kernel, DeepspeedKernel) and not isinstance(rate, DeepspeedRate | constant):
        raise CapabilityError(
            f"DeepSpeed's own {_named(draft, 'optimizer')} takes a number or DeepSpeed's own schedule, and "
            f"lr={rate!r}",
            where="fa.optim.from_deepspeed(lr=)",
            fix="fa.optim.deepspeed_lr(...) with a scheduler in the file; or fa.adamw(lr=schedule)",
        )


def _fill_optimizer(draft: Draft, optimizer: Optimizer) -> None:
    rate: Any = optimizer.lr
    base = rate.lr if isinstance(rate, DeepspeedRate) else rate.value
    draft.say("optimizer.params.lr", base, "fa.optim.from_deepspeed(lr=)")
    for option, setting in optimizer.options:
        value = list(setting) if isinstance(setting, tuple) else setting
        draft.say(f"optimizer.params.{option}", value, f"fa.optim.from_deepspeed({option}=)")
    for option in ("betas", "eps", "weight_decay"):
        if draft.is_auto(f"optimizer.params.{option}"):
            draft.drop(f"optimizer.params.{option}")


def _fill_schedule(draft: Draft, rate: DeepspeedRate) -> None:
    kind = _named(draft, "scheduler")
    names = _SCHEDULES.get(str(kind))
    if names is None:  # DeepSpeed's own error explains the wrong name
        return
    for option in ("lr", "low", "warmup", "total"):
        value: Any = getattr(rate, option)
        origin = f"fa.optim.deepspeed_lr({option}={value})"
        if value is not None and option in names:
            draft.say(f"scheduler.params.{names[option]}", value, origin)
        elif value is not None and option != "lr":  # the rate that an optimizer is made with
            draft.object_to(f"{origin} means nothing to {kind} in {draft.origin}")
    if names.get("low") and rate.low is None:
        draft.resolve(f"scheduler.params.{names['low']}", 0.0)
