"""`fa.big.load` with a record: the bits of `fa.big.quantize`, from full width and from codes, on any map."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fnaccel as fa
from fnaccel.errors import ArgumentError, TreeMismatchError
from tests.big.quantize.models import BITSANDBYTES, RECORDS, Net, empty, gpt2, llama, made, same

IDS = torch.arange(24).reshape(2, 12) % 128
CASES = [(llama, record) for record in RECORDS] + [(gpt2, record) for record in BITSANDBYTES]


@pytest.mark.long_except(r"gpt2|Int")
@pytest.mark.parametrize(("kind", "record"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_weights_are_quantized_as_they_stream_in(kind, record, tmp_path):
    kind().save_pretrained(tmp_path / "full", max_shard_size="40KB")
    expected = fa.big.quantize(kind(), record)
    fa.big.save_quantized(tmp_path / "codes", expected, max_shard_size="20KB")
    for folder, chosen in (("full", record), ("codes", fa.big.quantization_of(tmp_path / "codes"))):
        model = empty(kind)
        fa.big.load(model, tmp_path / folder, quantization=chosen).remove()
        assert same(dict(model.state_dict()), dict(expected.state_dict()))
        with torch.no_grad():
            assert torch.equal(model.eval()(IDS).logits, expected.eval()(IDS).logits)


@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_layers_on_the_disk_are_codes(record, tmp_path):
    torch.save(made().state_dict(), tmp_path / "net.pt")
    expected = fa.big.quantize(made(), record).eval()
    model = empty().eval()
    places = {"up": "disk", "down": "disk", "norm": "cpu", "lm_head": "cpu"}
    run = fa.big.load(model, tmp_path / "net.pt", places, quantization=record, folder=tmp_path / "offload")
    x = made(lambda: torch.randn(4, 128))
    for _ in range(2):
        assert torch.equal(model(x), expected(x))
    run.remove()
    assert same(dict(model.named_buffers()), dict(expected.named_buffers()))


def test_codes_need_a_record_and_wrong_ones_leave_the_model(tmp_path):
    folder = fa.big.save_quantized(tmp_path / "codes", fa.big.quantize(made(), fa.big.Nf4()))
    with pytest.raises(ArgumentError, match="holds codes of Nf4") as raised:
        fa.big.load(empty(), folder)
    assert "quantization_of" in raised.value.fix
    for record in (fa.big.Nf4(double=True), fa.big.Int8(), fa.big.Nf4(block=128)):
        model = empty()
        with pytest.raises(TreeMismatchError, match="up"):
            fa.big.load(model, folder, quantization=record)
        assert type(model.up) is nn.Linear
        assert model.up.weight.requires_grad
    model = made().to(torch.bfloat16)
    with pytest.raises(TreeMismatchError, match="up"):
        fa.big.load(model, folder, quantization=fa.big.Int8(keep="norm"))
    assert model.norm.weight.dtype is torch.bfloat16
    assert not hasattr(model, "is_loaded_in_8bit")
    model = fa.big.quantize(empty(), fa.big.Nf4())  # a model that is quantized and empty needs no record
    fa.big.load(model, folder).remove()
    assert isinstance(model, Net)
    assert not model.up.missing()


def test_a_file_with_layers_that_bitsandbytes_gets_wrong_is_refused(tmp_path, monkeypatch):
    kind = lambda: Net(96)  # noqa: E731
    with monkeypatch.context() as patched:
        patched.setattr(fa.big.Nf4, "obstacle", lambda self, layer: None)  # as other tools do
        folder = fa.big.save_quantized(tmp_path / "codes", fa.big.quantize(made(kind), fa.big.Nf4()))
    model = empty(kind)
    with pytest.raises(TreeMismatchError, match="up"):
        fa.big.load(model, folder, quantization=fa.big.quantization_of(folder))
    assert type(model.down) is nn.Linear
