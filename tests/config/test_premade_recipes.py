"""The premade recipes in examples/recipes: each is loaded, and applied if a CPU can run it.

Those of DeepSpeed are applied in tests/strategies/deepspeed/test_premade_recipes.py.
"""

from __future__ import annotations

import re
import shlex

import pytest
import torch

import fnaccel as fa
from fnaccel.cli.launch import parser, read_order
from fnaccel.cli.overriding import file_layer
from fnaccel.config.applying import make_optimizer, transformed
from fnaccel.config.epochs import in_updates
from fnaccel.launch.carrier import plan
from fnaccel.program.launcher_flags import STEP_FIELDS
from tests.config.premade import FOLDER, ROOT, read, some_updates

NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
EAGER = {"compile_options": {"backend": "aot_eager"}}  # inductor takes half a minute
CHANGES = {
    "gpu": EAGER,
    "compile": EAGER,
    "compile_blocks": EAGER,
    "fp8_torchao": {"fp8.emulate": True},
    "fsdp_by_size": {"strategy": "fsdp(units=5000)"},  # the model of this test is smaller
}
ONE_RANK = ("accumulate", "attention", "bf16", "compile", "cpu", "ema", "fp16", "gpu", "mac", "window")
TWO_RANKS = (
    "checkpoints", "compile_blocks", "cpu_ranks", "ddp", "fp8_torchao", "fsdp", "fsdp_by_class", "fsdp_by_size",
    "fsdp_cpu_offload", "fsdp_large_model", "fsdp_no_split", "fsdp_zero2", "hook_bf16", "hook_powersgd", "local_sgd",
    "machines", "muon", "remat", "schedule_in_epochs", "tracking",
)  # fmt: skip
FOUR_RANKS = ("context", "hybrid", "tensor")
STAGES = ("pipeline",)
"""Their ranks hold other layers, which the plan of each says."""
DEEPSPEED = ("deepspeed_file", "deepspeed_offload", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
NEEDS_HARDWARE = (
    "deepspeed_nvme",
    "deepspeed_zero_plus_plus",
    "fp8_transformer_engine",
    "tpu",
    "tpu_sharded",
)


CLUSTERS = {
    "sagemaker": "sagemaker",
    "slurm": "slurm",
    "ssh_hosts": "ssh",
    "tpu_pod": "tpu",
}


def loss_fn(model, batch):
    return fa.Mean(model(batch).sum(), weight=len(batch))


def test_every_recipe_is_applied_or_needs_hardware():
    assert (
        sorted((*ONE_RANK, *TWO_RANKS, *FOUR_RANKS, *STAGES, *DEEPSPEED, *NEEDS_HARDWARE, *CLUSTERS)) == NAMES
    )


@pytest.mark.parametrize(("name", "carrier"), CLUSTERS.items())
def test_a_recipe_of_a_cluster_starts_there(name, carrier):
    order = read_order(["--config", str(FOLDER / f"{name}.yaml"), "train.py", "--steps", "1"])
    assert order.carrier == carrier
    made = plan(order.request, carrier)
    text = made.text
    for word in ("strategy=fsdp", "--steps") if carrier in ("ssh", "slurm") else ("steps",):
        assert word in text
    assert ("checkpoint.directory=" in text) == (carrier in ("ssh", "slurm"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads(name):
    recipe = read(name)
    assert str(fa.strategy(recipe.strategy))
    assert fa.config.from_yaml(fa.config.to_yaml(recipe)) == recipe
    transforms = {transform.name for transform in transformed(recipe, loss_fn).transforms}
    assert ("with_precision" in transforms) == (recipe.precision != "fp32")
    if "epochs" not in name:  # a length in epochs needs data
        assert make_optimizer(recipe.optimizer)


def test_a_length_in_epochs_becomes_updates():
    shards = fa.shard(torch.utils.data.DataLoader(range(40), batch_size=4))
    with fa.start():
        described = in_updates(read("schedule_in_epochs").optimizer, shards, "local", None)
    assert described.schedule_options == {"warmup": 2, "total": 30}


@pytest.mark.parametrize("name", NAMES)
def test_two_comments_say_the_purpose_and_the_command(name):
    purpose, command, empty = (FOLDER / f"{name}.yaml").read_text().splitlines()[:3]
    assert re.fullmatch(r"# [A-Z].{8,130}\.", purpose)
    assert not empty
    program, verb, *words = shlex.split(command.removeprefix("#"))
    assert (program, verb) == ("fnaccel", "launch")
    options = parser().parse_args(words)
    assert options.config == f"examples/recipes/{name}.yaml"
    script = next(word for word in words if word.endswith(".py"))
    assert (ROOT / script).is_file()
    if script != "examples/train_recipe.py":  # other scripts have no place for the sections of a recipe
        sections = {field.partition(".")[0] for field in file_layer(FOLDER / f"{name}.yaml").fields}
        assert sections <= STEP_FIELDS


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_a_row_for_each_recipe(name):
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("|")]
    assert sum(f"({name}.yaml)" in row for row in rows) == 1


@pytest.fixture(scope="module")
def fp32(pools):
    """The first loss in fp32 on one rank."""
    [(losses, _, _)] = pools.run(1, some_updates, "mac", {}, "")
    return losses[0]


@pytest.mark.long_except(r"^(?!compile|gpu|tracking|context|tensor|fsdp_large)")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 1) for name in ONE_RANK),
        *((name, 2) for name in TWO_RANKS),
        *((name, 4) for name in FOUR_RANKS),
    ],
)
def test_a_recipe_trains(pools, tmp_path, fp32, name, ranks):
    results = pools.run(ranks, some_updates, name, CHANGES.get(name, {}), str(tmp_path))
    losses, plan, saved = results[0]
    assert all(result == (losses, plan, saved) for result in results)
    assert losses[0] == pytest.approx(fp32, abs=1e-3)
    assert losses[3] < losses[0] - 1e-3
    assert saved == (["step-0000000004"] if name in {"checkpoints", "machines", "tracking"} else [])
    assert f"{ranks} rank" in plan


@pytest.mark.parametrize("name", STAGES)
def test_a_recipe_of_stages_trains(pools, tmp_path, fp32, name):
    results = pools.run(4, some_updates, name, {}, str(tmp_path))
    losses, plan, saved = results[0]
    own = re.compile(r"[\d,]+ on this rank")
    assert all(result[0] == losses and result[2] == saved == [] for result in results)
    assert {own.sub("", other) for _, other, _ in results} == {own.sub("", plan)}
    assert len({own.search(other)[0] for _, other, _ in results}) == 2, "one for each stage"
    assert losses[0] == pytest.approx(fp32, abs=1e-3)
    assert losses[3] < losses[0] - 1e-3
    assert "4 ranks" in plan
