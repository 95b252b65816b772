"""Every example runs as a user runs it, and shows what it promises."""

from __future__ import annotations

import ast
import json
import re

import pytest

from fnaccel.track import read_jsonl
from tests.examples.running import ROOT, run

pytestmark = pytest.mark.launcher

HELPERS = {"digits.py", "python_sources.py", "ray_job.py"}  # tests/examples/test_jobs.py has the last
SCRIPTS = sorted(path for path in (ROOT / "examples").glob("**/*.py") if path.name not in HELPERS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_says_how_to_start_it_and_is_listed(script):
    name = str(script.relative_to(ROOT / "examples"))
    docstring = ast.get_docstring(ast.parse(script.read_text()))
    assert f"examples/{name}" in docstring
    assert f"]({name})" in (ROOT / "examples" / "README.md").read_text()


def calls_of(tree):
    """The keywords of all calls of a script by the called name, such as `fa.scan`."""
    calls = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(ast.unparse(node.func), set()).update(word.arg for word in node.keywords)
    return calls


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_calls_the_functions_of_its_row(script):
    """A reader finds in the script what the table says: `fa.scan(track=...)` is such a call, no recipe."""
    name = str(script.relative_to(ROOT / "examples"))
    text = (ROOT / "examples" / "README.md").read_text()
    table = next(table for table in text.split("\n\n") if f"| [{name.split('/')[-1]}]({name})" in table)
    head, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
    row = next(row for row in rows if f"]({name})" in row[1])
    named = re.findall(r"`(fa\.[^`]*)`", row[head.index("calls")])
    assert named
    calls = calls_of(ast.parse(script.read_text()))
    for call in named:
        node = ast.parse(call).body[0].value
        function = ast.unparse(node.func if isinstance(node, ast.Call) else node)
        assert function in calls, call
        assert {word.arg for word in getattr(node, "keywords", ())} <= calls[function], call


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_one_script_is_about_recipes(script):
    """The others show their transforms, and the launcher fills in what they leave open."""
    names = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert ("fa.config" in names) == (script.name == "train_recipe.py")


@pytest.mark.long
def test_train_digits_is_above_97_percent():
    out = run("train_digits").out
    found = re.search(r"accuracy ([\d.]+) on 397 held-out digits", out)
    assert found
    assert float(found[1]) > 0.97


@pytest.mark.long
def test_train_digits_on_three_ranks_by_a_flag():
    out = run("train_digits", "--epochs", "8", ranks=3, launch=("--strategy", "ddp")).out
    found = re.search(r"accuracy ([\d.]+) on 397 held-out digits", out)
    assert found
    assert float(found[1]) > 0.94


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gan(strategy):
    out = run("gan", "--epochs", "2", ranks=2, launch=("--strategy", strategy)).out
    assert len(re.findall(r"epoch \d+: discriminator [\d.]+, generator [\d.]+", out)) == 2


@pytest.mark.long
def test_train_parallel_goes_on_under_another_strategy(tmp_path):
    losses = r"step (\d+): ([\d.]+) nats"
    first = run(
        "train_parallel", "--dir", str(tmp_path), "--steps", "3",
        ranks=4, launch=("--strategy", "fsdp(2) * tensor(2)"),
    )  # fmt: skip
    then = run("train_parallel", "--dir", str(tmp_path), "--steps", "5")
    alone = run("train_parallel", "--steps", "5")
    found = re.findall(losses, first.out) + re.findall(losses, then.out)
    expected = re.findall(losses, alone.out)
    assert [step for step, _ in found] == [step for step, _ in expected] == ["1", "2", "3", "4", "5"]
    assert [float(loss) for _, loss in found] == pytest.approx([float(x) for _, x in expected], abs=2e-3)


@pytest.mark.long
def test_distill_with_a_sharded_teacher_and_a_replicated_student():
    out = run("distill", "--teacher", "fsdp", "--student", "ddp", "--epochs", "6", ranks=2).out
    scores = {name: float(score) for name, score in re.findall(r"(\w+): accuracy ([\d.]+)", out)}
    assert scores["teacher"] > 0.9
    assert scores["student"] > 0.8


@pytest.mark.long
def test_distill_with_one_strategy_by_a_flag():
    out = run("distill", "--epochs", "3", ranks=2, launch=("--strategy", "fsdp")).out
    assert len(re.findall(r"(teacher|student): accuracy 0.[5-9]", out)) == 2


@pytest.mark.long_except(r"None")
@pytest.mark.parametrize("ranks", [None, 2])
def test_own_transform(ranks):
    out = run("own_transform", ranks=ranks, launch=("--strategy", "fsdp") if ranks else ()).out
    assert "calls counted by the transform: 100" in out
    assert "GRADS    gradient_noise" in out


@pytest.mark.long
def test_accumulate_tokens_on_one_rank_and_on_two():
    texts = [
        run("accumulate_tokens").out,
        run("accumulate_tokens", ranks=2, launch=("--strategy", "fsdp")).out,
    ]
    losses = [float(loss) for text in texts for loss in re.findall(r"micro-batches: loss ([\d.]+)", text)]
    assert len(losses) == 10
    assert losses == pytest.approx(losses[:1] * 10, abs=2e-6)
    for text in texts:
        assert float(re.search(r"largest difference: ([\d.e+-]+)", text)[1]) < 1e-6


SWAPS = [(1, "fsdp"), (2, "ddp"), (2, "fsdp"), (2, "pipeline(2)"), (4, "ddp"), (4, "hsdp(2, 2)")]


@pytest.mark.long
def test_the_one_line_swap_gives_one_loss_curve(tmp_path):
    """The same loss curve under every strategy and number of processes, for one global batch."""

    def curve(name, ranks, strategy):
        path = tmp_path / f"{name}.json"
        launch = ("--strategy", strategy, "--accumulate", "2")
        run("train_gpt", "--steps", "8", "--quiet", "--json", str(path), ranks=ranks, launch=launch)
        return json.loads(path.read_text())

    expected = curve("local", 1, "local")
    assert expected["losses"][0] > 5.5
    assert expected["losses"][-1] < expected["losses"][0] - 0.5
    assert curve("again", 1, "local")["digest"] == expected["digest"]
    for ranks, strategy in SWAPS:
        found = curve("swap", ranks, strategy)
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5), (ranks, strategy)


