"""Faults on three ranks: what one rank does wrong while the others train, and what each rank then raises.

Ranks are forks of the caller, which has everything imported. Nobody watches them as a launcher would, so that
every rank reports its own error.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import attrs
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel.launch.network import free_port
from fnaccel.world.world import current

RANKS = 3
ROWS, BATCH = 48, 6
AT = 3
"""The step in which the faulty rank goes wrong."""


@attrs.define
class Run:
    """What a fault can reach: the train step, its state, the data, where the run stands."""

    folder: Path
    train_step: object
    state: object
    shards: object
    loss: object
    batch: object = None

    def broken_loader(self):
        """A loader whose first batch raises."""

        def collate(rows):
            raise ValueError("boom in the loader")

        return DataLoader(self.shards.loader.dataset, batch_size=BATCH, collate_fn=collate)


@attrs.frozen
class Outcome:
    """How one rank ended; `error` is the name of a class, or how the process ended if it raised nothing."""

    rank: int
    error: str
    what: str
    waited: float
    """Seconds from the fault to the end of this rank."""


FAULTS = {}
"""Name of a fault -> what the faulty rank does in the place of step `AT`; True means: go on after it."""


def fault(name):
    def note(fn):
        FAULTS[name] = fn
        return fn

    return note


@fault("leaves its loop early")
def leave_loop(run):
    raise StopIteration


@fault("closes the world early")
def close_early(run):
    current().close()
    raise StopIteration


@fault("takes a step more")
def step_more(run):
    run.state, _ = run.train_step(run.state, run.batch)
    return True


@fault("leaves a step out")
def step_less(run):
    return False


@fault("raises between steps")
def raise_between(run):
    raise ValueError("boom")


@fault("raises in the loss")
def raise_in_loss(run):
    run.loss.broken = True
    return True


@fault("raises in the loader")
def raise_in_loader(run):
    next(iter(fa.shard(run.broken_loader())))


@fault("raises KeyboardInterrupt")
def interrupt(run):
    raise KeyboardInterrupt


@fault("sys.exit(0)")
def exit_zero(run):
    sys.exit(0)


@fault("sys.exit(3)")
def exit_three(run):
    sys.exit(3)


@fault("os._exit(0)")
def exit_at_once(run):
    os._exit(0)


@fault("os.abort")
def abort(run):
    os.abort()


@fault("kill -9")
def kill(run):
    os.kill(os.getpid(), signal.SIGKILL)


@fault("SIGTERM")
def terminate(run):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@fault("gathers, the others step")
def gather(run):
    fa.gather(torch.ones(2))
    return True


@fault("reduces, the others step")
def reduce(run):
    fa.reduce(torch.ones(2))
    return True


@fault("broadcasts objects, the others step")
def broadcast_objects(run):
    fa.collectives.broadcast_objects("run")
    return True


@fault("waits in a barrier, the others step")
def barrier(run):
    current().barrier()
    return True


@fault("pads, the others step")
def pad(run):
    fa.pad_across_processes(torch.ones(2))
    return True


@fault("broadcasts, the others step")
def broadcast(run):
    fa.broadcast(torch.ones(2))
    return True


@fault("asks any_process, the others step")
def ask(run):
    fa.collectives.any_process(True)
    return True


@fault("runs first in main_first, the others step")
def main_first(run):
    with current().main_first(local=False):
        pass
    return True


@fault("saves in the background, the others step")
def save_async(run):
    fa.save_async(run.folder / "state", run.state)
    return True


@fault("restores, the others step")
def restore(run):
    fa.restore(run.folder / "state", like=run.state)
    return True


@fault("looks, the others step")
def look(run):
    run.train_step.look(run.state, lambda model: model(torch.ones(1, 2)))
    return True


@fault("saves, the others step")
def save(run):
    fa.save(run.folder / "state", run.state)
    return True


@fault("evaluates, the others step")
def evaluate(run):
    fa.evaluate(run.train_step, run.state, metric, run.shards)
    return True


@fault("gathers objects, the others save")
def gather_objects(run):
    fa.collectives.gather_objects("mine")
    return True


@fault("builds a second train step, the others step")
def build(run):
    make(run.loss)[0].init()
    return True


@fault("passes a batch of another width")
def wide(run):
    x, y = run.batch.data
    run.train_step(run.state, attrs.evolve(run.batch, data=(torch.cat([x, x], 1), y)))
    return False


@fault("passes a batch without rows")
def empty(run):
    run.batch = attrs.evolve(run.batch, data=(torch.empty(0, 2), torch.empty(0, 1)))
    return True


@fault("passes a batch of its own")
def own_batch(run):
    run.state, _ = run.train_step(run.state, run.batch.data)
    return False


@fault("passes a batch of another structure")
def structure(run):
    run.train_step(run.state, {"x": run.batch.data[0]})
    return False


@fault("reports another aux")
def other_aux(run):
    run.loss.aux = {"extra": torch.ones(())}
    return True


class Loss:
    """A loss that can be told to go wrong."""

    broken = False
    aux = None

    def __call__(self, model, batch):
        if self.broken:
            raise ValueError("boom in the loss")
        x, y = batch
        return fa.Mean((model(x) - y).square().sum(), weight=len(y), aux=self.aux)


def metric(model, batch):
    x, y = batch
    return fa.Mean((model(x) - y).square().sum(), weight=len(y))


def make(loss, strategy="ddp"):
    step = fa.train_step(loss, model=fa.distribute(lambda: nn.Linear(2, 1), strategy), optimizer=fa.sgd(0.1))
    data = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(data, data[:, :1]), batch_size=BATCH)
    return step, fa.shard(loader)


def train(faulty, name, folder, strategy):
    """The program of one rank."""
    with fa.start(device="cpu") as world:
        loss = Loss()
        train_step, shards = make(loss, strategy)
        run = Run(Path(folder), train_step, train_step.init(), shards, loss)
        for number, run.batch in enumerate(shards):
            if number == AT and world.rank in faulty:
                Path(folder, "began").write_text(str(time.monotonic()))
                try:
                    if not FAULTS[name](run):
                        continue
                except StopIteration:
                    break
            elif number == AT and name.endswith("the others save"):
                fa.save(run.folder / "state", run.state)
            run.state, _ = train_step(run.state, run.batch)


def live(rank, port, program, arguments, answer, folder):
    """One process: become a rank, run, report."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), FNACCEL_LAUNCHED="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    faulthandler.disable()  # pytest's would print the stack of a rank that is to abort
    atexit._clear()  # what the parent does at its end is not for its forks
    sys.stderr = (Path(folder) / f"err{rank}").open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 2)
    error, what = "returned", ""
    try:
        program(*arguments)
    except BaseException as raised:
        error, what = type(raised).__name__, str(raised)
        traceback.print_exc()
    Path(answer).write_text(json.dumps([error, what, time.monotonic()]))
    atexit._run_exitfuncs()
    os._exit(0)


def run_ranks(program, *arguments, folder, limit=60.0):
    """Run `program(*arguments)` on all ranks; how each of them ended.

    A rank that has not ended after `limit` seconds is killed, and its error is "hung".
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    answers = [Path(folder) / f"rank{rank}.json" for rank in range(RANKS)]
    processes = [
        context.Process(target=live, args=(rank, port, program, arguments, str(answers[rank]), str(folder)))
        for rank in range(RANKS)
    ]
    begun = time.monotonic()
    for process in processes:
        process.start()
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.0, begun + limit - time.monotonic()))
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join()
        if answers[rank].exists():
            outcomes.append(Outcome(rank, *json.loads(answers[rank].read_text())))
        else:
            end = "hung" if hung else f"ended with {process.exitcode}"
            outcomes.append(Outcome(rank, end, "", time.monotonic()))
    mark = Path(folder, "began")
    began = float(mark.read_text()) if mark.exists() else begun
    # a rank that was killed is noticed after those that are joined before it
    return [attrs.evolve(outcome, waited=max(0.0, outcome.waited - began)) for outcome in outcomes]
