"""Configurations of every kind become recipes: all keys have a row, and the recipes are valid."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import fnaccel as fa
from fnaccel.cli.config.checking import mistakes_of
from fnaccel.cli.main import main
from fnaccel.config.importing import commented, deepspeed_file, import_file, parse
from fnaccel.config.importing.draft import leaves_of

FOLDER = Path(__file__).parent / "files"
FILES = sorted(FOLDER.iterdir())

STRATEGIES = {
    "multi_gpu": "ddp",
    "multi_cpu": "ddp",
    "two_machines": "ddp",
    "one_process": "local",
    "mpirun": "ddp",
    **{f"multi_{name}": "ddp" for name in ("xpu", "npu", "mlu", "musa", "sdaa", "hpu")},
    "fsdp1": "fsdp(reshard_after_forward=False, units=('Block',), offload=True, forward_prefetch=1, init='rank0')",
    "fsdp1_numbers": "hsdp(2, -1, reshard_after_forward=False, units=1000000)",
    "fsdp2": "fsdp(reshard_after_forward=False, units=None)",
    "fsdp_no_shard": "ddp",
    "parallelism": "ddp(2) * fsdp(2) * context(2, method='ring') * tensor(2)",
    "ulysses": "ddp(2) * context(2, method='heads')",
    "deepspeed": "deepspeed(stage=3, offload_optimizer='nvme', offload_params='cpu', nvme_path='/nvme', "
    "zero3_init=True, moe_layers=('MixtralSparseMoeBlock',))",
    "deepspeed_zero2": "deepspeed(stage=2)",
    "deepspeed_machines": "deepspeed(stage=1)",
    "megatron": "pipeline(2) * fsdp(reshard_after_forward=False) * tensor(2, sequence=True)",
    "tensor": "tensor(2)",
    "tpu": "xla",
    "tpu_here": "xla",
    "sagemaker": "ddp",
    "sagemaker_local": "local",
    "fp8_te": "ddp",
    "fp8_te_flags": "fsdp",
    "fp8_msamp": "ddp",
    "fp8_torchao": "fsdp",
    "dynamo": "ddp",
    "dynamo_short": "ddp",
    "dynamo_old": "ddp",
}

FIELDS = {
    "multi_gpu": {"precision": "fp16", "launch.ranks": 4, "launch.gpus": "0,1,2,3", "launch.port": 29501,
                  "launch.affinity": True, "launch.debug": True},
    "multi_cpu": {"precision": "fp32", "launch.ranks": 2, "launch.cpu": True, "launch.threads": 1},
    "two_machines": {"launch.ranks": 8, "launch.machines": 2, "launch.machine": 1, "launch.address": "10.0.0.1",
                     "launch.restarts": 2, "launch.monitor_interval": 5.0, "accumulate": 4, "clip_norm": 1.0},
    "one_process": {"launch.cpu": True, "launch.ranks": 1, "precision": "bf16"},
    "mpirun": {"launch.ranks": 4, "launch.carrier": "mpirun", "launch.hosts.file": "hostfile",
               "launch.env.CCL_WORKER_COUNT": "1"},
    "fsdp1": {"remat": True},
    "fsdp2": {"remat": False},
    "deepspeed": {"accumulate": 2, "clip_norm": 1.0, "precision": "bf16"},
    "deepspeed_machines": {"launch.carrier": "pdsh", "launch.hosts.file": "hostfile",
                           "launch.hosts.include": "worker-1@worker-2"},
    "deepspeed_with_file": {"precision": "bf16", "accumulate": 2, "clip_norm": 1.0},
    "ds": {"precision": "bf16", "accumulate": 2},
    "ds_optimizer": {"precision": "fp16", "clip_norm": 1.0, "accumulate": 1, "optimizer.name": "from_deepspeed",
                     "optimizer.lr": 3e-4, "optimizer.schedule": "deepspeed_lr"},
    "megatron": {"accumulate": 2, "clip_norm": 1.0, "remat": "attention", "launch.ranks": 4},
    "tpu": {"launch.tpu": True, "launch.tpu_vm.name": "pod-a", "launch.tpu_vm.zone": "us-central2-b",
            "launch.tpu_vm.sudo": True, "launch.tpu_vm.workers": "all", "launch.env.LOG": "1",
            "launch.tpu_vm.commands": ["pip install fnaccel", "ls"]},
    "tpu_here": {"launch.tpu": True},
    "sagemaker": {"launch.carrier": "sagemaker", "launch.machines": 2, "launch.sagemaker.torch": "2.6",
                  "launch.sagemaker.spot": True, "launch.sagemaker.max_wait": 86400, "compile": "loss",
                  "strategy": "ddp", "launch.sagemaker.network_isolation": True,
                  "launch.sagemaker.arguments": {"volume_size": 100, "tags": {"team": "a"}}},
    "sagemaker_local": {"launch.sagemaker.local": True, "launch.ranks": 1},
    "fp8_te": {"fp8.backend": "transformer_engine", "fp8.recipe": "hybrid", "fp8.margin": 0,
               "fp8.amax_history_len": 1024, "fp8.amax_compute_algo": "max"},
    "fp8_te_flags": {"fp8.recipe": "mxfp8"},
    "fp8_msamp": {"precision": "fp8", "fp8.backend": "torchao"},
    "fp8_torchao": {"fp8.backend": "torchao", "fp8.all_gather": True, "fp8.pad": True},
    "dynamo": {"compile": "block", "compile_options.backend": "inductor", "compile_options.mode": "max-autotune",
               "compile_options.dynamic": True},
    "dynamo_short": {"compile": "loss", "compile_options.backend": "aot_eager", "compile_options.fullgraph": True},
    "dynamo_old": {"compile": "loss", "compile_options.backend": "eager"},
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_key_has_one_row_and_the_recipe_is_valid(path, tmp_path):
    imported = import_file(path)
    keys = [row.key for row in imported.rows]
    leaves = leaves_of(parse(path))
    assert [key for key in keys if ": " not in key] == list(leaves), "the rest are keys of a DeepSpeed file"
    assert all(row.why and row.became for row in imported.rows)
    assert not [row.key for row in imported.rows if row.why.startswith("unknown")]
    assert mistakes_of(imported.recipe) == []
    text = commented(imported, path.name)
    written = tmp_path / "fnaccel.yaml"
    written.write_text(text)
    assert fa.config.from_yaml(written) == imported.recipe
    assert fa.config.from_yaml(fa.config.to_yaml(imported.recipe)) == imported.recipe


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_each_kind_becomes(path):
    imported = import_file(path)
    if path.stem in STRATEGIES:
        assert imported.recipe.strategy == STRATEGIES[path.stem]
    for field, value in FIELDS.get(path.stem, {}).items():
        assert imported.fields[field] == value, field
    assert path.stem in STRATEGIES or path.stem in FIELDS


def test_a_deepspeed_file_beside_it_is_read_and_named():
    imported = import_file(FOLDER / "deepspeed_with_file.yaml")
    file = str(FOLDER / "ds.json")
    assert imported.recipe.strategy == f"deepspeed(config={file!r}, zero3_init=True)"
    rows = {row.key: row for row in imported.rows}
    assert rows[f"{file}: gradient_accumulation_steps"].became == "accumulate: 2"
    assert rows[f"{file}: zero_optimization.reduce_bucket_size"].why.startswith("auto")
    assert import_file(FOLDER / "ds.json").recipe.strategy == f"deepspeed(config={file!r})"


def test_a_section_fills_auto():
    section = {"zero_stage": 3, "offload_param_device": "cpu", "offload_optimizer_device": "none"}
    zero = {"stage": "auto", "offload_param": {"device": "auto"}, "offload_optimizer": {"device": "auto"}}
    document = {"deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": True, **section}}
    files = {"ds.json": {"zero_optimization": zero}}
    strategy = fa.config.import_document(document, files=files).recipe.strategy
    assert strategy == "deepspeed(config='ds.json', stage=3, offload_params='cpu', zero3_init=True)"


def test_keys_that_guides_show_are_imported():
    """The table comes from `python -m tests.config.importing.listing`."""
    lines = (FOLDER.parent / "keys.txt").read_text().split("\n")
    shown = {line.split(" ", 1)[1] for line in lines if line.startswith("accelerate ")}
    kinds = {key.split("=")[1] for key in shown if key.startswith("distributed_type=")}
    tested = {parse(path).get("distributed_type") for path in FILES}
    assert kinds <= tested
    keys = {key for path in FILES if path.suffix == ".yaml" for key in leaves_of(parse(path))}
    # the kinds compare with the tested kinds, and an address of another tool is in no file
    assert {key for key in shown if "=" not in key} - keys == set()
    for line in filter(None, lines):
        tool, key = line.split(" ", 1)
        if tool == "deepspeed":
            assert key.split(".")[0] in deepspeed_file.TOP


LAUNCHES = [path for path in FILES if path.suffix == ".yaml"]


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.name)
def test_a_launch_runs_or_names_what_it_needs(path, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    imported = import_file(path)
    machines = range(1, imported.recipe.launch.machines + 1)
    hosts = "".join(f"worker-{n} slots={imported.recipe.launch.ranks}\n" for n in machines)
    for name, text in {**TABLES, "hostfile": hosts}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text("import fnaccel as fa\nfa.start().close()\n")
    (tmp_path / "r.yaml").write_text(commented(imported, path.name))
    code = main(["launch", "--config", "r.yaml", "--dry-run", "train.py"])
    printed = capfd.readouterr()
    if code:
        assert path.stem in NEEDS
        assert NEEDS[path.stem] in printed.err
        assert "fix: " in printed.err
    else:
        assert "train.py" in printed.out


TABLES = {
    "inputs.tsv": "channel_name\tdata_location\ntrain\ts3://bucket/train\n",
    "metrics.tsv": "metric_name\tmetric_regex\nloss\tloss=(.*)\n",
}
NEEDS = {
    "multi_gpu": "no GPU of this machine is among 0,1,2,3",
    "sagemaker": "2.6",  # a container of this torch, which fnaccel does not run on
}


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("num_layers_per_virtual_pipeline_stage", "virtual="),
        ("decoder_last_pipeline_num_layers", "split="),
        ("pipeline_model_parallel_split_rank", "split="),
    ],
)
def test_where_stages_begin_in_megatron_is_named_with_the_option_that_says_so(tmp_path, key, why):
    section = {"megatron_lm_pp_degree": 2, f"megatron_lm_{key}": 1}
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "MEGATRON_LM", "megatron_lm_config": section}))
    imported = import_file(path)
    assert imported.recipe.strategy == "pipeline(2) * ddp"
    (row,) = [row for row in imported.rows if row.key.endswith(key)]
    assert row.became == "nothing"
    assert f"fa.pipeline({why})" in row.why


def test_a_pipeline_of_deepspeed_is_built_in_code():
    imported = deepspeed_file.read({"pipeline": {"stages": 2}}, "ds.json")
    (row,) = imported.rows
    assert (row.key, row.became) == ("pipeline.stages", "nothing")
    assert "fa.pipeline()" in row.why


def test_what_needs_something_is_said_in_the_file():
    text = commented(import_file(FOLDER / "megatron.yaml"), "megatron.yaml")
    assert "# megatron_lm_config.megatron_lm_tp_degree: needs a model with a plan" in text
    assert yaml.safe_load(text)["strategy"].startswith("pipeline(2) * fsdp(")
