"""The keys and values of the files in `tests/test_configs` of Accelerate 1.15, and what each file becomes."""

from __future__ import annotations

import pytest

from fnaccel.cli.config.checking import mistakes_of
from fnaccel.config.importing import import_file
from fnaccel.errors import ConfigError

HERE = "compute_environment: LOCAL_MACHINE"
NO = "distributed_type: 'NO'"
ONE = f"{HERE} / {NO} / num_processes: 1"
MACHINE = "machine_rank: 0 / main_training_function: main / num_machines: 1 / use_cpu: false"
PORT = "main_process_ip: null / main_process_port: null"
OLD = f"{ONE} / {MACHINE} / {PORT} / mixed_precision: 'no' / deepspeed_config: {{}} / fsdp_config: {{}}"
TPU = "tpu_env: [] / tpu_use_cluster: false / tpu_use_sudo: false"
STATIC = "rdzv_backend: static / same_network: true"
POD = (
    f"{OLD} / {STATIC} / downcast_bf16: 'no' / gpu_ids: all / megatron_lm_config: {{}} / tpu_name: 'test-tpu' / "
    "tpu_zone: 'us-central1-a' / command_file: tests/test_samples/test_command_file.sh"
)
MPI = (
    f"{HERE} / {STATIC} / {TPU} / debug: false / distributed_type: MULTI_CPU / downcast_bf16: 'no' / "
    "ipex_config: {ipex: true} / machine_rank: 0 / main_process_ip: 127.0.0.1 / main_process_port: 29500 / "
    "main_training_function: main / mixed_precision: 'no' / num_machines: 4 / num_processes: 16 / use_cpu: true / "
    "mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: hosts/hostfile}"
)
FSDP = (
    "{fsdp_activation_checkpointing: false, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, "
    "fsdp_backward_prefetch: BACKWARD_PRE, fsdp_cpu_ram_efficient_loading: true, fsdp_forward_prefetch: false, "
    "fsdp_offload_params: false, fsdp_sharding_strategy: FULL_SHARD, fsdp_state_dict_type: SHARDED_STATE_DICT, "
    "fsdp_sync_module_states: true, fsdp_transformer_layer_cls_to_wrap: BertLayer, fsdp_use_orig_params: true}"
)
FP8 = (
    "{amax_compute_algo: max, amax_history_len: 1024, backend: TE, fp8_format: E4M3, interval: 1, margin: 0, "
    'override_linear_precision: "(false, false, false)", use_autocast_during_eval: false}'
)
FILES = {
    "0_11_0": OLD,
    "0_12_0": f"{OLD} / downcast_bf16: 'no'",
    "0_28_0_mpi": MPI,
    "0_30_0_sagemaker": (
        "compute_environment: AMAZON_SAGEMAKER / debug: false / distributed_type: NO / mixed_precision: fp16 / "
        "debug: false / use_cpu: false / ec2_instance_type: MY_TYPE / iam_role_name: MY_ROLE"
    ),
    "0_34_0_fp8": (
        f"{HERE} / {MACHINE} / {STATIC} / {TPU} / debug: false / distributed_type: MULTI_GPU / gpu_ids: all / "
        f"downcast_bf16: 'no' / enable_cpu_affinity: false / mixed_precision: fp8 / num_processes: 2 / "
        f"fp8_config: {FP8}"
    ),
    "debug": f"{ONE} / debug: True",
    "downcast": f"{POD} / commands: null",
    "fsdp": (
        f"{HERE} / distributed_type: MEGATRON_LM / num_processes: 1 / "
        "fsdp_config: {x: 1, fsdp_sync_module_states: true}"
    ),
    "invalid_keys": f"{OLD} / downcast_bf16: 'no' / invalid_key: invalid_value / another_invalid_key: a_value",
    "latest": f"{POD} / command: null",
    "latest_fsdp": (
        f"{HERE} / {MACHINE} / {STATIC} / {TPU} / debug: false / distributed_type: FSDP / downcast_bf16: 'no' / "
        f"enable_cpu_affinity: false / mixed_precision: 'no' / num_processes: 1 / fsdp_config: {FSDP}"
    ),
    "megatron": (
        f"{HERE} / distributed_type: MEGATRON_LM / num_processes: 1 / "
        "megatron_lm_config: {megatron_lm_recompute_activations: false}"
    ),
    "mpi_multicpu": MPI,
    "one_proc": f"{ONE} / debug: true",
    "validate_launch_cmd": (
        f"{ONE} / debug: true / fsdp_config: {{fsdp_sync_module_states: false}} / "
        "deepspeed_config: {deepspeed_config_file: path/to/be/ignored}"
    ),
}
MPIRUN = {"launch.ranks": 4, "launch.machines": 4, "launch.carrier": "mpirun", "launch.cpu": True}
BECAME = {
    "0_11_0": ("local", {"launch.ranks": 1}),
    "0_12_0": ("local", {"launch.ranks": 1}),
    "0_28_0_mpi": ("ddp", MPIRUN),
    "0_30_0_sagemaker": ("local", {"precision": "fp16", "launch.sagemaker.role": "MY_ROLE"}),
    "0_34_0_fp8": ("ddp", {"precision": "fp8", "fp8.recipe": "e4m3", "launch.ranks": 2}),
    "debug": ("local", {"launch.debug": True}),
    "downcast": ("local", {"launch.tpu_vm.name": "test-tpu"}),
    "fsdp": ("ddp", {"launch.ranks": 1}),
    "invalid_keys": ("local", {"launch.ranks": 1}),
    "latest": ("local", {"launch.tpu_vm.name": "test-tpu"}),
    "latest_fsdp": ("fsdp(units=('BertLayer',), init='rank0')", {"precision": "fp32"}),
    "megatron": ("ddp", {}),
    "mpi_multicpu": ("ddp", MPIRUN),
    "one_proc": ("local", {"launch.debug": True}),
    "validate_launch_cmd": ("local", {"launch.debug": True}),
}
UNKNOWN = {"invalid_keys": ["invalid_key", "another_invalid_key"], "latest": ["command"]}
TWICE = {"0_30_0_sagemaker": ["debug"]}


