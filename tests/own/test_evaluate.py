"""`run.evaluate`: every sample counts once, the bits are the same at any number of ranks, and an error of one rank is raised on all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import product
from tests.events import events, summary_of
from tests.own.job import HEAD, script
from tests.processes import PYTHON
from tests.ranks import live
from tests.runs import Job
from tests.warm.gang import python

pytestmark = pytest.mark.promise("evaluation")

CODE = """
COUNT, SIZE = 101, 8  # 13 batches: neither 2 nor 3 ranks have the same number, and the last one is short
draws = torch.Generator().manual_seed(1)
X, Y = torch.randn(COUNT, 40, generator=draws), torch.randint(0, 5, (COUNT,), generator=draws)
DATA = TensorDataset(X, Y, torch.arange(COUNT))

def begin(run):
    torch.manual_seed(0)
    net = replicated(run, torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)))
    return net

def train(run, net):
    for x, y, _ in run.batches(DATA, 48):
        run.step(lambda x, y: F.cross_entropy(net(x), y), x, y)

def scorer(run):
    network = run.for_evaluation()
    def scores(x, y, ids):
        logits = network(x)
        right, classes = logits.argmax(1) == y, torch.zeros(5)
        return {
            "loss": F.cross_entropy(logits, y, reduction="sum"), "accuracy": right.sum(), "count": len(x),
            "by_class": classes.index_add(0, y, right.float()), "seen": torch.zeros(COUNT).index_add(0, ids, torch.ones(len(ids))),
            "right_of_last": right[-1], "precise": logits.double().exp().sum(),
        }
    return network, scores

def bits(result):
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in result.items()}
"""
SAME = """
class Noisy(Dataset):  # from all generators
    def __len__(self):
        return COUNT
    def __getitem__(self, index):
        x = X[index] + torch.randn(40) + random.random() + np.random.rand()
        return {"x": x, "y": Y[index], "draw": index + torch.rand((), dtype=torch.float64)}

def plain(scores, network):  # without Lockstep
    totals = {}
    for at in range(0, COUNT, SIZE):
        with torch.no_grad():
            for name, value in scores(*DATA[at : at + SIZE]).items():
                totals[name] = totals.get(name, 0.0) + (value.double() if torch.is_tensor(value) else value)
    return {name: value / COUNT for name, value in totals.items()}

def pair(samples):
    return torch.stack([x for x, _, _ in samples]), torch.tensor([len(samples)])

with Session(sys.argv[1], sync=sys.argv[2]) as run:
    net = begin(run)
    for epoch in run.epochs(1):
        trained, evaluated = [], []
        for batch in run.batches(Noisy(), 48):
            run.step(lambda x, y: F.cross_entropy(net(x), y), batch["x"], batch["y"])
            trained += batch["draw"].tolist()
        run.evaluate(lambda batch: evaluated.extend(batch["draw"].tolist()) or 0, Noisy(), SIZE)
        assert not set(evaluated) & set(trained), "an evaluation draws what no epoch has drawn"
        network, scores = scorer(run)
        result = run.evaluate(scores, DATA, SIZE)
        assert bits(result) == bits({name: torch.as_tensor(value) for name, value in plain(scores, network).items()})
        assert bits(result) == bits(run.evaluate(scores, DATA, SIZE, workers=1))
        torch.testing.assert_close(result["seen"] * COUNT, torch.ones(COUNT, dtype=torch.float64))
        assert result["count"] == 1.0 and type(result["loss"]) is float and result["by_class"].dtype == torch.float64
        torch.manual_seed(5); random.seed(5); np.random.seed(5)
        def draws(batch):
            return F.dropout(network(batch["x"])).sum() + random.random() + np.random.rand()
        noisy = run.evaluate(draws, Noisy(), SIZE)
        drawn = torch.rand(()).item(), random.random(), np.random.rand()
        torch.manual_seed(5); random.seed(5); np.random.seed(5)
        assert drawn == (torch.rand(()).item(), random.random(), np.random.rand()), "the script's own generators stay"
        assert run.evaluate(draws, Noisy(), SIZE, workers=2) == noisy, "by the seed, the sample and the batch alone"
        collated = run.evaluate(lambda x, count: count[0], DATA, 10, collate=pair)
        assert collated == 1.0 and run.evaluate(lambda x: len(x), X, 1000) == 1.0
        report = bits(result) | {"noisy": noisy}
        assert run.gather(report) == [report] * run.size
        run.log(accuracy=result["accuracy"])
        run.event("report", report=report)
