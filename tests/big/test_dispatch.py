"""Modules whose layers are on several devices, in host memory, or on the disk."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fnaccel as fa
from fnaccel.big.layers import layers
from tests.big.models import Block, Net, nets
from tests.big.movers import Devices, Simulated, device_of

TOKENS = torch.tensor([0, 0, 0])


def output(net, tokens=TOKENS, **options):
    with torch.inference_mode():
        return net(tokens, **options)["logits"]


def values(net):
    named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    return {name: tensor.clone() for name, tensor in named}


def check_restored(net, before):
    """No hooks, no meta tensors, the same values, and tied parameters still tied."""
    after = dict([*net.named_parameters(remove_duplicate=False), *net.named_buffers()])
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(device_of(tensor) == "cpu" for tensor in after.values())
    for module in net.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._state_dict_hooks
    assert fa.big.dispatch_of(net) is None


@given(nets(), st.data())
def test_any_map_gives_the_outputs_of_the_plain_forward(tmp_path_factory, net, data):
    net.requires_grad_(False)
    parts = layers(net, () if data.draw(st.booleans(), "split blocks") else None)
    homes = st.sampled_from([0, 1, "cpu", "disk"])
    placed = {part.path: data.draw(homes, part.path) for part in parts}
    for block in range(len(net.blocks)):  # residual connections stay on one device
        if f"blocks.{block}" not in placed:
            runs = data.draw(st.sampled_from([0, 1]), f"block {block}")
            names = [path for path in placed if path.startswith(f"blocks.{block}.")]
            placed |= {name: runs if runs == 1 or placed[name] == 1 else placed[name] for name in names}
    placed["mask"] = 0 if placed["embed"] == 0 or isinstance(placed["embed"], str) else 1
    expected, before = output(net), values(net)
    tied = net.head.weight is net.embed.weight
    run = fa.big.dispatch(
        net,
        placed,
        folder=tmp_path_factory.mktemp("offload"),
        device=0,
        prefetch=data.draw(st.integers(0, 3), "prefetch"),
        offload_buffers=data.draw(st.booleans(), "offload buffers"),
        mover=Simulated(),
    )
    with Devices():
        for _ in range(3):
            found = output(net)
            assert device_of(found) == "cpu"
            assert torch.equal(found, expected)
    run.remove()
    check_restored(net, before)
    assert (net.head.weight is net.embed.weight) == tied
    assert torch.equal(output(net), expected)


def offloaded(net, tmp_path=None, home="cpu", **options):
    mover = Simulated()
    options |= {"folder": tmp_path} if home == "disk" else {}
    return fa.big.offload(net.eval(), 0, home, mover=mover, **options), mover


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_next_layers_are_fetched_while_one_computes(tmp_path, home, prefetch):
    net = Net(width=8, depth=4, tied=False)
    expected = output(net.eval())
    run, mover = offloaded(net, tmp_path, home, prefetch=prefetch)
    count = 4 + 3  # blocks, embedding, norm, head
    assert torch.equal(output(net), expected)
    assert (run.counts.fetched, run.counts.ahead) == (count, 0)
    for _ in range(2):
        output(net)
    # the second pass is fetched ahead but for its first layers, the third one whole
    assert run.counts.fetched == 3 * count
    assert run.counts.ahead == (2 * count - 1 if prefetch else 0)
    assert run.counts.most <= 1 + prefetch
    largest = fa.big.sizes(net).largest[1]
    buffers = sum(buffer.nbytes for buffer in net.buffers())
    inputs = 4096  # tokens lie on the device too
    assert mover.most[0] <= (1 + prefetch) * largest + buffers + inputs
    assert run.counts.out_of_order == 0
    run.remove()


def test_another_order_is_counted_and_right(tmp_path):
    net = Net(depth=3).eval()
    x = torch.ones(3, 4)
    with torch.inference_mode():
        expected, skipped = output(net), net.head(net.blocks[2](net.blocks[0](x)))
        run, _ = offloaded(net, tmp_path, "disk")
        output(net)
        assert torch.equal(net.head(net.blocks[2](net.blocks[0](x))), skipped)
    assert run.counts.out_of_order == 2  # block 2 after block 0, the head after block 2
    assert torch.equal(output(net), expected)
    assert run.counts.most == 2


def test_a_layer_that_calls_itself():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((64,), 0.5), requires_grad=False)

        def forward(self, x, times=3):
            return x * self.weight if not times else self(x * self.weight, times - 1)

    model = nn.Sequential(Again(), Again())
    expected = model(torch.ones(64))
    run, mover = offloaded(model)
    assert torch.equal(model(torch.ones(64)), expected)
    assert run.counts.reentered == 6
    run.send_home()
    assert mover.live[0] == 0


def test_a_layer_that_comes_twice_in_a_row_stays():
    block = Block(4).eval()
    model = nn.Sequential(block, block, nn.Linear(4, 4))
    x = torch.ones(2, 4)
    with torch.inference_mode():
        expected = model(x)
        run, _ = offloaded(model)
        for _ in range(3):
            assert torch.equal(model(x), expected)
    assert run.counts.out_of_order > 0  # the same layer is followed by itself, then by another


def test_a_layer_that_stays_goes_when_another_comes():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(4) for _ in range(6))

        def forward(self, x):
            for block in self.blocks:
                x = block(block(x))
            return x

    model, x = Twice().eval(), torch.ones(2, 4)
    with torch.inference_mode():
        expected = model(x)
        run, _ = offloaded(model)
        for _ in range(3):
            assert torch.equal(model(x), expected)
    assert run.counts.most == 2


def test_gradients_raise_and_frozen_layers_run():
    net = Net()
    run, _ = offloaded(net)
    with pytest.raises(fa.errors.CapabilityError, match="embed is offloaded, and gradients would"):
        net(TOKENS)
    with torch.no_grad():
        net(TOKENS)
    net.requires_grad_(False)
    run.remove()
    offloaded(net)
    assert not net(TOKENS)["logits"].requires_grad


def test_a_pass_that_fails_leaves_nothing_behind():
    class Fails(nn.Linear):
        def forward(self, x):
            if x.sum() > 0:
                raise KeyboardInterrupt if x.sum() > 5 else ValueError("of the user")
            return super().forward(x)

    model = nn.Sequential(nn.Linear(2, 2, bias=False), Fails(2, 2)).requires_grad_(False)
    model[0].weight.copy_(torch.eye(2))
    zeros = model(torch.zeros(1, 2))
    run, mover = offloaded(model)
    for value, error in ((1, ValueError), (9, KeyboardInterrupt)):
        with pytest.raises(error):
            model(torch.full((1, 2), value / 1.0))
        assert torch.equal(model(torch.zeros(1, 2)), zeros)
        assert run.counts.reentered == 0
    run.send_home()
    assert mover.live[0] == 0


def test_keyword_arguments_and_outputs_of_any_structure():
    net = Net()
    bias = {"bias": torch.ones(3, 4)}
    with torch.inference_mode():
        expected = net.eval()(TOKENS, extra=bias)["logits"]
    run, mover = offloaded(net)
    with Devices():
        assert torch.equal(output(net, extra=bias), expected)
    run.remove()
    moved = len(mover.moves)
    run = fa.big.dispatch(net, {"": 0, "head": 1}, skip_keys=["extra"], mover=mover)
    with Devices(), pytest.raises(AssertionError, match="mixes"):
        output(net, extra=bias)
    assert all(shape != (3, 4) for shape, *_ in mover.moves[moved:] if shape != (11, 4))


class Reads(nn.Module):
    """Reads the weight of an inner module, without a call of it."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x @ self.inner.weight)


