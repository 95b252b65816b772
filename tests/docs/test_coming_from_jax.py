"""Each row of the table of names in "Coming from JAX" is code that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

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
        given = {
            **names, "train_step": train_step, "state": state, "batch": batch, "model": model,
            "params": fa.params(model), "key": fa.random.key(0), "total": torch.ones(()), "folder": tmp_path,
            "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch), batch_size=4),
        }  # fmt: skip
        assert eval(code, given) is not None, jax
