"""A step given as a function may run again: in parts, at half the scale, for a diagnosis. A step given as a loss is left out if it
overflows. A run can end early."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests import product
from tests.events import events, status_of, summary_of
from tests.own.job import assert_weights, script, scripts, shared
from tests.processes import Result

CODE = """
run_dir, options, *words = sys.argv[1:]
how = {"loss": False, "scaled": False, "norm": False, "dropout": 0.0, "steps": 20, "fate": "-1:0:", **json.loads(options)}
DATA = TensorDataset(torch.randn(240, 6, generator=torch.Generator().manual_seed(1)), torch.arange(240) % 3)
drawn, calls, infinite, right = [], [], [], []
struck, at, what = how["fate"].split(":")
class Shift(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(8))
    def forward(self, x):
        by = self.by * 1
        if infinite:  # in one gradient element: under zero1 and fsdp it is in one rank's part
            by.register_hook(lambda grad: torch.cat([grad[:-1], grad[-1:] * float("inf")]))
        return x + by
class Drawn(torch.nn.Dropout):
    def forward(self, x):
        y = super().forward(x)
        if self.training:
            drawn.append(float(((y == 0).float() * torch.arange(y.numel()).view(y.shape)).sum()))
        return y
with Session(run_dir, "checkpoint.every_steps=100", *words, config={"name": "function"}) as run:
    torch.manual_seed(3)
    norm = torch.nn.BatchNorm1d(8) if how["norm"] else torch.nn.Identity()
    model = run.replicate(torch.nn.Sequential(torch.nn.Linear(6, 8), norm, Shift(), Drawn(how["dropout"]), torch.nn.Linear(8, 3)))
    optimizer = run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    scaler = torch.amp.GradScaler("cpu", growth_interval=5, enabled=how["scaled"])
    run.keep(scaler=scaler)
    def loss(x, y):
        calls.append(run.steps)
        here = run.rank == int(struck)
        infinite[:] = [1] * (here and (what == "INF" and run.steps == int(at) and calls.count(run.steps) < 3
                                       or what == "EVER" and run.steps >= int(at)))
        if here and what == "NAN" and run.steps == int(at):
            x = x * float("nan")
        logits = model(x)
        right.append(int((logits.argmax(1) == y).sum()))
        return F.cross_entropy(logits, y), {"accuracy": right[-1]}
    for epoch in run.epochs(steps=how["steps"]):
        for x, y in run.batches(DATA, 24):
            if what == "LEAVE" and run.steps == int(at):
                sys.exit(0)
            if how["loss"]:
                run.step(loss(x, y)[0], scaler=scaler, clip=1.0)
            else:
                run.step(loss, x, y, scaler=scaler, clip=1.0)
            if what == "STOP" and run.steps == int(at) and run.rank == int(struck):
                run.stop("enough")
        run.log(calls=len(calls))
    drawn = run.gather(drawn)
    run.print(f"RIGHT {sum(run.gather(sum(right[-10:]))) / 240}")
    run.print(f"DRAWN {drawn[0][:1] != drawn[-1][:1]} {[len(each) for each in drawn]}")
    print(f"SCALE {scaler.get_scale()} CALLS {len(calls)}\\n", end="")
"""


def case(run_dir: Path, *words: str, **options: object) -> tuple[object, ...]:
    return run_dir, json.dumps(options), *words


def train(run_dir: Path, *words: str, code: str = CODE, **options: object) -> Result:
    return script(2, code, run_dir, json.dumps(options), *words)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run without options, and its output."""
    run_dir = tmp_path_factory.mktemp("whole")
    done = train(run_dir)
    assert done.code == 0, done.output
    return run_dir, done.output


@pytest.mark.promise("half-precision", "session-same")
@pytest.mark.parametrize("sync", ["ddp", "zero1"])
def test_a_step_that_overflows_is_taken_again_and_none_is_lost(tmp_path: Path, sync: str) -> None:
    """Scales are powers of two: the weights are those without a scale, of all twenty steps."""
    name = f"sync.name={sync}"
    cases = case(tmp_path / "plain", name), case(tmp_path / "half", name, scaled=True, fate="1:3:INF")
    plain, half = scripts(2, CODE, *cases)
    assert plain.code == half.code == 0, half.output
    assert "CALLS 20" in plain.output and half.output.count("CALLS 22") == 2, half.output
    assert_weights(tmp_path / "plain", shared(tmp_path / "half")["model"], atol=0)


@pytest.mark.promise("half-precision", "session-same")
@pytest.mark.parametrize("sync", ["flat", product.FSDP])
def test_an_overflow_on_one_rank_leaves_out_the_step_of_a_loss_on_all(tmp_path: Path, sync: str) -> None:
    """The weights are those without a scaler, which leaves out the same step."""
    how = {"loss": True, "fate": "1:7:INF"}
    plain = case(tmp_path / "plain", f"sync.name={sync}", "nonfinite=skip", **how)
    skipped, done = scripts(2, CODE, plain, case(tmp_path / "scaled", f"sync.name={sync}", scaled=True, **how))
    assert skipped.code == done.code == 0, skipped.output + done.output
    assert done.output.count("SCALE 262144.0") == 2, done.output  # 2^16: doubled once, halved, doubled twice
    assert_weights(tmp_path / "plain", shared(tmp_path / "scaled")["model"], atol=0)


