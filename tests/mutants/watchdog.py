"""Deliberate bugs of the watchdog: false alarms, wrong names, and hangs that it does not see."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VERDICTS = "tests/launch/test_watchdog_verdicts.py"

MUTANTS = [
    Mutant(
        "a first gather that nobody compares", "world/same_order.py", "if other != what:", "if False:",
        ("tests/launch/test_gather_order.py", "-k", "skips and one and step"),
    ),
    Mutant(
        "an error of one rank is kept from the others", "strategies/gather_order.py", "self._order.fail(error)", "pass",
        ("tests/launch/test_gather_order.py", "-k", "raises and first and step"),
    ),
    Mutant(
        "a rank that failed goes on to the next call", "world/watcher.py", "record.left is None and record.calls <= number and not ended",
        "False", ("tests/launch/test_gather_order.py", "-k", "fails_later and look"),
    ),
    Mutant(
        "a rank that saves is a rank that hangs", "world/stalls.py",
        '_UNLIMITED = ("compile", "save", "restore")', '_UNLIMITED = ("compile", "restore")',
        (VERDICTS, "-k", "no_alarm"),
    ),
    Mutant(
        "code of the script without its longer limit", "world/stalls.py", "return OWN_CODE * limit", "return limit",
        (VERDICTS, "-k", "no_alarm"),
    ),
    Mutant(
        "data without its longer limit", "world/stalls.py", 'record.phase in ("data", "evaluate")',
        'record.phase == "evaluate"', (VERDICTS, "-k", "no_alarm"),
    ),
    Mutant(
        "ranks that wait for nobody are judged", "world/stalls.py", "if late and any(map(_waits, records)):", "if late:",
        (VERDICTS, "-k", "no_alarm"),
    ),
    Mutant(
        "the rank that waits is named", "world/stalls.py",
        "[record for record in records if key(record) != most]",
        "[record for record in records if key(record) == most]",
        (VERDICTS, "-k", "keeps_the_others"),
    ),
    Mutant(
        "a suspended job counts as a hang", "world/stalls.py", "min(now - self._looked, 2 * self.interval)",
        "now - self._looked", (VERDICTS, "-k", "suspended"),
    ),
    Mutant(
        "a worker of a loader writes in the place of its rank", "world/rank_record.py",
        "os.register_at_fork(after_in_child=_end_all)", "pass", (VERDICTS, "-k", "forks"),
    ),
]  # fmt: skip
