"""`fnaccel COMMAND`: runs the command and prints the errors that fnaccel raises."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from fnaccel import __version__, _lazy
from fnaccel.cli.options import COMMANDS
from fnaccel.cli.terminal import printable
from fnaccel.errors import ArgumentError, FnaccelError, UnknownNameError, nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: after the program's name. By default those of `sys.argv`.

    Returns:
        The exit code: 0, a failing script's own, or 2 if fnaccel itself raised an error.

    Example:
        >>> main(["--version"])
        fnaccel ...
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    _open_closed_streams()
    try:
        try:
            return _run(*words)
        finally:
            sys.stdout.flush()  # here an error still gets a message
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has seen enough: `fnaccel inspect DIR | head`
        _drop_output()
        return 128 + signal.SIGPIPE
    except FnaccelError as error:
        complain(error)
    except OSError as error:
        _drop_output()
        file = "" if error.filename is None else f" ({error.filename})"
        fix = "give paths that can be read and written, on a device with free space"
        if error.errno == errno.EMFILE:
            fix = "raise the limit of open files of a process: ulimit -n 4096"
        what = f"{error.strerror or error}{file}"
        complain(type(error)(f"{what}\n  where: fnaccel {words[0]}\n  fix: {fix}"))
    return 2


def _run(command: str, *options: str) -> int:
    if command in ("-h", "--help"):
        print(_usage())
        return 0
    if command == "--version":
        print(f"fnaccel {__version__}")
        return 0
    if command not in COMMANDS:
        raise UnknownNameError(
            f"no command is called {command!r}", where="fnaccel", fix=nearest(command, COMMANDS)
        )
    _check_folder(command)
    if {"-h", "--help"} & set(options):  # without PyTorch. It exits, unless the option is a script's own
        module = _lazy.load(f"fnaccel.cli.options.{command}")
        actions = getattr(module, "ACTIONS", {})  # of `fnaccel config`
        actions.get(options[0], module.parser)().parse_known_args(options)
    # by name, so that a command does not pay for the imports of another
    return _lazy.load(f"fnaccel.cli.{command}").run(list(options))


def _open_closed_streams() -> None:
    """Open the null device in the place of standard streams that a daemon or cron has closed.

    Otherwise the next file that is opened, such as a socket, gets the number of a standard stream.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        target: int | str = number
        try:
            os.fstat(number)
            target = os.devnull  # a file that was opened since has this number, and keeps it
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
        setattr(sys, name, open(target, mode, encoding="utf-8", closefd=target != number))  # noqa: SIM115


def _check_folder(command: str) -> None:
    """Raise if the working folder is gone: PyTorch's libraries would end the process without an error."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ArgumentError(
            "the working folder does not exist any more",
            where=f"fnaccel {command}",
            fix="change to a folder that exists: cd /path/to/project",
        ) from error


def _drop_output() -> None:
    """Redirect a broken standard output, so that Python's flush at exit does not fail too."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(*errors: Exception) -> None:
    """Print errors. Names in a hostile checkpoint may contain control characters of a terminal."""
    for error in errors:
        print(f"{type(error).__name__}: {printable(str(error), keep=chr(10))}", file=sys.stderr)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        ["usage: fnaccel COMMAND ...", "", *lines, "", "fnaccel COMMAND --help shows its options"]
    )


if __name__ == "__main__":
    sys.exit(main())
