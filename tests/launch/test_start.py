"""What a script sees when it was launched: ranks, variables, arguments, `__main__`, its own end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import buffered

pytestmark = pytest.mark.launcher

LOOK = """
    import json, os, sys
    import numpy, torch
    import __main__
    seen = {
        "env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "main": __main__.__dict__ is globals(), "threads": torch.get_num_threads(),
        "package": __package__, "numpy": numpy.random.random(),
    }
    with open(f"rank{os.environ['RANK']}", "w") as file:
        json.dump(seen, file)
"""


HOLDS = """
    import os, socket, sys
    import fnaccel as fa
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            print(error)
    with fa.start() as world:
        print(fa.gather(world.rank))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is reserved elsewhere")
def test_no_other_process_gets_the_port_of_the_ranks_before_they_listen(launcher):
    ended = launcher("-n", 1, "--cpu", launcher.write(HOLDS.replace("fa.gather(world.rank)", "world.size")))
    assert (ended.code, "in use" in ended.out) == (0, True), ended


def looked(launcher, ranks):
    return [json.loads((launcher.folder / f"rank{rank}").read_text()) for rank in range(ranks)]


def test_every_rank_knows_its_place(launcher):
    outer = {"TORCHELASTIC_USE_AGENT_STORE": "True", "FNACCEL_OVERRIDES": '{"ema": 0.5}', "KEPT": "x"}
    ended = launcher("-n", 3, "--cpu", "--threads", 2, launcher.write(LOOK), env=outer)
    assert ended.code == 0, ended.err
    seen = looked(launcher, 3)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    for rank, each in enumerate(seen):
        assert [each["env"][name] for name in names] == [str(rank), "3", str(rank), "3", "0", "2"]
        assert each["env"]["FNACCEL_LAUNCHED"] == "1"
        assert each["env"]["FNACCEL_DEVICE"] == "cpu"
        assert each["env"]["KEPT"] == "x"
        assert not {"TORCHELASTIC_USE_AGENT_STORE", "FNACCEL_OVERRIDES"} & each["env"].keys()
        assert each["threads"] == 2
    assert len({each["env"]["MASTER_PORT"] for each in seen}) == 1
    assert len({each["numpy"] for each in seen}) == 3, "forks share numpy's generator"


def test_a_file_is_main_and_what_follows_it_is_its_own(launcher):
    launcher.write(LOOK, "deep/train.py")
    args = ["-n", "5", "--strategy", "x", "-m", "y", "--", "--cpu", "--", "", "a b"]
    ended = launcher("-n", 1, "deep/train.py", *args)
    assert ended.code == 0, ended.err
    [seen] = looked(launcher, 1)
    assert seen["argv"] == ["deep/train.py", *args]
    assert seen["path"] == str(launcher.folder / "deep")
    assert (seen["name"], seen["main"], seen["package"]) == ("__main__", True, None)
    assert seen["file"] == str(launcher.folder / "deep" / "train.py")
    assert seen["env"]["WORLD_SIZE"] == "1"


@pytest.mark.parametrize("name", ["pack.inner", "pack"])
def test_a_module_runs_as_python_m_does(launcher, name):
    launcher.write("", "pack/__init__.py")
    launcher.write("from .inner import *", "pack/__main__.py")
    launcher.write("from . import sibling", "pack/inner.py")
    launcher.write(LOOK, "pack/sibling.py")
    file = "inner" if name == "pack.inner" else "__main__"
    launcher.write(
        LOOK.replace("import json", "from . import sibling\n    import json", 1), f"pack/{file}.py"
    )
    ended = launcher("-n", 2, "-m", name, "-m", "--set")
    assert ended.code == 0, ended.err
    for seen in looked(launcher, 2):
        assert seen["argv"] == [str(launcher.folder / "pack" / f"{file}.py"), "-m", "--set"]
        assert seen["path"] == str(launcher.folder)
        assert (seen["name"], seen["main"], seen["package"]) == ("__main__", True, "pack")


@pytest.mark.long
def test_classes_of_the_script_pickle_in_workers_and_after_its_end(launcher):
    script = launcher.write("""
        import atexit, pickle, torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return i * i

        def at_the_end():
            assert type(pickle.loads(pickle.dumps(Squares()))) is Squares
            print("pickled", flush=True)

        if __name__ == "__main__":
            for how in ("fork", "spawn"):
                loader = DataLoader(Squares(), num_workers=1, multiprocessing_context=how)
                assert torch.cat(list(loader)).tolist() == [0, 1, 4, 9]
            atexit.register(at_the_end)
    """)
    ended = launcher("-n", 1, script)
    assert (ended.code, ended.out) == (0, "pickled\n"), ended.err


def test_a_rank_ends_as_python_does(launcher):
    script = launcher.write("""
        import atexit, threading, time

        class Loud:
            def __del__(self):
                print("collected", flush=True)

        left_open = open("left_open", "w")
        left_open.write("written")
        loud = Loud()

        def late():
            time.sleep(0.2)
            print("thread", left_open.closed, flush=True)

        threading.Thread(target=late).start()
        atexit.register(lambda: print("at exit", flush=True))
    """)
    ended = launcher("-n", 1, script)
    assert (ended.code, ended.out) == (0, "thread False\nat exit\ncollected\n"), ended.err
    assert (launcher.folder / "left_open").read_text() == "written"


def test_overrides_reach_the_recipe(launcher):
    launcher.write("precision: bf16\naccumulate: 1\noptimizer: {lr: 0.5}\nclip_norm: 1.0\n", "recipe.yaml")
    script = launcher.write("""
        import fnaccel as fa
        print(fa.config.to_yaml(fa.config.recipe(fa.config.Recipe(accumulate=4, ema=0.5))), end="")
    """)
    flags = ["--strategy", "ddp(2)", "--clip-norm", "2", "--compile", "loss", "--set", "optimizer.name=sgd"]
    ended = launcher("-n", 1, "--config", "recipe.yaml", *flags, "--set", "optimizer.lr=1e-4", script)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [
        "strategy: ddp(2)", "precision: bf16", "clip_norm: 2.0", "ema: 0.5", "compile: loss",
        "optimizer:", "  name: sgd", "  lr: 0.0001",
    ]  # fmt: skip


def test_ranks_meet(launcher):
    script = launcher.write("""
        import torch, fnaccel as fa
        with fa.start(device="cpu") as world:
            total = fa.reduce(torch.tensor(world.rank + 1.0))
            world.print(f"{world.source}: {total.item()} of {world.size}")
    """)
    ended = launcher("-n", 2, script)
    assert (ended.code, ended.out) == (0, "fnaccel launch: 3.0 of 2\n"), ended.err


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [[str(Path(sys.executable).with_name("fnaccel"))], [sys.executable, "-m", "fnaccel"]],
    ids=["script", "module"],
)
def test_the_program_itself_and_standard_input(tmp_path, command):
    (tmp_path / "read.py").write_text("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    ended = subprocess.run(
        [*command, "launch", "-n", "2", "read.py"],
        input="one line",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=buffered(),
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(ended.stdout.splitlines()) == ["0 'one line'", "1 ''"]
