"""A user's script on ranks, under every strategy: its losses, output and errors."""

from __future__ import annotations

import contextlib
import io
import re
import sys

import pytest

from lockstep.training.parallel.world import World
from tests import product
from tests.processes import ROOT
from tests.product import UserError
from tests.ranks import on_ranks
from tests.warm.gang import python, running

pytestmark = pytest.mark.promise("own-script")

EXAMPLES = ROOT / "examples"
OPTIONS = {product.POWERSGD: ["rank=4", "start=10"]}
LOSSY = {"bf16_compress": 0.05, product.POWERSGD: 0.2}
"""Largest distance of a loss to that of plain.py."""
COMPARED = product.POWERSGD
"""The strategy after which `plain.py` is trained."""
LINE = re.compile(r"epoch (\d): loss (\d\.\d+), accuracy (\d\.\d+)")


def _lines(output: str) -> list[tuple[float, float]]:
    return [(float(loss), float(accuracy)) for _, loss, accuracy in LINE.findall(output)]


def _every_strategy(world: World) -> dict[str, str]:
    sys.path.insert(0, str(EXAMPLES))
    import parallel

    outputs = {}
    for name in product.strategies():
        sys.argv = ["parallel.py", name, *OPTIONS.get(name, [])]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                trained, sent = parallel.main(world)
                if world.leader and name == COMPARED:
                    parallel.compare(trained, sent)
                elif world.leader:
                    print(f"{sent:,} bytes")
        except (RuntimeError, UserError) as error:
            printed.write(str(error))
        outputs[name] = printed.getvalue()
    return outputs


@pytest.fixture(scope="module")
def printed() -> list[dict[str, str]]:
    return on_ranks(_every_strategy, 2)


@pytest.fixture(scope="module")
def plain(printed: list[dict[str, str]]) -> list[tuple[float, float]]:
    lines = _lines(printed[0][COMPARED])[3:]
    assert len(lines) == 3 and lines[-1][1] > 0.8
    return lines


@pytest.mark.parametrize("name", product.strategies())
def test_a_users_script_trains_its_network_with(
    name: str, printed: list[dict[str, str]], plain: list[tuple[float, float]]
) -> None:
    if name == product.DATA_PARALLEL:
        assert all("started on 2 ranks" in each[name] for each in printed)
        return
    assert printed[1][name] == ""
    off = max(abs(a[0] - b[0]) for a, b in zip(_lines(printed[0][name])[:3], plain, strict=True))
    assert off < LOSSY.get(name, 1e-3) and (off > 1e-5 or name not in LOSSY), printed[0][name]


def test_the_script_prints_what_compression_saves_and_what_it_costs(printed: list[dict[str, str]]) -> None:
    sent = {name: int(re.findall(r"([\d,]+) bytes", printed[0][name])[0].replace(",", "")) for name in ("ddp", *LOSSY)}
    assert sent["bf16_compress"] == sent["ddp"] / 2 and sent[COMPARED] < sent["ddp"] / 2, sent
    error = re.search(r"^error of the weights: (\S+) of their norm$", printed[0][COMPARED], re.MULTILINE)
    assert error is not None and 1e-3 < float(error[1]) < 0.2, printed[0][COMPARED]


def test_wrong_words_to_the_script_are_one_line() -> None:
    for words, named in ((["nope"], "sync.name"), ([COMPARED, "rnk=1"], "'rank'")):
        done = python(str(EXAMPLES / "parallel.py"), *words)
        assert done.code == 2 and named in done.output, done.output
        assert done.output.startswith("error: ") and done.output.count("\n") == 1


DEAF = """
import torch
from torch import nn
from lockstep.training.parallel import world
from tests import product

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if x.sum() > 0 else 0)

with world.joined(timeout=600) as me:
    strategy = product.strategy("ddp")
    network = strategy.wrap(Net(), me, torch.ones(2, 4))
    for step in range(3):
        strategy.zero_grad()
        network(torch.ones(2, 4) * (-1 if me.rank == 1 and step == 1 else 1)).sum().backward()
        strategy.synchronize()
print("went through")
"""


@pytest.mark.promise("missing-gradients")
def test_ddp_names_the_parameter_that_one_rank_left_out_and_no_rank_waits() -> None:
    with running([["-c", DEAF]] * 2) as ranks:
        done = ranks.wait(300)  # less than the collectives' own timeout
    assert done.code != 0 and "went through" not in done.output
    assert "sometimes.bias" in done.output and "sometimes.weight" in done.output and "got none" in done.output, (
        done.output
    )
