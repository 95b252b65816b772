"""The sections of carriers in a recipe: through YAML and back, and their mistakes."""

from __future__ import annotations

import pytest
import yaml

from fnaccel.config import LaunchRecipe, TpuVmRecipe, from_yaml, to_yaml
from fnaccel.errors import ConfigError

TEXT = """
launch:
  ranks: 4
  carrier: slurm
  hosts: {names: ["gpu1", "gpu2:4"], file: hosts.txt, include: "gpu1@gpu2:0,2"}
  slurm: {partition: gpu, time: "1:00:00", exclusive: true, setup: ["module load cuda"]}
  tpu_vm: {name: pod, zone: z, folder: ~/gpt, sudo: true, workers: 0, commands: [ls], command_file: c.sh,
    env: {A: "1"}, install: fnaccel}
  sagemaker: {role: r, profile: p, region: e, image: i, instance_type: ml.g5.xlarge, job_name: n, spot: true,
    max_wait: 100, max_run: 90, python: py312, torch: 2.6.0, transformers: 4.49.0,
    inputs_file: a.tsv, metrics_file: b.tsv, network_isolation: true, local: true, arguments: {volume_size: 3}}
  role: trainer
  rdzv: {join_timeout: 30}
  monitor_interval: 0.5
  numa: true
  python: false
  tee: logs
  quiet: true
  debug: true
  nccl: consumer
"""


def test_every_field_goes_through_yaml_and_back():
    recipe = from_yaml(TEXT)
    assert from_yaml(to_yaml(recipe)) == recipe
    launch = recipe.launch
    assert launch.hosts.names == ("gpu1", "gpu2:4")
    assert launch.slurm["setup"] == ("module load cuda",)
    assert (launch.tpu_vm.name, launch.tpu_vm.workers) == (("pod",), "0")
    assert (launch.sagemaker.torch, launch.sagemaker.arguments) == ("2.6.0", {"volume_size": 3})
    assert (launch.carrier, launch.nccl, launch.python) == ("slurm", "consumer", False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("carrier: slrum", "did you mean 'slurm'"),
        ("hosts: {fil: x}", "HostsRecipe has no key 'fil'"),
        ("hosts: {include: a, exclude: b}", "can't be used together"),
        ("hosts: {names: {a: 4}}", "is no list of names"),
        ("slurm: {time: 1:00:00}", "the number 3600"),
        ("slurm: gpu", "expected a mapping"),
        ("tpu_vm: {zones: z}", "no key 'zones'"),
        ("sagemaker: {torch: 2.10}", "a version is text"),
        ("sagemaker: {spot: true}", "max_wait=None"),
        ("sagemaker: {spot: true, max_wait: 10, max_run: 20}", "max_wait=10"),
        ("nccl: gamer", "nccl='gamer' is no preset"),
    ],
)
def test_mistakes_name_the_field(text, says):
    with pytest.raises(ConfigError, match=says):
        from_yaml(f"launch:\n  {text}")


NEWLINES = {
    "slurm": [{"partition": "gpu\ntouch x"}, {"job-name": "a\n#SBATCH --uid=0"}, {"account": "a\rb"}, {"output": "o\n"},
              {"nodes": ["a", "b\n"]}, {"qos\ntouch x": "a"}],
    "tpu_vm": [{"workers": "all\ntouch x"}, {"zone": "z\n"}, {"install": "a\nb"}, {"env": {"A\nB": "1"}}],
    "hosts": [{"file": "a\nb"}],
    "sagemaker": [{"job_name": "a\nb"}, {"arguments": {"a": ["b\x00"]}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "options"), [(section, options) for section, each in NEWLINES.items() for options in each]
)
def test_a_newline_adds_no_line_to_a_job_script(section, options):
    with pytest.raises(ConfigError, match="has a control character") as raised:
        from_yaml(yaml.safe_dump({"launch": {section: options}}))
    assert raised.value.where.startswith(f"launch.{section}")


def test_shell_lines_and_values_of_variables_may_have_several_lines():
    launch = LaunchRecipe(
        slurm={"setup": "module load cuda\nmodule load nccl"},
        env={"CERTIFICATE": "first\nsecond"},
        tpu_vm=TpuVmRecipe(commands=("for a in b\ndo c\ndone",), env={"A": "1\n2"}),
    )
    assert launch.slurm["setup"] == ("module load cuda", "module load nccl")
