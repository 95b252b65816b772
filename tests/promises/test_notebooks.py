"""What a notebook shows of plans, train steps, states and checkpoints."""

from __future__ import annotations

import io
import sys

import pytest

import fnaccel as fa
from fnaccel.loop.progress import open_bar
from fnaccel.step.html_table import table
from fnaccel.texts import size_of
from tests.tiny_models import batch_of, program


def shown(value):
    return value._repr_html_()  # the method that IPython looks for


def test_what_is_shown(tmp_path):
    with fa.start():
        train_step = program(optimizer=fa.adamw(0.1))
        assert "no live state" in shown(train_step)
        before = train_step.init(seed=0)
        state, _ = train_step(before, batch_of(4))
        path = fa.save(tmp_path, state)
        assert "adamw" in shown(train_step.plan)
        assert "live state: step 1" in shown(train_step)
        text = shown(state)
        assert "8 tensors, 115 elements, 460 B" in text
        assert "16 tensors" in text
        assert "blocks.0.mix.weight" in text
        assert "donated" in shown(before)
        html = shown(fa.checkpoint.checkpoints(tmp_path)[0])
        assert "manifest.json" in html
        assert str(path) in html


def test_text_is_escaped():
    assert table("<b>", [("<i>",)], ["<u>"]).count("&lt;") == 3


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (999_600, "1 MB"), (2 * 10**12, "2 TB")],
)
def test_sizes(count, text):
    assert size_of(count) == text


def test_the_bar_of_a_notebook_moves_often(monkeypatch):
    class Stream(io.StringIO):
        """A stream of a kernel."""

    monkeypatch.setattr("tqdm.tqdm", lambda **options: ("text", options["mininterval"]))
    monkeypatch.setattr("tqdm.auto.tqdm", lambda **options: ("widget", options["mininterval"]))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # tests of kernels import it
    assert open_bar(3, 0) == ("text", 5.0)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)  # a rank of fa.notebook_launch
    assert open_bar(3, 0) == ("text", 0.1)
    monkeypatch.setattr(Stream, "__module__", "ipykernel.iostream")
    monkeypatch.setattr(sys, "stderr", Stream())
    assert open_bar(3, 0) == ("widget", 0.1)
