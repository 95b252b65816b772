"""The files of `files/` with one value replaced: a recipe with all rows, or an error with three lines."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

import fnaccel as fa
from fnaccel.config.importing import commented, parse
from fnaccel.config.importing.draft import leaves_of
from fnaccel.errors import FnaccelError
from tests.config.importing.test_kinds import FILES

DOCUMENTS = [parse(path) for path in FILES]
VALUES = [None, True, False, 0, 1, 2, -1, 3.5, "no", "auto", "1", "", "bf16", "FSDP", "none", "nvme", [], ["a"], {}, {"a": 1}]  # fmt: skip


def paths_of(document, above=()):
    for key, value in document.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths_of(value, (*above, key))


@given(st.sampled_from(DOCUMENTS), st.sampled_from(VALUES), st.data())
def test_a_replaced_value(original, value, data):
    document = copy.deepcopy(original)
    *parents, last = data.draw(st.sampled_from(list(paths_of(document))))
    branch = document
    for parent in parents:
        branch = branch[parent]
    branch[last] = value
    files = {"ds.json": {"zero_optimization": {"stage": "auto"}}}
    try:
        imported = fa.config.import_document(document, files=files)
    except FnaccelError as error:
        assert "\n  where: " in str(error)  # noqa: PT017 - most values are no mistake
        return
    assert [row.key for row in imported.rows if ": " not in row.key] == list(leaves_of(document))
    assert fa.config.from_yaml(fa.config.to_yaml(imported.recipe)) == imported.recipe


def test_a_variable_whose_name_yaml_reads_as_false():
    document = {"num_processes": 1, "tpu_env": ["NO=1", "LOG=2"]}
    text = commented(fa.config.import_document(document), "a.yaml")
    assert fa.config.from_yaml(text).launch.env == {"NO": "1", "LOG": "2"}
