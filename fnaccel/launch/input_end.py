"""`--end-with-input`: the launcher gets SIGTERM when its standard input is closed.

ssh passes no signals on, and a remote command outlives its connection. But its standard input is closed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from fnaccel.launch.rank import PR_SET_PDEATHSIG


def end_with_input() -> None:
    """Start a process that reads standard input to its end, and then sends SIGTERM to this process.

    Standard input of this process is empty afterwards. The process ends with this one.
    """
    # pdsh blocks signals in the commands that it starts
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        _read_to_the_end(launcher)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _read_to_the_end(launcher: int) -> None:
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 1)  # sshd waits for all who hold the streams of a command
        os.dup2(nothing, 2)
        while os.read(0, 65_536):
            pass
        if os.getppid() == launcher:
            os.kill(launcher, signal.SIGTERM)
    finally:
        os._exit(0)
