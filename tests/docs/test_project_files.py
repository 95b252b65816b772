"""The files that a hosting site reads: the citation, the workflow, the templates for issues and pull requests. A release."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
import yaml

import fnaccel as fa
from tests.docs.names import ROOT, missing_files, missing_targets

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()  # what the format requires
    assert citation["version"] == fa.__version__ == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == [{"name": "The fnaccel authors"}]


def runs(text):
    """The shell lines of a workflow."""
    jobs = yaml.safe_load(text)["jobs"].values()
    return "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)


def as_page(lines):
    return f"```\n{lines}\n```\n"


def test_the_workflow_calls_the_targets_that_decide():
    decide = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    lines = runs(WORKFLOW.read_text())
    assert [
        line.removesuffix(" PYTHON=python") for line in lines.splitlines() if line.startswith("make ")
    ] == decide
    assert missing_targets(as_page(lines.replace(" PYTHON=python", ""))) == []


def test_the_workflow_runs_each_python_and_the_newest_torch():
    text = WORKFLOW.read_text()
    matrix = yaml.safe_load(text)["jobs"]["test"]["strategy"]["matrix"]
    named = [
        entry.rpartition(" ")[2] for entry in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d", entry)
    ]
    assert set(named) <= set(matrix["python"])
    assert f">={matrix['python'][0]}" == PROJECT["requires-python"]
    assert "newest" in [entry["torch"] for entry in matrix["include"]]
    # the line that this job takes out of the constraints
    pattern = re.search(r"sed -i '/(.*)/d' constraints.txt", text)
    assert pattern is not None
    assert re.search(pattern[1], (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_the_workflow_says_that_it_has_not_run():
    assert WORKFLOW.read_text().startswith("# Not run yet")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form(form):
    content = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert content.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= content.keys()
    fields = [item for item in content["body"] if item["type"] != "markdown"]
    assert len({item["id"] for item in fields}) == len(fields)
    assert all(item["attributes"]["label"] for item in fields)
    assert {item["type"] for item in content["body"]} <= {
        "markdown",
        "textarea",
        "input",
        "dropdown",
        "checkboxes",
    }
    words = re.findall(r"[\w./-]+\.(?:md|py)\b", form.read_text())
    assert missing_files(" ".join(f"`{word}`" for word in words)) == []


def test_there_are_forms_for_a_bug_and_a_feature():
    assert {"bug", "feature"} <= {form.stem for form in FORMS}


HISTORY = re.compile(
    r"\bno longer\b|\bstill works\b|\brenamed\b|names that moved|\bformerly\b|^\| was\b|\bbefore this\b",
    re.IGNORECASE | re.MULTILINE,
)


def released(text):
    """The versions of a changelog that have a date."""
    return re.findall(r"^## (\d+\.\d+\.\d+) \((?!unreleased)", text, re.MULTILINE)


def test_the_changelog_of_a_first_release_has_no_history():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert released(text) or HISTORY.findall(text) == []
    assert text.count("\n### ") > 10, "a heading for each topic"


def test_history_is_found():
    assert released("## 0.1.0 (unreleased)\n") == []
    assert released("## 0.2.0 (unreleased)\n\n## 0.1.0 (2027-01-01)\n") == ["0.1.0"]
    assert (
        len(
            HISTORY.findall(
                "### Names that moved\n| was `fa.` | is |\n`run_name=` (the old word still works)"
            )
        )
        == 3
    )


RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))


def test_a_release_has_one_version():
    named = RELEASE["versions"]()
    assert set(named.values()) == {fa.__version__}
    assert RELEASE["the_version"](named) == fa.__version__
    with pytest.raises(SystemExit, match=r"0\.2\.0 +CITATION\.cff"):
        RELEASE["the_version"](named | {"CITATION.cff": "0.2.0"})


def test_what_is_to_do_for_a_release(tmp_path):
    wheel = tmp_path / "fnaccel-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    first = RELEASE["to_do"]("0.1.0", "# Changelog\n\n## 0.1.0 (unreleased)\n", [wheel], " M a.py\n")
    assert "write the date into CHANGELOG.md" in first
    assert "commit or undo what has changed:\n M a.py" in first
    then = RELEASE["to_do"]("0.1.0", "# Changelog\n\n## 0.1.0 (2027-01-31)\n", [wheel], "")
    assert "Before an upload" not in then
    assert f"{hashlib.sha256(b'wheel').hexdigest()}  {wheel.name}" in then
    assert f"twine upload dist/{wheel.name}" in then


def test_the_script_that_tries_a_wheel_trains(tmp_path):
    (tmp_path / "train.py").write_text(RELEASE["SCRIPT"])
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert float(done.stdout.removeprefix("loss ")) < 0.1


def test_a_release_has_a_row():
    page = (ROOT / "docs" / "releases.md").read_text()
    rows = re.findall(r"^\| \[(\d+\.\d+\.\d+)\]\(\.\./CHANGELOG\.md\) \| ([\w -]+) \|", page, re.MULTILINE)
    headings = re.findall(r"^## (\d+\.\d+\.\d+) \((.+)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert rows == [(version, date.replace("unreleased", "not released")) for version, date in headings]
