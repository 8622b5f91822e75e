from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from lockstep.training.checkpoint import weights
from tests.product import UserError


def test_weight_files(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = tmp_path / "w.pth"
    torch.save({f"module.{name}": tensor for name, tensor in model.state_dict().items()}, path)
    other = torch.nn.Linear(2, 2)
    weights.assign(other, weights.read(path), path)
    assert torch.equal(model.weight, other.weight)
    with pytest.raises(UserError, match="weight has shape"):
        weights.assign(torch.nn.Linear(3, 2), weights.read(path), path)
    with pytest.raises(UserError, match="bias is not in the model"):
        weights.assign(torch.nn.Linear(2, 2, bias=False), weights.read(path), path)
    with pytest.raises(UserError, match="exists already"):
        weights.write({}, path)
    for content in (b"", b"nonsense", b"\x80\x04cposix\nsystem\n"):
        for bad in (path, tmp_path / "bad.safetensors"):
            bad.write_bytes(content)
            with pytest.raises(UserError, match=r"is not a file of plain weights"):
                weights.read(bad)
    plain = {"weight": torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last), "bias": torch.randn(2)}
    weights.write(plain, tmp_path / "w.safetensors")
    for read in (weights.read, safetensors.torch.load_file):  # ours, and anybody's
        found = read(tmp_path / "w.safetensors")
        assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)
    weights.write(plain, tmp_path / "v.safetensors", {"width": 64, "half": "\ud800", "\ud800": 1, 2: 3, "format": "x"})  # type: ignore[dict-item]
    with safetensors.safe_open(tmp_path / "v.safetensors", "pt") as file:
        assert file.metadata() == {"width": "64", "format": "pt"}
    values = {f"v{number}": number for number in range(8)}
    weights.write(plain, tmp_path / "one.safetensors", values)
    weights.write(dict(reversed(plain.items())), tmp_path / "other.safetensors", dict(reversed(values.items())))
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "other.safetensors").read_bytes()
    torch.save([1], path)
    with pytest.raises(UserError, match="does not hold a state dict"):
        weights.read(path)
    with pytest.raises(UserError, match="cannot read"):
        weights.read(tmp_path / "none.pth")