def test_a_layer_that_reads_weights_of_inner_modules():
    model = nn.Sequential(Reads(), nn.Linear(4, 4)).requires_grad_(False)
    x = torch.ones(1, 3, 4)
    expected = model(x)
    run = fa.big.dispatch(model, {"": "cpu"}, device=0, mover=Simulated())
    with pytest.raises(fa.errors.CapabilityError, match=r"0\.inner\.weight is not on its device") as error:
        model(x)
    assert "preload" in error.value.fix
    run.remove()
    fa.big.dispatch(model, {"": "cpu"}, device=0, mover=Simulated(), preload=["Reads"])
    assert torch.equal(model(x), expected)


def test_attention_of_torch_is_fetched_whole():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    model.eval().requires_grad_(False)
    x = torch.randn(2, 5, 8)
    expected = model(x)
    run, _ = offloaded(model)
    assert torch.equal(model(x), expected)
    assert run.counts.fetched == 2


def test_models_that_take_turns():
    first, second, third = (nn.Linear(8, 8).requires_grad_(False) for _ in range(3))
    x = torch.ones(1, 8)
    expected = third(second(second(first(x))))
    mover = Simulated()
    one = fa.big.offload(first, 0, keep=True, mover=mover)
    two = fa.big.offload(second, 0, keep=True, after=one, mover=mover)
    three = fa.big.offload(third, 0, keep=True, after=two, mover=mover)
    size = 8 * 8 * 4 + 8 * 4
    hidden = first(x)
    for _ in range(2):
        hidden = second(hidden)
    assert two.counts.fetched == 1
    assert mover.live[0] - 2 * 32 <= size  # and the activations between them
    assert torch.equal(third(hidden), expected)
    three.send_home()
    assert mover.live[0] <= 3 * 32


