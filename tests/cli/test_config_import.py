"""`fnaccel config import`: the table, the recipe, the file; and a run of an imported recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fnaccel.cli.main import main
from fnaccel.config import from_yaml

ROOT = Path(__file__).parents[2]
CPU = "distributed_type: MULTI_CPU\nnum_processes: 2\nnum_machines: 1\nmixed_precision: 'no'\nuse_cpu: true\n"

SHARDED = """distributed_type: FSDP
num_processes: 2
mixed_precision: bf16
use_cpu: true
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FNACCEL_SET", raising=False)
    (tmp_path / "default_config.yaml").write_text(CPU)
    return tmp_path


def test_the_table_and_the_recipe(folder, capsys):
    assert main(["config", "import", "default_config.yaml"]) == 0
    table, recipe = capsys.readouterr().out.split("\n\n", 1)
    lines = [line.split() for line in table.splitlines()]
    assert lines[0][:2] == ["key", "value"]
    assert [line[0] for line in lines[1:]] == [line.split(":")[0] for line in CPU.splitlines()]
    assert lines[2][2:4] == ["launch.ranks:", "2"]
    assert recipe.startswith("# imported from default_config.yaml\nstrategy: ddp\n")
    assert [path.name for path in folder.iterdir()] == ["default_config.yaml"]


def test_json(folder, capsys):
    assert main(["config", "import", "default_config.yaml", "--json", "-o", "r.yaml"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["recipe"]["launch"] == {"machines": 1, "ranks": 2, "cpu": True}
    assert set(result["rows"][0]) == {"key", "value", "became", "why"}
    assert from_yaml(folder / "r.yaml").launch.ranks == 2


def test_a_file_is_written_once(folder, capsys):
    assert main(["config", "import", "default_config.yaml", "-o", "fnaccel.yaml"]) == 0
    assert "wrote fnaccel.yaml. Start it with:\n  fnaccel launch train.py" in capsys.readouterr().out
    (folder / "fnaccel.yaml").write_text("precision: bf16")
    assert main(["config", "import", "default_config.yaml", "-o", "fnaccel.yaml"]) == 2
    assert "there is a file fnaccel.yaml already" in capsys.readouterr().err
    assert (folder / "fnaccel.yaml").read_text() == "precision: bf16"


def test_a_deepspeed_file_of_another_folder(folder, capsys):
    (folder / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: x.json}"
    )
    assert main(["config", "import", "a.yaml"]) == 2
    assert "--deepspeed ds.json" in capsys.readouterr().err
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}')
    assert main(["config", "import", "a.yaml", "--deepspeed", "ds.json", "-o", "r.yaml"]) == 0
    recipe = from_yaml(folder / "r.yaml")
    assert (recipe.strategy, recipe.clip_norm) == ("deepspeed(config='ds.json')", 0.5)


@pytest.mark.long
@pytest.mark.launcher
@pytest.mark.parametrize("text", [CPU, SHARDED], ids=["cpu", "fsdp"])
def test_two_commands_train_an_accelerate_project(folder, text):
    (folder / "default_config.yaml").write_text(text)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    fnaccel = [sys.executable, "-m", "fnaccel"]
    imported = [*fnaccel, "config", "import", "default_config.yaml", "-o", "fnaccel.yaml"]
    subprocess.run(imported, cwd=folder, env=environ, check=True, capture_output=True)
    script = [str(ROOT / "examples" / "train_gpt.py"), "--steps", "3", "--global-batch", "4"]
    run = subprocess.run(
        [*fnaccel, "launch", *script, "--json", "losses.json", "--quiet"],
        cwd=folder, env=environ, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    written = next(folder.glob("losses*.json"))
    result = json.loads(written.read_text())
    losses = result["losses"]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