def imported(text, tmp_path, name="a.yaml"):
    (tmp_path / name).write_text(text.replace(" / ", "\n"))
    return import_file(tmp_path / name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_its_tests_is_imported(name, tmp_path):
    result = imported(FILES[name], tmp_path)
    strategy, fields = BECAME[name]
    assert result.recipe.strategy == strategy
    assert fields.items() <= result.fields.items()
    assert mistakes_of(result.recipe) == []
    assert [row.key for row in result.rows if row.why.startswith("unknown")] == UNKNOWN.get(name, [])
    assert [row.key for row in result.rows if row.value == "twice"] == TWICE.get(name, [])


@pytest.mark.parametrize("word", ["true", "'yes'"])
def test_offloaded_activations_wait_on_the_host(word, tmp_path):
    text = (
        "distributed_type: FSDP / num_processes: 1 / fsdp_config: {fsdp_activation_checkpointing: %s, "
        "fsdp_activation_checkpointing_offload: %s}"
    )
    result = imported(text % (word, word), tmp_path)
    assert result.recipe.remat == "offload"
    [row] = [row for row in result.rows if row.key.endswith("_offload")]
    assert row.became == "remat: offload"
    with pytest.raises(ConfigError, match=r"_offload: .*: only blocks that are recomputed can"):
        imported(text % ("false", word), tmp_path)
    [row] = [row for row in imported(text % (word, "false"), tmp_path).rows if row.key.endswith("_offload")]
    assert row.why == "activations stay on the device"


@pytest.mark.parametrize("environment", ["LOCAL_MACHINE", "AMAZON_SAGEMAKER"])
@pytest.mark.parametrize("word", ["NO", "no", "'NO'", "No"])
def test_no_without_quotes_is_the_word(environment, word, tmp_path):
    """YAML reads it as false."""
    text = f"compute_environment: {environment} / distributed_type: {word} / mixed_precision: {word}"
    result = imported(text, tmp_path)
    rows = {row.key: row for row in result.rows}
    assert (result.recipe.strategy, result.recipe.precision) == ("local", "fp32")
    assert (rows["distributed_type"].value, rows["mixed_precision"].value) in (
        ("NO", "no"),
        (word.strip("'"),) * 2,
    )


def test_a_word_that_yaml_reads_as_true_is_no_kind(tmp_path):
    with pytest.raises(ConfigError, match="distributed_type: True: there is no such name"):
        imported("num_processes: 1 / distributed_type: yes", tmp_path)


@pytest.mark.parametrize("ending", ["yaml", "json"])
@pytest.mark.parametrize(
    ("first", "second", "says"),
    [("2", "3", "2 and 3"), ("2", '"2"', "2 and '2'"), ("null", "3", "None and 3")],
)
def test_a_key_with_two_values_names_both(ending, first, second, says, tmp_path):
    text = f'{{"num_processes": {first}, "distributed_type": "MULTI_GPU", "num_processes": {second}}}'
    with pytest.raises(ConfigError, match=f"num_processes is there twice, with two values: {says}") as raised:
        imported(text, tmp_path, f"a.{ending}")
    assert raised.value.where == str(tmp_path / f"a.{ending}")
    assert raised.value.fix


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_a_key_with_one_value_several_times_is_one_row(ending, tmp_path):
    section = '"fsdp_config": {"fsdp_offload_params": true, "fsdp_offload_params": true}'
    text = f'{{"num_processes": 2, {section}, "num_processes": 2, "num_processes": 2}}'
    result = imported(text, tmp_path, f"a.{ending}")
    assert result.recipe.launch.ranks == 2
    twice = [(row.key, row.became) for row in result.rows if row.value == "twice"]
    assert sorted(twice) == [("fsdp_offload_params", "nothing"), ("num_processes", "nothing")]


def test_a_key_with_two_values_between_equal_ones_raises(tmp_path):
    with pytest.raises(ConfigError, match="two values: 3 and 2"):
        imported("num_processes: 2 / num_processes: 3 / num_processes: 2 / num_processes: 2", tmp_path)
