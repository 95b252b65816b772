"""Kernels of one graph as one C++ file. torch.compile calls g++ once for each kernel.

Each call reads torch's headers once more: 0.6 of 0.85 CPU seconds if they are precompiled, and longer if not
(2.13, kernels of a small GPT).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^\s*#\s*(?!include\b|pragma\b)\w", re.MULTILINE)


def fits(kernel: str) -> bool:
    """Whether a kernel can stand beside others: one that defines macros would define them for all."""
    return not _DIRECTIVE.search(kernel)


def name_of(number: int) -> str:
    """The function, and the Python module, of a kernel of the file."""
    return f"kernel_{number}"


def as_one_file(kernels: Sequence[str]) -> str:
    """The text of a C++ file with several Python modules, each with one function.

    Args:
        kernels: C++ with a function `kernel` and the module `PyInit_kernel` for it.
    """
    # headers first: included again inside of a namespace they are empty
    headers = dict.fromkeys(line for kernel in kernels for line in _INCLUDE.findall(kernel))
    parts = [_renamed(kernel, name_of(number)) for number, kernel in enumerate(kernels)]
    return "\n".join(["#define PY_SSIZE_T_CLEAN", *headers, *parts])


def _renamed(kernel: str, name: str) -> str:
    """A kernel in a namespace of its own. C names, which namespaces do not separate, get its number."""
    kernel = re.sub(r"\b(PyInit_)?kernel\b", rf"\g<1>{name}", kernel)
    return f"namespace {name}_only {{\n{kernel}\n}}"