@pytest.mark.promise("half-precision")
def test_the_scale_resumes_where_it_was(whole: tuple[Path, str], tmp_path: Path) -> None:
    """Scales are powers of two: the weights are those without a scale."""
    left = train(tmp_path / "run", scaled=True, fate="1:13:LEAVE")
    assert left.code == 0 and "SCALE" not in left.output, left.output
    done = train(tmp_path / "run", scaled=True)
    assert done.code == 0 and "Resuming at step 13" in done.output, done.output
    assert_weights(whole[0], shared(tmp_path / "run")["model"], atol=0)
    assert "SCALE 1048576.0" in done.output, done.output
    calm, resumed = (events(run_dir, "epoch")[-1] for run_dir in (whole[0], tmp_path / "run"))
    assert calm["train_accuracy"] == resumed["train_accuracy"], "of the whole epoch, which both starts have a part of"


@pytest.mark.promise("half-precision")
def test_an_overflow_that_no_scale_mends_ends_the_run(tmp_path: Path) -> None:
    """The run fails early, and does not skip all steps."""
    done = train(tmp_path / "run", loss=True, scaled=True, fate="1:3:EVER", steps=40)
    assert done.code == 1 and "a gradient is not finite, though every loss is" in done.output, done.output
    status = status_of(tmp_path / "run")
    assert status["code"] == 1 and 20 < status["step"] < 40, status


@pytest.mark.promise("not-finite")
@pytest.mark.parametrize(("sync", "scaled"), [("ddp", True), (product.FSDP, False)])
def test_the_rank_and_the_parameter_of_a_nan_are_named(tmp_path: Path, sync: str, scaled: bool) -> None:
    """A NaN is not mistaken for an overflow of a scaled loss. A step that is left out changes no weight and no statistics."""
    how = {"norm": True, "scaled": scaled, "fate": "1:4:NAN"}
    stop, skip = (case(tmp_path / kind, f"sync.name={sync}", f"nonfinite={kind}", **how) for kind in ("stop", "skip"))
    done, skipped = scripts(2, CODE, stop, skip)
    named = "" if sync == product.FSDP else ", gradient of 0.weight"
    assert done.code == 1 and f"diverged at step 5: rank 1: loss is not finite{named}" in done.output, done.output
    assert "rank 0: " not in done.output.split("diverged at")[1].splitlines()[0]
    assert skipped.code == 0 and "left out step 5: rank 1: loss" in skipped.output, skipped.output
    assert all(bool(torch.isfinite(tensor).all()) for tensor in shared(tmp_path / "skip")["model"].values())


@pytest.mark.promise("session-same")
def test_micro_batches_are_a_setting(whole: tuple[Path, str], tmp_path: Path) -> None:
    run_dir, output = whole
    parts = train(tmp_path / "parts", "micro_batch_size=5")
    assert parts.code == 0, parts.output
    assert "CALLS 20" in output and "CALLS 60" in parts.output, "each part of twelve in three"
    assert_weights(tmp_path / "parts", shared(run_dir)["model"], atol=1e-6)
    right = {summary_of(each)["train_accuracy"] for each in (run_dir, tmp_path / "parts")}
    assert len(right) == 1 and f"RIGHT {right.pop()}\n" in output, output


@pytest.mark.promise("session-resume")
def test_dropout_differs_between_the_ranks(tmp_path: Path) -> None:
    done = train(tmp_path / "run", dropout=0.5)
    assert done.code == 0 and "DRAWN True [20, 20]" in done.output, done.output


@pytest.mark.promise("session-resume")
def test_a_run_of_so_many_steps_resumes_with_more(whole: tuple[Path, str], tmp_path: Path) -> None:
    """Twelve steps end in the middle of an epoch of ten. A start with twenty resumes there."""
    for steps in (12, 20):
        done = train(tmp_path / "run", steps=steps)
        assert done.code == 0, done.output
        status = status_of(tmp_path / "run")
        assert status["step"] == steps and status["reason"] == "complete"
    assert_weights(tmp_path / "run", shared(whole[0])["model"], atol=0)


@pytest.mark.promise("session-resume")
def test_one_rank_ends_the_run_for_good(tmp_path: Path) -> None:
    for attempt in (1, 2):
        done = train(tmp_path / "run", fate="1:13:STOP")
        status = status_of(tmp_path / "run")
        assert done.code == 0 and status["reason"] == "stopped: enough", done.output
        assert 13 <= status["step"] <= 14 and ("It was stopped: enough" in done.output) == (attempt == 2), done.output
        assert ("Stopped for good: enough" in done.output) == (attempt == 1), done.output
    assert "Raise the number of steps to continue" in done.output, done.output
    done = train(tmp_path / "run", steps=24)
    status = status_of(tmp_path / "run")
    assert done.code == 0 and (status["step"], status["reason"]) == (24, "complete"), done.output