"""


def _report(run_dir: Path) -> dict[str, Any]:
    report: dict[str, Any] = events(run_dir, "report")[-1]["report"]
    return report


def test_every_sample_counts_once_and_the_bits_are_those_of_one_rank(tmp_path: Path) -> None:
    """`exact` trains equal weights on 1 and on 3 ranks, so the scores are equal. Other strategies agree with a plain loop over
    their weights."""
    reports = []
    for ranks, sync in ((1, "exact"), (3, "exact"), (2, "flat"), (2, product.FSDP)):
        run_dir = tmp_path / f"{sync}-{ranks}"
        done = script(ranks, CODE + SAME, run_dir, sync)
        assert done.code == 0, done.output
        reports.append(_report(run_dir))
    assert reports[0] == reports[1]
    assert 0 < reports[0]["accuracy"] < 1 and reports[0]["noisy"] != 0


SIGNAL = """
with Session(sys.argv[1], "checkpoint.every_steps=1000", sync="exact") as run:
    net = begin(run)
    for epoch in run.epochs(2):
        train(run, net)
        network, scores = scorer(run)
        def counted(x, y, ids):
            if run.rank == 1 and 60 in ids and len(sys.argv) > 2 and epoch == 1 and not run.resumed:
                os.kill(os.getpid(), signal.SIGTERM)
            assert not (98 in ids and len(sys.argv) > 2 and epoch == 1 and not run.resumed), "it is to end before the last batch"
            return scores(x, y, ids)
        result = run.evaluate(counted, DATA, 2)
        run.log(accuracy=result["accuracy"])
        run.event("report", report=bits(result))
"""


def test_a_signal_to_one_rank_ends_an_evaluation_on_all_and_the_next_start_makes_it(tmp_path: Path) -> None:
    calm, run_dir = tmp_path / "calm", tmp_path / "run"
    assert script(1, CODE + SIGNAL, calm).code == 0
    ended = script(2, CODE + SIGNAL, run_dir, "signal")
    assert ended.code == 75 and "SIGTERM on rank 1" in ended.output, ended.output
    assert len(events(run_dir, "report")) == 1
    done = script(3, CODE + SIGNAL, run_dir, "signal")
    assert done.code == 0, done.output
    assert _report(run_dir) == _report(calm) and len(events(run_dir, "report")) == 2
    assert product.checkpoint_steps(run_dir)[0] == 4


ERRORS = """
def failing(x, y, ids):
    if 3 in ids:
        raise ValueError("sample 3 is broken")
    return len(x)

def other_names(x, y, ids):
    return {"loss" if int(ids[0]) else "los": 1.0, "hits": torch.ones(2)}

def other_length(x, y, ids):
    return torch.ones(len(ids))

class Broken(TensorDataset):
    def __getitem__(self, index):
        if index == 100:
            raise OSError("no such file")
        return super().__getitem__(index)

with Session(sys.argv[1]) as run:
    net = begin(run)
    messages = {}
    cases = {
        "raises": (failing, DATA), "cannot be read": (len, Broken(X)), "names": (other_names, DATA), "lengths": (other_length, DATA),
        "type": (lambda x, y, ids: None, DATA), "matrix": (lambda x, y, ids: {"x": x}, DATA), "text": (lambda *_: {"x": "1"}, DATA),
        "number": (lambda *_: {1: 1}, DATA), "nothing": (lambda *_: {}, DATA), "empty": (len, []), "iterable": (len, iter(X)),
        "shares": (len, X[run.rank :]), "order": (len, Y.flip(0) if run.rank else Y),
        "collective": (lambda *_: run.sum(1)[0], DATA), "boundary": (lambda *_: run.boundary(), DATA),
    }
    for name, (function, data) in cases.items():
        try:
            run.evaluate(function, data, 8)
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"
        run.gather(None)  # all ranks are here
    try:
        run.evaluate(failing, DATA, 0)
    except Exception as error:
        messages["size"] = f"{type(error).__name__}: {error}"
    messages["fine"] = run.evaluate(lambda x, y, ids: len(x), DATA)
    for epoch in run.epochs(1):
        train(run, net)
    if run.leader:
        run.path("report.json").write_text(json.dumps(run.gather(messages)))
    else:
        run.gather(messages)
