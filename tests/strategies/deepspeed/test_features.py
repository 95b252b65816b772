"""What a researcher asks of DeepSpeed: offload, ZeRO++, several engines, inference, and steps that fail."""

from __future__ import annotations

import pytest

import fnaccel as fa
from tests.optim.test_optimizers import Anchored
from tests.parity.rows import Net, loss_fn
from tests.strategies.deepspeed.training import (
    adopt_and_export,
    break_backward,
    distil,
    fail_and_go_on,
    foreign,
    half_norm,
    held_after_closing,
    infer,
    replaced_linear,
    run_offloaded,
    run_with,
    scheduled,
    two_models,
    wrong_rows,
)

ADAGRAD = {"lr_decay": 0.1, "initial_accumulator_value": 0.3}
FOREIGN = [
    (0, "RMSprop", {}, ""),
    (2, "RMSprop", {}, ""),
    (1, "Adagrad", ADAGRAD, ""),
    (2, "Adagrad", ADAGRAD, ""),
    (3, "Adagrad", ADAGRAD, ""),
    (2, "NAdam", {}, "partitions elements"),
    (3, "Adafactor", {}, "partitions elements"),
    (0, "Rprop", {}, "begins step_size at the learning rate"),
    (3, "Rprop", {}, "begins step_size at the learning rate"),
    (2, "Adagrad", {"groups": {"*bias": {"lr_decay": 0.2}}, "lr_decay": 0.1}, "one group for all parameters"),
]

OPTIONS = {
    "optimizer on the CPU, stage 1": (1, {"offload_optimizer": "cpu"}),
    "optimizer on the CPU, stage 2": (2, {"offload_optimizer": "cpu"}),
    "both on the CPU": (3, {"offload_optimizer": "cpu", "offload_params": "cpu"}),
    "partitioned as made": (3, {"zero3_init": True}),
    "nothing stays whole": (3, {"config": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}),
    "a second copy within machines": (3, {"config": {"zero_optimization": {"zero_hpz_partition_size": 2}}}),
    "layers gathered as one": (3, {"moe_layers": ("Block",)}),
    "sizes from the hidden size": (
        3,
        {
            "hidden_size": 7,
            "config": {
                "zero_optimization": {
                    "reduce_bucket_size": "auto",
                    "stage3_prefetch_bucket_size": "auto",
                    "stage3_param_persistence_threshold": "auto",
                    "sub_group_size": 50,
                    "overlap_comm": False,
                }
            },
        },
    ),
}


@pytest.fixture(scope="module")
def plain(pools):
    return pools.run(2, run_with, "ddp", {})[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_changes_the_numbers(pools, plain, name):
    stage, options = OPTIONS[name]
    for losses, params in pools.run(2, run_with, stage, options):
        assert losses == pytest.approx(plain[0], rel=1e-6, abs=1e-6)
        assert params == pytest.approx(plain[1], rel=1e-6, abs=1e-6)


def test_state_that_is_offloaded(pools, tmp_path):
    """Slots and parameters on the CPU are saved, restored and trained on as any."""
    everything = {"offload_optimizer": "cpu", "offload_params": "cpu"}
    for rank, later in enumerate(pools.run(2, run_offloaded, tmp_path, everything)):
        assert later == [], rank


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_fails_leaves_the_state_live(pools, stage):
    """A loss that raises in the second of three micro-batches: the next call is as if it had not been."""
    for losses, expected in pools.run(2, fail_and_go_on, stage):
        assert losses == expected


@pytest.mark.parametrize(("student", "teacher"), [(2, 3), (3, 3), (1, 0)])
def test_a_student_and_a_lent_teacher(pools, student, teacher):
    """ZeRO inference (stage 3 without an optimizer) lends its model; the student learns as under ddp."""
    for losses, expected, moved in pools.run(2, distil, student, teacher):
        assert losses == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert not moved


def test_two_models_in_turn(pools):
    """Two engines of different stages in one process don't disturb each other."""
    for losses, alone in pools.run(2, two_models):
        assert losses == alone


def test_inference(pools):
    for looked, expected, refused in pools.run(2, infer):
        assert looked == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert "no optimizer" in refused


def test_adopt_and_export(pools, tmp_path):
    """A checkpoint that DeepSpeed wrote itself is adopted; `export_hf` writes the whole model in bf16."""
    for wrong, exported in pools.run(2, adopt_and_export, tmp_path):
        assert wrong == []
        assert exported == []


@pytest.mark.parametrize(("stage", "ours", "options", "why_not"), FOREIGN)
def test_other_optimizers_of_torch(pools, stage, ours, options, why_not):
    """Elementwise ones train as under ddp; the others are refused, never changed."""
    for losses, expected, refused in pools.run(2, foreign, stage, ours, options):
        assert losses == ([] if why_not else pytest.approx(expected, rel=1e-6, abs=1e-6))
        assert why_not in refused
        assert bool(refused) is bool(why_not)


def anchored():
    optimizer = fa.optim.from_torch(Anchored, lr=0.1)
    train_step = fa.train_step(loss_fn, model=fa.distribute(Net, fa.deepspeed(2)), optimizer=optimizer)
    with pytest.raises(fa.errors.CapabilityError) as caught:
        train_step.init(seed=0)
    return str(caught.value)


def test_slots_that_begin_as_a_copy_of_the_parameter_are_refused(pools):
    (text,) = pools.run(1, anchored)
    assert "begins anchor at the parameter's value" in text


@pytest.mark.long_except("block")
@pytest.mark.parametrize("scope", ["loss", "block"])
def test_compiled_below_stage_3(pools, plain, scope):
    for losses, params in pools.run(2, run_with, 2, {"compile": scope}):
        assert losses == pytest.approx(plain[0], abs=1e-5)
        assert params == pytest.approx(plain[1], abs=1e-5)


def test_batch_norm_in_half_precision_is_refused(pools):
    for text in pools.run(1, half_norm):
        assert "DeepSpeed casts its weights" in text


def test_a_batch_of_another_size_than_the_file_says(pools):
    for ranks in (1, 2):
        for text in pools.run(ranks, wrong_rows):
            assert f"says 5 rows in a rank's micro-batch, and it has [4] on rank {ranks - 1}" in text


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_schedule(pools, stage):
    """WarmupLR as DeepSpeed runs it, and the same after going back to an earlier state."""
    for rates, again in pools.run(2, scheduled, stage):
        assert rates == pytest.approx([0.0, 0.0, 0.01, 0.02, 0.03], abs=1e-9)
        assert again == rates[2:]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_pass_that_fails(pools, stage):
    """Below stage 2 the next call works; from there on it says what to do, and the state can be saved."""
    for same, said in pools.run(2, break_backward, stage):
        assert same
        assert ("a backward pass failed" in said) is (stage >= 2)
        assert stage >= 2 or not said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_closing_frees_the_tensors(pools, stage):
    for first, *later in pools.run(1, held_after_closing, stage):
        assert max(later) <= first + 64


@pytest.mark.parametrize("zero3_init", [False, True])
def test_torch_has_its_linear_function_outside_of_steps_of_stage_3(pools, zero3_init):
    during, outside = pools.run(1, replaced_linear, zero3_init)[0]
    assert set(during) == {True}
    assert outside == [False, False]
