"""Which ranks a tracker writes on: the main one, all of them with a run each, or one by its number."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import fnaccel as fa
from fnaccel.track import JsonlTracker, TensorBoardTracker, read_jsonl
from tests.tiny_models import batch_of, program


class Named:
    """A tracker whose ranks are given, without an ability to name its runs."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.steps = []

    def start(self, config):
        pass

    def log(self, step, metrics):
        self.steps.append(step)

    def finish(self):
        pass


def train(world, trackers):
    from torch.utils.data import DataLoader, TensorDataset

    shards = fa.shard(DataLoader(TensorDataset(*batch_of(12)), batch_size=4))
    train_step = program(strategy="ddp" if world.size > 1 else "local", world=world)
    return [state.step for state, _ in fa.scan(train_step, train_step.init(), shards, track=trackers)]


def on_a_rank(folder):
    """Train on this rank, and return the steps that each tracker without a file has seen."""
    folder = Path(folder)
    own = [Named("main"), Named("all"), Named(1)]
    with fa.start(device="cpu") as world:
        train(
            world,
            [
                JsonlTracker(folder / "main.jsonl"),
                JsonlTracker(folder / "all.jsonl", ranks="all"),
                JsonlTracker(folder / "one.jsonl", ranks=1),
                {"name": "tensorboard", "directory": folder / "tb", "ranks": "all"},
                *own,
            ],
        )
        with fa.tracked(JsonlTracker(folder / "hand.jsonl", ranks="all")) as run:
            run.log(1, {"rank": world.rank})
        with fa.tracked(JsonlTracker(folder / "hand_main.jsonl")) as run:
            run.log(1, {"rank": world.rank})
            run.log_table(1, "nothing here can show it", ["a"], [[1]])
            count = len(run.trackers)
    return [tracker.steps for tracker in own], count


def test_each_tracker_writes_on_its_ranks(pools, tmp_path):
    results = pools.run(2, on_a_rank, str(tmp_path))
    assert results == [([[1, 2, 3], [1, 2, 3], []], 1), ([[], [1, 2, 3], [1, 2, 3]], 0)]
    files = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert files == [
        "all.rank0.jsonl", "all.rank1.jsonl", "hand.rank0.jsonl", "hand.rank1.jsonl", "hand_main.jsonl",
        "main.jsonl", "one.jsonl",
    ]  # fmt: skip
    records = {name: read_jsonl(tmp_path / name)[1:] for name in files}
    assert [record["step"] for record in records["one.jsonl"]] == [1, 2, 3]
    losses = [[record["loss"] for record in records[f"all.rank{rank}.jsonl"]] for rank in (0, 1)]
    assert losses[0] == losses[1] == [record["loss"] for record in records["main.jsonl"]]
    assert [records[f"hand.rank{rank}.jsonl"][0]["rank"] for rank in (0, 1)] == [0, 1]
    assert sorted(path.name for path in (tmp_path / "tb").iterdir()) == ["rank0", "rank1"]


@pytest.mark.parametrize(
    ("ranks", "kind", "words"),
    [
        ("man", fa.errors.ArgumentError, "names no ranks"),
        (True, fa.errors.ArgumentError, "names no ranks"),
        (-1, fa.errors.ArgumentError, "names no ranks"),
        (1, fa.errors.WorldError, "the world has 1 ranks"),
    ],
)
def test_ranks_that_do_not_exist(ranks, kind, words):
    with fa.start(device="cpu") as world, pytest.raises(kind, match=words):
        train(world, Named(ranks))


def test_a_run_keeps_its_name_over_several_scans(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tb", ranks="all")
    with fa.start(device="cpu") as world:
        train(world, tracker)
        train(world, tracker)
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["rank0"]
    assert len(list((tmp_path / "tb" / "rank0").iterdir())) == 2


def logged(text):
    """Loggers on two ranks: the lines that this rank wrote."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage(), record.funcName))

    plain = logging.getLogger("tests.ranks")
    plain.addHandler(Keep())
    plain.propagate = False
    logger = fa.seeing.get_logger("tests.ranks", level="info")
    with fa.start(device="cpu") as world:
        logger.info("main %s", text)
        logger.warning("all", all_ranks=True)
        logger.info("rank %d of %s", world.rank, text, in_order=True)
        logger.info("rank %(rank)d", {"rank": world.rank}, in_order=True)
        logger.info("%d and %d", world.rank, in_order=True)
        logger.debug("too low", in_order=True)
        try:
            raise ValueError("mine")
        except ValueError:
            logger.exception("failed", all_ranks=True)
    return lines


def test_lines_of_the_main_rank_of_all_ranks_and_in_order(pools):
    first, second = pools.run(2, logged, "x")
    assert first == [
        ("INFO", "[rank 0] main x", "logged"),
        ("WARNING", "[rank 0] all", "logged"),
        ("INFO", "[rank 0] rank 0 of x", "logged"),
        ("INFO", "[rank 1] rank 1 of x", "logged"),
        ("INFO", "[rank 0] rank 0", "logged"),
        ("INFO", "[rank 1] rank 1", "logged"),
        ("INFO", "[rank 0] %d and %d (0,): TypeError: not enough arguments for format string", "logged"),
        ("INFO", "[rank 1] %d and %d (1,): TypeError: not enough arguments for format string", "logged"),
        ("ERROR", "[rank 0] failed", "logged"),
    ]
    assert second == [("WARNING", "[rank 1] all", "logged"), ("ERROR", "[rank 1] failed", "logged")]