@pytest.mark.promise("session-resume")
def test_a_schedule_that_no_checkpoint_has_is_warned_of_and_may_come_between_two_starts(tmp_path: Path) -> None:
    """A schedule that is not kept would change the rates of a resumed start, so it is warned of. One that is added between two starts
    finds its numbers missing in the checkpoint, and begins."""
    made = "    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)\n    run.keep("
    later = CODE.replace("clip=1.0)\n", "clip=1.0); schedule.step()\n").replace("    run.keep(", made)
    assert train(tmp_path / "run", steps=4).code == 0
    done = train(tmp_path / "run", steps=6, code=later)
    assert done.code == 0 and "Resuming at step 4" in done.output, done.output
    assert done.output.count("run.keep(schedule=") == 1, done.output
    done = train(tmp_path / "kept", steps=4, code=later.replace("run.keep(", "run.keep(schedule=schedule, "))
    assert done.code == 0 and "run.keep(schedule=" not in done.output, done.output


TOKENS = """
draws = torch.Generator().manual_seed(1)
X, Y = torch.randn(44, 8, 6, generator=draws), torch.randint(0, 3, (44, 8), generator=draws)
Y[torch.rand(44, 8, generator=draws) < 0.4] = -100  # padding, which is no token
with Session(sys.argv[1], sync=sys.argv[2], micro_batch_size=int(sys.argv[3])) as run:
    torch.manual_seed(0)
    net, plain = run.replicate(torch.nn.Linear(6, 3)), torch.nn.Linear(6, 3)
    plain.load_state_dict(net.state_dict())
    mine, its = run.optimizer(lambda p: torch.optim.SGD(p, lr=0.5)), torch.optim.SGD(plain.parameters(), lr=0.5)
    def loss(x, y, net=net):
        logits = net(x)
        surest = logits.softmax(-1).amax(-1)[y != -100].sum()
        total = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
        return total, {"surest": surest, "accuracy": int((logits.argmax(-1) == y).sum())}
    scaler, minimised, tokens, numbers = torch.amp.GradScaler("cpu", init_scale=4.0), 0.0, 0, torch.zeros(2)
    for epoch in run.epochs(1):
        for x, y, ids in run.batches(TensorDataset(X, Y, torch.arange(44)), 16, uneven="weight"):
            run.step(loss, x, y, divisor=(y != -100).sum(), scaler=scaler)
            ids = torch.cat(run.gather(ids))
            total, also = loss(X[ids], Y[ids], plain)
            numbers += torch.tensor([float(also["surest"]), also["accuracy"]])
            its.zero_grad(); (total / (Y[ids] != -100).sum()).backward(); its.step()
            norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
            assert abs(run.grad_norm - norm) < 1e-5 * norm
            minimised, tokens = minimised + total.item(), tokens + int((Y[ids] != -100).sum())
    torch.testing.assert_close(list(net.parameters()), list(plain.parameters()))
    assert abs(run.history["train_loss"] - minimised / tokens) < 1e-5, "the loss that is shown is the one that is minimised"
    shown = torch.tensor([run.history["train_surest"], run.history["train_accuracy"]])
    torch.testing.assert_close(shown, numbers / tokens)
"""


@pytest.mark.promise("session-same")
def test_a_divisor_may_be_what_each_rank_has_counted(tmp_path: Path) -> None:
    same = []
    for ranks, sync, micro in ((2, "flat", "3"), (1, "exact", "0"), (3, "exact", "0")):
        run_dir = tmp_path / f"{sync}-{ranks}"
        done = script(ranks, TOKENS, run_dir, sync, micro)
        assert done.code == 0, done.output
        summary = summary_of(run_dir)
        same.append(
            {name: summary[name] for name in ("weights_sha256", "train_loss", "train_surest", "train_accuracy")}
        )
        steps = events(run_dir, "step")
        assert [event["step"] for event in steps] == [1, 3], "the first and the last, whatever log.every is"
        for event in steps:
            assert (
                f"step {event['step']}, loss {event['train_loss']:.4g}, accuracy {event['train_accuracy']:.4g}, "
                in done.output
            )
        assert re.search("seconds +train accuracy +train surest +train loss", done.output), done.output
        assert 'name="train_surest"' in (run_dir / "metrics/rank-00000.prom").read_text()
    assert same[1] == same[2]


@pytest.mark.parametrize("sync", ["flat", "exact"])
def test_ranks_that_return_other_numbers_are_refused_by_name(tmp_path: Path, sync: str) -> None:
    done = script(2, TOKENS.replace('"surest":', '"surest" if run.rank else "other":'), tmp_path / "run", sync, "0")
    message = "error: the function of a step returned the numbers accuracy, other on rank 0, and the numbers accuracy, surest on rank 1"
    assert done.code == 2 and done.output.count("error: ") == 1 and message in done.output, done.output
