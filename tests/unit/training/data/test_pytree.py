"""Every batch of a loader moves to the device and keeps its types."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence

from lockstep.training.data.pytree import to_device

META = torch.device("meta")


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding: its `to` moves what is in it, and gives itself back."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        self.data = {name: value.to(device=device, non_blocking=non_blocking) for name, value in self.data.items()}
        return self


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str
    count: int = field(init=False, default=3)


def x() -> torch.Tensor:
    return torch.ones(2)


ITEMS: dict[str, tuple[Any, Any]] = {
    "a packed sequence": (
        lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
        lambda p: [p.data] if p.batch_sizes.device.type == "cpu" else [],  # torch wants these on the CPU
    ),
    "an encoding": (lambda: Encoding({"x": x()}, "kept"), lambda e: [e["x"]] if e.encodings == "kept" else []),
    "a dictionary": (lambda: {"x": x(), "text": ["a"]}, lambda d: [d["x"]] if d["text"] == ["a"] else []),
    "a shape": (lambda: (x(), torch.Size([1, 2])), lambda p: [p[0]] if type(p[1]) is torch.Size else []),
    "a dataclass": (lambda: Sample(x(), "a"), lambda s: [s.x] if (s.name, s.count) == ("a", 3) else []),
}


def test_whatever_is_given_comes_to_the_device_and_stays_what_it_was() -> None:
    for name, (make, tensors) in ITEMS.items():
        item = make()
        moved = to_device(item, META)
        on_device = tensors(moved)
        assert type(moved) is type(item) and on_device and all(tensor.device == META for tensor in on_device), name