def test_a_state_dict_has_values(tmp_path):
    net = Net()
    before = values(net)
    run, _ = offloaded(net, tmp_path, "disk")
    state = net.state_dict()
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert all(p.is_meta for p in net.parameters())
    other = Net()
    other.load_state_dict(state)
    assert torch.equal(other.head.weight, before["embed.weight"])
    run.remove()


def test_values_outside_of_a_forward_pass(tmp_path):
    net = Net()
    before = values(net)
    run, mover = offloaded(net, tmp_path, "disk")
    with run.fetched("blocks.1") as block:
        assert torch.equal(block.up.weight, before["blocks.1.up.weight"])
        assert device_of(block.up.weight) == 0
        assert net.blocks[0].up.weight.is_meta
    assert block.up.weight.is_meta
    with run.fetched():
        assert torch.equal(net.head.weight, before["embed.weight"])
    assert mover.live[0] == sum(buffer.nbytes for buffer in net.buffers())


def test_pages_of_a_file_are_used_where_they_are(tmp_path):
    net = Net(width=64, depth=2).eval()
    expected, before = output(net), values(net)
    run = fa.big.dispatch(net, {"": "disk"}, folder=tmp_path)
    pointers = {p.data_ptr() for p in net.parameters()}
    assert 0 not in pointers
    for _ in range(3):
        assert torch.equal(output(net), expected)
        assert {p.data_ptr() for p in net.parameters()} == pointers
    for file in tmp_path.iterdir():
        file.unlink()  # they stay mapped
    assert torch.equal(output(net), expected)
    run.remove()
    check_restored(net, before)


def test_threads_end_with_the_dispatch():
    before = set(threading.enumerate())
    net = Net()
    run, _ = offloaded(net, prefetch=2)
    output(net)
    (thread,) = set(threading.enumerate()) - before
    run.remove()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({"": 7}, "the map names the device 7, and this machine has no accelerators"),
        ({"": "disk"}, "go to the disk, and there is no folder"),
        ({"embed": 0}, "the map has no device for"),
        ({"": 0, "norm.weight": 1}, "norm.bias would run on 0|norm.weight would run on 1"),
        ({"": "gpu"}, "'gpu' is no device"),
        ("nowhere", "'nowhere' is no device"),
        (None, "None is no device"),
    ],
)
def test_errors_come_before_changes(placed, message):
    net = Net()
    before = values(net)
    with pytest.raises(fa.errors.FnaccelError, match=message):
        fa.big.dispatch(net, placed, mover=Simulated())
    check_restored(net, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "prefetch=-1"),
        ({"prefetch": 1.5}, "prefetch=1.5"),
        ({"preload": "Blok"}, "the model has no module of class 'Blok'"),
    ],
)
def test_options_that_are_wrong(options, message):
    net = Net()
    before = values(net)
    with pytest.raises(fa.errors.ArgumentError, match=message):
        fa.big.dispatch(net, "cpu", **options)
    check_restored(net, before)
    fa.big.dispatch(net, "cpu", preload="Block", skip_keys="extra").remove()


