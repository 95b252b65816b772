"""A signal to any rank: all ranks end after the same step, with the state of it saved."""

from __future__ import annotations

import os
import pickle
import signal
import threading

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnaccel as fa
from fnaccel import errors
from fnaccel.engine import stop_request
from fnaccel.engine.aux_values import Agreement
from fnaccel.engine.stop_request import Notice
from fnaccel.engine.totals import Totals
from fnaccel.step.loss import LossParts
from fnaccel.testing import count_collectives
from fnaccel.world.world import current
from tests.tiny_models import batch_of, loss_fn, program

BOTH = (signal.SIGTERM, signal.SIGUSR1)


def shards(rows=24, batch=4):
    return fa.shard(DataLoader(TensorDataset(*batch_of(rows)), batch_size=batch))


def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def scanned(
    root, *, steps=5, at=None, number=signal.SIGTERM, rank=0, strategy="local", wrap=None, every=None
):
    """Steps that a scan yields where one rank gets a signal after some of them, and how it ended."""
    train_step = program(wrap or loss_fn, strategy=strategy)
    state, seen, ended = train_step.init(seed=0), [], None
    try:
        for state, _ in fa.scan(
            train_step, state, shards(), steps=steps, save=fa.Autosave(root, every=every)
        ):
            seen.append(state.step)
            if state.step == at and current().rank == rank:
                send(number)
    except fa.errors.Preempted as stop:
        ended = (stop.code, stop.step, stop.path.name)
    train_step.close()
    return seen, ended, [one.step for one in fa.checkpoint.checkpoints(root)]


@pytest.fixture
def world():
    with fa.start() as started:
        yield started


@pytest.fixture(autouse=True)
def handlers():
    """Every test leaves the handlers of signals as it found them."""
    before = [signal.getsignal(number) for number in BOTH]
    yield
    assert [signal.getsignal(number) for number in BOTH] == before


@pytest.mark.parametrize("number", BOTH)
def test_one_process_ends_after_the_step_that_hears_of_it(world, tmp_path, number):
    seen, ended, saved = scanned(tmp_path, at=2, number=number)
    assert (seen, ended, saved) == ([1, 2, 3], (75, 3, "step-0000000003"), [3])


def test_a_step_is_saved_once(world, tmp_path, monkeypatch):
    from fnaccel import checkpoint

    saved = []
    real = checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda *args, **rest: saved.append(args[1].step) or real(*args, **rest)
    )
    assert scanned(tmp_path / "a", at=2, every=3)[1] == (75, 3, "step-0000000003")
    assert saved == [3]
    assert scanned(tmp_path / "b", steps=4, every=2) == ([1, 2, 3, 4], None, [2, 4])
    assert saved == [3, 2, 4]


def test_a_run_that_is_complete_saves_nothing_and_yields_nothing(world, tmp_path):
    train_step = program()
    state = train_step.init()
    for state, _ in fa.scan(train_step, state, shards(), steps=2):
        pass
    assert (
        list(fa.scan(train_step, state, shards(), steps=2, save=fa.Autosave(tmp_path / "none", every=1)))
        == []
    )
    assert not (tmp_path / "none").exists()


def test_a_signal_before_the_first_step(world, tmp_path):
    class Early(TensorDataset):
        def __getitem__(self, at):
            if at == 0:
                send()
            return super().__getitem__(at)

    train_step = program()
    loader = DataLoader(Early(*batch_of(12)), batch_size=4)
    with pytest.raises(fa.errors.Preempted) as stopped:
        list(fa.scan(train_step, train_step.init(), fa.shard(loader), steps=9, save=tmp_path))
    assert (stopped.value.step, fa.checkpoint.latest(tmp_path)) == (1, stopped.value.path)