@pytest.mark.long
def test_compare_scopes_has_a_row_for_each_and_names_what_fails():
    flags = ("--scopes", "eager", "--strategies", "local", "fsdp", "nonsense", "--ranks", "2", "--steps", "2")
    head, local, fsdp, nonsense = run("compare_scopes", *flags).out.splitlines()
    assert head.split() == ["strategy", "scope", "first", "step", "s", "ms/step", "speed", "peak", "MiB"]
    assert local.split()[:2] == ["local", "eager"]
    assert "1.00x" in local
    assert fsdp.split()[:2] == ["fsdp", "eager"]
    assert "losses differ" not in fsdp
    assert "no strategy is called 'nonsense'" in nonsense


@pytest.mark.long
def test_train_gpt_draws_samples_and_saves(tmp_path):
    done = run(
        "train_gpt", "--steps", "3", "--sample", "20", "--report", str(tmp_path / "report.html"),
        "--dir", str(tmp_path / "run"), "--trackers", "jsonl", "tensorboard",
        ranks=1, launch=("--precision", "bf16"),
    )  # fmt: skip
    assert "compute bf16" in done.out
    assert "sample:\ndef " in done.out
    assert "3/3" in done.err
    assert "Gradient norm" in (tmp_path / "report.html").read_text()
    assert list((tmp_path / "run").glob("step-*/*"))
    first, *records = read_jsonl(tmp_path / "run" / "logs" / "metrics.jsonl")
    assert first["config"]["steps"] == 3
    assert [record["step"] for record in records] == [1, 2, 3]
    assert list((tmp_path / "run" / "logs").glob("events.out.tfevents.*"))


@pytest.mark.long
def test_train_gpt_compiled_is_the_same_run_and_a_second_start_is_warm(tmp_path):
    losses = {}
    for name in ("eager", "cold", "warm"):
        file = tmp_path / f"{name}.json"
        flags = ("--steps", "20", "--quiet", "--json", str(file), "--compile-cache", str(tmp_path / "cache"))
        out = run("train_gpt", *flags, ranks=1, launch=() if name == "eager" else ("--compile", "auto")).out
        losses[name] = json.loads(file.read_text())["losses"]
        if name != "eager":
            assert "scope step (chosen: no hooks in the way" in out
            hits, misses = re.search(r"cache_hits=(\d+), cache_misses=(\d+)", out).groups()
            assert (hits, misses) == (("0", "1") if name == "cold" else ("1", "0"))
    assert losses["cold"] == pytest.approx(losses["eager"], abs=1e-5)
    assert losses["warm"] == losses["cold"]
