"""One configuration out of the file, the arguments and the step; needs no DeepSpeed."""

from __future__ import annotations

import json
import types

import pytest
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, CapabilityError, ConfigError, UnknownNameError
from tests.parity.rows import Net, loss_fn

# the configuration of the second scenario of the peer's guide, and with the third one's values left open
FILE = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_gather_16bit_weights_on_model_save": False,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 10,
    "steps_per_print": 2000000,
}
OPEN = {
    **FILE,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
        "offload_param": {"device": "auto"},
    },
    "gradient_clipping": "auto",
    "gradient_accumulation_steps": "auto",
}


@pytest.fixture(autouse=True)
def world():
    with fa.start() as started:
        yield started


def made(strategy, step=loss_fn, optimizer=None, model=Net):
    return fa.train_step(step, model=fa.distribute(model, strategy), optimizer=optimizer or fa.adamw(1e-3))


def config(*args, **kwargs):
    return made(*args, **kwargs).plan.deepspeed


def test_scenario_1_file_and_step_disagree(tmp_path):
    """Every disagreement at once: both values, and where each came from."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(FILE))
    step = fa.clip_norm(fa.accumulate(fa.with_precision(loss_fn, "fp16"), 4), 0.5)
    strategy = fa.deepspeed(stage=2, offload_optimizer="cpu", config=path)
    with pytest.raises(ConfigError) as raised:
        made(strategy, step)
    text = str(raised.value)
    for part in (
        f"zero_optimization.stage is 3 in {path}, and 2 in fa.deepspeed(stage=2)",
        "offload_optimizer.device is 'none'",
        f"gradient_accumulation_steps is 10 in {path}, and 4 in fa.accumulate(step, 4)",
        f"gradient_clipping is 1.0 in {path}, and 0.5 in fa.clip_norm(step, 0.5)",
        "bf16.enabled is True",
        '"auto"',
    ):
        assert part in text, part


def test_scenario_2_the_file_alone(tmp_path):
    """What only the file says is carried out, and the plan shows it."""
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(FILE))
    plan = made(fa.deepspeed(config=path)).plan
    found = plan.deepspeed
    assert found["zero_optimization"] == FILE["zero_optimization"]
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (10, 1.0)
    rows = {row.what: row for row in plan.rows}
    assert rows["accumulate"].detail.startswith("n=10")
    assert rows["clip_norm"].detail == "max_norm=1.0"
    assert "compute bf16" in rows["with_precision"].detail
    assert {rows[name].by for name in ("accumulate", "clip_norm", "gradients", "adamw")} == {"deepspeed"}
    assert "[by deepspeed]" in str(plan)


def test_scenario_3_everything_is_auto():
    """The step and the arguments fill what the file leaves open."""
    step = fa.clip_norm(fa.accumulate(fa.with_precision(loss_fn, "fp16"), 5), 1.0)
    strategy = fa.deepspeed(
        stage=3,
        offload_params="cpu",
        offload_optimizer="nvme",
        nvme_path="swap",
        config=OPEN,
    )
    found = config(strategy, step)
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["stage3_gather_16bit_weights_on_model_save"]) == (3, False)
    assert (zero["offload_optimizer"]["device"], zero["offload_optimizer"]["nvme_path"]) == ("nvme", "swap")
    assert zero["offload_param"]["device"] == "cpu"
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (False, True)
    assert (found["gradient_accumulation_steps"], found["gradient_clipping"]) == (5, 1.0)
    assert "auto" not in json.dumps(found)


def test_other_spellings():
    found = made(
        fa.deepspeed(config={"bfloat16": {"enabled": True}, "gradient_accumulation_steps": 2.0})
    ).plan
    assert found.deepspeed["bf16"]["enabled"] is True
    assert next(row.detail for row in found.rows if row.what == "accumulate").startswith("n=2")


def test_equality_is_accepted():
    step = fa.clip_norm(fa.accumulate(fa.with_precision(loss_fn, "bf16"), 10), 1)
    assert config(fa.deepspeed(stage=3, config=FILE), step)["gradient_clipping"] == 1.0


def test_what_nobody_fills_is_an_error():
    with pytest.raises(ConfigError, match=r"zero_optimization\.overlap_events") as raised:
        made(fa.deepspeed(config={"zero_optimization": {"stage": 1, "overlap_events": "auto"}}))
    assert "write the values out" in str(raised.value)


class Hidden(nn.Linear):
    def __init__(self, **config):
        super().__init__(2, 2)
        self.config = types.SimpleNamespace(**config)


@pytest.mark.parametrize(
    ("model", "options", "hidden"),
    [
        (lambda: Hidden(hidden_size=64), {}, 64),
        (lambda: Hidden(hidden_sizes=[32, 128]), {}, 128),
        (lambda: Hidden(text_config=types.SimpleNamespace(hidden_size=16)), {}, 16),
        (Net, {"hidden_size": 8}, 8),
    ],
)
def test_sizes_from_the_hidden_size(model, options, hidden):
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    written = {"zero_optimization": dict.fromkeys(names, "auto")}
    zero = config(fa.deepspeed(stage=3, config=written, **options), model=model)["zero_optimization"]
    assert zero["reduce_bucket_size"] == hidden * hidden
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * hidden * hidden)
    assert zero["stage3_param_persistence_threshold"] == 10 * hidden


def test_sizes_of_a_model_without_hidden_size():
    with pytest.raises(ConfigError, match=r"config\.hidden_size") as raised:
        made(fa.deepspeed(stage=3, config={"zero_optimization": {"reduce_bucket_size": "auto"}}))
    assert "fa.deepspeed(hidden_size=768)" in str(raised.value)


ADAM = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
    },
}  # fmt: skip


def test_both_from_the_file():
    rate = fa.optim.deepspeed_lr(3e-4, warmup=10, total=100)
    found = config(
        fa.deepspeed(config={"optimizer": ADAM, "scheduler": WARMUP}),
        optimizer=fa.optim.from_deepspeed(rate, weight_decay=0.1),
    )
    assert found["optimizer"]["params"] == {"lr": 3e-4, "weight_decay": 0.1}
    assert found["scheduler"]["params"] == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 100,
    }  # fmt: skip


def test_both_ours():
    found = config(fa.deepspeed(stage=2), optimizer=fa.adamw(fa.warmup_cosine(1e-3, warmup=1, total=9)))
    assert not {"optimizer", "scheduler"} & set(found)


def test_our_optimizer_with_the_files_schedule():
    rate = fa.optim.deepspeed_lr(1e-3, warmup=5, total=50)
    found = config(fa.deepspeed(config={"scheduler": WARMUP}), optimizer=fa.adamw(rate))
    assert found["scheduler"]["params"]["warmup_max_lr"] == 1e-3


def test_the_files_optimizer_with_our_schedule_is_refused():
    with pytest.raises(CapabilityError, match="takes a number or DeepSpeed's own schedule") as raised:
        made(
            fa.deepspeed(config={"optimizer": ADAM}),
            optimizer=fa.optim.from_deepspeed(fa.warmup_cosine(1e-3, warmup=1, total=9)),
        )
    assert "fa.optim.deepspeed_lr" in str(raised.value)


@pytest.mark.parametrize(
    ("written", "optimizer", "said"),
    [
        ({"optimizer": ADAM}, fa.adamw(1e-3), "optimizer is 'AdamW' in config={...}, and fa.adamw"),
        ({}, fa.optim.from_deepspeed(1e-3), "takes the file's optimizer"),
        ({}, fa.adamw(fa.optim.deepspeed_lr(1e-3)), "takes the schedule that the file names"),
        ({"scheduler": WARMUP}, fa.adamw(1e-3), "scheduler is 'WarmupDecayLR'"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
            fa.optim.from_deepspeed(1e-3),
            "optimizer.params.lr is 0.01 in config={...}, and 0.001",
        ),
        ({"gradient_accumulation_steps": 2.5}, fa.adamw(1e-3), "gradient_accumulation_steps is 2.5"),
        ({"gradient_accumulation_steps": "2"}, fa.adamw(1e-3), "gradient_accumulation_steps is '2'"),
        ({"gradient_clippng": 1.0}, fa.adamw(1e-3), "'gradient_clipping' may be meant"),
        ({"gradient_clipping": "1.0"}, fa.adamw(1e-3), "gradient_clipping is '1.0'"),
        ({"train_batch_size": "8"}, fa.adamw(1e-3), "train_batch_size is '8'"),
        ({"bf16": True}, fa.adamw(1e-3), "bf16 is True in config={...}, and not a section"),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            fa.adamw(1e-3),
            "bf16 and fp16 are both enabled",
        ),
        ({"zero_optimization": {"stage": "3"}}, fa.adamw(1e-3), "zero_optimization.stage is '3'"),
        ({"torch_autocast": {"enabled": True}}, fa.adamw(1e-3), "torch_autocast casts a second time"),
        (
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
            fa.adamw(1e-3),
            "train_batch_size is 7",
        ),
    ],
)
def test_contradictions(written, optimizer, said):
    with pytest.raises(ConfigError) as raised:
        made(fa.deepspeed(config=written), optimizer=optimizer)
    assert said in str(raised.value)


def test_a_rate_for_a_group_beside_deepspeeds_schedule():
    optimizer = fa.adamw(fa.optim.deepspeed_lr(1e-2), groups={"*bias": {"lr": 1e-4}})
    with pytest.raises(CapabilityError, match="a group has a rate of its own"):
        made(fa.deepspeed(config={"scheduler": WARMUP}), optimizer=optimizer)


def test_elsewhere_deepspeeds_own_is_refused():
    with pytest.raises(CapabilityError, match="the strategy is another"):
        made("local", optimizer=fa.optim.from_deepspeed(1e-3))
    with pytest.raises(CapabilityError, match="the strategy is another"):
        made("local", optimizer=fa.adamw(fa.optim.deepspeed_lr(1e-3)))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"stage": 4}, ArgumentError, "stage=4"),
        ({"stage": 2, "offload_params": "cpu"}, ArgumentError, "offload_params"),
        ({"stage": 1, "zero3_init": True}, ArgumentError, "zero3_init"),
        ({"stage": 2, "offload_optimizer": "nvme", "nvme_path": "x"}, ArgumentError, "can't offload to NVMe"),
        ({"stage": 0, "offload_optimizer": "cpu"}, ArgumentError, "stage 0"),
        ({"stage": 3, "offload_optimizer": "nvme"}, ArgumentError, "NVMe offload has no path to write to"),
        ({"stage": 3, "offload_optimizer": "disk"}, UnknownNameError, "no place called 'disk'"),
        (
            {"stage": 3, "hpz": 2},
            ArgumentError,
            'config={"zero_optimization": {"zero_hpz_partition_size": 8}}',
        ),
        ({"config": "missing.json"}, ConfigError, "missing.json can't be read"),
        ({"config": {"a": object()}}, ConfigError, "not JSON"),
    ],
)
def test_arguments_that_cant_be(options, error, said):
    with pytest.raises(error) as raised:
        fa.deepspeed(**options)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("stage", "step", "said"),
    [
        (3, lambda: fa.with_ema(loss_fn, 0.9), "with_ema needs parameters"),
        (2, lambda: fa.with_ema(fa.with_precision(loss_fn, "bf16"), 0.9), "half-precision copy"),
        (2, lambda: fa.clip_value(loss_fn, 1.0), "clip_value needs gradients"),
        (1, lambda: fa.compile(loss_fn, scope="step"), "compile"),
    ],
)
def test_what_a_stage_cant_do(stage, step, said):
    with pytest.raises(CapabilityError) as raised:
        made(fa.deepspeed(stage), step())
    assert said in str(raised.value)


def test_inference_needs_stage_3():
    with pytest.raises(CapabilityError, match="stage 2 partitions"):
        fa.train_step(loss_fn, model=fa.distribute(Net, fa.deepspeed(2)), optimizer=None)


def test_several_optimizers():
    with pytest.raises(CapabilityError, match="one optimizer"):
        made(
            fa.deepspeed(2),
            optimizer={"a": fa.adamw(1e-3), "b": fa.sgd(1e-3)},
            model={"a": Net, "b": Net},
        )


@pytest.mark.parametrize("parts", [(fa.optim.trust_ratio(),), fa.adamw(0.1).parts], ids=["rule", "fused"])
def test_an_optimizer_from_parts(parts):
    with pytest.raises(CapabilityError, match=r"optim\.chain\(.*lr=0\.1\) is made of parts"):
        made(fa.deepspeed(2), optimizer=fa.optim.chain(*parts, lr=0.1))


def test_the_strategy_as_text(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILE))
    for strategy in (
        fa.deepspeed(3, offload_optimizer="cpu"),
        fa.deepspeed(config=FILE),
        fa.deepspeed(config=path),
    ):
        assert fa.strategy(str(strategy)) == strategy
    assert fa.strategy("deepspeed_zero3") == fa.deepspeed(stage=3)


def test_the_plan_of_another_strategy():
    with pytest.raises(CapabilityError, match="does not run on DeepSpeed"):
        _ = made("local").plan.deepspeed


def scheduler(kind, rate, **params):
    """The schedule's parameters where the file has these, and `rate` says the rest."""
    strategy = fa.deepspeed(config={"scheduler": {"type": kind, "params": params}})
    return config(strategy, optimizer=fa.adamw(rate))["scheduler"]["params"]


