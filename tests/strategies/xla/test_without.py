"""What can be said of `xla` where torch_xla is not installed: the record, messages, options, commands."""

from __future__ import annotations

import importlib.metadata
import types

import pytest
import torch

import fnaccel as fa
from fnaccel.cli import launch as command
from fnaccel.cli.launch import read
from fnaccel.errors import (
    ArgumentError,
    AxisProductError,
    CapabilityError,
    LaunchError,
    MissingBackendError,
    WorldError,
)
from fnaccel.launch.job import Job, check
from fnaccel.launch.variables import variables
from fnaccel.models.parameter import Leaf
from fnaccel.optim.chain_kernel import BoundChain
from fnaccel.optim.fused import FusedKernel
from fnaccel.step.spec import Spec
from fnaccel.strategies.runtime import check_device
from fnaccel.strategies.xla.record import Xla
from fnaccel.world import devices
from fnaccel.world.mesh import build, resolve
from tests.tiny_models import Net, loss_fn


def spec_on(kind):
    world = types.SimpleNamespace(device=torch.device(kind), size=1)
    return Spec(step=fa.Step(loss_fn), model=Net, strategy=fa.local(), optimizers=None, mesh=build(world, {}))


def test_the_record_prints_as_the_text_that_makes_it():
    for text in ("xla()", "xla(shard=True)", "xla(shard=4)"):
        assert str(fa.strategy(text)) == text
        assert fa.strategy(text) == fa.strategy(str(fa.strategy(text)))
    assert fa.strategy("xla") == fa.xla()
    assert fa.xla(shard=True) != fa.xla()


@pytest.mark.parametrize("shard", [0, -1, "all", 2.0])
def test_shards_that_cannot_be(shard):
    with pytest.raises(ArgumentError, match="can't be sharded over"):
        fa.xla(shard=shard)


@pytest.mark.parametrize(("shard", "devices_", "group"), [(False, 4, 1), (True, 4, 4), (2, 4, 2), (1, 4, 1)])
def test_groups(shard, devices_, group):
    assert Xla(shard).group(devices_) == group


def test_groups_that_do_not_make_up_the_devices():
    with pytest.raises(ArgumentError, match="4 devices can't be parted in groups of 3"):
        Xla(3).group(4)


def test_it_takes_one_process():
    assert resolve(fa.xla().degrees(), 1, "xla()") == {}
    with pytest.raises(AxisProductError, match="the world has 2"):
        resolve(fa.xla().degrees(), 2, "xla()")


def test_it_stands_alone():
    with (
        fa.start(device="cpu"),
        pytest.raises(CapabilityError, match=r"no interpreter together.*[\s\S]*use xla by itself"),
    ):
        fa.train_step(
            loss_fn, model=fa.distribute(Net, fa.local() * fa.xla() * fa.ddp()), optimizer=fa.sgd(0.1)
        )


def test_elsewhere_than_on_xla_it_says_what_to_start():
    with fa.start(device="cpu"), pytest.raises(WorldError, match="this world computes on cpu") as raised:
        fa.train_step(loss_fn, model=fa.distribute(Net, fa.xla()), optimizer=fa.sgd(0.1))
    assert "fa.start(device='xla')" in raised.value.fix


def test_another_strategy_on_xla():
    with pytest.raises(WorldError, match="nothing would end the graph"):
        check_device(spec_on("xla"))
    check_device(spec_on("cpu"))


def test_the_package_is_missing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(devices.importlib, "import_module", absent)
    with pytest.raises(MissingBackendError, match="torch_xla") as raised:
        fa.start(device="xla")
    assert "torch_xla==2.9.0" in raised.value.fix


def test_the_package_was_built_for_another_torch(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    with pytest.raises(MissingBackendError, match=r"torch_xla 1\.2\.3 was not built for torch") as raised:
        fa.start(device="xla")
    assert "torch==2.9.0 torch_xla==2.9.0" in raised.value.fix


def test_the_package_breaks_as_it_is_imported(monkeypatch):
    def broken(name):
        raise OSError("libcublas.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: torch.__version__)
    monkeypatch.setattr(devices.importlib, "import_module", broken)
    with pytest.raises(MissingBackendError, match="libcublas"):
        fa.start(device="xla")


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adam", "adamw"])
@pytest.mark.parametrize("skip", [0.0, 1.0, None])
def test_the_parts_equal_the_fused_kernels(name, skip):
    """In float64 to the last bits; a skipped update changes nothing, though its gradient is NaN."""
    torch.manual_seed(0)
    start = [[torch.randn(3, 5, dtype=torch.float64) for _ in range(2)] for _ in range(2)]
    params = [[torch.nn.Parameter(p.clone()) for p in start[0]] for _ in range(2)]
    options = {"weight_decay": 0.1}
    if name.startswith("adam"):
        options |= {"betas": (0.9, 0.99), "eps": 1e-8}
    else:
        options |= {"momentum": 0.0 if name == "sgd" else 0.9, "nesterov": name == "nesterov"}
    kernel = FusedKernel(name if name.startswith("adam") else "sgd")
    groups = []
    for own in params:
        leaves = [Leaf(name, p, p.detach(), p.detach()) for name, p in zip("ab", own, strict=True)]
        members = tuple(map(fa.extend.Member, range(2), leaves))
        groups.append(fa.extend.Group(members, options, None, 0.1))
    fused, chain = kernel.bind(groups[:1]), BoundChain(kernel.parts(options), groups[1:])
    for update in range(1, 4):
        for bound in (fused, chain):
            grads = [torch.full_like(g, float("nan")) if skip else g * update for g in start[1]]
            skips = None if skip is None else torch.tensor(skip)
            bound.apply(grads, [0.1 / update], 2.0, skips, torch.tensor(float(update)))
    changed = not torch.equal(params[1][0], start[0][0])
    assert changed is (not skip)
    expected, ours = dict(fa.tree.items(fused.slots)), dict(fa.tree.items(chain.slots))
    assert expected.keys() == ours.keys()
    for a, b in [*zip(*params, strict=True), *((expected[key], ours[key]) for key in expected)]:
        # the number of updates is an fp32 tensor
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)


def test_the_environment_of_the_one_process():
    found = variables(Job(script=__file__, tpu=True), 0, port=1, environ={})
    assert (found["FNACCEL_DEVICE"], found["PJRT_DEVICE"]) == ("xla", "TPU")
    rehearsed = variables(Job(script=__file__, tpu=True), 0, port=1, environ={"PJRT_DEVICE": "CPU"})
    assert (rehearsed["FNACCEL_DEVICE"], rehearsed["PJRT_DEVICE"]) == ("xla", "CPU")
    assert "PJRT_DEVICE" not in variables(Job(script=__file__), 0, port=1, environ={})


def test_a_tpu_vm_needs_no_option(monkeypatch):
    monkeypatch.setattr("fnaccel.launch.accelerators.count_accelerators", lambda environ: 3)
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert read(["t.py"]).tpu
    assert read(["t.py"]).processes == 1
    assert not read(["--cpu", "t.py"]).tpu
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert not read(["t.py"]).tpu
    assert read(["--tpu", "t.py"]).tpu


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"processes": 2}, "which one drives all"),
        ({"machines": 2}, "which one drives all"),
        ({"cpu": True}, "together"),
    ],
)
def test_what_cannot_be_started_on_tpus(fields, message):
    with pytest.raises(LaunchError, match=message):
        check(Job(script=__file__, tpu=True, **fields))


def test_gcloud_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="gcloud is not installed"):
        command.run(["--tpu-name", "mine", "--tpu-zone", "z", "t.py"])