def test_two_signals_during_a_save_do_not_tear_it(world, tmp_path, monkeypatch):
    from fnaccel.checkpoint.disk import durable

    real, count = durable.rename, []

    def rename(*args):
        count.append(send(signal.SIGTERM) or send(signal.SIGTERM) or send(signal.SIGUSR1))
        return real(*args)

    monkeypatch.setattr(durable, "rename", rename)
    seen, ended, saved = scanned(tmp_path, steps=9, every=2)
    assert count
    assert (seen, ended, saved) == ([1, 2, 3], (75, 3, "step-0000000003"), [2, 3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "rename", real)
        restored = fa.restore(tmp_path, like=program().init(), verify=True)
    assert restored.step == 3


def test_a_signal_after_the_last_step_is_not_lost(world, tmp_path):
    assert scanned(tmp_path, steps=3, at=3) == ([1, 2, 3], (75, 3, "step-0000000003"), [3])


def test_a_signal_while_evaluating(world, tmp_path):
    train_step = program()
    state, seen = train_step.init(), []

    def metric(model, batch):
        send(signal.SIGUSR1)
        return fa.Mean(model(batch[0]).sum(), weight=len(batch[0]))

    def loop(state):
        for state, _ in fa.scan(train_step, state, shards(), steps=9, save=tmp_path):
            seen.append(state.step)
            if state.step == 2:
                fa.evaluate(train_step, state, metric, shards())

    with pytest.raises(fa.errors.Preempted):
        loop(state)
    assert seen == [1, 2, 3]


def test_the_code_is_that_of_the_process_and_blocks_unwind(world, tmp_path):
    train_step = program()
    states = fa.scan(train_step, train_step.init(), shards(), steps=9, save=tmp_path)
    next(states)
    send()
    next(states)
    with pytest.raises(SystemExit) as stopped:
        next(states)
    assert stopped.value.code == fa.errors.Preempted.CODE == 75
    assert str(stopped.value) == f"stopped after step 2, saved {tmp_path / 'step-0000000002'}"
    again = pickle.loads(pickle.dumps(stopped.value))
    assert (again.step, again.path, again.code) == (2, stopped.value.path, 75)


def test_signals_are_left_alone_without_a_directory_or_where_told(world, tmp_path):
    heard = []
    before = [signal.signal(number, lambda *_: heard.append(1)) for number in BOTH]
    try:
        own = signal.getsignal(signal.SIGTERM)
        train_step = program()
        for options in (
            {},
            {"save": fa.Autosave(tmp_path, signals=())},
            {"save": fa.Autosave(tmp_path, signals=["SIGUSR1"])},
        ):
            for state, _ in fa.scan(train_step, train_step.init(), shards(), steps=2, **options):
                assert signal.getsignal(signal.SIGTERM) is own
                send()
        assert len(heard) == 6
        assert train_step.notice is None
    finally:
        for number, handler in zip(BOTH, before, strict=True):
            signal.signal(number, handler)


def test_handlers_come_back_however_the_loop_ends(world, tmp_path):
    before = [signal.getsignal(number) for number in BOTH]
    train_step = program()

    def loop():
        return fa.scan(train_step, train_step.init(), shards(), steps=4, save=tmp_path)

    for _ in loop():
        assert [signal.getsignal(number) for number in BOTH] != before
    assert [signal.getsignal(number) for number in BOTH] == before
    held = loop()
    next(held)
    held.close()
    assert [signal.getsignal(number) for number in BOTH] == before
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in loop()]
    assert [signal.getsignal(number) for number in BOTH] == before


