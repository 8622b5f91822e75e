from __future__ import annotations

import errno
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.training import files
from lockstep.training.checkpoint import layout, naming, store
from lockstep.training.checkpoint.state import checked
from lockstep.training.checkpoint.store import CorruptCheckpoint, Writer, load, newest_verified, verify
from lockstep.training.contract import UserError
from lockstep.training.parallel.exchange import DTYPES, join, pack, split, unpack


def _state(step: int) -> dict[str, Any]:
    return {
        "shared": {"model": {"w": torch.full((5, 3), float(step)), "b": torch.zeros(0)}, "cursor": [step, 1]},
        "ranks": [{"rng": (3, tuple(range(9)), None), 0: torch.tensor(True), "x": torch.ones(2, dtype=torch.bfloat16)}],
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


_leaves = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.builds(
        lambda kind, shape: (torch.rand(shape) * 9).to(DTYPES[kind]),
        st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3),
    )
)  # fmt: skip
_trees = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(_trees)
def test_trees_survive_every_way_of_travelling(tree: Any) -> None:
    plain, tensors = split(tree)
    assert _same(join(json.loads(json.dumps(plain)), tensors), tree)
    assert _same(unpack(pack(tree)), tree)
    plain, names = layout.named(plain)
    assert _same(layout.join(json.loads(json.dumps(plain)), dict(zip(names, tensors))), tree)


@given(_trees)
def test_every_tree_can_be_saved_and_read(tree: Any) -> None:
    """Whatever its keys make of the tensors' names: a key may hold a slash, and two places of a tree the same text."""
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), keep=1, keep_best=False)
        assert _same(load(writer.save(1, tree).result().path), tree)
        writer.wait()


def test_each_tensor_has_a_name_that_says_what_it_is(writer: Writer) -> None:
    one = torch.ones(1)
    kept = {"conv.weight": {"momentum_buffer": one, "step": 3}, "a/b": {"x": one}, "a": {"b/x": one}}
    rank = {"rng": {"torch": one}, "buffers": {"n.mean": one}, "sync": {"errors": {0: one, -1: one}, "rng": ["M", one]}}
    shared = {
        "model": {"conv.weight": one},
        "average": {"conv.weight": one},
        "optimizer": {"state": kept},
        "x": (1, [one]),
    }
    path = (
        writer.save(1, {"shared": shared, "ranks": [rank, {"\ud800": one}], "": one, "__metadata__": one}).result().path
    )
    with safetensors.safe_open(path / store.TENSORS, framework="pt") as file:
        assert sorted(file.keys()) == sorted([
            "model/conv.weight", "average/conv.weight", "optim/conv.weight/momentum_buffer", "optim/a/b/x", "optim/a/b/x~",
            "x/1/0", "ranks/0/rng/torch", "ranks/0/buffers/n.mean", "ranks/0/sync/errors/0", "ranks/0/sync/errors/-1",
            "ranks/0/sync/rng/1", "ranks/1/?", "~", "__metadata__~",
        ])  # fmt: skip
        assert file.metadata() == {"format": "pt"}
    assert list(load(path)["ranks"][1]) == ["\ud800"]


def test_each_tensor_lies_at_a_multiple_of_the_size_of_its_elements(writer: Writer) -> None:
    tensors = [
        torch.ones(3, dtype=dtype) for dtype in (torch.uint8, torch.float64, torch.bool, torch.bfloat16, torch.float32)
    ]
    data = (writer.save(1, tensors).result().path / store.TENSORS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for number, tensor in enumerate(tensors):
        assert header[str(number)]["data_offsets"][0] % tensor.element_size() == 0


@pytest.mark.parametrize("limit", ["MAX_STATE_BYTES", "MAX_HEADER_BYTES"])
def test_what_could_not_be_read_back_is_not_written(
    writer: Writer, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.save(1, _state(1)).result()
    monkeypatch.setattr(store, limit, 100)
    with pytest.raises(OSError, match="at most 100 are read"):
        writer.save(2, _state(2)).result()
    assert [path.name for path in writer.directory.iterdir()] == ["step-00000001"]


def test_what_no_checkpoint_can_hold() -> None:
    with pytest.raises(TypeError, match="cannot hold a PosixPath"):
        split({"x": [Path()]})
    with pytest.raises(TypeError, match="cannot hold torch.complex64"):
        split(torch.zeros(1, dtype=torch.complex64))


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    made = Writer(tmp_path / "checkpoints", keep=2, keep_best=True)
    yield made
    made.wait()


def test_a_checkpoint_gives_back_every_bit(writer: Writer) -> None:
    state = _state(7)
    path = writer.save(7, state).result().path
    state["shared"]["model"]["w"].zero_()  # the live tensors go on; the copy was taken at once
    assert _same(load(path), _state(7))
    assert path.name == "step-00000007" and verify(path)["step"] == 7


def test_the_buffer_is_allocated_once(writer: Writer) -> None:
    writer.save(1, _state(1)).result()
    before = [buffer.data_ptr() for buffer in writer._buffers]
    writer.save(2, _state(2)).result()
    assert [buffer.data_ptr() for buffer in writer._buffers] == before


def test_newest_and_best_are_kept(writer: Writer) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.3), (4, None), (5, 0.2)):
        writer.save(step, _state(step), score).result()
    assert [store.step_of(path) for path in store.candidates(writer.directory)] == [5, 4, 2]


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["first", "middle", "last", "truncate", "empty", "missing"])
def test_any_damage_is_found_and_the_one_before_is_used(writer: Writer, name: str, damage: str) -> None:
    writer.save(1, _state(1)).result()
    path = writer.save(2, _state(2)).result().path / name
    data = bytearray(path.read_bytes())
    if damage in ("first", "middle", "last"):
        at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 2}[damage]
        data[at] ^= 4
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncate": data[: len(data) // 2], "empty": b""}.get(damage, data))
    warnings: list[str] = []
    found = newest_verified(writer.directory, warnings.append)
    assert found is not None and store.step_of(found) == 1
    assert len(warnings) == 1 and name in warnings[0]


