"""Contestants train the same, peers that are not installed are left out, and rows hold what was measured."""

from __future__ import annotations

import json
import warnings

import attrs
import environment
import interleave
import models
import one_process
import options
import pytest
import report

import fnaccel as fa


@pytest.mark.parametrize("update", [0, 1, 3, 4, 5, 1_000, 999_999, 1_000_000])
def test_loops_by_hand_have_the_schedule_of_the_library(update):
    schedule = fa.warmup_cosine(models.PEAK, warmup=models.WARMUP, total=models.TOTAL)
    assert models.PEAK * models.rate(update) == pytest.approx(schedule(update), abs=1e-12)


def loops():
    return {
        "fnaccel": one_process.ours(models.mlp, models.rows()),
        "PyTorch by hand": one_process.by_hand(models.mlp, models.rows()),
        "PyTorch by hand, fused AdamW": one_process.by_hand(models.mlp, models.rows(), fused=True),
    }


def test_loops_reach_the_same_losses():
    with fa.start(device="cpu"):
        samples = interleave.race_steps(loops(), check=5, blocks=2, calls=1)
    assert {name: len(seconds) for name, seconds in samples.items()} == dict.fromkeys(samples, 2)
    assert list(samples) == list(loops())


def test_a_loop_with_another_schedule_is_found(monkeypatch):
    # the warm-up from before the library's began at 0
    monkeypatch.setattr(one_process, "rate", lambda update: min(1.0, (update + 1) / models.WARMUP))
    with fa.start(device="cpu"), pytest.raises(SystemExit, match="PyTorch by hand trains something else"):
        interleave.race_steps(loops(), check=4, blocks=1, calls=1)


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(environment, "is_installed", lambda peer: peer != "Lightning Fabric")
    contestants = ("fnaccel", "Accelerate + torch.compile(model)", "Lightning Fabric", "import accelerate")
    kept = environment.present(dict.fromkeys(contestants))
    assert list(kept) == ["fnaccel", "Accelerate + torch.compile(model)", "import accelerate"]
    monkeypatch.setattr(environment, "is_installed", lambda peer: False)
    assert list(environment.present(dict.fromkeys(contestants))) == ["fnaccel"]


def test_turns_rotate():
    assert list(interleave.turns(["a", "b"], 2)) == [
        (False, "b"), (False, "a"), (True, "a"), (True, "b"), (True, "b"), (True, "a"),
    ]  # fmt: skip


def test_a_slope_for_each_round():
    measured = [{"a": [1.0, 2.0]}, {"a": [3.0, 2.0]}]
    assert interleave.slopes((1, 2), measured) == {"a": [pytest.approx(2.0), pytest.approx(0.0)]}


# -- rows -------------------------------------------------------------------------------------------------------


def test_a_row_has_medians_and_the_range_of_its_rounds():
    peer = [10.0] * 5
    (row,) = report.compare("work", {"fnaccel": [4.0, 5.0, 6.0, 7.0, 90.0], "peer": peer}, {"peer": 1.0}, "s")
    record = row.record()
    assert (record["ours"], record["peer"], record["ratio"], record["rounds"]) == (6.0, 10.0, 0.6, 5)
    assert (record["low"], record["high"], record["goal"]) == (0.5, 0.7, 1.0)


@pytest.mark.parametrize(
    ("ours", "low", "high"), [([2.0], None, None), ([2.0, 1.0], 0.5, 1.0), ([3.0, 2.0, 1.0], 0.5, 1.5)]
)
def test_the_range_of_a_few_rounds(ours, low, high):
    record = report.Row("work", "peer", ours, [2.0] * len(ours)).record()
    assert (record["low"], record["high"]) == (low, high)


def written_to(path, **changes):
    settings = options.Options("seeing", ("a", "b"), "full", path, ("Lightning Fabric",), whole=True)
    return attrs.evolve(settings, **changes)


def row(what, ours=1.0, against="peer"):
    return report.Row(what, against, [ours], [2.0])


def test_rows_are_written_with_their_environment(tmp_path):
    path = tmp_path / "seeing.json"
    report.publish(written_to(path), [row("a"), report.NotRun("b", "peer", 0.5, "no GPU")], {"jax": "1.0"})
    content = json.loads(path.read_text())
    assert content["absent"] == ["Lightning Fabric"]
    assert {"date", "commit", "cpu", "cores", "versions"} <= content["environment"].keys()
    assert content["environment"]["versions"]["jax"] == "1.0"
    assert [(row["what"], row["ratio"]) for row in content["rows"]] == [("a", 0.5), ("b", None)]


def test_some_parts_replace_their_rows_in_place(tmp_path):
    path = tmp_path / "seeing.json"
    report.publish(written_to(path), [row("a"), row("a", against="gone"), row("b")])
    report.publish(written_to(path, whole=False), [row("c"), row("a", 4.0)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["what"], row["against"], row["ratio"]) for row in rows] == [
        ("a", "peer", 2.0), ("b", "peer", 0.5), ("c", "peer", 0.5),
    ]  # fmt: skip


def test_nothing_is_written_without_rows_or_a_file(tmp_path, capsys):
    path = tmp_path / "seeing.json"
    report.publish(written_to(path), [])
    report.publish(written_to(None, level="smoke"), [row("a")])
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.count("no results written") == 2


# -- the command line -------------------------------------------------------------------------------------------


@pytest.fixture
def begun(monkeypatch, tmp_path):
    """`begin` with words on the command line, and results in a folder of the test."""
    monkeypatch.setattr(options, "RESULTS", tmp_path)

    def begin(*words):
        monkeypatch.setattr("sys.argv", ["seeing.py", *words])
        return options.begin("seeing", "What it does.", ("a", "b"), ("Accelerate", "Lightning Fabric"))

    with warnings.catch_warnings():
        yield begin


def test_where_rows_go(begun, tmp_path):
    assert begun().into == tmp_path / "seeing.json"
    assert begun("--quick").into == tmp_path / "quick.json"
    assert begun("--smoke").into is None
    assert begun("--smoke", "--into", "x.json").into.name == "x.json"
    assert [begun(*words).pick(1, 2, 3) for words in ((), ("--quick",), ("--smoke",))] == [1, 2, 3]


def test_absent_peers_are_named(begun, monkeypatch, capsys):
    monkeypatch.setattr(options, "is_installed", lambda peer: peer == "Accelerate")
    assert begun("--only", "b").absent == ("Lightning Fabric",)
    assert "not installed, left out: Lightning Fabric" in capsys.readouterr().out


def test_some_parts_are_not_mixed_with_rows_of_another_commit(begun, tmp_path, capsys):
    path = tmp_path / "seeing.json"
    report.publish(written_to(path), [row("a")])
    assert not begun("--only", "b").whole
    report.publish(written_to(path), [row("a")], {"jax": "1.0"})
    assert not begun("--only", "b").whole
    content = json.loads(path.read_text())
    content["environment"]["commit"] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        begun("--only", "b")
    assert "another commit" in capsys.readouterr().err
    assert begun("--only", "a,b").whole


def test_an_unknown_part(begun, capsys):
    with pytest.raises(SystemExit):
        begun("--only", "c")
    assert "no part is called 'c'" in capsys.readouterr().err
