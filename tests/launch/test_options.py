"""The record of launch options: its parser, its command line, its YAML and its job follow from its fields."""

from __future__ import annotations

import attrs
import pytest

import fnaccel as fa
from fnaccel.cli.launch import job_of
from fnaccel.cli.options.launch import parser
from fnaccel.cli.overriding import check_overrides, layers
from fnaccel.config import Recipe
from fnaccel.errors import LaunchError
from fnaccel.launch.carriers.command_line import refuse
from fnaccel.launch.job import Job
from fnaccel.launch.options import at_least, changed_options, check_options, flags_of, option, words_of
from fnaccel.launch.recipe import LaunchRecipe
from fnaccel.launch.sections import CARRIERS

FLAGS = {name: (found, kind) for name, found, kind in flags_of(LaunchRecipe)}
SAMPLES = {int: ["3"], float: ["2.5"], str: ["a b"], bool: []}
CHOSEN = {
    "machines": ["2:4"], "env": ["A=b=c d"], "rdzv": ["join_timeout=5"], "carrier": ["tpu"], "nccl": ["consumer"],
    "hosts.include": ["a", "--hosts", "a,b"], "hosts.exclude": ["a", "--hosts", "a,b"],
}  # fmt: skip
"""Values of options that don't take any text, and options that they need."""
SECTIONS = {"tpu_vm", "hosts", "slurm", "sagemaker"}


def parsed(words):
    options = parser().parse_args(["--no-config", *words, "t.py"])
    return check_overrides(layers(options, {})).launch


def value_of(record, name):
    for part in name.split("."):
        record = getattr(record, part)
    return record


def test_each_field_is_an_option_or_a_section():
    fields = {field.name for field in attrs.fields(LaunchRecipe)}
    assert fields - {name.partition(".")[0] for name in FLAGS} == {
        "min_machines", "slurm", "sagemaker",
    }, "--nnodes sets min_machines, and these sections have keys of their own"  # fmt: skip
    lines = [line.strip().partition(": ")[0].split(", ") for line in LaunchRecipe.__doc__.splitlines()]
    assert not fields - {name for names in lines for name in names}, "the class describes each field"


@pytest.mark.parametrize("name", FLAGS)
def test_an_option_goes_from_the_command_line_to_the_job_and_back(name):
    found, kind = FLAGS[name]
    words = [found.name, *CHOSEN.get(name, SAMPLES[kind])]
    launch = parsed(words)
    assert value_of(launch, name) != value_of(LaunchRecipe(), name)
    assert set(found.flags) <= set(parser().option_names()), "its group is one of those in --help"
    recipe = Recipe(launch=launch)
    assert fa.config.from_yaml(fa.config.to_yaml(recipe)) == recipe
    job = Job(**attrs.asdict(launch, recurse=False), script="t.py")
    assert value_of(job, name) == value_of(launch, name)
    if name.partition(".")[0] not in SECTIONS:
        assert parsed(words_of(job, but=())) == launch


@pytest.mark.parametrize("name", [name for name in FLAGS if FLAGS[name][0].refused_by])
def test_a_carrier_refuses_what_it_cannot_carry(name):
    found, kind = FLAGS[name]
    carriers = found.refused_by.split()
    assert set(carriers) <= {*CARRIERS, "srun", "mpich"}
    launch = parsed([found.name, *CHOSEN.get(name, SAMPLES[kind])])
    for carrier in carriers:
        with pytest.raises(LaunchError, match=f"{found.name}.* can't be used with the carrier {carrier}"):
            refuse(Job(**attrs.asdict(launch, recurse=False)), carrier, "leave it out")
        refuse(Job(), carrier, "leave it out")


def test_a_job_keeps_the_options_of_a_recipe():
    launch = LaunchRecipe(cpu=True, ranks=2, tee="logs", env={"A": 1}, slurm={"partition": "gpu"})
    job = job_of(launch, script="t.py")
    assert (
        LaunchRecipe(**{field.name: getattr(job, field.name) for field in attrs.fields(LaunchRecipe)})
        == launch
    )


@attrs.frozen(kw_only=True)
class Longer(LaunchRecipe):
    patience: float = option(
        "--patience", "seconds", default=9.0, refused_by="sagemaker",
        check=at_least(0, "a patience of {:g} seconds", "--patience 9"),
    )  # fmt: skip


def test_a_new_option_is_a_new_field():
    found = {name: (option.name, kind) for name, option, kind in flags_of(Longer, "launch.")}
    assert found["launch.patience"] == ("--patience", float)
    longer = Longer(patience=0.25, quiet=True)
    assert words_of(longer, but=()) == ["-q", "--patience", "0.25"]
    assert list(changed_options(longer)) == ["quiet", "patience"]
    check_options(longer)
    with pytest.raises(LaunchError, match="a patience of -1 seconds"):
        check_options(Longer(patience=-1.0))
