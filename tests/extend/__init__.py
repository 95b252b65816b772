"""Extensions that are written from docs/extending.md alone: `page` holds what the page defines."""

import re
import sys
import types
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()

# a module that can be imported by name: strategies are read from text, and ranks are forks
page = types.ModuleType("extending_page")
sys.modules[page.__name__] = page
for block in re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE):
    exec(compile(block, "docs/extending.md", "exec"), page.__dict__)