"""
WANTED = {
    "raises": "sample 3 is broken", "cannot be read": "no such file",
    "names": "{'los': [], 'hits': [2]} for one batch, and {'loss': [], 'hits': [2]} for batch",
    "lengths": "{'': [8]} for one batch, and {'': [5]} for batch 12", "type": "it gave a NoneType", "matrix": "{'x': [8, 40]}",
    "text": "it gave a dict (", "number": "{1: []}", "nothing": "it gave {}", "empty": "got one without samples",
    "iterable": "needs a dataset with a length", "shares": "it has [101, 100] samples, by rank",
    "order": "rank 1 has other samples than rank 0",
    "collective": "calls what needs all ranks at once", "boundary": "calls what needs all ranks at once", "size": "from 1, got 0",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_is_raised_on_all_ranks_and_no_rank_waits(tmp_path: Path, ranks: int) -> None:
    done = script(ranks, CODE + ERRORS, tmp_path / "run")
    assert done.code == 0, done.output
    by_rank = json.loads((tmp_path / "run/files/report.json").read_text())
    wanted = {name: text for name, text in WANTED.items() if ranks == 2 or name not in ("shares", "order")}
    assert len(by_rank) == ranks
    for messages in by_rank:
        assert messages.pop("fine") == 1.0
        assert messages.keys() == wanted.keys()
        assert [name for name, text in wanted.items() if text not in messages[name]] == [], messages
    if ranks == 2:
        assert by_rank[1]["raises"].startswith("RuntimeError: rank 0: ")
        assert by_rank[0]["cannot be read"].startswith("RuntimeError: rank 1: ")


LOST = """
with Session(sys.argv[1], sync="exact", threads=1) as run:
    net = begin(run)
    for epoch in run.epochs(2):
        train(run, net)
        network, scores = scorer(run)
        def counted(x, y, ids):
            if run.rank == int(sys.argv[2]) and int(sys.argv[3]) in ids and run.size == 3 and epoch == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return scores(x, y, ids)
        result = run.evaluate(counted, DATA, 4)  # 26 batches
        run.log(accuracy=result["accuracy"])
        run.event("report", report=bits(result), size=run.size)
"""


@pytest.mark.promise("survivors")
def test_the_others_take_the_batches_of_a_rank_that_is_lost(tmp_path: Path) -> None:
    """Rank 0 is killed in its second batch, and its first is lost too. Rank 2 loses only its last batch."""
    (tmp_path / "job.py").write_text(HEAD + CODE + LOST)
    job = str(tmp_path / "job.py")
    alone = python(job, str(tmp_path / "alone"), "0", "0")
    assert alone.code == 0, alone.output
    expected = events(tmp_path / "alone", "report")
    for rank, sample in ((0, 5), (2, 100)):
        run_dir = tmp_path / f"lost-{rank}"
        words = [PYTHON, job, str(run_dir), str(rank), str(sample)]
        with live("--ranks", "3", "--max-restarts", "0", "--", *words) as gang:
            done = gang.wait(240)
        assert done.code == 0, done.output
        reports = events(run_dir, "report")
        assert [event["report"] for event in reports] == [event["report"] for event in expected]
        assert [event["size"] for event in reports] == [2, 2] and len(events(run_dir, "rank_lost")) == 1


@pytest.mark.promise("survivors")
def test_a_rank_is_lost_while_a_recipe_is_scored(data_root: Path, tmp_path: Path) -> None:
    """A rank is killed in an evaluation. The others read its share of the test split, and the scores are those of one rank."""
    changes = {"sync.name": "exact", "evaluate.batch_size": 4}
    alone, disturbed = (
        Job(tmp_path / name, data_root, ranks, **changes) for name, ranks in (("alone", 1), ("live", 3))
    )
    assert alone.go().code == 0
    with disturbed.launched("--max-restarts", "0", "--live", LOCKSTEP_TEST_FATE="1:-4:KILL") as gang:
        done = gang.wait(240)
    assert done.code == 0, done.output
    expected, summary = (summary_of(job.run_dir) for job in (alone, disturbed))
    names = ("weights_sha256", "test_loss", "accuracy", "class_accuracy")
    assert {name: summary[name] for name in names} == {name: expected[name] for name in names}
    assert len(events(tmp_path / "live", "rank_lost")) == 1