def test_a_disk_without_space(tmp_path, monkeypatch):
    net = Net()
    before = values(net)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(fa.errors.ArgumentError, match="which has 100 B left"):
        fa.big.dispatch(net, {"": "disk"}, folder=tmp_path / "new")
    monkeypatch.undo()
    monkeypatch.setattr(
        "fnaccel.big.on_disk.save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(fa.errors.CheckpointError, match="No space left"):
        fa.big.dispatch(net, {"": "disk"}, folder=tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    check_restored(net, before)


def test_twice_and_without_values():
    net = Net()
    run, _ = offloaded(net)
    for model in (net, nn.Sequential(net)):
        with pytest.raises(fa.errors.OwnershipError, match="is dispatched already"):
            fa.big.dispatch(model, {"": "cpu"})
    assert fa.big.dispatch_of(net) is run
    with fa.big.empty():
        empty = Net()
    with pytest.raises(fa.errors.ArgumentError, match=r"embed.weight has no values \(19 tensors in all\)"):
        fa.big.dispatch(empty, {"": "cpu"})
    with pytest.raises(fa.errors.ArgumentError, match="0 is no home"):
        fa.big.offload(Net(), "cpu", 0)


def test_a_compiled_model_breaks_its_graph_at_the_hooks(tmp_path):
    net = Net().eval()
    expected = output(net)
    fa.big.dispatch(net, {"": "disk"}, folder=tmp_path)
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad(), contextlib.suppress(AttributeError):
        assert torch.equal(compiled(TOKENS)["logits"], expected)


def write_on_ranks(folder):
    net = Net(width=64).eval()
    expected = output(net)
    fa.big.dispatch(net, {"": "disk"}, folder=folder)
    return torch.equal(output(net), expected)


def test_ranks_may_share_a_folder(pools, tmp_path):
    assert pools.run(3, write_on_ranks, tmp_path) == [True] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["offloaded-00000.safetensors"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_tensors_without_elements(tmp_path):
    model = nn.Sequential(nn.Linear(3, 0), nn.Linear(0, 2)).requires_grad_(False)
    expected = model(torch.ones(1, 3))
    run = fa.big.dispatch(model, {"": "disk"}, folder=tmp_path)
    assert torch.equal(model(torch.ones(1, 3)), expected)
    run.remove()
    assert model[0].weight.shape == (0, 3)


def test_a_model_that_calls_itself():
    class Deeper(nn.Sequential):
        def forward(self, x, times=2):
            x = super().forward(x)
            return self(x, times - 1) if times else x

    model = Deeper(nn.Linear(4, 4), nn.Linear(4, 4)).requires_grad_(False)
    expected = model(torch.ones(1, 4))
    run, mover = offloaded(model)
    for _ in range(2):
        assert torch.equal(model(torch.ones(1, 4)), expected)
    assert run.counts.reentered == 0
    run.send_home()
    assert mover.live[0] == 0


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_threads_may_call_one_model(tmp_path, home):
    net = Net(width=32, depth=3).eval()
    expected = output(net)
    run, mover = offloaded(net, tmp_path, home)
    results, failures = [], []

    def call():
        try:
            results.extend(output(net) for _ in range(20))
        except Exception as error:  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(torch.equal(found, expected) for found in results)
    run.send_home()
    assert mover.live[0] == sum(buffer.nbytes for buffer in net.buffers())


def test_what_is_written_to_a_mapped_weight_stays(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 4)).requires_grad_(False)
    run = fa.big.dispatch(model, {"": "disk"}, folder=tmp_path)
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model(torch.ones(1, 256))
    assert (model[0].weight == 2).all()
    run.remove()
    assert (model[0].weight == 2).all()


def test_a_dispatched_model_is_not_moved_or_copied(tmp_path):
    net = Net(width=64)
    run, _ = offloaded(net, tmp_path, "disk")
    for call in (
        net.half,
        net.cpu,
        lambda: net.to("cpu"),
        lambda: copy.deepcopy(net),
        lambda: pickle.dumps(net),
    ):
        with pytest.raises(fa.errors.CapabilityError, match="this model is dispatched"):
            call()
    with pytest.raises(RuntimeError, match="is not on its device"), pytest.warns(UserWarning, match="no-op"):
        net.load_state_dict(net.state_dict())
    run.remove()
    copy.deepcopy(net).half()


@pytest.mark.parametrize("placed", [{"": 0}, {"": 0, "blocks.1": 1, "head": 1, "norm": 1}])
def test_a_copy_without_offloaded_layers_has_a_dispatch_of_its_own(placed):
    net = Net(tied=False).eval()
    calls = []
    net.head.register_forward_pre_hook(lambda *_: calls.append(1))
    expected = output(net)
    mover = Simulated()
    run = fa.big.dispatch(net, placed, mover=mover)
    parent = nn.ModuleDict({"net": net, "other": nn.Linear(1, 1)})
    other = copy.deepcopy(parent)["net"]
    assert fa.big.dispatch_of(net) is run
    assert fa.big.dispatch_of(other) not in (None, run)
    assert fa.big.dispatch_of(other).map == run.map
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    calls.clear()
    with Devices():
        assert torch.equal(output(net), expected)
        assert not output(other).any()
    assert len(calls) == 2
    run.remove()
    with Devices():
        assert not output(other).any()
    fa.big.dispatch_of(other).remove()
    assert not any(module._forward_pre_hooks for module in other.modules() if module is not other.head)


class Nested(nn.Linear):
    """A linear layer whose inner modules hold its weight."""

    def __init__(self):
        super().__init__(50, 50)
        self.inner = nn.ModuleList(nn.Linear(50, 50) for _ in range(3))
        for layer in self.inner:
            layer.weight = self.weight

    def forward(self, x):
        x = super().forward(x)
        for layer in self.inner:
            x = layer(x)
        return x


@pytest.mark.parametrize("home", ["cpu", "disk"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_nested_tied_weight_is_sent_once(tmp_path, home, prefetch):
    model = nn.Sequential(Nested(), nn.Linear(50, 50)).requires_grad_(False)
    x = torch.ones(1, 50)
    expected = model(x)
    run, mover = offloaded(model, tmp_path, home, prefetch=prefetch)
    with Devices():
        for number in range(3):
            before = len(mover.moves)
            assert torch.equal(model(x), expected)
            weights = [move for move in mover.moves[before:] if move[0] == (50, 50) and move[2] == 0]
            # the last layer's own, and one that is fetched ahead for the next pass
            assert len(weights) <= (2 if number == 0 or not prefetch else 3)
    assert mover.most[0] <= 20_000 + 8 * 200 + 2000
    run.send_home()
    assert mover.live[0] == 0
    run.remove()
    assert model[0].inner[2].weight is model[0].weight


def test_values_on_another_device(tmp_path):
    net = Net()
    before = values(net)
    mover = Simulated()
    run = fa.big.dispatch(
        net, {"": "disk", "norm": 0, "head": "disk"}, folder=tmp_path, device=0, mover=mover
    )
    with run.fetched(device=1) as whole:
        assert all(device_of(tensor) == 1 for tensor in [*whole.parameters(), *whole.buffers()])
        assert whole.head.weight is whole.embed.weight
        assert all(torch.equal(p, before[name]) for name, p in whole.named_parameters())
    assert device_of(net.norm.weight) == 0
    assert mover.live[1] == 0
    assert net.blocks[1].up.weight.is_meta
    with fa.big.fetched(net, "cpu"), run.fetched("blocks.1", device=1) as block:
        assert device_of(block.up.weight) == 1
        assert device_of(net.blocks[0].up.weight) == "cpu"
    with pytest.raises(fa.errors.ArgumentError, match="disk"), run.fetched(device="disk"):
        pass
    with pytest.raises(fa.errors.CapabilityError, match="the device 7"), run.fetched(device=7):
        pass
    with torch.inference_mode():
        assert torch.isfinite(net.eval()(TOKENS)["logits"]).all()
    run.remove()
    check_restored(net, before)


def test_values_of_a_module_that_is_not_dispatched():
    net, mover = Net(), Simulated()
    pointers = [tensor.data_ptr() for tensor in net.parameters()]
    parameters = list(net.parameters())
    with fa.big.fetched(net, 1, mover=mover) as module:
        assert all(device_of(tensor) == 1 for tensor in [*module.parameters(), *module.buffers()])
        module.norm.weight.data.fill_(7)
    assert [tensor.data_ptr() for tensor in net.parameters()] == pointers
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert (net.norm.weight == 7).all()
    assert mover.live[1] == 0
    with fa.big.empty():
        empty = Net()
    with pytest.raises(fa.errors.ArgumentError, match="no values"), fa.big.fetched(empty, "cpu"):
        pass


class Asks(nn.Module):
    """Reads the device and the dtype of weights that are elsewhere, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            here = torch.arange(x.shape[-1], device=layer.weight.device)
            x = layer(x[..., here].to(layer.weight.dtype))
        return x


def loaded(tmp_path, dtype):
    torch.manual_seed(0)
    original = Asks()
    torch.save(original.state_dict(), tmp_path / "asks.pt")
    model = Asks()
    run = fa.big.load(model, tmp_path / "asks.pt", "disk", dtype=dtype)
    return original.to(dtype), model, run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_elsewhere_has_the_device_and_dtype_of_its_layer(tmp_path, dtype):
    original, model, run = loaded(tmp_path, dtype)
    x = torch.randn(2, 256)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(x), original(x))
    assert fa.big.sizes(model).total == fa.big.sizes(original).total
    run.remove()


def test_a_state_dict_of_a_part_has_values(tmp_path):
    original, model, _ = loaded(tmp_path, torch.bfloat16)
    part = model.layers.state_dict()
    assert all(torch.equal(part[name], value) for name, value in original.layers.state_dict().items())


def test_what_is_written_past_torch_stays(tmp_path):
    """peft merges an adapter so: `.data` has a version of its own."""
    _, model, run = loaded(tmp_path, torch.float32)
    model.layers[0].weight.data.zero_()
    with torch.inference_mode():
        for _ in range(3):
            model(torch.ones(1, 256))
    assert not model.layers[0].weight.any()
    run.remove()
    assert not model.layers[0].weight.any()


def test_a_fork_fetches_by_a_thread_of_its_own(tmp_path):
    original, model, run = loaded(tmp_path, torch.bfloat16)
    x = torch.randn(2, 256)
    with torch.inference_mode():
        expected = original(x)
        model(x), model(x)
        in_fork = [
            lambda: sys.exit(not torch.equal(model(x), expected)),
            run.remove,
        ]
        for target in in_fork:
            child = multiprocessing.get_context("fork").Process(target=target)
            child.start()
            child.join(60)
            assert child.exitcode == 0


def test_a_pass_leaves_values_that_were_fetched_by_hand(tmp_path):
    original, model, run = loaded(tmp_path, torch.bfloat16)
    with torch.inference_mode(), run.fetched("layers.1") as layer:
        model(torch.ones(1, 256))
        assert torch.equal(layer.weight, original.layers[1].weight)
    with pytest.raises(fa.errors.CapabilityError, match=r"layers\.1\.weight"):
        layer.weight + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_assigned_raises_and_stays(tmp_path, dtype):
    _, model, run = loaded(tmp_path, dtype)
    mine = nn.Parameter(torch.ones(256, 256, dtype=dtype))
    model.layers[1].weight = mine
    with (
        pytest.raises(fa.errors.OwnershipError, match=r"layers\.1\.weight was assigned"),
        torch.inference_mode(),
    ):
        model(torch.ones(1, 256))
    run.remove()
    assert model.layers[1].weight is mine
    assert not model.layers[0].weight.is_meta


def test_a_scripted_module_is_refused_and_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))).requires_grad_(False)
    with pytest.raises(fa.errors.CapabilityError, match="TorchScript"):
        fa.big.dispatch(model, "cpu")
    assert not model._forward_pre_hooks
    model(torch.ones(1, 4))


@pytest.mark.parametrize("device", ["gpu", "disk", -1, True])
def test_a_device_that_runs_no_layers(device):
    with pytest.raises(fa.errors.ArgumentError):
        fa.big.dispatch(nn.Linear(4, 4), "cpu", device=device)
