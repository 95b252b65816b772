"""Hostile YAML, JSON and FNACCEL_SET: each is an error of three lines, and no traceback. Lists of `--set` are YAML."""

from __future__ import annotations

import itertools

import pytest

import fnaccel as fa
from fnaccel.cli.launch import read
from fnaccel.cli.main import main
from fnaccel.errors import ArgumentError, ConfigError
from fnaccel.world.settings import parse_value

VALUES = {
    "alias": "[&x [1], *x]",
    "cycle": "&x [*x]",
    "cycle of a mapping": "&x {a: *x}",
    "digits": "9" * 4_000,
    "more digits": "9" * 5_000,
    "hexadecimal": "0x" + "f" * 4_000,
    "depth": "[" * 60 + "]" * 60,
    "more depth": "[" * 20_000 + "]" * 20_000,
    "surrogate": '"\\ud800"',
    "date": "2024-13-45",
    "tag": "!!timestamp x",
    "object": "!!python/object:os.system x",
    "infinite": "1e999",
    "list": "[1, [2]]",
    "text": "file.json",
}
RECIPE = (
    "accumulate",
    "attention",
    "transforms",
    "optimizer",
    "tracking.trackers",
    "launch.env",
    "run.steps",
)
ACCELERATE = ("num_processes", "deepspeed_config", "fsdp_config", "mixed_precision", "gpu_ids")
TORCHTITAN = ("training", "training.steps")


def line(key, value):
    outer, _, inner = key.partition(".")
    return f"{outer}: {value}\n" if not inner else f"{outer}:\n  {inner}: {value}\n"


def refused(arguments, capsys):
    """Whether a command ended by an error of three lines. Its output can be written as UTF-8."""
    code = main(arguments)
    said = capsys.readouterr()
    (said.out + said.err).encode()
    assert code == 0 or (code == 2 and "where:" in said.err), said.err
    return code == 2


@pytest.mark.long_except(r"^(?!more depth)")
@pytest.mark.parametrize("kind", VALUES)
def test_no_value_is_a_traceback(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    value, file = VALUES[kind], tmp_path / "f.yaml"
    always = kind in (
        "alias",
        "cycle",
        "cycle of a mapping",
        "depth",
        "more depth",
        "surrogate",
        "date",
        "tag",
        "object",
    )
    for key in RECIPE:
        file.write_text(line(key, value))
        assert refused(["config", "validate", "f.yaml"], capsys) or not always
        refused(["config", "show", "--config", "f.yaml"], capsys)
        monkeypatch.setenv("FNACCEL_SET", f"{key}='{value}'")
        refused(["config", "show", "--no-config"], capsys)
        monkeypatch.delenv("FNACCEL_SET")
    for base, keys in (
        ("distributed_type: MULTI_GPU\nuse_cpu: false\n", ACCELERATE),
        ("model: {name: x}\n", TORCHTITAN),
    ):
        for key in keys:
            file.write_text(base + line(key, value))
            assert refused(["config", "import", "f.yaml"], capsys) or not always


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x 1\nb: *x", r"an alias \(\*name\) stands in line 2"),
        ("strategy: " + "[" * 51 + "]" * 51, "nested in more than 50 levels"),
        ("strategy: '" + "x" * (1 << 20) + "'", "1,048,576 are the limit"),
        ("run: {seed: " + "9" * 101 + "}", "more than 100 digits"),
        ('strategy: "\\ud800"', "half of a surrogate pair"),
    ],
)
def test_limits_of_yaml(text, words):
    with pytest.raises(ConfigError, match=words):
        fa.config.from_yaml(text)


@pytest.mark.parametrize("ending", ["json", "toml"])
def test_limits_of_other_files(tmp_path, ending, capsys):
    for number, text in enumerate(
        ("[" * 100_000, '{"a": ' * 60 + "1" + "}" * 60, '{"train_batch_size": ' + "9" * 200 + "}")
    ):
        file = tmp_path / f"{number}.{ending}"
        file.write_text(text)
        assert refused(["config", "import", str(file)], capsys)


def test_a_surrogate_in_a_variable_is_refused(monkeypatch):
    monkeypatch.setenv("FNACCEL_SET", "strategy=\udcff")
    with pytest.raises(ConfigError, match=r"can't be read: .*surrogate"):
        read(["--no-config", "--cpu", "t.py"])


