"""Each row of the table of names in "Coming from JAX" is code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from tests.docs.test_docs import blocks

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-jax.md"
NAMES = PAGE.read_text().split("## Names")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (.+?) \| `([^|]+)` \|$", NAMES, re.MULTILINE)


def test_every_row_of_the_table_is_here():
    assert len(ROWS) == NAMES.count("\n| ") - 1
    assert len(ROWS) > 35


@pytest.mark.parametrize(("jax", "code"), ROWS, ids=[jax for jax, _ in ROWS])
def test_a_row(jax, code, tmp_path):
    names: dict[str, object] = {}
    exec(next(code for language, _, code, _ in blocks(PAGE) if language == "python"), names)
    with names["world"]:
        train_step = names["make"]()
        state, batch = train_step.init(seed=0), names["batch_of"](8)
        model = names["Net"]()
        update = fa.pure(train_step)
        given = {
            **names, "train_step": train_step, "state": state, "batch": batch, "model": model,
            "params": fa.params(model), "key": fa.random.key(0), "total": torch.ones(()), "folder": tmp_path,
            "update": update, "values": update.init(), "steps": fa.tree.map(torch.zeros_like, dict(state.params)),
            "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=4),
        }  # fmt: skip
        assert eval(code, given) is not None, jax


# -- what the sentences below the table say ----------------------------------------------------------------------


@pytest.fixture
def page():
    """The names of the page's first block."""
    names: dict[str, Any] = {}
    exec(next(code for language, _, code, _ in blocks(PAGE) if language == "python"), names)
    with names["world"]:
        yield names


def code_of(start):
    return next(code for jax, code in ROWS if jax.startswith(start))


def test_an_update_of_multi_steps_takes_several_batches(page):
    """The row was `fa.accumulate`, which makes an update of each batch. Oracle: one batch of all rows."""
    train_step, batch = page["make"](), page["batch_of"](8)
    loader = DataLoader(TensorDataset(*batch), batch_size=3)  # 3, 3 and 2 rows
    shards = eval(code_of("`optax.MultiSteps`"), {"fa": fa, "loader": loader})
    assert shards.window == 4
    [(state, _)] = fa.scan(train_step, train_step.init(seed=0), shards)
    after = {name: value.clone() for name, value in state.params.items()}
    again = page["make"]()
    state, _ = again(again.init(seed=0), batch)
    for name, value in state.params.items():
        torch.testing.assert_close(after[name], value)


def test_multi_transform_is_several_optimizers(page):
    optimizer = eval(code_of("`optax.multi_transform`"), {"fa": fa})
    train_step = page["make"](optimizer=optimizer)
    _, metrics = train_step(train_step.init(), page["batch_of"](8))
    assert (metrics["lr/sgd"], metrics["lr/adamw"]) == (0.1, 3e-4)


def test_a_scan_of_updates_is_one_graph(page):
    update, batch = fa.pure(page["make"]()), page["batch_of"](8)
    values, code = update.init(seed=0), code_of("`jax.lax.scan`").replace("True)", "True, backend='eager')")
    graph = eval(code, {"torch": torch, "update": update, "batch": batch})
    found, _ = graph(values)
    expected, _ = update(update(values, batch)[0], batch)
    torch.testing.assert_close(found["params"], expected["params"])
    assert float(found["step"]) == 2


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_init_is_no_part_of_a_graph(page):
    update = fa.pure(page["make"]())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda: update.init()["params"], fullgraph=True, backend="eager")()


def test_the_gradient_of_a_private_step(page):
    loss_fn, batch = page["loss_fn"], page["batch_of"](8)
    noisy = page["make"](fa.per_example(loss_fn, clip=0.1, noise=1.0))
    with pytest.raises(fa.errors.CapabilityError, match="what it hides"):
        fa.value_and_grad(noisy)
    clipped, plain = page["make"](fa.per_example(loss_fn, clip=0.1)), page["make"]()
    grads = fa.value_and_grad(clipped)(clipped.init(seed=0), batch)[1]
    state = plain.init(seed=0)
    rows = [fa.value_and_grad(plain)(state, (x[None], y[None]))[1] for x, y in zip(*batch, strict=True)]
    scaled = [fa.tree.scale(row, min(1.0, 0.1 / float(fa.tree.norm(row)))) for row in rows]
    mean = fa.tree.scale(fa.tree.map(lambda *each: sum(each), *scaled), 1 / len(rows))
    for name, value in mean.items():
        torch.testing.assert_close(grads[name], value)
