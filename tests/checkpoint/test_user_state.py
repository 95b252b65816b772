"""The user's own in a state: objects, arrays, nodes of any class, growing lists."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import attrs
import numpy as np
import pytest
import torch

import fnaccel
from fnaccel import tree
from fnaccel.checkpoint import restore, save
from fnaccel.errors import CheckpointError, NotSerializableError, StaleStateError, TreeMismatchError
from fnaccel.world.world import start
from tests.checkpoint.training import batch, gathered, make, train, unequal


@pytest.fixture(autouse=True)
def world():
    with start(device="cpu") as found:
        yield found


class Meter:
    def __init__(self):
        self.seen, self.table = [], torch.zeros(2)

    def state_dict(self):
        return {"seen": list(self.seen), "table": self.table, 7: ("a", None)}

    def load_state_dict(self, state):
        if state[7] != ("a", None):
            raise ValueError("not a meter's")
        self.seen, self.table = state["seen"], state["table"]


Pair = namedtuple("Pair", "left right")


@dataclass
class Settings:
    rate: float
    table: torch.Tensor


tree.learn(Settings(0.0, torch.zeros(1)))


def trained(extras):
    step = make("local()")
    return train(step, step.init(seed=1, extras=extras), 0, 1)


def test_an_object_is_given_its_state_back(tmp_path):
    meter = Meter()
    meter.seen, meter.table = [1, 2], torch.tensor([3.0, 4.0])
    save(tmp_path, trained({"meter": meter}))
    other = Meter()
    state = restore(tmp_path, like=trained({"meter": other}))
    assert state.extras["meter"] is other
    assert other.seen == [1, 2]
    assert other.table.tolist() == [3.0, 4.0]
    # without one to load into, what it gave out comes back
    plain = restore(tmp_path, like=trained(None)).extras["meter"]
    assert plain["seen"] == [1, 2]
    assert plain[7] == ("a", None)


def test_a_torch_optimizer_and_scheduler_and_module_are_objects(tmp_path):
    def make_all():
        module = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(module.parameters())
        return {
            "module": module,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        }

    first, second = make_all(), make_all()
    first["module"](torch.ones(1, 2)).sum().backward()
    first["optimizer"].step()
    first["schedule"].step()
    save(tmp_path, first)
    found = restore(tmp_path, like=second)
    assert torch.equal(found["module"].weight, first["module"].weight)
    assert (
        found["optimizer"].state_dict()["state"][0]["exp_avg"].tolist()
        == first["optimizer"].state_dict()["state"][0]["exp_avg"].tolist()
    )
    assert found["schedule"].last_epoch == 1


def test_an_object_that_refuses_its_state_fails_loudly(tmp_path):
    save(tmp_path, {"meter": Meter()})
    other = Meter()
    other.load_state_dict = lambda state: 1 / 0
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        restore(tmp_path, like={"meter": other})


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool", "complex64", "float16"])
def test_arrays(tmp_path, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    value = {
        "a": array,
        "view": array[:, ::-1],
        "empty": np.zeros((0, 3), dtype),
        "n": np.float64(0.5),
        "k": np.int32(3),
    }
    save(tmp_path, value)
    found = restore(tmp_path, like={**value, "n": 0.0, "k": 0})
    for name in ("a", "view", "empty"):
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], value[name])
    assert (found["n"], found["k"]) == (0.5, 3)
    with pytest.raises(
        TreeMismatchError, match=r"a: an array .* in the checkpoint, an array int16 \[1\] in like"
    ):
        restore(tmp_path, like={**value, "a": np.zeros(1, "int16"), "n": 0.0, "k": 0})


@pytest.mark.parametrize("array", [np.array(["x"]), np.array([None]), np.zeros(1, "complex128")])
def test_other_arrays_are_refused_by_path(tmp_path, array):
    with pytest.raises(NotSerializableError, match=r"x/0 (is a NumPy array|has dtype)"):
        save(tmp_path, {"x": [array]})


def test_nodes_of_any_class(tmp_path):
    def value(number):
        grown = defaultdict(list, a=[number])
        return {
            "pair": Pair(number, torch.full((2,), float(number))),
            "settings": Settings(number, torch.ones(number)),
            "d": grown,
        }

    save(tmp_path, value(3))
    like = value(3)
    like["pair"] = Pair(0, torch.zeros(2))
    found = restore(tmp_path, like=like)
    assert type(found["pair"]) is Pair
    assert found["pair"].left == 3
    assert found["pair"].right.tolist() == [3.0, 3.0]
    assert type(found["settings"]) is Settings
    assert type(found["d"]) is defaultdict
    with pytest.raises(TreeMismatchError, match="pair: a Node in the checkpoint, a dict in like"):
        restore(tmp_path, like={**like, "pair": {"x": 1}})


@dataclass
class Curriculum:
    level: int
    seen: list
    table: torch.Tensor
    doubled: int = field(init=False, default=0)


@attrs.frozen
class Best:
    score: float
    _weights: torch.Tensor = attrs.field(alias="weights")
    curriculum: Curriculum | None = None
    rounded: int = attrs.field(
        init=False, default=attrs.Factory(lambda self: round(self.score), takes_self=True)
    )


class Unknown:
    pass


def records(number):
    curriculum = Curriculum(number, [number], torch.full((2,), float(number)))
    curriculum.doubled = 2 * number
    return {"best": Best(float(number), torch.ones(number), curriculum)}


def test_dataclasses_and_attrs_classes_come_back(tmp_path):
    save(tmp_path, trained(records(3)))
    for like in (records(3), records(4)):  # sizes of the user's own may differ
        best = restore(tmp_path, like=trained(like)).extras["best"]
        assert type(best) is Best
        assert (best.score, best._weights.tolist(), best.rounded) == (3.0, [1.0] * 3, 3)
        assert type(best.curriculum) is Curriculum
        assert (best.curriculum.level, best.curriculum.seen, best.curriculum.doubled) == (3, [3], 6)
        assert best.curriculum.table.tolist() == [3.0, 3.0]
    assert (
        restore(tmp_path, like=trained(None)).extras["best"]["score"] == 3.0
    )  # without the class its entries


def test_an_unknown_class_inside_of_one_is_named(tmp_path):
    curriculum = Curriculum(0, [Unknown()], torch.ones(1))
    with pytest.raises(NotSerializableError, match=r"extras/best/curriculum/seen/0 is a .*Unknown"):
        save(tmp_path, trained({"best": Best(0.0, torch.ones(1), curriculum)}))


def test_a_snapshot_copies_what_they_hold():
    state = trained(records(2))
    copied = fnaccel.snapshot(state).extras["best"]
    state.extras["best"].curriculum.table.zero_()
    assert copied.curriculum.table.tolist() == [2.0, 2.0]


def test_with_extras_moves_the_lease(tmp_path):
    step = make("local()")
    state = step.init(seed=1, extras={"a": 1})
    held, params = state, state.params
    state = state.with_extras(records(5))
    assert step.live_state is state
    for use in (
        lambda: held.extras,
        lambda: held.params,
        lambda: held.with_extras(None),
        lambda: dict(params),
    ):
        with pytest.raises(StaleStateError):
            use()
    with pytest.raises(StaleStateError):
        step(held, batch(step.mesh, 0))
    state, _ = step(state, batch(step.mesh, 0))
    assert (state.step, state.extras["best"].score) == (1, 5.0)
    free = fnaccel.snapshot(state).with_extras({"b": 2})  # not live: nothing is donated
    assert (free.extras, state.extras["best"].score) == ({"b": 2}, 5.0)
    save(tmp_path, state)
    assert restore(tmp_path, like=state).extras["best"].score == 5.0


def test_keys_that_look_alike_stay_apart(tmp_path):
    value = {
        1: torch.zeros(1),
        "1": torch.ones(1),
        None: torch.full((1,), 2.0),
        "None": torch.full((1,), 3.0),
    }
    save(tmp_path, value)
    found = restore(tmp_path, like={key: torch.empty(1) for key in value})
    assert [float(found[key]) for key in value] == [0.0, 1.0, 2.0, 3.0]


def test_lists_and_arrays_in_extras_may_have_grown(tmp_path):
    state = trained({"losses": [0.5, 0.25], "best": None, "curve": np.arange(4)})
    save(tmp_path, state)
    found = restore(
        tmp_path, like=trained({"losses": [], "best": None, "curve": np.zeros(0, "int64")})
    ).extras
    assert found["losses"] == [0.5, 0.25]
    assert found["curve"].tolist() == [0, 1, 2, 3]


def drawn():
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    )


def test_the_global_streams_go_on(tmp_path):
    step = make("local()")
    state = train(step, step.init(seed=1), 0, 1)
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    drawn()
    save(tmp_path, state)
    wanted = [drawn() for _ in range(3)]
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    kept = drawn()
    restored = restore(tmp_path, like=state, only="params")
    assert [drawn()] != wanted[:1]
    assert kept not in wanted
    restore(tmp_path, like=restored)
    assert [drawn() for _ in range(3)] == wanted


def test_a_snapshot_leaves_the_streams_alone(tmp_path):
    from fnaccel.state import snapshot

    step = make("local()")
    state = step.init(seed=1)
    save(tmp_path, state)
    random.seed(9)
    wanted = random.random()
    random.seed(9)
    restore(tmp_path, like=snapshot(state))
    assert random.random() == wanted


def test_extras_of_any_kind_take_what_was_saved(tmp_path):
    def first():
        return {
            "d": defaultdict(list),
            "o": OrderedDict(),
            "q": deque([1]),
            "n": np.int64(0),
            "x": 0.5,
            "t": torch.zeros(1),
            "k": {"a": 1},
        }

    state = trained(first())
    state.extras["d"][7].append("x")
    state.extras["o"]["z"] = 1
    state.extras["q"].append(2)
    state.extras.update(n=np.int64(3), x=torch.tensor(0.25), t=torch.ones(4))
    state.extras["k"]["b"] = None
    save(tmp_path, state)
    found = restore(tmp_path, like=trained(first())).extras
    assert type(found["d"]) is defaultdict
    assert found["d"] == {7: ["x"]}
    assert type(found["o"]) is OrderedDict
    assert found["o"] == {"z": 1}
    assert (found["n"], found["x"].item(), found["t"].tolist(), found["k"]) == (
        3,
        0.25,
        [1.0] * 4,
        {"a": 1, "b": None},
    )
    assert list(found["q"].values()) == [1, 2]  # a node of another size: its entries


def test_an_object_that_refuses_leaves_the_state_live(tmp_path):
    save(tmp_path, trained({"m": torch.nn.Linear(3, 3)}))
    state = trained({"m": torch.nn.Linear(5, 5)})
    kept = gathered(state.params)
    with pytest.raises(CheckpointError, match="size mismatch"):
        restore(tmp_path, like=state)
    assert unequal(gathered(state.params), kept) == []


def test_a_stream_that_would_read_out_of_bounds(tmp_path):
    import struct

    step = make("local()")
    state = step.init(seed=1)
    path = save(tmp_path, state) / "shard-00000-of-00001.safetensors"
    data = path.read_bytes()
    kept = np.random.get_state(legacy=False)["state"]
    at = data.index(kept["key"].astype("<u4").tobytes()) + 624 * 4
    path.write_bytes(data[:at] + struct.pack("<i", 2_000_000_000) + data[at + 4 :])
    with pytest.warns(UserWarning, match="begin anew: numpy stands at 2000000000"):
        restore(tmp_path, like=state)
    np.random.rand()


@pytest.mark.parametrize("kind", ["python", "torch", "numpy"])
def test_streams_that_are_none_warn_and_begin_anew(tmp_path, kind):
    from fnaccel.checkpoint.random_streams import capture

    step = make("local()")
    state = step.init(seed=1)
    with pytest.MonkeyPatch.context() as patch:
        broken = {**capture(torch.device("cpu")), kind: torch.full((7,), 255, dtype=torch.uint8)}
        patch.setattr("fnaccel.checkpoint.random_streams.capture", lambda device: broken)
        save(tmp_path, state)
    with pytest.warns(UserWarning, match="can't be put back, and begin anew"):
        state = restore(tmp_path, like=state)
    first = drawn()
    with pytest.warns(UserWarning, match="begin anew"):
        restore(tmp_path, like=state)
    assert drawn() == first


def streams(directory):
    step = make("ddp()")
    state = step.init(seed=1)
    random.seed(step.mesh.world.rank)
    save(directory, state)
    wanted = random.random()
    state, _ = step(restore(directory, like=state), batch(step.mesh, 0))
    return wanted, random.random()


def elsewhere(directory):
    step = make("local()" if __import__("torch").distributed.get_world_size() == 1 else "fsdp()")
    restore(directory, like=step.init(seed=3))
    return random.random()


def test_each_rank_has_its_own(pools, tmp_path):
    found = pools.run(3, streams, tmp_path)
    assert [wanted for wanted, _ in found] == [after for _, after in found]
    assert len({wanted for wanted, _ in found}) == 3
    # on another number of ranks they begin anew, the same each time, and differ between ranks
    once, again = (pools.run(2, elsewhere, tmp_path) for _ in range(2))
    assert once == again
    assert len({*once, *(wanted for wanted, _ in found)}) == 5
