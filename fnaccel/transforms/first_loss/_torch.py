"""Inductor's own names: how it compiles a graph's kernels for CPUs, and for which instructions. (2.13)"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# ruff: noqa: SLF001
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._inductor import async_compile, cpu_vec_isa, exc
from torch._inductor.codecache import CppPythonBindingsCodeCache, LambdaFuture

from fnaccel.transforms.first_loss.translation_unit import as_one_file, fits, name_of

_PER_FILE = 64
"""Kernels in one file. More of them are several files, which g++ compiles at the same time."""


@functools.cache
def compile_quickly() -> None:
    """From now on compile the kernels of a graph as one file, and try out one set of instructions.

    What is computed stays the same, and what torch has compiled stays in use. Where torch's names are others,
    nothing changes.
    """
    instructions: Any = cpu_vec_isa
    names = {"valid_vec_isa_list", "supported_vec_isa_list", "x86_isa_checker"}
    able = instructions.x86_isa_checker() if names <= vars(cpu_vec_isa).keys() else []
    if able:
        known = [
            i for i in instructions.supported_vec_isa_list if all(part in able for part in str(i).split())
        ]
        instructions.valid_vec_isa_list = lambda: _TriedInTurn(known)
    compiler: Any = async_compile.AsyncCompile
    if {"cpp_pybinding", "wait", "submit"} <= vars(compiler).keys() and os.name == "posix":
        compiler.cpp_pybinding, compiler.wait = _beside_others(compiler.cpp_pybinding, compiler.wait)


class _TriedInTurn(Sequence[Any]):
    """Sets of vector instructions, best first, of which one is tried out when it is asked for.

    torch builds and loads a program for each set that a processor has, in each process, and takes the first.
    """

    def __init__(self, known: Sequence[Any]) -> None:
        self._known = known

    def __iter__(self) -> Iterator[Any]:
        return filter(None, self._known)  # torch tries it out to tell whether it is true, and remembers

    def __getitem__(self, number: Any) -> Any:
        return [*iter(self)][number] if number else next(iter(self))

    def __len__(self) -> int:
        return len([*iter(self)])

    def __bool__(self) -> bool:
        return any(self)


def _beside_others(alone: Callable[..., Any], wait_alone: Callable[..., None]) -> tuple[Any, Any]:
    """The two methods of torch's compiler that generated code calls: for each kernel, and at its end."""

    class Kernel(LambdaFuture):
        """One of a graph's, which are compiled when the first is asked for."""

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> Any:
        if not fits(source_code):
            return alone(self, argtypes, source_code)
        submit = self.submit if async_compile.get_compile_threads() > 1 else None
        graph: _Kernels = vars(self).setdefault("fnaccel_kernels", _Kernels(submit))
        number = graph.add(argtypes, source_code)

        def kernel() -> Any:
            found = graph.functions
            if found is not None:
                return found[number]
            one = alone(self, argtypes, source_code)  # the function itself where torch has one thread
            return one.result() if isinstance(one, LambdaFuture) else one

        return Kernel(kernel)

    def wait(self: Any, scope: dict[str, Any]) -> None:
        waiting = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
        scope.update({name: value.result() for name, value in waiting.items()})
        wait_alone(self, scope)

    return cpp_pybinding, wait


class _Kernels:
    """The kernels of one graph."""

    def __init__(self, submit: Callable[..., Any] | None) -> None:
        self._submit = submit
        self._texts: list[str] = []

    def add(self, argtypes: list[str], source: str) -> int:
        """Take one more. Returns its number."""
        self._texts.append(_with_binding(argtypes, source))
        return len(self._texts) - 1

    @functools.cached_property
    def functions(self) -> list[Any] | None:
        """The kernels as Python functions. None if the compiler does not take them as one file."""
        try:
            parts = [self._texts[i : i + _PER_FILE] for i in range(0, len(self._texts), _PER_FILE)]
            files = [_file(part, self._submit) for part in parts]  # all begin before the first is waited for
            return [function for loaded in files for function in loaded()]
        except exc.CppCompileError:
            return None


def _with_binding(argtypes: Sequence[str], source: str) -> str:
    """A kernel, and torch's text that makes a Python module of it."""
    texts: list[str] = []

    class Text(CppPythonBindingsCodeCache):
        @classmethod
        def load_async(cls, main_code: str, *_: object, **__: object) -> None:
            texts.append(main_code)

    Text.load_pybinding_async(argtypes, source)
    return texts[0]


def _file(texts: Sequence[str], submit: Callable[..., Any] | None) -> Callable[[], list[Any]]:
    """Compile one file, if the cache lacks it. Returns what waits for its functions."""
    count = len(texts)

    class OneFile(CppPythonBindingsCodeCache):
        cache: dict[str, Any] = {}  # noqa: RUF012 - a class of its own for each file

        @classmethod
        def _load_library(cls, path: str, key: str) -> Any:
            return [_function(path, key, name_of(number)) for number in range(count)]

        @classmethod
        def _get_uncompiled_header(cls, _: str) -> None:
            """To compile torch's headers ahead takes longer than to read them once."""

    return OneFile.load_async(as_one_file(texts), submit_fn=submit)


def _function(path: str, key: str, name: str) -> Any:
    """Load one of the Python modules of a compiled file."""

    class One(CppPythonBindingsCodeCache):
        entry_function = name

    return getattr(One._load_library_inner(path, key), name)
