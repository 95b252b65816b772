"""Each program on each strategy, accumulated and compiled, equals its loop by hand. What is refused raises by name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import fnaccel as fa
from fnaccel import errors
from tests.parameter_losses import accumulated, captured, equals
from tests.parity.programs import PROGRAMS
from tests.parity.programs.states import donated
from tests.strategies.deepspeed.conftest import compiled  # noqa: F401 - a fixture

TENSOR = "tensor(2, {'*mix': 'colwise_gather'})"


def in_two(step):
    return fa.accumulate(step, 2)


def block_by_block(step):
    return fa.compile(step, scope="block", backend="aot_eager")


WAYS = {
    "local": (1, "local", accumulated),
    "fsdp": (2, "fsdp", accumulated),
    "ddp": (2, "ddp", accumulated),
    "hsdp": (4, "hsdp(2, 2)", in_two),  # 2 to 4 rows a rank
    "tensor": (2, TENSOR, accumulated),
    "deepspeed": (2, "deepspeed_zero3", accumulated),
    "local-captured": (1, "local", captured),
    "ddp-captured": (2, "ddp", captured),
    "fsdp-captured": (2, "fsdp", captured),
    "local-inductor": (1, "local", fa.compile),
}
PURE = ("rates", "hypergradients", "one-graph")
VALUES = ("maml", "private", "variance", "hessian", "gauss-newton")
SHORT = ("local", "fsdp")
SHORT_TOO = {("sharpness", "local-captured"), ("learned-rate", "ddp")}
LONG = {("one-graph", "local")}  # it compiles four updates
LEFT_OUT = {
    "tensor": ("gan", "layout"),  # which would need a plan of their own
    "ddp": PURE,  # each rank's own: the program below has them in a loss
    "ddp-captured": PURE,
    "fsdp-captured": (*PURE, "learned-rate"),  # refused as on fsdp
    "local-inductor": tuple(name for name in PROGRAMS if name not in ("maml", "lamb")),
}

LACKS = errors.CapabilityError
REFUSALS = [
    ((*PURE, "learned-rate"), ("fsdp", "hsdp", "tensor", "deepspeed"), LACKS, "with the whole model", "fa.local() or fa.ddp()"),
    (PURE, ("local-captured",), LACKS, "compiles a step with its state", "torch.compile(fn, fullgraph=True)"),
    (VALUES, ("tensor",), LACKS, "ranks along tp compute parts of one model", "fa.fsdp()"),
    (("maml", "private"), ("deepspeed",), LACKS, "deepspeed keeps the parameters", "fa.fsdp()"),
    (("aux", *VALUES[2:]), ("deepspeed",), LACKS, "deepspeed keeps gradients to itself", "fa.fsdp()"),
    (("sharpness",), ("deepspeed",), LACKS, "perturb needs gradients", "choose another strategy"),
    (("own-transform",), ("deepspeed",), LACKS, "heavy needs gradients", "choose another strategy"),
    (("lamb",), ("deepspeed",), LACKS, "DeepSpeed takes an optimizer of torch", "fa.fsdp()"),
    (("gan",), ("fsdp-captured",), LACKS, "a sharded model is lent to a step that is captured", "scope='block'"),
]  # fmt: skip
REFUSED = {(name, way): row[2:] for row in REFUSALS for name in row[0] for way in row[1]}


def rows():
    for way in WAYS:
        for name in PROGRAMS:
            if name not in LEFT_OUT.get(way, ()):
                short = (way in SHORT or (name, way) in SHORT_TOO) and (name, way) not in LONG
                yield pytest.param(name, way, marks=[] if short else [pytest.mark.long])


@pytest.mark.filterwarnings("ignore:Grad strides")  # of DDP, for a second derivative
@pytest.mark.parametrize(("name", "way"), list(rows()))
def test_equals_its_loop_by_hand(request, pools, tmp_path, name, way):
    ranks, strategy, transform = WAYS[way]
    if way == "deepspeed":
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed")
        request.getfixturevalue("compiled")
    program, by_hand = PROGRAMS[name]
    if (name, way) in REFUSED:
        error, what, fix = REFUSED[name, way]
        with pytest.raises(error, match=re.escape(what)) as raised:
            pools.run(ranks, program, strategy, transform, tmp_path)
        assert fix in raised.value.fix
        return
    expected = by_hand()
    for found in pools.run(ranks, program, strategy, transform, tmp_path):
        assert equals(found, expected)


@pytest.mark.long
def test_a_step_compiled_by_block_borrows_a_sharded_model(pools, tmp_path):
    """The way that the refusal names."""
    program, by_hand = PROGRAMS["gan"]
    expected = by_hand()
    for found in pools.run(2, program, "fsdp", block_by_block, tmp_path):
        assert equals(found, expected)


@pytest.mark.parametrize("way", SHORT)
def test_a_donated_state_is_refused(pools, tmp_path, way):
    ranks, strategy, transform = WAYS[way]
    with pytest.raises(errors.StaleStateError) as raised:
        pools.run(ranks, donated, strategy, transform, tmp_path)
    assert "fa.snapshot(state)" in raised.value.fix


PAGE = Path(__file__).parents[2] / "docs" / "coming-from-jax.md"
TABLE = {
    "`fa.params`": (VALUES, ""),
    "`fa.value_and_grad`": (("aux", "sharpness"), ""),
    "`fa.pure`": ((*PURE, "learned-rate"), ""),
    "`fa.optim.chain`": (("lamb", "own-transform"), ""),
    "a lent model in a compiled step": (("gan",), "-captured"),
}


@pytest.mark.parametrize("start", TABLE)
def test_the_table_of_refusals_agrees(start):
    """A strategy is in the second column if no program of the row is refused on it."""
    names, suffix = TABLE[start]
    table = PAGE.read_text().split("## What is refused")[1]
    (row,) = (line for line in table.splitlines() if line.startswith(f"| {start}"))
    taken = set(re.findall(r"\w+", row.split("|")[2]))
    for way in WAYS:
        strategy = way.removesuffix(suffix)
        if way == strategy + suffix and strategy.isalpha():
            refused = [(name, way) in REFUSED for name in names]
            assert all(refused) or not any(refused)
            assert (strategy in taken) != all(refused), (strategy, row)
