from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from lockstep.tools.export import write
from lockstep.training.checkpoint import weights
from lockstep.training.parallel import names
from tests.product import UserError


def test_weight_files(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "w.pth"
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, path)
    target = torch.nn.Linear(2, 2)
    weights.assign(target, weights.read(path), path)
    assert torch.equal(model.weight, target.weight)
    with pytest.raises(UserError, match=r"w\.pth does not fit the model: .*size mismatch for weight"):
        weights.assign(torch.nn.Linear(3, 2), weights.read(path), path)
    with pytest.raises(UserError, match=r"Unexpected key.*bias"):
        weights.assign(torch.nn.Linear(2, 2, bias=False), weights.read(path), path)
    with pytest.raises(UserError, match="exists already"):
        write({}, path)
    for content in (b"", b"nonsense", b"\x80\x04cposix\nsystem\n"):
        for bad in (path, tmp_path / "bad.safetensors"):
            bad.write_bytes(content)
            with pytest.raises(UserError, match=r"is not a file of plain weights"):
                weights.read(bad)
    plain = {"weight": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last), "bias": torch.randn(2)}
    write(plain, tmp_path / "w.safetensors")
    for read in (weights.read, safetensors.torch.load_file):  # our reader, and safetensors'
        tensors = read(tmp_path / "w.safetensors")
        assert tensors.keys() == plain.keys() and all(torch.equal(tensors[name], plain[name]) for name in plain)
    write(plain, tmp_path / "v.safetensors", {"width": 64, "half": "\ud800", "\ud800": 1, 2: 3, "format": "x"})  # type: ignore[dict-item]
    with safetensors.safe_open(tmp_path / "v.safetensors", "pt") as file:
        assert file.metadata() == {"width": "64", "format": "pt"}
    values = {f"v{number}": number for number in range(8)}
    write(plain, tmp_path / "one.safetensors", values)
    write(dict(reversed(plain.items())), tmp_path / "other.safetensors", dict(reversed(values.items())))
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    torch.save([1], path)
    with pytest.raises(UserError, match="does not hold a state dict"):
        weights.read(path)
    with pytest.raises(UserError, match="cannot read"):
        weights.read(tmp_path / "none.pth")


class Net(torch.nn.Module):
    def __init__(self, parallel: type[torch.nn.Module] | None = None) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 2)  # the network's attribute, not a wrapper's
        self.tied = torch.nn.Sequential(self.module)
        if parallel is not None:
            self.tied = parallel(self.tied)  # type: ignore[assignment]
        self.register_buffer("cache", torch.zeros(1), persistent=False)


class Compiled(torch.nn.Module):
    """As `torch.compile` keeps a module, without its compiler, which takes seconds to load."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_what_wrappers_add_to_names_makes_no_difference(tmp_path: Path) -> None:
    net, path = Net(), tmp_path / "w.pth"
    wrapped = Compiled(Net(torch.nn.DataParallel))
    assert {*names.plain(wrapped, wrapped.state_dict())} == net.state_dict().keys()
    for prefix in (
        "",
        "module.",
        "_orig_mod.",
        "_orig_mod.module.",
        "_fsdp_wrapped_module.",
        "tied._checkpoint_wrapped_module.",
    ):
        tensors = {
            (prefix + name if "tied" not in prefix else name.replace("tied.", prefix)): tensor
            for name, tensor in net.state_dict().items()
        }
        for content in (tensors, {"state_dict": tensors, "epoch": 3}, {"model": tensors, "optimizer": {"state": {}}}):
            torch.save(content, path)
            for target in (Net(), wrapped):
                weights.assign(target, weights.read(path), path)
                assert all(
                    torch.equal(first, second)
                    for first, second in zip(net.state_dict().values(), target.state_dict().values())
                )
    tensors = net.state_dict()
    with pytest.raises(UserError, match="Unexpected key"):
        weights.assign(Net(), {**tensors, "_orig_mod.module.weight": tensors["module.weight"]}, path)
    torch.save({"model": tensors, "model_ema": tensors, "epoch": 3}, path)
    with pytest.raises(UserError, match="holds 'model' and 'model_ema'"):
        weights.read(path)