def test_a_key_twice_is_an_error_in_a_file_of_deepspeed(tmp_path):
    """tests/config/importing/test_accelerate_files.py has the files of Accelerate."""
    from fnaccel.config.importing import import_file

    (tmp_path / "d.json").write_text(
        '{"train_batch_size": 8, "zero_optimization": {}, "train_batch_size": 8}'
    )
    with pytest.raises(ConfigError, match="two keys 'train_batch_size'"):
        import_file(tmp_path / "d.json")


@pytest.mark.parametrize("kind", [kind for kind in VALUES if kind not in ("infinite", "list", "text")])
def test_device_maps_refuse_hostile_texts(kind):
    for text in (VALUES[kind], f'{{"places": {VALUES[kind]}}}', f'{{"a": {VALUES[kind]}}}'):
        with pytest.raises(ArgumentError, match="device"):
            fa.big.DeviceMap.from_json(text)


# -- values of --set and FNACCEL_SET ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[jsonl,wandb]", ["jsonl", "wandb"]),
        ("[{name: wandb, project: gpt}, jsonl]", [{"name": "wandb", "project": "gpt"}, "jsonl"]),
        ("{warmup: 10%, total: 100}", {"warmup": "10%", "total": 100}),
        ("yes", True), ("off", False), ("true", True), ("None", None), ("null", None),
        ("1e-4", 1e-4), ("12:30", "12:30"), ("1:30:00", "1:30:00"), ("2024-01-01", "2024-01-01"),
        ("ddp(2) * fsdp(4)", "ddp(2) * fsdp(4)"), ("a: b", {"a": "b"}), ("", ""), ("0,1", (0, 1)),
        ("gpu1:8", "gpu1:8"), ("[0.9, 0.95]", [0.9, 0.95]), ("*", "*"), ("%x", "%x"), ("s3://a/b", "s3://a/b"),
    ],
)  # fmt: skip
def test_values_of_set(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize("text", ["[jsonl, wandb", "{a: ", "[&x [1], *x]"])
def test_lists_that_cannot_be_read(text):
    with pytest.raises(ConfigError, match="can't be read"):
        parse_value(text)


@pytest.mark.parametrize("by", ["option", "variable"])
def test_trackers_on_the_command_line(tmp_path, monkeypatch, by):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    text = "tracking.trackers=[jsonl,{name: wandb, offline: true}]"
    if by == "variable":
        monkeypatch.setenv("FNACCEL_SET", f"'{text}'")
    job = read(["--cpu", *(["--set", text] if by == "option" else []), "t.py"])
    assert job.overrides == {"tracking.trackers": ["jsonl", {"name": "wandb", "offline": True}]}
    recipe = fa.config.yaml.override(fa.config.Recipe(), job.overrides)
    assert recipe.tracking.trackers == ("jsonl", {"name": "wandb", "offline": True})


def test_the_documented_command_works(tmp_path, monkeypatch):
    """As docs/tracking.md prints it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    fields = [
        read(["--cpu", "--set", f"tracking.trackers={text}", "t.py"]).overrides
        for text in ("[jsonl,wandb]", "jsonl")
    ]
    assert list(itertools.chain(*(field.values() for field in fields))) == [["jsonl", "wandb"], "jsonl"]


REFUSED = {
    "nan": ("optimizer: {lr: .nan, schedule: warmup_cosine}", "the rate of an optimizer is nan"),
    "infinity": ("optimizer: {lr: .inf}", "the rate of an optimizer is inf"),
    "a pattern's": ("optimizer: {by_pattern: {'*': {lr: .inf}}}", "the rate of an optimizer is inf"),
    "octal": ("run: {steps: 010}", "line 1 has 010, an octal number in YAML"),
    "factors": ("strategy: " + " * ".join(["ddp()"] * 20_000), "is no strategy"),
    "brackets": ("strategy: " + "(" * 20_000 + "ddp()" + ")" * 20_000, "is no strategy"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_config_validate_refuses(tmp_path, capsys, kind):
    text, said = REFUSED[kind]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert main(["config", "validate", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err) < 1_000
    with pytest.raises(ArgumentError):
        fa.sgd(float("inf"))
