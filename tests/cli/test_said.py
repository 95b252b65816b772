"""What messages say of wrong options and values, and of files that were damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import fnaccel as fa
from fnaccel.cli.main import main
from fnaccel.errors import ConfigError, LaunchError
from fnaccel.launch.carriers import sagemaker
from fnaccel.launch.sections import SageMakerRecipe

ROOT = Path(__file__).parents[2]


def damaged(kind, path):
    values = {"w": torch.arange(64.0), "b": torch.ones(3, 5)}
    if kind == "meta":
        values["w"] = torch.ones(2, device="meta")
    elif kind == "nested":
        values["w"] = torch.nested.nested_tensor([torch.ones(2)])
    torch.save(values, path, _use_new_zipfile_serialization=kind != "old")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["meta", "nested"])
def test_tensors_without_values_are_named(tmp_path, capsys, kind):
    damaged(kind, tmp_path / "a.bin")
    assert main(["convert", str(tmp_path / "a.bin"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert {"meta": "w in a.bin has no values", "nested": "w in a.bin is a Tensor, not a dense"}[kind] in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["new", "old"])
def test_damaged_files_are_errors_of_three_lines(tmp_path, capsys, kind):
    file = tmp_path / "a.bin"
    damaged(kind, file)
    whole, drawn = file.read_bytes(), random.Random(0)
    refused = 0
    for number in range(40):
        data = bytearray(whole)
        if number % 4 == 3:
            del data[drawn.randrange(len(data)) :]
        for _ in range(3):
            data[drawn.randrange(len(data) or 1) : 1] = b""
            if data:
                data[drawn.randrange(len(data))] = drawn.randrange(256)
        file.write_bytes(data)
        code = main(["convert", str(file), str(tmp_path / f"out{number}")])
        assert code == 0 or "where:" in capsys.readouterr().err
        refused += code == 2
    assert refused > 10


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("clip_norm: abc", "'abc'"), ("accumulate: 1.5", "1.5 is not a whole number"),
        ("skip_nonfinite: 3", "3 is not true or false"), ("run: {steps: x}", "'x'"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_shown_with_its_file(tmp_path, text, says):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says) as raised:
        fa.config.from_yaml(tmp_path / "r.yaml")
    assert raised.value.where == str(tmp_path / "r.yaml")


def test_options_are_listed_without_words_of_the_help(capsys):
    assert main(["launch", "--dry-rum", "x.py"]) == 2
    said = capsys.readouterr().err
    assert "did you mean '--dry-run'?" in said
    assert "--dry-run:" not in said


@pytest.mark.parametrize(
    ("version", "good"), [("2.6.0", False), ("2.8", False), ("1.13", False), ("2.9.0", True), ("2.10", True)]
)
def test_sagemaker_needs_the_torch_of_the_package(version, good):
    section = SageMakerRecipe(role="r", instance_type="ml.g5.xlarge", torch=version)
    if good:
        sagemaker._check_torch(section)
        return
    with pytest.raises(LaunchError, match=rf"torch {version}, and fnaccel needs 2\.9"):
        sagemaker._check_torch(section)
    sagemaker._check_torch(SageMakerRecipe(role="r", instance_type="x", image="i:1", torch=version))


def test_the_oldest_torch_is_that_of_the_package():
    numbers = ".".join(map(str, sagemaker.TORCH))
    assert f'"torch>={numbers}"' in (ROOT / "pyproject.toml").read_text()
