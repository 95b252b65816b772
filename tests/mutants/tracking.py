"""Deliberate bugs of trackers and loggers: errors that end training, runs of other ranks, lines in part."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAILING = "tests/track/test_failing.py"
RANKS = "tests/track/test_ranks.py"

MUTANTS = [
    Mutant(
        "errors of a tracker that are counted once", "track/calls.py", "self.errors += 1\n            if",
        "self.errors = 1\n            if", (FAILING, "-k", "logged_once"),
    ),
    Mutant(
        "metrics that trackers share", "track/log.py", "each.log(step, dict(values))", "each.log(step, values)",
        ("tests/track/test_blocking.py", "-k", "of_its_own"),
    ),
    Mutant(
        "rows that are dropped without a word", "track/calls.py", "self.lost += 1", "pass",
        ("tests/track/test_blocking.py", "-k", "loses_rows"),
    ),
    Mutant(
        "a missing package that ends training", "track/log.py", "except MissingBackendError as error:",
        "except ZeroDivisionError as error:", (FAILING, "-k", "missing_package and wandb"),
    ),
    Mutant(
        "a line in part on a full disk", "track/jsonl.py",
        "os.ftruncate(self._file, os.fstat(self._file).st_size - written)", "pass", (FAILING, "-k", "left_in_part"),
    ),
    Mutant(
        "a tracker of all ranks that writes on the main rank only", "track/tracker.py",
        'return ranks == "all" or rank == 0', "return rank == 0", (RANKS, "-k", "each_tracker"),
    ),
    Mutant(
        "ranks that share one file", "loop/tracked.py", "tracker.use_rank(world.rank)", "tracker.use_rank(0)",
        (RANKS, "-k", "each_tracker"),
    ),
    Mutant(
        "options of a recipe's tracker that are lost", "config/applying.py",
        'options["name"] = load(name, where)', 'options = {"name": load(name, where)}',
        ("tests/track/test_by_name.py", "-k", "round_trips_and_trains"),
    ),
    Mutant(
        "lines of other ranks without the main one's order", "seeing/logging.py", "elif all_ranks or ranks.rank == 0:",
        "elif all_ranks:", (RANKS, "-k", "in_order"),
    ),
]  # fmt: skip
