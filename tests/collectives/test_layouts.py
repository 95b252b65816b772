"""Tensors of other layouts than a dense one: every collective names the leaf and what to pass."""

from __future__ import annotations

import pytest
import torch

import fnaccel as fa
from fnaccel import errors

KINDS = {
    "a nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "to_padded_tensor",
    ),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "to_padded_tensor",
    ),
    "sparse": (lambda: torch.eye(3).to_sparse(), "to_dense"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collective", [fa.gather, fa.reduce, fa.broadcast, fa.pad_across_processes])
def test_a_tensor_that_is_not_dense_raises(kind, collective):
    make, fix = KINDS[kind]
    with fa.start(device="cpu"), pytest.raises(errors.ArgumentError, match="mine is a") as caught:
        collective({"mine": make()})
    assert fix in caught.value.fix
