"""Deliberate bugs of trackers and loggers: errors that end training, runs of other ranks, lines in part."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FAILING = "tests/track/test_failing.py"
RANKS = "tests/track/test_ranks.py"
VALUES = "tests/track/test_values.py"

MUTANTS = [
    Mutant(
        "errors of a tracker that are counted once", "track/calls.py", "self.errors += 1\n            if",
        "self.errors = 1\n            if", (FAILING, "-k", "logged_once"),
    ),
    Mutant(
        "metrics that trackers share", "track/log.py", "each.log(row.step, dict(row.values), options)",
        "each.log(row.step, row.values, options)",
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
        "ranks that share one file", "loop/tracking.py", "tracker.use_rank(world.rank)", "tracker.use_rank(0)",
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
    Mutant(
        "text of metrics that disappears", "track/fetcher.py", "value if number is None else number",
        "0.0 if number is None else number", (VALUES, "-k", "text_and_nested"),
    ),
    Mutant(
        "a metric that is left out at each step in the log", "track/library.py", "self._names.add(name)", "pass",
        (VALUES, "-k", "named_once"),
    ),
    Mutant(
        "a call without a step that counts on", "loop/tracked.py", "        self._step = last\n", "",
        (VALUES, "-k", "without_a_step"),
    ),
    Mutant(
        "rows of scan that wait outside of the run", "loop/tracked.py", "takes_tensors = True",
        "takes_tensors = False", (VALUES, "-k", "keep_their_order"),
    ),
    Mutant(
        "an open run without the plan", "loop/tracked.py", 'self._log.call("add_config", config)', "pass",
        (VALUES, "-k", "open_run"),
    ),
    Mutant(
        "more of a config that counts as a restart", "seeing/runs.py", "self._began = self._began or not more",
        "self._began = True", (VALUES, "-k", "open_run"),
    ),
    Mutant(
        "the rate of an optimizer under the names of its groups", "engine/updater.py",
        "reported[name] = rate", "reported[name] = base",
        ("tests/optim/test_several.py", "-k", "rates_of_groups and local"),
    ),
    Mutant(
        "options of a call for each tracker", "track/log.py", "if name in names for key", "for key",
        (VALUES, "-k", "tracker_of_that_name"),
    ),
]  # fmt: skip
