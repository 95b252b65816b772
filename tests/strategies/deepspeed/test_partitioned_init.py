"""`zero3_init`: parameters are partitioned as they are made and loaded, with the values that were asked for."""

from __future__ import annotations

import pytest
import torch

from tests.strategies.deepspeed.partitioned import compare, first_values, pretrained, refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    paths = {}
    for kind in ("gpt2", "llama"):
        torch.manual_seed(11)
        paths[kind] = tmp_path_factory.mktemp(kind)
        pretrained(kind, None)().save_pretrained(paths[kind])
    return paths


@pytest.mark.long_except("llama")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_pretrained(pools, saved, kind):
    from safetensors.torch import load_file

    values = load_file(saved[kind] / "model.safetensors")
    for found in pools.run(2, compare, kind, saved[kind]):
        partitioned, plain = found["partitioned"], found["plain"]
        assert all(torch.equal(values[name], value) for name, value in partitioned["first"].items())
        assert partitioned["first"].keys() == plain["first"].keys()
        assert partitioned["held"] == []
        assert partitioned["losses"] == pytest.approx(plain["losses"], rel=1e-6, abs=1e-6)
        for name, value in partitioned["last"].items():
            torch.testing.assert_close(value, plain["last"][name], atol=1e-6, rtol=0)
        assert not found["known"]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_a_configuration(pools, kind):
    """The constructor of a transformers model initialises what its children have partitioned already."""
    for found in pools.run(2, compare, kind, None):
        for name, value in found["plain"]["first"].items():
            assert torch.equal(found["partitioned"]["first"][name], value), name
        assert found["partitioned"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("how", ["functions", "methods", "shape", "apply"])
def test_what_a_parent_initialises_has_the_seeded_values(pools, how):
    assert pools.run(2, first_values, how) == [[], []]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("built", "no parameter of Linear is partitioned"),
        ("nothing", "returned NoneType, not a module"),
        ("pair", "returned tuple, not a module"),
        ("fails", "the model's factory failed while parameters are partitioned"),
        ("read", "the model's factory failed while parameters are partitioned"),
        ("orthogonal", "the model's factory failed while parameters are partitioned"),
        ("data", "normal_ was called on an empty tensor"),
    ],
)
def test_factories_that_cant_be(pools, what, said):
    for text in pools.run(2, refused, what):
        assert said in text