def test_a_signal_that_nobody_acted_on_goes_to_the_handler_of_before(world, tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:
        train_step = program()
        for _ in fa.scan(train_step, train_step.init(), shards(), steps=4, save=tmp_path):
            send()
            break
        assert heard == [1]
        with pytest.raises(ZeroDivisionError), fa.preemption(train_step):
            _ = send() or 1 / 0
        assert heard == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_fork_ends_by_the_signal_as_it_would_have(world):
    with fa.preemption() as notice:
        pid = os.fork()
        if pid == 0:
            send()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        assert not notice.asked


def test_another_thread_trains_without_signals(world, tmp_path):
    found = []

    def train():
        with fa.start():
            found.append(scanned(tmp_path, steps=2))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [([1, 2], None, [2])]


def test_a_hand_loop_with_two_train_steps(world, tmp_path):
    first, second = program(), program()
    a, b = first.init(), second.init()
    with fa.preemption(first, second) as notice:
        seen = []
        for at in range(9):
            a, _ = first(a, batch_of(4))
            if at == 2:
                send()
            b, _ = second(b, batch_of(4))
            seen.append(notice.stopping)
            if notice.stopping:
                break
    assert seen == [False, False, True]


def test_names_are_checked(world):
    train_step = program()
    with (
        pytest.raises(errors.UnknownNameError, match="SIGTREM"),
        fa.preemption(train_step, signals=["SIGTREM"]),
    ):
        pass
    with pytest.raises(errors.UnknownNameError, match="SIGTREM"):
        next(
            iter(fa.scan(train_step, train_step.init(), shards(), save=fa.Autosave("a", signals=["SIGTREM"])))
        )


STEPS = {
    "plain": loss_fn,
    "accumulate": fa.accumulate(loss_fn, 2),
    "weight": fa.with_weight(loss_fn, lambda batch: len(batch[0])),
    "aux": lambda model, batch: (loss_fn(model, batch).total, {"rows": fa.Sum(torch.tensor(1.0))}),
}


def on_ranks(root, name, rank, strategy):
    return scanned(root, at=2, rank=rank, strategy=strategy, wrap=STEPS[name])


@pytest.mark.long_except("0-ddp|1-fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", STEPS)
def test_one_rank_is_told_and_all_end_after_the_same_step(pools, tmp_path, name, rank, strategy):
    found = pools.run(2, on_ranks, str(tmp_path), name, rank, strategy)
    assert found == [([1, 2, 3], (75, 3, "step-0000000003"), [3])] * 2


def compiled_whole(root):
    step = fa.compile(loss_fn, "step", backend="aot_eager")
    return scanned(root, at=1, rank=0, strategy="local", wrap=step)


def test_under_a_compiled_step(world, tmp_path):
    assert compiled_whole(tmp_path) == ([1, 2], (75, 2, "step-0000000002"), [2])


def at_the_end(root):
    return scanned(root, steps=3, at=3, rank=1, strategy="ddp")


def test_one_rank_is_told_after_its_last_step(pools, tmp_path):
    assert pools.run(2, at_the_end, str(tmp_path)) == [([1, 2, 3], (75, 3, "step-0000000003"), [3])] * 2


def counted(armed):
    train_step = program(strategy="ddp")
    state = train_step.init()
    for _ in range(2):  # torch's DDP tells the ranks its buckets in the second step
        state, _ = train_step(state, batch_of(4))
    with fa.preemption(*[train_step] * armed) as notice, count_collectives() as found:
        notice.ask()
        state, _ = train_step(state, batch_of(4))
    train_step.close()
    return dict(found.counts), notice.stopping


def test_it_costs_no_collective(pools):
    assert pools.run(2, counted, 0) == [({"all_reduce": 2}, False)] * 2
    assert pools.run(2, counted, 1) == [({"all_reduce": 2}, True)] * 2


def beyond_the_batch():
    """Ranks that share no batch still agree, by one collective more."""
    import torch.distributed as dist

    world = current()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][world.rank // 2]
    found = []
    for group in (pair, None):
        notice = Notice(dist.group.WORLD)
        for asking in (False, True):
            if asking and world.rank == 3:
                notice.ask()
            report = Totals(group, world.device, Agreement(), [notice])
            report.take(LossParts(torch.tensor(float(world.rank)), 1, None, True), 1)
            report.send()
            report.wait()
            found.append((notice.stopping, float(report.finish()["loss"])))
    return found


def test_a_batch_that_does_not_cover_the_world(pools):
    found = pools.run(4, beyond_the_batch)
    for rank, each in enumerate(found):
        shared = 0.5 if rank < 2 else 2.5
        assert each == [(False, shared), (True, shared), (False, float(rank)), (True, float(rank))]


def test_an_accelerator_answers_one_step_later(monkeypatch):
    """Always one, whether or not the copy has arrived: ranks must not differ."""
    waited = []

    class Copy:
        """A copy that is on its way from a device."""

        def __init__(self, tensor):
            self.tensor = tensor.clone()

        def read(self):
            waited.append(self)
            return self.tensor

    monkeypatch.setattr(stop_request, "HostCopy", Copy)
    notice = Notice()
    answers = []
    for asked in (0.0, 1.0, 0.0):
        notice._hear_later(torch.tensor(asked))
        answers.append(notice.stopping)
    assert answers == [False, False, True]
    assert len(waited) == 2


WITH_WORKERS = """
import sys, time, torch, fnaccel as fa
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 4_000
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(3), torch.ones(1)

def loss_fn(model, batch):
    return fa.Mean((model(batch[0]) - batch[1]).square().sum(), weight=len(batch[0]))

if __name__ == "__main__":
    with fa.start(device="cpu"):
        step = fa.train_step(loss_fn, model=fa.distribute(lambda: torch.nn.Linear(3, 1), "local"), optimizer=fa.sgd(0.1))
        loader = DataLoader(Rows(), batch_size=4, num_workers=2)
        shards = fa.shard(loader)
        for state, _ in fa.scan(step, step.init(), shards, epochs=50, save=fa.Autosave(sys.argv[1], every=5, keep=1)):
            pass
"""


@pytest.mark.long
def test_workers_outlive_a_signal_to_the_whole_group(tmp_path):
    import subprocess
    import sys
    import time

    script = tmp_path / "script.py"
    script.write_text(WITH_WORKERS)
    root = tmp_path / "run"
    job = subprocess.Popen(
        [sys.executable, script, root], start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while not fa.checkpoint.checkpoints(root) and time.monotonic() < until:
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGTERM)
        _, said = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert (job.returncode, said) == (75, "")


def test_a_loop_that_is_left_on_the_stopping_step_passes_the_signal_on(world, tmp_path):
    told = []
    before = signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
    try:
        train_step = program()
        for state, _ in fa.scan(train_step, train_step.init(), shards(), steps=9, save=tmp_path):
            if state.step == 2:
                send(signal.SIGUSR1)
            if state.step == 3:
                break
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == [1]
