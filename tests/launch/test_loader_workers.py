"""Workers of a loader end with their rank, also if it ends while they start."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.launch.conftest import gone

pytestmark = pytest.mark.launcher
WORKERS = """
    import os, sys, time
    import torch
    from torch.utils.data import DataLoader, Dataset
    import fnaccel as fa

    def note(name):
        with open("writing" + name, "w") as file:
            print(os.getpid(), file=file)
        os.rename("writing" + name, name)

    class Rows(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            if sys.argv[1] == "read":
                note(f"worker{torch.utils.data.get_worker_info().id}")
                time.sleep(1000)
            return torch.ones(4)

    def begin(worker):
        if sys.argv[1] == "start":
            note(f"worker{worker}")
            time.sleep(3)  # its rank ends in the meantime

    if __name__ == "__main__":
        with fa.start(device="cpu"):
            note("rank")
            loader = DataLoader(Rows(), batch_size=2, num_workers=2, worker_init_fn=begin,
                                multiprocessing_context=sys.argv[2])
            for batch in fa.shard(loader):
                pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("when", "context", "number"),
    [
        ("start", "fork", signal.SIGKILL),
        ("start", "fork", signal.SIGTERM),
        ("start", "spawn", signal.SIGKILL),
        ("start", "forkserver", signal.SIGKILL),
        ("read", "fork", signal.SIGKILL),
        ("read", "forkserver", signal.SIGKILL),
    ],
)
def test_workers_end_with_their_rank(launcher, when, context, number):
    """SIGKILL goes to the rank, and SIGTERM to the launcher."""
    started = launcher.start("-n", 1, launcher.write(WORKERS), when, context)
    rank, *workers = (int(text) for text in launcher.wait_for("rank", "worker0", "worker1"))
    os.kill(rank if number == signal.SIGKILL else started.pid, number)
    started.wait()
    time.sleep(4 if when == "start" else 0)  # until they have begun
    assert all(gone(worker) for worker in workers)
