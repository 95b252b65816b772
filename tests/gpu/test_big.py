"""Big models on a CUDA device: maps over the device, the host and the disk, and quantized layers."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Deep()
    from safetensors.torch import save_file

    save_file(model.state_dict(), tmp_path / "model.safetensors")
    return model, tmp_path


MAPS = {
    "device": {"": 0},
    "host": {
        "layers.0": 0,
        "layers.1": 0,
        "layers.2": "cpu",
        "layers.3": "cpu",
        "layers.4": 0,
        "layers.5": 0,
    },
    "disk": {
        "layers.0": 0,
        "layers.1": "disk",
        "layers.2": "cpu",
        "layers.3": "disk",
        "layers.4": 0,
        "layers.5": 0,
    },
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_computes_what_the_model_does(saved, tmp_path, name):
    model, path = saved
    x = torch.randn(4, 256)
    expected = model(x)
    with fa.big.empty():
        empty = Deep()
    fa.big.load(empty, path / "model.safetensors", MAPS[name])
    for _ in range(3):
        with torch.no_grad():
            found = empty(x.cuda())
        assert torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_a_map_by_budget(saved):
    model, path = saved
    with fa.big.empty():
        empty = Deep()
    placed = fa.big.device_map(empty, budget={0: "600KB", "cpu": "1GB"})
    assert {str(where) for where in placed.values()} == {"0", "cpu"} or "cuda:0" in {
        str(w) for w in placed.values()
    }
    fa.big.load(empty, path / "model.safetensors", placed)
    x = torch.randn(4, 256)
    with torch.no_grad():
        assert torch.allclose(empty(x.cuda()).cpu(), model(x), rtol=1e-4, atol=1e-5)


def test_auto_budget_is_the_free_memory_of_the_device():
    placed = fa.big.device_map(Deep())
    assert all(str(where) in ("0", "cuda:0") for where in placed.values())
