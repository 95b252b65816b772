"""Values that contradict each other, unknown keys, and the law that every key has a row."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import fnaccel as fa
from fnaccel.config.importing import accelerate, import_file, kind_of
from fnaccel.config.importing.draft import leaves_of
from fnaccel.errors import ConfigError, FnaccelError


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{num_processes: 3, num_machines: 2, main_process_ip: a}", "does not divide by num_machines: 2"),
        ("{num_processes: 4, num_machines: 2}", "2 machines need an address"),
        ("{num_processes: 4, num_machines: 2, main_process_ip: a, machine_rank: 2}", "there are 2 machines"),
        ("{num_processes: 4, distributed_type: 'NO'}", "this is one process, and num_processes is 4"),
        ("{num_processes: 4, distributed_type: MULTI_GPU, gpu_ids: '0,1'}", "num_processes needs 4"),
        ("{num_processes: two}", "'two': this is no number"),
        ("{num_processes: 1.5}", "no whole number"),
        ("{num_processes: 2, distributed_type: MULTI_GPUS}", "did you mean 'MULTI_GPU'"),
        ("{num_processes: 2, use_cpu: perhaps}", "neither true nor false"),
        ("{num_processes: 2, mixed_precision: bf61}", "did you mean 'bf16'"),
        ("{num_machines: 0}", "at least one machine"),
        ("fsdp_config: {fsdp_sharding_strategy: FULL_SHRD}", "did you mean 'FULL_SHARD'"),
        ("fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: false}", "contradicts"),
        ("fsdp_config: {fsdp_cpu_ram_efficient_loading: true, fsdp_sync_module_states: false}", "needs it"),
        ("fsdp_config: {fsdp_auto_wrap_policy: SIZE_BASED_WRAP}", "the size is missing"),
        ("deepspeed_config: {zero_stage: 4}", "there is no such stage"),
        ("deepspeed_config: {zero_stage: 3, offload_optimizer_device: nvme}", "nvme needs one folder"),
        ("deepspeed_config: {deepspeed_config_file: none.json}", "none.json is needed"),
        ("{deepspeed_config: {gradient_clipping: 1.0}, gradient_clipping: 2.0}", "contradict each other"),
        ("{num_processes: 4, parallelism_config: {tp_size: 8}}", "multiply to 8, and num_processes is 4"),
        ("parallelism_config: {tp_size: 0}", "a size is 1 or more"),
        ("parallelism_config: {cp_size: 2, sp_size: 2}", "both cut sequences"),
        ("{additional_args: {use_spot_instances: true}}", "max_wait"),
        ("{bf16: {enabled: true}, fp16: {enabled: true}}", "both true"),
        ("{optimizer: {type: AdamW, params: {lr: 0.01}}, zero_optimization: {stage: 2}, "
         "scheduler: {type: WarmupLR, params: {warmup_max_lr: 0.02}}}", "the scheduler rises to 0.02"),
        ("{zero_optimization: {stage: 2}, train_batch_size: 10, train_micro_batch_size_per_gpu: 4, "
         "gradient_accumulation_steps: 1}", "no number of ranks"),
        ("{strategy: ddp, precision: bf16}", "this is a recipe already"),
        ("{a: 1}", "no key of the document belongs to a tool"),
        ("[1]", "holds list, not keys"),
    ],
)  # fmt: skip
def test_mistakes(text, says):
    with pytest.raises(ConfigError, match=says) as raised:
        fa.config.import_document(yaml.safe_load(text))
    assert raised.value.where
    assert raised.value.fix


@pytest.mark.parametrize(
    ("deepspeed", "section", "says"),
    [
        ({"zero_optimization": {"stage": 2}}, {"zero_stage": 3}, "says 2"),
        ({"gradient_clipping": 1.0}, {"gradient_clipping": 0.5}, "contradict each other: clip_norm"),
        (
            {"gradient_accumulation_steps": 2},
            {"gradient_accumulation_steps": 4},
            "contradict each other: accumulate",
        ),
    ],
)
def test_a_section_and_its_file_must_agree(deepspeed, section, says):
    document = {"deepspeed_config": {"deepspeed_config_file": "ds.json", **section}}
    with pytest.raises(ConfigError, match=says):
        fa.config.import_document(document, files={"ds.json": deepspeed})
    if "zero_stage" not in section:
        auto = dict.fromkeys(deepspeed, "auto")
        fa.config.import_document(document, files={"ds.json": auto})


def test_unknown_keys_are_rows_with_the_nearest_name():
    rows = fa.config.import_document({"num_processes": 1, "num_machins": 1, "qqq": 2}).rows
    assert "did you mean 'num_machines'?" in rows[1].why
    assert rows[2].why.startswith("unknown")
    assert [row.became for row in rows[1:]] == ["nothing", "nothing"]


def test_sections_of_another_kind_are_not_used():
    document = {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "fsdp_config": {"fsdp_offload_params": True},
        "fp8_config": {"backend": "TE"},
        "mixed_precision": "bf16",
    }
    imported = fa.config.import_document(document)
    rows = {row.key: row for row in imported.rows}
    assert "does not read" in rows["fsdp_config.fsdp_offload_params"].why
    assert "does not read" in rows["fp8_config.backend"].why
    assert (imported.recipe.strategy, imported.recipe.fp8) == ("ddp", {})


def test_files_that_can_not_be_read(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        import_file(tmp_path / "a.yaml")
    twice, deep = '{"a": 1, "a": 2}', "[" * 100_000
    files = (("a.yaml", "a: [1"), ("a.json", "{"), ("b.json", twice), ("c.json", deep))
    for name, text in (*files, ("d.yaml", deep)):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="can't be parsed"):
            import_file(tmp_path / name)
    (tmp_path / "e.yaml").write_bytes(b"strategy: \xff\xfe")
    for read in (import_file, fa.config.from_yaml):
        with pytest.raises(ConfigError, match=r"e\.yaml is no text in UTF-8"):
            read(tmp_path / "e.yaml")


def test_the_kinds():
    assert kind_of({"compute_environment": "LOCAL_MACHINE"}) == "accelerate"
    assert kind_of({"train_batch_size": 8, "optimizer": {}}) == "deepspeed"


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 9),
    st.sampled_from(["no", "auto", "1", "", "bf16", "FSDP", "NO"]),
)
_KEYS = st.sampled_from(sorted(accelerate.KEYS)) | st.text("abc._", min_size=1, max_size=6)


@given(st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=12))
def test_any_keys_and_values_give_rows_or_a_three_line_error(flat):
    document = {"compute_environment": "LOCAL_MACHINE"}
    for key, value in flat.items():
        section, _, name = key.partition(".")
        if name and isinstance(document.setdefault(section, {}), dict):
            document[section][name] = value
        elif section not in document:
            document[section] = value
    try:
        imported = fa.config.import_document(document)
    except FnaccelError as error:
        assert str(error).count("\n  ") == 2  # noqa: PT017 - not every document has one
    else:
        assert [row.key for row in imported.rows] == list(leaves_of(document))
        assert fa.config.from_yaml(fa.config.to_yaml(imported.recipe)) == imported.recipe
