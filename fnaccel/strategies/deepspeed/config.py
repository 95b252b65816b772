"""From a step, an optimizer and a file to the one configuration of DeepSpeed, which is not imported here."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import nn

from fnaccel.errors import CapabilityError, ConfigError
from fnaccel.extend import Delegation, Spec, delegator
from fnaccel.step.choices import PrecisionName
from fnaccel.step.precision_policy import DTYPES, Precision
from fnaccel.step.step import Step
from fnaccel.strategies.deepspeed.choosing import choose_update
from fnaccel.strategies.deepspeed.draft import Draft
from fnaccel.strategies.deepspeed.record import Deepspeed
from fnaccel.transforms.accumulation import Accumulate, accumulate
from fnaccel.transforms.clipping import clip_norm
from fnaccel.transforms.precision import with_precision

_WHERE = "fa.deepspeed"
_DELEGATED = frozenset({"accumulate", "clip_norm", "skip_nonfinite"})
_QUIET = 2_000_000_000  # steps between two lines that nobody asked for


@delegator(Deepspeed)
def delegate(spec: Spec, record: Deepspeed) -> Delegation:
    """The transforms that DeepSpeed carries out, and its configuration.

    Raises:
        CapabilityError: the step needs a capability that DeepSpeed lacks.
        ConfigError: the file, the arguments, the step and the optimizer don't agree.
    """
    draft = Draft(record.written, "fa.deepspeed()" if record.config is None else record.config.origin)
    draft.check_shape()
    _arguments(record, draft)
    step = _precision(spec.step, draft)
    step = _accumulation(step, draft)
    step = _clipping(step, draft)
    choose_update(spec, draft, record)
    rows = _batch(draft, spec.mesh.batch_size)
    draft.check()
    _hidden(spec.model, record, draft)
    draft.fill("steps_per_print", _QUIET)
    draft.fill("zero_allow_untested_optimizer", True)
    draft.fill("zero_force_ds_cpu_optimizer", False)
    _check_averages(step, record)
    return Delegation(
        step=step,
        by="deepspeed",
        names=_DELEGATED,
        config=draft.finish(),
        notes=_notes(step, record),
        rows=rows,
    )


def _arguments(record: Deepspeed, draft: Draft) -> None:
    """Write the arguments of `fa.deepspeed(...)` into the draft."""
    zero = "zero_optimization"
    if record.stage is None:
        draft.fill(f"{zero}.stage", record.level)
    else:
        draft.say(f"{zero}.stage", record.stage, f"fa.deepspeed(stage={record.stage})")
    for name, key in (("offload_optimizer", "offload_optimizer"), ("offload_params", "offload_param")):
        place = getattr(record, name)
        where = f"{zero}.{key}"
        draft.resolve(f"{where}.device", place or "none")
        if place is not None:
            origin = f"fa.deepspeed({name}={place!r})"
            draft.say(f"{where}.device", place, origin)
            draft.fill(f"{where}.pin_memory", torch.accelerator.is_available())
            if place == "nvme":
                draft.say(
                    f"{where}.nvme_path", record.nvme_path, f"fa.deepspeed(nvme_path={record.nvme_path!r})"
                )
        draft.resolve(f"{where}.pin_memory", torch.accelerator.is_available())
        draft.resolve(f"{where}.nvme_path", record.nvme_path)
    draft.resolve(f"{zero}.stage3_gather_16bit_weights_on_model_save", False)


def _precision(step: Step, draft: Draft) -> Step:
    """The step with its compute dtype: the step's own, or else the file's."""
    if draft.written("torch_autocast.enabled"):
        draft.object_to(
            'torch_autocast casts a second time: leave it out, and say fa.with_precision(step, "bf16")'
        )
    settings = step.settings
    if not settings.casts:
        halves: tuple[PrecisionName, ...] = ("bf16", "fp16")
        enabled: list[PrecisionName] = [name for name in halves if draft.written(f"{name}.enabled") is True]
        if len(enabled) > 1:
            draft.object_to(f"bf16 and fp16 are both enabled in {draft.origin}")
            draft.check()
        if enabled:
            step = with_precision(step, enabled[0])
            settings = step.settings
    policy = settings.precision
    compute = policy.compute
    if policy.param is not torch.float32:
        raise CapabilityError(
            f"deepspeed updates parameters in fp32, and the step keeps them in {policy.param}",
            where="fa.with_precision",
            fix='fa.with_precision(step, "bf16"): computes in bf16 and updates in fp32',
        )
    short = {dtype: name for name, dtype in DTYPES.items()}
    origin = f'fa.with_precision(step, "{short.get(compute, str(compute))}")'
    for name in ("bf16", "fp16"):
        runs = compute is DTYPES[name]
        if runs or draft.written(f"{name}.enabled") is not None or draft.is_auto(f"{name}.enabled"):
            draft.say(f"{name}.enabled", runs, origin)
    if compute in (torch.bfloat16, torch.float16):
        draft.fill("communication_data_type", short.get(policy.reduce, "fp32"))
    if compute is torch.float16:
        step = step.replaced("with_precision", _loss_scale(policy, draft, origin))
    return step


def _loss_scale(policy: Precision, draft: Draft, origin: str) -> Precision:
    """The fp16 policy with the file's loss scale, which is part of the state as in all strategies."""
    usual = Precision()
    static = draft.written("fp16.loss_scale")
    draft.drop("fp16.loss_scale")
    draft.fill("fp16.loss_scale", 1.0)  # DeepSpeed's own factor: the loss scale is part of the state
    if static:
        return attrs.evolve(policy, init_scale=float(static), growth=1.0, backoff=1.0)
    for field, key, to, back in (
        (
            "init_scale",
            "fp16.initial_scale_power",
            lambda scale: int(math.log2(scale)),
            lambda power: 2.0**power,
        ),
        ("interval", "fp16.loss_scale_window", int, int),
    ):
        value = getattr(policy, field)
        there = draft.written(key)
        if there is None:
            draft.fill(key, to(value))
        elif value == getattr(usual, field):
            policy = attrs.evolve(policy, **{field: back(there)})
        else:
            draft.say(key, to(value), origin)
    return policy


