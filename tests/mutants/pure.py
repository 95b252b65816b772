"""Deliberate bugs of pure updates. Each would compute something else without an error."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PURE = "tests/program/test_pure.py"
UPDATE, VALUES, RULES = "program/pure.py", "program/pure_values.py", "optim/pure_rules.py"

MUTANTS = [
    Mutant(
        "a pure update chooses old and new the wrong way round",
        VALUES,
        "torch.where(skip, a, b)",
        "torch.where(skip, b, a)",
        (PURE, "-k", "left_out_moves_nothing"),
    ),
    Mutant(
        "each of several ranks trains alone under local()",
        "program/train_step.py",
        "        resolve(self._spec.strategy.degrees(), self.mesh.world.size, str(self._spec.strategy))\n",
        "",
        (PURE, "-k", "updates_of_its_own and local"),
    ),
    Mutant(
        "a pure rule counts updates on the host",
        RULES,
        "UpdateInfo(count + 1, rate)",
        "UpdateInfo(1.0, rate)",
        (PURE, "-k", "optimizers_are_those and adamw"),
    ),
    Mutant(
        "a pure update counts one that was left out",
        UPDATE,
        "unless(skip, updates, updates + 1)",
        "updates + 1",
        (PURE, "-k", "left_out_moves_nothing"),
    ),
    Mutant(
        "a pure update writes to its values",
        RULES,
        "            params[i] = new.to(old.dtype)\n",
        "            params[i] = old.copy_(new.detach())\n",
        (PURE, "-k", "nothing_is_written"),
    ),
    Mutant(
        "a pure update writes to its buffers",
        "program/pure_loss.py",
        "self._path(name): value.clone() for",
        "self._path(name): value for",
        (PURE, "-k", "buffers_go_in_as_clones"),
    ),
    Mutant(
        "averages of a pure update take parameters that were left out",
        UPDATE,
        "        params.update(dict(zip(self._trained, moved, strict=True)))\n",
        "        params.update(dict(zip(self._trained, done.params, strict=True)))\n",
        (PURE, "-k", "left_out_moves_nothing"),
    ),
    Mutant(
        "averages move in a pure update that is left out",
        UPDATE,
        "unless(skip, averages, averaged)",
        "averaged",
        (PURE, "-k", "left_out_moves_nothing"),
    ),
    Mutant(
        "a pure update forgets all micro-batches but the last",
        "program/pure_loss.py",
        "[a + b for a, b in zip(grads, listed, strict=True)] if grads else listed",
        "listed",
        (PURE, "-k", "steps_are_those and accumulated"),
    ),
    Mutant(
        "a number of the description reaches every part of one name",
        RULES,
        "option if len(parts) == 1 else",
        "option if True else",
        (PURE, "-k", "numbers_of_the_description"),
    ),
    Mutant(
        "recomputed draws other numbers",
        "transforms/recomputed.py",
        "first[0].put_back() if again else first.append(now)",
        "first.append(now)",
        (PURE, "-k", "draws_the_same_numbers"),
    ),
]
