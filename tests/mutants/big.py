"""Deliberate bugs in models bigger than the machine: device maps, loading, and layers fetched ahead."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MAPS, DISPATCH, LOAD = "tests/big/test_device_map.py", "tests/big/test_dispatch.py", "tests/big/test_load.py"
FILLING = "tests/big/test_filling.py"

MUTANTS = [
    Mutant(
        "no room for offloaded layers", "big/placing.py", "used + largest <= room.budget", "used <= room.budget",
        (MAPS, "-k", "facts"),
    ),
    Mutant(
        "a device that is used again", "big/placing.py", "at, used = at + 1, 0", "at, used = at + 1, used",
        (MAPS, "-k", "strategies"),
    ),
    Mutant(
        "tied parameters that count twice", "big/sizes.py", "{id(tensor): tensor for tensor in tensors}.values()",
        "list(tensors)", (MAPS, "-k", "facts"),
    ),
    Mutant(
        "a map of entries that are too wide", "big/device_map.py", "and not apart.intersection(placement)", "",
        (MAPS, "-k", "no_accelerator_holds_runs"),
    ),
    Mutant(
        "tied layers apart", "big/deciding.py", "        for other in others:  # this layer ties two groups",
        "        for other in ():", (MAPS, "-k", "stay_together"),
    ),
    Mutant(
        "gaps without room for offloaded layers", "big/placing.py", "left = room - largest - sum(", "left = room - sum(",
        (FILLING, "-k", "run_device_holds"),
    ),
    Mutant(
        "layers that are fetched with their block", "big/device_map.py", "decision.fetched_alone.union(", "frozenset().union(",
        (FILLING, "-k", "run_device_holds"),
    ),
    Mutant(
        "buffers that count with their layers", "big/placing.py", "    limits[0] -= reserved\n", "", (MAPS, "-k", "where_they_stay"),
    ),
    Mutant(
        "parts of a block on two accelerators", "big/placing.py", "if not part.run_only}, room[at])", "}, room[at])",
        (MAPS, "-k", "only_if_accelerators"),
    ),
    Mutant(
        "one layer more on the device", "big/walker.py", "len(seen) <= self._prefetch", "len(seen) <= self._prefetch + 1",
        (DISPATCH, "-k", "next_layers"),
    ),
    Mutant(
        "layers that are never taken away", "big/unit.py", "            self.put(self.empty)\n",
        "            pass\n", (DISPATCH, "-k", "next_layers"),
    ),
    Mutant(
        "gradients through layers that are gone", "big/walker.py", "if torch.is_grad_enabled() and unit.trained:",
        "if False:", (DISPATCH, "-k", "gradients_raise"),
    ),
    Mutant(
        "an output on the device of the last layer", "big/dispatch.py",
        "return None if came_from is None else self._on(output, came_from)", "return None",
        (DISPATCH, "-k", "any_map"),
    ),
    Mutant(
        "absent values that compute", "big/away.py", "if getattr(func, \"__name__\", \"\") in _ALLOWED:", "if True:",
        (DISPATCH, "-k", "reads_weights"),
    ),
    Mutant(
        "a file that is copied", "big/planning.py", "slot.in_place = slot.mapped and", "slot.in_place = False and",
        (DISPATCH, "-k", "used_where"),
    ),
    Mutant(
        "parameters restored one by one", "big/unit.py", "        if id(slot.empty) not in placed:\n            placed[id(slot.empty)] = slot.as_registered(",
        "        if True:\n            placed[id(slot.empty)] = slot.as_registered(", (DISPATCH, "-k", "any_map"),
    ),
    Mutant(
        "interrupted layers that stay", "big/dispatch.py", "                    if unit.depth:\n",
        "                    if False:\n", (DISPATCH, "-k", "that_fails"),
    ),
    Mutant(
        "values of the wrong dtype", "big/reading.py", "entry.dtype == dtype and not self.copy", "not self.copy",
        (LOAD, "-k", "dtypes"),
    ),
    Mutant(
        "tensors left without values", "big/loading.py", "if tensor.is_meta and name not in values", "if False",
        (LOAD, "-k", "buffers_without"),
    ),
    Mutant(
        "the whole file in memory", "big/reading.py", "            out.copy_(entry.view())\n",
        "            out.copy_(entry.view().clone().double())\n", (LOAD, "-k", "host_holds"),
    ),
    Mutant(
        "layers that are elsewhere show no device", "big/away.py",
        'if getattr(func, "__self__", None) is torch.Tensor.device:', "if False:", (DISPATCH, "-k", "device_and_dtype"),
    ),
    Mutant(
        "written pages let go", "big/mapped_pages.py", " and not _written(tensor)", "",
        (DISPATCH, "-k", "written_past_torch"),
    ),
    Mutant(
        "assigned weights that are ignored", "big/unit.py", "        if self.replaced:\n            raise",
        "        if False:\n            raise", (DISPATCH, "-k", "is_assigned"),
    ),
    Mutant(
        "codes without values in a state dict", "big/dispatch.py", "            if absent:  # a quantized layer", "            if False:  # a",
        ("tests/big/quantize/test_offloading.py", "-k", "elsewhere_has_their_codes"),
    ),
]  # fmt: skip