def _accumulation(step: Step, draft: Draft) -> Step:
    n = step.settings.micro_batches
    written = draft.written("gradient_accumulation_steps")
    if n and step.settings.sync_each:  # DeepSpeed decides when to communicate
        step = step.replaced("accumulate", Accumulate(n))
    if n:
        draft.say("gradient_accumulation_steps", n, f"fa.accumulate(step, {n})")
    elif written is not None and written != 1:
        step = accumulate(step, int(written))
    draft.fill("gradient_accumulation_steps", 1)
    return step


def _clipping(step: Step, draft: Draft) -> Step:
    max_norm = step.settings.max_norm
    written = draft.written("gradient_clipping")
    if max_norm is not None:
        draft.say("gradient_clipping", max_norm, f"fa.clip_norm(step, {max_norm})")
    elif written:
        step = clip_norm(step, written)
    draft.fill("gradient_clipping", 0.0)
    return step


def _batch(draft: Draft, ranks: int) -> int | None:
    """Relate the three batch sizes. Returns the rows of a micro-batch if the file gives them."""
    per_rank, whole = draft.written("train_micro_batch_size_per_gpu"), draft.written("train_batch_size")
    steps = draft.written("gradient_accumulation_steps")
    if per_rank is None and whole is not None and not whole % (ranks * steps):
        per_rank = whole // (ranks * steps)
    if whole is not None and (per_rank is None or per_rank * steps * ranks != whole):
        draft.object_to(
            f"train_batch_size is {whole}, and {ranks} ranks of {steps} micro-batches"
            + ("" if per_rank is None else f" of {per_rank} rows")
            + " don't make that up"
        )
    draft.drop("train_batch_size")  # it follows from the other two
    # without a size in the file, this is only the unit of DeepSpeed's log
    draft.fill("train_micro_batch_size_per_gpu", int(per_rank or 1))
    return None if per_rank is None else int(per_rank)


def _hidden(model: object, record: Deepspeed, draft: Draft) -> None:
    """Bucket sizes that follow from the model's hidden size (the rule of the Transformers integration)."""
    zero = "zero_optimization"
    rules: dict[str, Any] = {
        f"{zero}.reduce_bucket_size": lambda hidden: hidden * hidden,
        f"{zero}.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
        f"{zero}.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
    }
    autos = [key for key in rules if draft.is_auto(key)]
    if not autos:
        return
    hidden = record.hidden_size or hidden_size(model)
    if hidden is None:
        raise ConfigError(
            f'{", ".join(autos)} is "auto", which follows from config.hidden_size, and the model has none',
            where=f"{_WHERE}, {draft.origin}",
            fix="fa.deepspeed(hidden_size=768), or write the values out",
        )
    for key in autos:
        draft.resolve(key, rules[key](hidden))


def hidden_size(model: Any) -> int | None:
    """`config.hidden_size` of a model, the largest of `hidden_sizes`, or that of `text_config`."""
    for source in model.values() if isinstance(model, dict) else (model,):
        if isinstance(source, str):  # a copy of another
            continue
        if isinstance(source, nn.Module):
            module: Any = source
        else:
            with torch.device("meta"):  # no memory, no values: only its config is read
                module = source()
        config: Any = getattr(module, "config", None)
        for place in (config, getattr(config, "text_config", None)):
            if isinstance(size := getattr(place, "hidden_size", None), int):
                return size
            if sizes := getattr(place, "hidden_sizes", None):
                return max(sizes)
    return None


def _check_averages(step: Step, record: Deepspeed) -> None:
    half = step.settings.precision.compute is not torch.float32
    if step.settings.ema_decay is not None and half and record.level < 3:
        raise CapabilityError(
            "with_ema would average the half-precision copy: deepspeed partitions the fp32 parameters",
            where="fa.with_ema",
            fix="train in fp32, or use fa.fsdp()",
        )


def _notes(step: Step, record: Deepspeed) -> tuple[str, ...]:
    notes: list[str] = ["deepspeed reads the weight and the norm on the host each step"]
    if step.settings.micro_batches and record.level >= 2:
        notes.append(f"stage {record.level} communicates gradients after each micro-batch")
    if record.level > 0:
        notes.append("an update whose gradient is not finite is skipped, as by fa.skip_nonfinite")
    written: Any = record.written.get("fp16", {})
    if isinstance(written, dict) and written.get("hysteresis", 1) != 1 and step.settings.casts:
        notes.append("hysteresis is not used: the loss scale, which is in the state, halves at each overflow")
    return tuple(notes)
