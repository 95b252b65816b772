"""Tests whose rows stand for each other, and the rows that `make test` runs. `make test-all` runs the others.

A pattern is searched in the id of a row. Deliberate bugs (`tests/mutants`) name rows that stay.
"""

from __future__ import annotations

import re

STAY = {
    "axes/test_tensor.py::test_checkpoints_go_to_any_layout_and_back":
        r"fsdp-(local|fsdp\(2\) \* )|sequence-local|ddp-fsdp\(3\)",
    "axes/test_tensor.py::test_parity": r"^(?!captured)",
    "axes/test_tensor_state.py::test_updates_are_those_of_one_process":
        "tensor|fsdp-(adamw|Muon|averages|weight)|ddp-(adamw|adafactor)",
    "big/test_load.py::test_the_host_holds_the_model_and_a_tensor_a_reader": "float64",
    "checkpoint/test_layouts.py::test_any_layout_restores_any_other":
        r"local|ddp\(\)', [23]|fsdp\(\)', [34]|hsdp\(2, 2\)",
    "cli/test_config_import.py::test_two_commands_train_an_accelerate_project": "fsdp",
    "config/test_premade_recipes.py::test_a_recipe_trains": "^(?!compile|gpu|tracking)",
    "context/test_parity.py::test_compiled": "options[012]",
    "context/test_parity.py::test_products": "step[012]",
    "context/test_parity.py::test_two_ranks_share_a_sequence": r"options(0|1|3|6|8|9|11|12|15|18|21)-",
    "deepspeed/test_parity.py::test_equals_the_raw_loop": "acc3",
    "deepspeed/test_state.py::test_any_layout_restores_any_other": r"local|'ddp'|zero[13]', 2",
    "estimate/test_training.py::test_it_is_what_the_largest_rank_holds":
        r"1-local-.*GPT'>-{}|2-ddp-.*Llama|2-fsdp-.*bf16|4-fsdp-.*GPT|4-fsdp\(2\) |4-hsdp.*Llama",
    "estimate/test_training.py::test_options_of_strategies_and_optimizers": r"8bit|units=None|hook=",
    "estimate/test_work.py::test_collectives_of_a_step": r"2-ddp|2-fsdp-.*bf16|4-fsdp\(2\) ",
    "extension/test_extension.py::test_compiled_beside_copies": "block",
    "extension/test_parts.py::test_parts_of_a_loss_are_one_loss": "options[^7]",
    "extension/test_whole_model.py::test_frozen_parameters_and_patterns_are_those_of_the_whole_model": "^(?!fsdp.*True)",
    "launch/test_elastic.py::test_strangers_on_the_ports_of_a_job": "garbage",
    "launch/test_in_step.py::test_a_launcher_that_goes_ends_the_job": "0",
    "launch/test_machines.py::test_ranks_of_two_machines_meet": "found",
    "launch/test_uneven.py::test_ranks_in_different_calls": "fsdp|saves",
    "launch/test_uneven.py::test_the_launcher_names_a_rank_that_exits_before_start": "1",
    "launch/test_watchdog.py::test_a_rank_is_named": "stop-1|data|apart",
    "launch/test_watchdog.py::test_ranks_that_wait_for_nobody_are_no_alarm": "sleeps",
    "laws/test_resume.py::test_other_ranks_go_on_with_the_same_samples": "plain",
    "parity/test_compiled.py::test_a_parameter_that_one_rank_uses_is_trained_on_all": "ddp",
    "parity/test_compiled.py::test_compiled_equals_eager":
        "block|plain|ragged|local-step-(rich|ema|fp16|own|models|replacing|each)|local-loss-rich",
    "parity/test_matrix.py::test_equals_the_raw_loop": "-1-|-2-|acc3-clip-4",
    "parity/test_options.py::test_an_option_beside_others": "accumulate|-ema",
    "parity/test_regather.py::test_a_gather_of_the_model_s_own_stays_in_its_place": r"activations-fsdp\(2\)-",
    "parity/test_traps.py::test_equals_the_raw_loop": "eager|scalars-sgd",
    "track/test_failing.py::test_a_full_disk_does_not_end_training": "jsonl",
    "track/test_real_runs.py::test_a_real_run_is_read_back": "tensorboard",
    "transforms/test_remat.py::test_compiled_blocks": "attention-block",
}  # fmt: skip


def is_long(nodeid: str) -> bool:
    """Whether a row is one of those that only `make test-all` runs."""
    test, _, row = nodeid.removeprefix("tests/").partition("[")
    return test in STAY and re.search(STAY[test], row.removesuffix("]")) is None