def test_all_bad_is_an_error_and_never_a_new_start(writer: Writer) -> None:
    assert newest_verified(writer.directory) is None
    for step in (1, 2):
        path = writer.save(step, _state(step)).result().path
        (path / "state.json").write_text("{}")
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        newest_verified(writer.directory)


def test_a_full_disk_fails_the_future_and_leaves_nothing_behind(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.save(1, _state(1)).result()

    def full(descriptor: int, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(OSError, match="No space"):
        writer.save(2, _state(2)).result()
    monkeypatch.undo()
    assert [path.name for path in writer.directory.iterdir()] == ["step-00000001"]
    assert store.step_of(writer.save(3, _state(3)).result().path) == 3


def test_older_ones_go_only_after_the_new_one_was_read_back(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        writer.save(step, _state(step)).result()

    def bad(path: Path) -> dict[str, Any]:
        raise CorruptCheckpoint("the disk lies")

    monkeypatch.setattr(store, "verify", bad)
    with pytest.raises(OSError, match="the disk lies"):
        writer.save(3, _state(3)).result()
    assert len(store.candidates(writer.directory)) == 3


def test_what_a_killed_save_left_is_cleaned(tmp_path: Path) -> None:
    for name in (".step-00000003.123", ".old-step-00000001.9", "step-00000002", ".hidden"):
        (tmp_path / name).mkdir()
    store.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "step-00000002"]


def test_a_step_that_is_saved_again_replaces_the_old_one_and_keeps_its_score(writer: Writer) -> None:
    writer.save(1, _state(1), 0.5).result()
    path = writer.save(1, _state(9)).result().path
    assert _same(load(path), _state(9)) and len(list(writer.directory.iterdir())) == 1
    assert verify(path)["score"] == 0.5


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, keep=1, keep_best=False)
    writer.save(1, _state(1)).result()
    real, calls = files.rename, [0]

    def failing(source: Path, target: Path) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(files, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        writer.save(1, _state(9)).result()
    writer.wait()
    found = newest_verified(tmp_path)
    assert found is not None and _same(load(found), _state(1))


def test_a_loss_that_is_no_number_is_no_damage() -> None:
    """A run with `nonfinite: ignore`, or whose evaluation alone overflows, goes on."""
    rank = {
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()}, "buffers": {}, "average_buffers": {},
        "losses": torch.zeros(2, dtype=torch.float64), "sync": {},
    }  # fmt: skip
    shared = {
        "model": {"w": torch.ones(2)}, "average": {}, "aliases": {}, "cursor": [0, 1], "trained_seconds": 1.0,
        "optimizer": {"state": {}, "own": {}, "param_groups": []},
        "history": {"train_loss": float("nan"), "test_loss": float("inf"), "accuracy": None},
    }  # fmt: skip
    assert checked({"shared": shared, "ranks": [rank]})["ranks"] == [rank]
    for history in ({"train_loss": "x"}, {"class_accuracy": torch.zeros(2)}, {"class_accuracy": ["cat"]}):
        with pytest.raises(ValueError, match="its history does not have the form that a run saves"):
            checked({"shared": {**shared, "history": history}, "ranks": [rank]})


def _optimizer() -> dict[str, Any]:
    """As torch has it, with an entry of the optimizer's own and a parameter that has got no gradient yet."""
    return {
        "state": {0: {"exp_avg": torch.ones(2)}, 2: {"exp_avg": torch.zeros(1)}, "count": 7},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }


def test_an_optimizers_state_goes_by_name_and_back() -> None:
    named = naming.by_name(_optimizer(), [["a", "b"], ["c"]])
    assert list(named["state"]) == ["a", "c"] and named["own"] == {"count": 7}
    assert named["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}]
    assert _same(naming.by_number(named, [["a", "b"], ["c"]]), _optimizer())
    other_order = naming.by_number(named, [["b", "a"], ["c"]])
    assert list(other_order["state"]) == [1, 2, "count"] and other_order["param_groups"][0]["params"] == [0, 1]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([["a", "b", "c"]], "has 1 groups of parameters, and the checkpoint has different ones"),
        ([["a", "renamed"], ["c"]], "b is in group 0 of either"),
        ([["a"], ["b", "c"]], "b is in group 0 of either"),
    ],
)
def test_another_optimizers_state_is_refused(names: list[list[str]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        naming.by_number(naming.by_name(_optimizer(), [["a", "b"], ["c"]]), names)


def test_state_of_a_parameter_that_the_optimizer_does_not_have() -> None:
    named = naming.by_name(_optimizer(), [["a", "b"], ["c"]])
    named["state"]["d"] = {}
    with pytest.raises(ValueError, match="has no parameter d"):
        naming.by_number(named, [["a", "b"], ["c"]])