def test_what_a_schedule_is_told_is_filled_in():
    rate = fa.optim.deepspeed_lr(0.1, warmup=3)
    assert scheduler("WarmupLR", rate) == {"warmup_max_lr": 0.1, "warmup_num_steps": 3}
    assert scheduler("WarmupLR", rate, warmup_min_lr="auto", warmup_max_lr=0.1) == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 3,
    }  # fmt: skip
    whole = fa.optim.deepspeed_lr(0.1, warmup=3, total=9, low=0.01)
    assert scheduler("WarmupDecayLR", whole) == {
        "warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 3, "total_num_steps": 9,
    }  # fmt: skip
    cosine = fa.optim.deepspeed_lr(0.1, warmup=3, total=9)
    assert scheduler("WarmupCosineLR", cosine) == {"warmup_num_steps": 3, "total_num_steps": 9}
    assert scheduler("OneCycle", fa.optim.deepspeed_lr(0.1, low=0.01)) == {
        "cycle_max_lr": 0.1,
        "cycle_min_lr": 0.01,
    }


@pytest.mark.parametrize(
    ("kind", "rate", "params", "said"),
    [
        ("WarmupLR", {"warmup": 3}, {"warmup_max_lr": 0.5}, "warmup_max_lr is 0.5 in config={...}, and 0.1"),
        ("WarmupLR", {"warmup": 3}, {"warmup_num_steps": 7}, "is 7 in config={...}, and 3"),
        ("WarmupLR", {"total": 9}, {}, "fa.optim.deepspeed_lr(total=9) means nothing to WarmupLR"),
        (
            "WarmupCosineLR",
            {"low": 0.1},
            {},
            "fa.optim.deepspeed_lr(low=0.1) means nothing to WarmupCosineLR",
        ),
        (None, {}, {}, "scheduler in config={...} has no type, such as 'WarmupLR'"),
    ],
)
def test_what_a_schedule_is_told_otherwise(kind, rate, params, said):
    with pytest.raises(ConfigError) as raised:
        scheduler(kind, fa.optim.deepspeed_lr(0.1, **rate), **params)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"params": {"lr": "auto"}}, "optimizer in config={...} has no type, such as 'AdamW'"),
        ({"type": "SGD", "params": {"lr": "auto", "dampening": 0.5}}, "treats the first update apart"),
        ({"type": "Muon", "params": {"lr": "auto"}}, "goes by matrices marked for it"),
    ],
)
def test_optimizers_that_cannot_be_run(optimizer, said):
    with pytest.raises(ConfigError) as raised:
        config(fa.deepspeed(config={"optimizer": optimizer}), optimizer=fa.optim.from_deepspeed(0.1))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "key", ["gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu"]
)
@pytest.mark.parametrize("value", [0, -4, 1e300, float("inf"), float("nan")])
def test_counts_that_are_none(key, value):
    with pytest.raises(ConfigError, match=key):
        config(fa.deepspeed(config={key: value}))


def test_a_key_that_stands_twice(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    with pytest.raises(ConfigError, match="two keys 'stage'"):
        fa.deepspeed(config=path)


def test_a_file_that_begins_with_a_mark(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILE), encoding="utf-8-sig")
    assert config(fa.deepspeed(config=path))["gradient_clipping"] == 1.0
