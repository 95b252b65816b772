"""The table of devices, and what is refused because of it."""

from __future__ import annotations

import importlib
import types

import pytest
import torch

import fnaccel as fa
from fnaccel.errors import CapabilityError, MissingBackendError, WorldError
from fnaccel.world import devices
from fnaccel.world.devices import (
    KINDS,
    check_precision,
    check_processes,
    open_device,
)
from fnaccel.world.launched import Ranks
from fnaccel.world.random_streams import ModuleStream, stream_of
from fnaccel.world.world import World, _choose_device
from tests.tiny_models import Net, loss_fn

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def world_on(kind, **fields):
    return World(
        rank=0, size=1, local_rank=0, local_size=1, machine=0, machines=1,
        device=torch.device(kind), backend="none", **fields,
    )  # fmt: skip


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_decides(kind, precision):
    device = types.SimpleNamespace(type=kind)
    if precision in KINDS[kind].precisions:
        check_precision(device, DTYPES[precision])
        return
    with pytest.raises(CapabilityError) as raised:
        check_precision(device, DTYPES[precision])
    assert precision in str(raised.value)
    assert kind in raised.value.where
    assert raised.value.fix == f"choose one of: {', '.join(KINDS[kind].precisions)}"


def test_a_kind_that_nobody_knows_is_not_refused():
    check_precision(types.SimpleNamespace(type="privateuseone"), torch.float16)
    check_processes(types.SimpleNamespace(type="privateuseone"), 4)


def test_a_train_step_asks():
    with pytest.raises(CapabilityError, match="loss scale"):
        fa.train_step(
            fa.with_precision(loss_fn, "fp16"),
            model=fa.distribute(Net, fa.local()),
            optimizer=fa.sgd(0.1),
            world=world_on("mps"),
        )
    made = fa.train_step(
        fa.with_precision(loss_fn, "bf16"),
        model=fa.distribute(Net, fa.local()),
        optimizer=fa.sgd(0.1),
        world=world_on("mps"),
    )
    assert "compute bf16" in str(made.plan)


@pytest.mark.parametrize("kind", ["mps", "xla"])
def test_one_process_where_there_are_no_collectives(kind):
    device = torch.device(kind)
    check_processes(device, 1)
    with pytest.raises(WorldError, match=f"2 processes were started on {kind}"):
        check_processes(device, 2)
    with pytest.raises(WorldError, match="2 processes"):
        check_processes(device, 2)


def test_start_says_so(monkeypatch):
    with pytest.raises(WorldError, match="2 processes were started on mps"):
        _choose_device("mps", Ranks(rank=1, size=2, local_rank=1, local_size=2))


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu:1", "meta", torch.device("cuda", 1)])
def test_a_device_that_is_not_there(monkeypatch, kind):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(WorldError, match=r"has no (cuda|mps|xpu|meta): torch finds no accelerator") as raised:
        fa.start(device=kind)
    assert "device='cpu'" in raised.value.fix


@pytest.mark.parametrize("name", ["cpu:3", 3, 3.5, "tpu", ""])
def test_a_name_that_is_no_device(name):
    with pytest.raises(WorldError) as raised:
        fa.start(device=name)
    assert raised.value.where == "fa.start(device=)"
    assert "cpu" in raised.value.fix


@pytest.mark.parametrize(("name", "package"), [("npu", "torch_npu"), ("hpu:0", "habana_frameworks.torch")])
def test_a_package_that_is_not_there(name, package):
    with pytest.raises(MissingBackendError, match=package) as raised:
        open_device(name)
    assert "pip install" in raised.value.fix


def test_a_package_that_brings_a_device(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    monkeypatch.setitem(
        KINDS, "meta", devices.Kind(name="meta", backend=None, precisions=(), package="brings_meta")
    )
    assert open_device("meta") == torch.device("meta")
    assert asked == ["brings_meta"]


def test_no_such_device():
    with pytest.raises(WorldError, match="torch knows no device 'cdua'"):
        fa.start(device="cdua")


def test_a_stream_made_of_a_module(monkeypatch):
    """As on MPS, whose module has functions in the place of a generator."""
    generator = torch.Generator()
    module = types.SimpleNamespace(
        get_rng_state=generator.get_state,
        set_rng_state=generator.set_state,
        manual_seed=generator.manual_seed,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    stream = stream_of(torch.device("mps"))
    assert isinstance(stream, ModuleStream)
    assert stream.device.type == "mps"
    stream.manual_seed(3)
    kept = stream.get_state()
    first = torch.rand(3, generator=generator)
    stream.set_state(kept)
    assert torch.equal(first, torch.rand(3, generator=generator))


def test_a_stream_that_is_a_generator(monkeypatch):
    made = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: types.SimpleNamespace(default_generators=made)
    )
    assert stream_of(torch.device("cuda:1")) is made[1]
