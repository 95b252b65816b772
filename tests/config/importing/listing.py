"""Lists the keys and kinds of configurations that the guides of other tools show.

`python -m tests.config.importing.listing FOLDER > tests/config/importing/keys.txt` reads the text files of a
folder, which is not part of this checkout. Only names are kept.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

import yaml

from fnaccel.config.importing import kind_of
from fnaccel.config.importing.draft import leaves_of
from fnaccel.errors import ConfigError

_FENCE = re.compile(r"^\s*```.*$", re.MULTILINE)
_KINDS = ("distributed_type", "compute_environment")


def documents_of(text):
    """The mappings of the code blocks of a text that a tool knows, with its name."""
    # fences of the guides do not always match, so the text between any two is tried
    for block in _FENCE.split(text):
        plain = re.sub(r"^~\$.*|^[+-] ?(?=[a-z_]+:)", "", textwrap.dedent(block), flags=re.MULTILINE)
        for read in (json.loads, yaml.safe_load):
            try:
                document = read(plain)
                yield kind_of(document), document
                break
            except (ValueError, yaml.YAMLError, ConfigError):
                continue


def keys_of(text):
    """`tool key` and `tool key=kind` of all documents in a text."""
    lines = set()
    for tool, document in documents_of(text):
        for key, value in leaves_of(document).items():
            lines.add(f"{tool} {key}={value}" if key in _KINDS else f"{tool} {key}")
    return lines


def main(folder):
    lines = set().union(*(keys_of(path.read_text()) for path in sorted(Path(folder).glob("*.txt"))))
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main(sys.argv[1])
