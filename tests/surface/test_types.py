"""pyright finds the mistakes in a script against the sources, and none in a script that is right.

`test_installs.py` repeats it for both installs.
"""

from __future__ import annotations

import inspect
import sys
from typing import get_args, get_type_hints

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

import fnaccel as fa
from fnaccel.big.loading import _SHORT, ReadDtype
from fnaccel.big.sizes import BITS
from fnaccel.big.sizes import DtypeName as SizedDtype
from fnaccel.checkpoint.format.dtypes import NAMES
from fnaccel.optim.foreign import AdafactorOptions
from fnaccel.seeing.profile import _ACTIVITIES, Activity
from fnaccel.step.choices import DtypeName
from fnaccel.step.precision_policy import dtype_of
from fnaccel.strategies.ddp_hooks import PowerSgdOptions
from fnaccel.strategies.fsdp import FsdpOptions
from fnaccel.testing.tolerances import _PRECISIONS, Precision
from tests.surface.scripts import MISTAKES, RIGHT, WRONG, errors
from tests.surface.structure import PACKAGE


@pytest.mark.long
def test_a_right_script_has_no_error_and_each_mistake_is_one(tmp_path):
    right, wrong = errors([RIGHT, WRONG], tmp_path, sys.executable, sources=PACKAGE.parent)
    assert right == []
    assert wrong == list(MISTAKES.items())


def keywords(function, *others):
    """The names of a function's parameters, without those that its callers give by themselves."""
    return [name for name in inspect.signature(function).parameters if name not in others]


def test_options_that_are_passed_on_are_those_of_the_function_that_takes_them():
    assert list(FsdpOptions.__annotations__) == keywords(fa.fsdp, "degree")
    written = {name: hint.__forward_arg__ for name, hint in FsdpOptions.__annotations__.items()}
    taken = inspect.signature(fa.fsdp).parameters
    assert written == {name: taken[name].annotation for name in written}
    assert list(AdafactorOptions.__annotations__) == keywords(torch.optim.Adafactor, "params", "lr")
    assert list(PowerSgdOptions.__annotations__) == keywords(PowerSGDState, "process_group")


def test_names_for_type_checkers_are_those_that_the_library_takes():
    floating = {name for name, dtype in (NAMES | _SHORT).items() if dtype.is_floating_point}
    assert set(get_args(ReadDtype)) == {*floating, "stored"}
    assert set(get_args(SizedDtype)) == set(BITS)
    assert set(get_args(Activity)) == set(_ACTIVITIES)
    assert set(get_args(Precision)) == set(_PRECISIONS)
    assert {dtype_of(name, "here") for name in get_args(DtypeName)} == {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    }


def test_an_optimizer_keeps_its_signature_and_names_an_unknown_option():
    for make in (fa.sgd, fa.adam, fa.adamw):
        assert not [p for p in inspect.signature(make).parameters.values() if p.kind is p.VAR_KEYWORD]
        assert get_type_hints(make)["return"] is fa.optim.Optimizer
        with pytest.raises(
            fa.errors.ConfigError, match=f"fa.{make.__name__} has no option 'weight_decai'"
        ) as raised:
            make(0.1, weight_decai=0.1)
        assert "weight_decay" in raised.value.fix
    with pytest.raises(
        fa.errors.ConfigError, match=r"from_torch\(torch.optim.Adam, lr=..., amsgrad=...\) takes it"
    ):
        fa.adam(0.1, amsgrad=True)
