"""What a page names: files, functions, flags and make targets. Each check raises or returns what does not exist."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

from fnaccel.cli.completion import parsers
from tests.surface.structure import PACKAGE, ROW

ROOT = PACKAGE.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    ROOT / "tests" / "docs" / "accelerate_tests.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md",
]
SPAN = re.compile(r"`([^`\n]+)`")
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOREIGN = re.compile(
    r"Accelerate|DeepSpeed|Megatron|torchtitan|^there$|^in the script$|takes the place of|^option or variable$|^keys of the file$"
)
"""Heads of the columns that hold the names of other tools."""
FOLDERS = ("fnaccel", "docs", "tests", "examples", "benchmarks", ".github", ".ci")
PATH = re.compile(r"(?:\./)?[\w.-]+(?:/[\w.-]+)*/?")
ENDS = (".py", ".md", ".yaml", ".yml", ".toml", ".cff", ".txt", ".json", ".sh", "/")
THEIRS = {
    # of the reader
    "train.py", "train_gpt.py", "run.sh", "fnaccel.yaml", "recipe.yaml", "gpt.yaml", "hosts.txt", "requirements.txt",
    "ray_job.py",
    # of other tools
    "config.json", "generation_config.json", "adapter_config.json", "pytorch_model_fsdp_0/", "fnaccel-job.sh",
    "weight_map.index.json", "model.safetensors.index.fp16.json",
    "params.yaml", "manifest.json", "megatron_lm_gpt_pretraining.py", "examples/config_yaml_templates",
    # written by a run
    "results/quick.json",
}  # fmt: skip
"""Files that pages name and that are no files of this repository."""
THEIR_FLAGS = frozenset({"--fsdp_offload_params", "--flag", "--standalone"})
"""Flags of other tools that pages name outside of a column of such flags."""


def spans(text: str) -> list[str]:
    """The code spans of a page's prose, without those in columns with the names of other tools."""
    kept: list[str] = []
    foreign: set[int] = set()
    lines = BLOCK.sub("", text).splitlines()
    for number, line in enumerate(lines):
        cells = line.split("|")
        if not line.startswith("|"):
            foreign = set()
        elif number + 1 < len(lines) and re.fullmatch(r"[|: -]+", lines[number + 1]):
            foreign = {place for place, cell in enumerate(cells) if FOREIGN.search(cell.strip())}
        kept.append("|".join(cell for place, cell in enumerate(cells) if place not in foreign))
    return [span for line in kept for span in SPAN.findall(line)]


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, code) of each fenced block."""
    return [(found[1], found[3]) for found in BLOCK.finditer(text)]


def commands(text: str) -> list[list[str]]:
    """The words of each command line of a page, in code spans and in blocks of the shell."""
    lines = spans(text)
    for language, code in blocks(text):
        if language in ("", "console", "bash", "sh"):
            shown = code.replace("\\\n", " ").splitlines()
            entered = [line for line in shown if line.startswith("$ ")]  # then the other lines are output
            lines += entered or shown
    found: list[list[str]] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # no command line
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and (re.match(r"[A-Z_]+=", words[0]) or words[:2] == ["python", "-m"]):
                words = words[2 if words[0] == "python" else 1 :]
            found += [words] if words else []
    return found


# -- files -----------------------------------------------------------------------------------------------------


@functools.cache
def known_files() -> frozenset[str]:
    """Each file and folder of the repository, and the ends of their paths: `strategies/ddp.py`, `ddp.py`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    paths = {parent for name in listed if name for parent in (Path(name), *Path(name).parents)}
    return frozenset("/".join(path.parts[start:]) for path in paths for start in range(len(path.parts)))


def missing_files(text: str) -> list[str]:
    """The paths on a page that are no files of the repository."""
    words = [span for span in spans(text) if PATH.fullmatch(span) and _is_path(span)]
    for command in commands(text):
        if command[0] in ("python", "fnaccel"):
            words += [word for word in command[1:] if word.partition("/")[0] in FOLDERS]
    paths = [word.partition(":")[0].removeprefix("./") for word in words]
    return [path for path in paths if path.rstrip("/") not in known_files()]


def _is_path(span: str) -> bool:
    parts = span.removeprefix("./").rstrip("/").split("/")
    if span in THEIRS or parts[-1] in THEIRS or any(part.isupper() for part in parts):  # DIRECTORY/logs
        return False
    in_package = parts[0] in ROW and "/".join(parts[:2]) in known_files()
    return span.endswith(ENDS) or in_package or (parts[0] in FOLDERS and len(parts) > 1)


def missing_targets(text: str) -> list[str]:
    """The targets of `make` on a page that the Makefile lacks."""
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return [
        word
        for command in commands(text)
        if command[0] == "make"
        for word in command[1:]
        if word not in targets
    ]


# -- flags -----------------------------------------------------------------------------------------------------


@functools.cache
def flags_of(command: str) -> frozenset[str]:
    """The options of a command of `fnaccel`, such as `"config show"`."""
    return frozenset(name for action in parsers()[command]._actions for name in action.option_strings)


