"""`xla` on virtual devices: parity with a raw PyTorch loop, one graph, checkpoints, refusals."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys

import pytest
import torch

from fnaccel.testing import assert_close, oracle_run
from tests.parity.rows import RATES, STEPS, loss_fn
from tests.strategies.xla.conftest import environ
from tests.strategies.xla.jobs import DEVICES, EVEN, global_batch, net, parity_rows

if importlib.util.find_spec("torch_xla") is None:
    pytest.skip(
        "torch_xla is not installed: make test-xla has an environment for it", allow_module_level=True
    )

ROWS = [(devices, row, ranks) for devices in DEVICES for row, ranks in parity_rows(devices)]


@functools.cache
def expected(ranks, precision, clip, optimizer):
    batches = [[global_batch(step, ranks)] for step in range(STEPS)]
    return oracle_run(
        net, loss_fn, batches, lr=RATES[optimizer], optimizer=optimizer, clip=clip, precision=precision
    )


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("devices", "row", "ranks"), ROWS, ids=[f"{d}-{r}-{n}" for d, r, n in ROWS])
def test_equals_the_raw_loop(on_xla, devices, row, ranks):
    oracle = expected(ranks, row.precision, row.clip, row.optimizer)
    found = on_xla(devices, "parity")[f"{row}-{ranks}"]
    assert_close(found["losses"], oracle.losses, precision=row.precision)
    if row.clip is not None:
        assert_close(found["norms"], oracle.grad_norms, precision=row.precision)
    assert_close(found["params"], oracle.params, precision=row.precision)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(("devices", "row", "ranks"), ROWS, ids=[f"{d}-{r}-{n}" for d, r, n in ROWS])
def test_parameters_and_slots_lie_where_the_strategy_says(on_xla, devices, row, ranks):
    found = on_xla(devices, "parity")[f"{row}-{ranks}"]
    group = {"xla()": 1, "xla(shard=True)": devices, "xla(shard=2)": 2}[row.strategy]
    for name, spec in (found["specs"] | found["slots"]).items():
        shared = group > 1 and not name.startswith("out.bias")
        assert ("devices=" in spec) is shared, (name, spec)
        if shared and group == devices:
            assert "last_tile_dim_replicate" not in spec
    assert f"{devices} XLA devices (CPU)" in found["plan"]
    uneven = ranks != EVEN and devices > 1
    assert (
        [text for text in found["warned"] if "rows don't divide" in text] != []
        if uneven
        else not any("rows don't divide" in text for text in found["warned"])
    )


@pytest.mark.parametrize("devices", DEVICES)
def test_a_step_is_one_graph_compiled_once(on_xla, devices):
    found = on_xla(devices, "schedule")
    assert found["everything"][0] >= 1, "the counter counts"
    for name, counts in found.items():
        assert counts[2:] == [0] * 6, (name, counts)
        assert sum(counts) <= 2, (name, counts)


@pytest.mark.parametrize("devices", DEVICES)
def test_every_call_of_the_matrix_compiles_twice_at_most(on_xla, devices):
    for name, found in on_xla(devices, "parity").items():
        assert found["compiles"][2:] == [0], (name, found["compiles"])


@pytest.mark.parametrize("devices", DEVICES)
def test_a_gradient_that_is_nan_changes_nothing(on_xla, devices):
    found = on_xla(devices, "skipping")
    before, first, second, third = found["trees"]
    assert found["skipped"] == [0.0, 1.0, 0.0]
    assert found["updates"] == 2.0
    assert_close(second, first, precision="fp64")
    assert not torch.equal(third["params"]["out.weight"], second["params"]["out.weight"])
    for name, average in first["ema"].items():
        assert_close(average, 0.75 * before["params"][name] + 0.25 * first["params"][name], precision="fp32")


@pytest.mark.parametrize("devices", DEVICES)
def test_tied_weights_stay_one_and_randomness_follows_the_seed(on_xla, devices):
    first, again, other = on_xla(devices, "tied")["runs"]
    assert first["one"]
    assert first["names"] == ["embed.weight"]
    assert first["on"] == "xla"
    assert first["buffer"] == 3.0
    assert first["losses"] == again["losses"]
    assert first["losses"] != other["losses"]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize(
    "pair", ["xla(shard=True) -> local()", "local() -> xla(shard=True)", "xla() -> xla(shard=True)"]
)
def test_a_checkpoint_goes_on_elsewhere(on_xla, devices, pair):
    found = on_xla(devices, "checkpoint")[pair]
    for tree, values in found["written"].items():
        for name, value in values.items():
            for one, other in zip(flat(value), flat(found["read"][tree][name]), strict=True):
                assert torch.equal(one, other), (tree, name)
    assert found["step"] == 3
    assert_close(found["resumed"][0], found["uninterrupted"][0], precision="fp32")
    assert_close(found["resumed"][1], found["uninterrupted"][1], precision="fp32")
    if devices > 1 and pair.endswith("xla(shard=True)"):
        assert "devices=" in found["specs"]["out.weight"]


def flat(value):
    return list(value.values()) if isinstance(value, dict) else [value]


@pytest.mark.parametrize("devices", DEVICES)
def test_scan_and_evaluate_equal_local(on_xla, devices):
    found = on_xla(devices, "loops")
    assert len(found["xla"]["losses"]) == 8
    assert_close(found["xla"]["losses"], found["cpu"]["losses"], precision="fp32")
    assert float(found["xla"]["scores"]["right"]) == float(found["cpu"]["scores"]["right"])
    assert_close(found["xla"]["scores"]["rows"], found["cpu"]["scores"]["rows"], precision="fp32")


REFUSED = {
    "number": ("WorldError", "xla is one device to a process", "device='xla'"),
    "fp16": ("CapabilityError", "TPUs compute in bf16", "choose one of: fp32, bf16"),
    "local": ("WorldError", "nothing would end the graph of a step", "fa.xla()"),
    "remat": ("CapabilityError", "remat needs modules", "remove remat"),
    "compile": ("CapabilityError", "compile needs", "remove fa.compile"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_xla_world_refuses(on_xla, name):
    kind, *parts = REFUSED[name]
    found = on_xla(4, "mistakes")[name]
    assert found.startswith(f"{kind}: ")
    for part in (*parts, "where: ", "fix: "):
        assert part in found


def test_groups_have_to_make_up_the_devices(on_xla):
    assert "4 devices can't be parted in groups of 3" in on_xla(4, "mistakes")["groups"]
    assert "1, 2, 4" in on_xla(4, "mistakes")["groups"]


@pytest.mark.parametrize("devices", DEVICES)
def test_no_number_of_the_host_compiles_a_step_anew(on_xla, devices):
    counts = on_xla(devices, "steady")["counts"]
    assert counts[0] >= 1
    assert counts[2:] == [0] * 18, counts


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("strategy", ["xla()", "xla(shard=True)"])
def test_a_snapshot_outlives_steps(on_xla, devices, strategy):
    found = on_xla(devices, "copies")[strategy]
    assert_close(found["later"], found["expected"], precision="fp64")
    assert found["loss"] > 0


@pytest.mark.parametrize("devices", DEVICES)
def test_averages_of_parameters_in_bf16(on_xla, devices):
    found = on_xla(devices, "half")
    for name, average in found["ema"].items():
        assert average.dtype == torch.float32
        expected = 0.75 * found["first"][name].float() + 0.25 * found["params"][name].float()
        assert_close(average, expected)


def test_a_tensor_that_is_no_column_of_rows_is_not_warned_of(on_xla):
    found = on_xla(4, "columns")
    assert found["divide"]["warned"] == []
    assert [text.split(" over")[0] for text in found["do not"]["warned"]] == ["30 rows don't divide"]


@pytest.mark.parametrize("devices", DEVICES)
def test_a_random_state_keeps_all_of_its_bits(on_xla, devices):
    for same, first, again in on_xla(devices, "streams")["found"]:
        assert same
        assert torch.equal(first, again)


@pytest.mark.parametrize("devices", DEVICES)
def test_what_xla_does_not_compile(on_xla, devices):
    found = on_xla(devices, "broken")
    assert "XLA can't compile or run the recorded step" in found["said"]
    assert "fa.restore" in found["said"]
    first = expected(EVEN, "fp32", None, "sgd").losses[0]
    assert_close([*found["after"], found["goes"]], [first, first], precision="fp32")
    assert found["anew"] > 0


EARLY = """
import fnaccel as fa, torch, torch_xla
torch.ones(2, device="xla")
try:
    fa.start(device="xla")
except fa.errors.WorldError as error:
    print(error)
"""


def test_xla_tensors_before_the_world():
    ended = subprocess.run(
        [sys.executable, "-c", EARLY], capture_output=True, text=True, check=False, env=environ(1)
    )
    assert "something used an XLA device before" in ended.stdout, ended.stderr[-2000:]


def test_a_tpu_without_its_driver():
    code = "import fnaccel as fa\ntry:\n    fa.start(device='xla')\nexcept fa.errors.MissingBackendError as e:\n    print(e)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env=environ(1) | {"PJRT_DEVICE": "TPU"},
    )  # fmt: skip
    assert "XLA's client for TPU does not begin" in ended.stdout, ended.stderr[-2000:]
    assert "torch_xla[tpu]" in ended.stdout