@functools.cache
def flags_of_script(script: str) -> frozenset[str]:
    """The options that a script of this repository, and the scripts that it imports, add to a parser."""
    tree = ast.parse((ROOT / script).read_text())
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument")
    ]
    names = {
        word.value
        for call in calls
        for word in call.args
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    }
    for node in ast.walk(tree):
        modules = (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        for module in modules:
            beside = (Path(script).parent / f"{module}.py", Path(f"{str(module).replace('.', '/')}.py"))
            for path in beside:
                if path.parts[0] != "fnaccel" and (ROOT / path).is_file() and str(path) != script:
                    names |= flags_of_script(str(path))
    return frozenset(name for name in names if name.startswith("-")) | {"-h", "--help"}


def missing_flags(text: str) -> list[str]:
    """The flags on a page that the command or script beside them does not take."""
    absent: list[str] = []
    for words in commands(text):
        if words[0] == "fnaccel":
            absent += _of_command(words[1:])
        elif words[0] == "python":
            absent += _of_script(words[1:])
        elif words[0].startswith("--") and _flag(words[0]) not in all_flags() | THEIR_FLAGS:
            absent.append(words[0])
    return absent


def _flag(word: str) -> str:
    return word.partition("=")[0].rstrip(",")


@functools.cache
def all_flags() -> frozenset[str]:
    """The options of all commands of `fnaccel` and of all scripts of this repository."""
    scripts = [path for folder in ("examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    of_scripts = [flags_of_script(str(path.relative_to(ROOT))) for path in scripts]
    return frozenset().union(*map(flags_of, parsers()), *of_scripts, {"--version"})


def _of_command(words: list[str]) -> list[str]:
    if not words or not re.fullmatch(r"[a-z-]+", words[0]):  # `fnaccel`, `fnaccel COMMAND`
        return []
    command, rest = words[0], words[1:]
    if command.startswith("--") or command not in parsers():
        return [] if command in ("--version", "--help") else [f"fnaccel {command}"]
    if rest and f"{command} {rest[0]}" in parsers():
        command, rest = f"{command} {rest[0]}", rest[1:]
    own = len(rest)
    if command == "launch":  # what follows the script belongs to the script
        own = next((place for place, word in enumerate(rest) if word.endswith(".py")), own)
    flags = [word for word in rest[:own] if _is_flag(word)]
    return [
        f"fnaccel {command} {flag}" for flag in flags if _flag(flag) not in flags_of(command)
    ] + _of_script(rest[own:])


def _of_script(words: list[str]) -> list[str]:
    if not words or words[0].partition("/")[0] not in FOLDERS or not (ROOT / words[0]).is_file():
        return []
    flags = [word for word in words[1:] if _is_flag(word)]
    return [f"{words[0]} {flag}" for flag in flags if _flag(flag) not in flags_of_script(words[0])]


def _is_flag(word: str) -> bool:
    return re.match(r"--?[a-z]", word) is not None


# -- functions -------------------------------------------------------------------------------------------------

VALUES = ("world", "train_step", "state", "shards", "batch")
"""Values of every script, whose attributes pages name. The fixture `things` has one of each."""
DESCRIPTIONS = {
    "ddp",
    "fsdp",
    "hsdp",
    "xla",
    "local",
    "Precision",
    "Float8",
    "warmup_cosine",
    "deepspeed_lr",
    "from_deepspeed",
    "powersgd",
    "Recipe",
}  # fmt: skip - they can be called without a world or a file


def missing_names(text: str, things: dict[str, Any]) -> list[str]:
    """The names `fa.a.b` on a page, in code spans and in blocks, that lead nowhere."""
    absent: list[str] = []
    for source in (*spans(text), *(code for _, code in blocks(text))):
        for chain in re.findall(r"(?<![\w./\"'-])fa(?:\.[a-zA-Z]\w*)+", source):
            try:
                resolve(chain.removesuffix(".NAME"), things)
            except AttributeError:
                absent.append(chain)
    return absent


def resolve(chain: str, things: dict[str, Any]) -> Any:
    """The object that a chain of names leads to."""
    first, *rest = chain.split(".")
    return functools.reduce(getattr, rest, things[first])


def check(span: str, things: dict[str, Any]) -> None:
    """Raise if a name of fnaccel in a code span does not exist, or a call has an argument that does not."""
    assert missing_flags(f"`{span}`") == []
    if " fnaccel " in f" {span}":
        return
    for chain in re.findall(rf"(?<![.\w])(?:{'|'.join(things)})(?:\.\w+)+", span):
        resolve(chain.removesuffix(".NAME"), things)
    for call in calls(span):
        name = ast.unparse(call.func)
        if name.split(".")[0] in things and name != "fa.NAME" and re.fullmatch(r"[\w.]+", name):
            check_call(name, call, things)


def calls(span: str) -> list[ast.Call]:
    """The calls in a code span, if it is Python."""
    source = span.removeprefix("@")
    try:
        tree = ast.parse(source + " pass" if source.endswith(":") else source)
    except SyntaxError:
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def check_call(name: str, call: ast.Call, things: dict[str, Any]) -> None:
    """Raise if a function has no such argument, or refuses its values."""
    function = resolve(name, things)
    parameters = inspect.signature(function).parameters
    named = {word.arg for word in call.keywords if word.arg}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        assert named <= parameters.keys(), f"{name} has no {named - parameters.keys()}"
    names = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    if name.split(".")[-1] in DESCRIPTIONS and names == {"fa"} and "..." not in ast.unparse(call):
        eval(compile(ast.Expression(call), name, "eval"), {"fa": things["fa"]})
