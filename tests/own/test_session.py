"""A user's loop computes the plain loop's weights at every number of ranks. Arguments that cannot be meant are refused."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

from tests import product
from tests.events import events, status_of, summary_of
from tests.nets import DyingPlain
from tests.own.job import OwnJob, assert_weights, script, scripts
from tests.processes import Result
from tests.ranks import gang
from tests.warm.gang import python

COUNT, BATCH = 190, 41
"""Neither 2 nor 3 divides a batch, and the last one of an epoch has 26 samples."""


@functools.cache
def plain(hard: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Trains `loop.py` in one process without Lockstep. Returns the weights after three epochs, and their average.

    `hard` is LOOP_HARD, over whole batches.
    """
    from tests.own import loop

    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        data = loop.Noisy()
        model = loop.Two(DyingPlain()) if hard else DyingPlain()
        average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        body = torch.optim.SGD((model.body if hard else model).parameters(), lr=0.05, momentum=0.9)
        optimizers = [body, torch.optim.Adam([model.bias], lr=0.01)] if hard else [body]
        schedule = torch.optim.lr_scheduler.OneCycleLR(body, 0.1, total_steps=1000)
        steps = 0
        for _ in range(3):
            for batch in torch.randperm(COUNT).split(BATCH):
                model.zero_grad()
                F.cross_entropy(model(data.images[batch]), data.labels[batch]).backward()
                if hard:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                schedule.step()
                if (steps := steps + 1) % 3 == 0:
                    for name, parameter in model.named_parameters():
                        average[name].lerp_(parameter.detach(), 1 - 0.9**3)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}, average
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(state)


SAME = [
    ("flat", 1, "part", True), ("flat", 3, "part", True), ("ddp", 2, "part", True), ("zero1", 3, "part", False),
    (product.FSDP, 2, "part", False), ("flat", 2, "unequal", False),
]  # fmt: skip
"""Strategy, ranks, kind of `loop.py`, and whether with micro-batches, clipping, two optimizers."""


@pytest.mark.promise("session-same")
@pytest.mark.parametrize(("sync", "ranks", "kind", "hard"), SAME)
def test_weights_and_average_are_those_of_the_plain_loop(
    tmp_path: Path, sync: str, ranks: int, kind: str, hard: bool
) -> None:
    """A rank's part may be longer than another's: it counts by its samples, and only `samples` of the step states their number."""
    variables = {"LOOP_EXACT": "1", "LOOP_BATCH": str(BATCH), "LOOP_HARD": str(int(hard))}
    job = OwnJob(tmp_path / "run", ranks, kind, f"sync.name={sync}", **variables)
    done = job.go()
    assert done.code == 0, done.output
    model, average = plain(hard)
    assert_weights(job.run_dir, model)
    assert_weights(job.run_dir, average, "average")


PAUSES = """
with Session(sys.argv[1], "sync.bucket_mb=1", sync=sys.argv[2]) as run:
    net = torch.nn.Sequential(torch.nn.Linear(4, 500), torch.nn.Linear(500, 500), torch.nn.Linear(500, 500), torch.nn.Linear(500, 2))
    model = run.replicate(net, example=torch.ones(2, 4))
    run.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=1e-3))
    for epoch in run.epochs(1):
        for batch in run.batches(torch.utils.data.TensorDataset(torch.randn(240, 4)), 12):
            began = time.perf_counter()
            run.step(model(batch[0]).square().mean())
            pause = max(0.05, 2 * (time.perf_counter() - began))
            if run.rank and run.steps < 20:
                time.sleep(pause)
                print("SLEPT", pause)
"""


@pytest.mark.promise("named-rank")
def test_what_the_script_does_after_a_step_is_time_of_its_training(tmp_path: Path) -> None:
    """Rank 1 sleeps after each step, twice as long as the step took. Rank 1 is the slow rank, also on a busy machine."""
    names = ("flat", "ddp", product.FSDP, product.HOOKS)
    for sync, done in zip(names, scripts(2, PAUSES, *((tmp_path / sync, sync) for sync in names)), strict=True):
        assert done.code == 0, done.output
        slept = [float(seconds) for seconds in re.findall(r"SLEPT (\S+)", done.output)]
        summary = summary_of(tmp_path / sync)
        assert summary["steps"] == 20 and len(slept) == 19 and summary["trained_seconds"] > sum(slept)
        shares = []
        for rank in (0, 1):
            text = (tmp_path / f"{sync}/metrics/rank-{rank:05d}.prom").read_text()
            phases = dict(re.findall(r"training_(grad_ready|sync_wait)_seconds_sum\{[^}]*\} (\S+)", text))
            shares.append({name: float(seconds) for name, seconds in phases.items()})
        fast, slow = shares
        assert slow["grad_ready"] > sum(slept), (sync, shares, slept)
        assert slow["grad_ready"] > fast["grad_ready"] and fast["sync_wait"] > slow["sync_wait"], (sync, shares, slept)


LOOP = "m, o = make(run)\n    for _ in run.epochs(1):\n        "
WRONG = {
    "no replicate": ("run.keep()", "RuntimeError", "replicate(model)"),
    "an optimizer that is made": (
        "m = run.replicate(torch.nn.Linear(1, 1)); run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1))",
        "TypeError", "takes a function that makes the optimizer, got a SGD"),
    "no optimizer": ("run.replicate(torch.nn.Linear(1, 1)); run.keep()", "RuntimeError", "run.optimizer("),
    "a parameter from elsewhere": (
        "run.replicate(torch.nn.Linear(1, 1)); "
        "run.optimizer(lambda p: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)); run.keep()", "ValueError", "optimizer"),
    "the steps of a script without a Session": (
        LOOP + "for x, y in run.batches(DATA, 16): F.cross_entropy(m(x), y).backward(); o.step()", "RuntimeError", "run.step(loss)"),
    "a second loop in an epoch": (
        LOOP + "for b in run.batches(DATA, 16): step(run, m, b)\n        for b in run.iterate([DATA[:8]]): m(b[0])",
        "RuntimeError", "run.epochs("),
    "micro-batches that are left early": (
        LOOP + "for x, y in run.batches(DATA, 16):\n            for a, b in run.accumulate([(x[:8], y[:8]), (x[8:], y[8:])]):\n"
        "                run.backward(F.cross_entropy(m(a), b), samples=16); break\n            run.update()",
        "RuntimeError", "accumulate()"),
    "an update without a backward": (
        "m, o = make(run); run.optimizer(lambda of: torch.optim.SGD(of, lr=0.1), 'second')\n    for _ in run.epochs(1): run.update()",
        "RuntimeError", "update() was called without run.backward(loss)"),
    "a batch without an update": (
        LOOP + "for x, y in run.batches(DATA, 16): run.backward(m(x).sum())", "RuntimeError", "update()"),
    "a state that no file holds": (
        "make(run); run.keep(x=type('S', (), {'state_dict': lambda s: {'a': [1, object()]}, 'load_state_dict': print})())",
        "TypeError", "keep(x=…)/a/1"),
    "samples unknown": (LOOP + "for b in run.iterate([DATA[:8]]): step(run, m, b)", "TypeError", "samples=…"),
    "a batch counted in part": (
        LOOP + "for b in run.batches(DATA, 16): step(run, m, b, samples=1)", "RuntimeError", "1 samples"),
    "a number's name": ("make(run); run.log(**{'../x': 1.0})", "ValueError", "'../x'"),
    "two optimizers over one parameter": (
        "m, o = make(run); run.optimizer(lambda p: torch.optim.SGD(p, lr=0.1), 'second')\n    for _ in run.epochs(1):\n"
        "        for b in run.batches(DATA, 16): step(run, m, b)", "ValueError", '"optimizer" and "second", would move 0.weight'),
    "an error of the user's": (LOOP + "for b in run.batches(DATA, 64): pass", "error", 'uneven="weight"'),
    "several models under a strategy that takes one": (
        "run.settings.sync.name = 'zero1'; run.replicate(torch.nn.Linear(1, 1), name='a'); run.replicate(torch.nn.Linear(1, 1), name='b')",
        "error", "sync.name=zero1"),
    "a parameter in two models": (
        "n = torch.nn.Linear(1, 1); run.replicate(n, name='a'); run.replicate(torch.nn.Sequential(n), name='b')",
        "ValueError", "replicate(b)"),
    "a second backward": (
        LOOP + "for x, y in run.batches(DATA, 16): [run.backward(F.cross_entropy(m(x), y)) for _ in 'ab']",
        "error", "run.accumulate(batches)"),
    "clipping by hand what a rank has in part": (
        "run.settings.sync.name = 'zero1'; " + LOOP + "for x, y in run.batches(DATA, 16):\n"
        "            run.backward(F.cross_entropy(m(x), y)); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0); run.update()",
        "error", "run.update(clip=…)"),
    "clipping within an accumulation": (
        LOOP + "for x, y in run.batches(DATA, 16):\n            for a, b in run.accumulate([(x[:8], y[:8]), (x[8:], y[8:])]):\n"
        "                run.backward(F.cross_entropy(m(a), b), samples=8); torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)\n"
        "            run.update()", "RuntimeError", "after the loop of run.accumulate()"),
    "the steps in a worker process": (
        "from torch.utils.data import Dataset\n    class Growing(Dataset):\n        __len__ = lambda self: 32\n"
        "        def __getitem__(self, index): return DATA[index][0] * run.steps, DATA[index][1]\n    "
        + LOOP + "for b in run.batches(Growing(), 16, workers=1): pass", "RuntimeError", "run.steps does not count"),
    "an optimizer that looks at all gradients, of which a rank has a part": (
        "run.settings.sync.name = 'zero1'\n    class Normed(torch.optim.SGD):\n        def step(self):\n"
        "            torch.nn.utils.clip_grad_norm_(self.param_groups[0]['params'], 1.0); super().step()\n"
        "    net = run.replicate(torch.nn.Linear(1, 1)); run.optimizer(lambda of: Normed(of, lr=0.1))", "error", "Normed combines them"),
    "an optimizer with a state that is no parameter's": (
        "run.settings.sync.name = 'zero1'\n    class Counted(torch.optim.SGD):\n"
        "        def state_dict(self): return super().state_dict() | {'count': 1}\n"
        "    net = run.replicate(torch.nn.Linear(1, 1)); run.optimizer(lambda of: Counted(of, lr=0.1))", "error", "saves count besides"),
    "a hook before the step of a part": (
        "run.settings.sync.name = 'zero1'; m, o = make(run); o.register_step_pre_hook(print)", "error", "run.step(…, clip=…)"),
    "an optimizer that is not saved": (
        LOOP + "o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "        for x, y in run.batches(DATA, 16): run.step(lambda x, y: F.cross_entropy(m(x), y), x, y, optimizer=o)",
        "ValueError", "run.optimizer()"),
    "two loops in one": (
        LOOP + "for b, c in zip(run.batches(DATA, 16), run.batches(DATA, 8)): step(run, m, b)", "RuntimeError", "StackDataset(a, b)"),
    "a layer that is unfrozen within a step": (
        "n = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)); n[0].requires_grad_(False); run.replicate(n)\n"
        "    run.optimizer(lambda of: torch.optim.SGD(of, lr=0.1))\n    for _ in run.epochs(1):\n"
        "        for x, y in run.batches(DATA, 16):\n"
        "            for number, (a, b) in enumerate(run.accumulate([(x[:8], y[:8]), (x[8:], y[8:])])):\n"
        "                n[0].requires_grad_(number == 1); run.backward(F.cross_entropy(n(a), b), samples=8)\n            run.update()",
        "error", "0.weight trains since the middle of a step"),
    "a layer that a reentrant checkpoint calls twice": (
        "from torch.utils.checkpoint import checkpoint; " + LOOP + "for x, y in run.batches(DATA, 16):\n"
        "            h = x.requires_grad_()\n            for _ in 'ab': h = checkpoint(m[0], h, use_reentrant=True)[:, :4]\n"
        "            run.step(h.sum())", "RuntimeError", "use_reentrant=False"),
    "micro-batches of nothing": (
        "run.settings.micro_batch_size = 4; " + LOOP + "for x, y in run.batches(DATA, 16): run.step(lambda: F.cross_entropy(m(x), y))",
        "TypeError", "micro_batch_size"),
    "numbers that come later": (
        LOOP + "for x, y in run.batches(DATA, 16): run.step(lambda x: (m(x).sum(), {'hits': 1} if run.steps else {}), x)",
        "error", "returned the numbers hits, and the steps before no numbers"),
    "numbers that are not sums": (
        LOOP + "for x, y in run.batches(DATA, 16): run.step(lambda x: (m(x).sum(), {'hits': x}), x)",
        "TypeError", "returned hits as Tensor"),
    "an optimizer that computes the loss again": (
        "m = run.replicate(torch.nn.Linear(1, 1)); run.optimizer(torch.optim.LBFGS)", "error", "LBFGS computes the loss several times"),
    "a second loop over epochs that are over": (
        LOOP + "for b in run.batches(DATA, 16): step(run, m, b)\n    for _ in run.epochs(2):\n"
        "        for b in run.batches(DATA, 16): step(run, m, b)\n    for _ in run.epochs(1): pass",
        "RuntimeError", "has nothing left"),
    "two loops in one epoch": (
        LOOP + "for _ in 'ab':\n            for b in run.batches(DATA, 16): step(run, m, b)", "RuntimeError", "one loop over"),
    "an extra state that no checkpoint holds": (
        "L = type('L', (torch.nn.Linear,), {'get_extra_state': lambda _: {'at': 1j}, 'set_extra_state': print}); "
        "run.replicate(torch.nn.Sequential(L(1, 1)))", "TypeError", "0.get_extra_state()/at: "),
    "a summary before there is an optimizer": (
        "run.summary['size'] = sum(p.numel() for p in run.replicate(torch.nn.Linear(1, 1)).parameters())",
        "RuntimeError", "call run.optimizer(…) before"),
    "a model in TorchScript": (
        "run.replicate(torch.jit.trace(torch.nn.Linear(1, 1), torch.ones(1)))", "TypeError", "make TorchScript of the trained one"),
    "the sum of a tensor": ("make(run); run.sum(torch.ones(2))", "TypeError", "sum(run.gather(tensor))"),
}  # fmt: skip
"""Lines, the kind of error, and the call, argument or setting that it names."""


@pytest.mark.promise("session-refuses")
def test_arguments_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    code = 'exec(f"with Session(sys.argv[1]) as run:\\n    {sys.argv[2]}")'
    outputs = scripts(1, code, *((tmp_path / name, lines) for name, (lines, *_) in WRONG.items()))
    for (name, (_, kind, named)), done in zip(WRONG.items(), outputs, strict=True):
        errors = [line for line in done.output.splitlines() if line.startswith(f"{kind}: ")]
        assert errors and named in errors[-1], (name, done.output)
        assert status_of(tmp_path / name)["code"] == (2 if kind == "error" else 1), name


AWAY = """
import contextlib
from lockstep.training.contract import UserError
for begins in (False, True):
    with contextlib.suppress(SystemExit), Session(f"{sys.argv[1]}/{begins}") as run:
        if begins:
            make(run)
            run.keep()
        raise UserError("the bucket does not answer", code=int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [1, 2])
def test_status_json_has_the_exit_code_of_an_error(tmp_path: Path, code: int) -> None:
    """Backends trust it above the exit code. With 1 another start may help, before the loop begins and after it."""
    done = script(1, AWAY, tmp_path, str(code))
    assert done.code == 0, done.output
    assert [status_of(tmp_path / str(begins))["code"] for begins in (False, True)] == [code, code]


LOADERS = """
run_dir, kind = sys.argv[1:]
class Own(DistributedSampler):  # as one that sorts by lengths
    total_size = 32
    def __init__(self):
        pass
    def __iter__(self):
        return iter(range(int(os.environ["RANK"]), 32, 2))
    def __len__(self):
        return 16
with Session(run_dir) as run:
    m, o = make(run)
    batches = {
        "sampler": lambda: DataLoader(DATA, 8, sampler=DistributedSampler(DATA)),
        "part": lambda: torch.arange(32).split(8),
        "shuffled": lambda: DataLoader(DATA, 8, shuffle=True),  # all ranks begin with the same generators
        "lengths": lambda: [DATA[:8]] * (3 + run.rank),
        "repeated": lambda: DataLoader(DATA, 8, sampler=DistributedSampler(DATA, 3, run.rank)),
        "own": lambda: DataLoader(DATA, 8, sampler=Own()),
    }[kind]()
    for _ in run.epochs(2):
        for b in run.iterate(batches):
            mine = DATA[run.part(b)] if kind == "part" else b
            step(run, m, mine, samples=len(mine[1]))
"""


def test_ranks_that_are_given_the_same_batches_are_warned(tmp_path: Path) -> None:
    """The third loader visibly gives all ranks the same batches. A sampler that repeats samples, so that each rank has equally many, is
    named, too. The last loader has another length on each rank: the ranks would wait for one another until collective_timeout."""
    cases = ((tmp_path / kind, kind) for kind in ("sampler", "part", "shuffled", "repeated", "own", "lengths"))
    *trained, lengths = scripts(2, LOADERS, *cases)
    assert lengths.code == 1 and "3 on rank 0, 4 on rank 1" in lengths.output, lengths.output
    assert [done.code for done in trained] == [0] * 5, trained
    assert [done.output.count("all ranks were given the same batch") for done in trained] == [0, 0, 1, 0, 0], trained
    assert [done.output.count("repeats samples") for done in trained] == [0, 0, 0, 1, 0], trained


def test_another_order_of_the_samples_on_a_rank_is_refused(tmp_path: Path) -> None:
    """The ranks' datasets have another order, or other samples. Random transforms and paths of a rank's disk may differ. Images that two
    machines decode in different ways are a warning."""
    lines = """
class Files(Dataset):
    def __init__(self, names):
        self.names, self.draws = names, np.random.default_rng()
    def __len__(self):
        return len(self.names)
    def __getitem__(self, index):
        name = self.names[index]
        noisy = torch.full((3,), float(name)) + torch.randn(3)
        own = {"drawn": self.draws.normal(), "path": f"/disk-{run.rank}/{name}"}
        return {"noisy": noisy, "label": name % 3, "sparse": noisy.to_sparse(), **own}
with Session(sys.argv[1]) as run:
    m, o = make(run)
    names = [*range(64)]
    fine = Files(names[:])
    for workers in (0, 1):
        assert run.evaluate(lambda *samples: len(samples), fine, 32, workers=workers, collate=list) == 1.0
    assert run.evaluate(lambda *samples: len(samples), ["a", "b", "c"], collate=list) == 1.0
    decoded = [(torch.full((3, 8, 8), 1.0 + 1e-6 * run.rank), label) for label in range(9)]
    assert run.evaluate(lambda *samples: len(samples), decoded, collate=list) == 1.0
    names.sort(key=lambda name: (name * (5 + 2 * run.rank)) % 64)  # as a set of names comes, whose order each process draws
    for _ in run.epochs(1):
        try:
            next(iter(run.batches(Files(names), 16, collate=list)))
        except Exception as error:
            print(f"error: {error}\\n", end="")  # one write: two ranks print at once
        files = Files(names)
        loader = DataLoader(files, 8, sampler=DistributedSampler(files, run.size, run.rank), collate_fn=list)
        for b in run.iterate(loader): step(run, m, b)
"""
    done = script(2, lines, tmp_path / "run")
    refused = "() needs the same dataset on every rank, in the same order, and rank 1 has other samples than rank 0"
    counts = [done.output.count(f"error: run.{call}{refused}") for call in ("batches", "iterate")]
    assert done.code == 2 and counts == [2, 1], done.output
    assert done.output.count("warning: rank 0: run.evaluate() needs the same dataset on every rank") == 1, done.output


CHANGING = """
run_dir, kind = sys.argv[1:]
class Kept(Dataset):
    def __init__(self):
        self.kept, self.targets, self.draws = {}, [0.0] * 64, np.random.default_rng(run.rank)
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, index):
        if kind == "augmented":
            return self.kept.setdefault(index, torch.randn(3)), index
        if kind == "decoded":
            image = self.kept.setdefault(index, torch.full((3,), index))
            return image + torch.randn(3) + self.draws.normal(), index, self.targets[index]
        return torch.randn(3), index, self.targets[index]
with Session(run_dir) as run:
    m, o = make(run)
    data = Kept()
    draws = data.draws.bit_generator.state
    for epoch in run.epochs(3):
        batches = run.batches(data, 16, workers=int(kind == "workers"))
        assert epoch or data.draws.bit_generator.state == draws  # the script may have kept it
        for image, index, *_ in batches:
            for one in index:
                data.targets[one] += 0.5 if kind == "targets" else 0.0
            step(run, m, DATA[:8], samples=8)
        data.targets = [epoch] * 64 if kind == "decoded" else data.targets  # alike on all ranks
"""


@pytest.mark.parametrize(
    "kinds", [("decoded", "workers", "augmented"), ("targets",)]
)  # a process prints a warning once
def test_a_dataset_that_changes_on_each_rank_by_its_samples_is_named(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    """The dataset caches augmented samples, or the loop writes targets into it. Decoding, and changes alike on all ranks, are not named."""
    ends = scripts(2, CHANGING, *((tmp_path / kind, kind) for kind in kinds))
    named = [kind for kind, done in zip(kinds, ends, strict=True) if "changes as it is read" in done.output]
    assert {done.code for done in ends} == {0} and named == [*kinds[-1:]], ends


def test_parts_are_of_one_batch_and_of_the_same_samples(tmp_path: Path) -> None:
    """Draws for a rank's samples move its generators, so the next order differs. Three ranks do not divide crops as they divide their
    images. Paths may differ. Parts of an evaluation have any length."""
    lines = """
with Session(sys.argv[1]) as run:
    m, o = make(run)
    def lengths(*wholes):
        try:
            return [len(run.part(whole)) for whole in wholes]
        except Exception as error:
            return str(error)
    for _ in run.epochs(1):
        for _ in run.iterate(range(2)):
            step(run, m, DATA[run.part(torch.randperm(15))])
            results = [lengths(torch.arange(9) + run.rank), lengths([run.rank] * 9), lengths(torch.ones(9)[run.rank :])]
            results += [lengths([f"/disk-{run.rank}"] * 9, range(18)), lengths(torch.randn(9, 2) + run.rank), lengths(torch.ones(20, 2))]
            quantized = torch.quantize_per_tensor(torch.ones(9), 0.1, 0, torch.qint8)
            others = np.arange(9)[::-1], np.ones(9)[::-1], np.arange(9, dtype=">i8"), np.ones((9, 2), ">f8"), quantized
            results += [lengths(*others, np.frombuffer(bytes(9), "u1"), np.zeros(9, "M8[s]"), np.zeros(9, [("x", int)]))]
            try:
                step(run, m, DATA[:3], samples=3)
            except Exception as error:
                results += [str(error)]
            run.sum(1)  # the script's evaluation
            step(run, m, DATA[run.part(torch.arange(15))])
            print("\\n".join(f"rank {run.rank}: {result}" for result in results))
            torch.rand(run.rank + 1)  # as draws for each sample do
"""
    done = script(3, lines, tmp_path / "run")
    another = "run.part(batch) needs the same batch on every rank, and rank 1 has "
    lengths = "run.part() cuts 9 and 20 entries for one step, and 3 ranks do not divide both at the same samples"
    counts = [done.output.count(f"{prefix}{another}") for prefix in ("error: ", "rank 2: ")]
    assert done.code == 2 and counts == [1, 4] and done.output.count(f": {lengths}") == 3, done.output
    assert [done.output.count(f": {some}\n") for some in ([3, 6], [7], [3] * 8)] == [3, 2, 3], done.output
    assert "not writable" not in done.output, done.output


def test_a_batch_that_the_ranks_cannot_share_is_reported_once_in_the_words_of_a_script(tmp_path: Path) -> None:
    lines = """
with Session(sys.argv[1]) as run:
    m, o = make(run)
    for _ in run.epochs(1):
        for b in run.batches(DATA, 16): step(run, m, b)
"""
    done = script(3, lines, tmp_path / "run")
    message = 'error: a global batch of 16 cannot be divided among 3 ranks: make it 15 or 18, or choose uneven="weight"'
    assert done.code == 2 and done.output.count("batch of 16") == 1 and message in done.output, done.output


def test_an_evaluation_that_looks_for_signals_keeps_the_saves_that_are_due(tmp_path: Path) -> None:
    """The next call reads what the ranks agreed on at a boundary. Here it is the evaluation's call."""
    lines = """
with Session(sys.argv[1], "checkpoint.every_seconds=1", "checkpoint.keep=100") as run:
    m, o = make(run)
    began = time.monotonic()
    def over():
        return len(list(pathlib.Path(sys.argv[1], "checkpoints").glob("step-*"))) > 2 or time.monotonic() - began > 30
    for epoch in run.epochs(1):
        for b in run.iterate(iter(lambda: None if run.sum(over())[0] else DATA[:8], None)):
            step(run, m, b, samples=8)
            run.boundary()
"""
    done = script(2, lines, tmp_path / "run")
    assert done.code == 0, done.output
    assert len(events(tmp_path / "run", "checkpoint_written")) > 3, "the last one is that of the end"


def test_a_script_that_continues_has_its_handlers_and_generators_back(tmp_path: Path) -> None:
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

def now():
    drawn = str([random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()])
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ()), drawn

before = now()
try:
    with Session(sys.argv[1]) as run:
        random.random(), np.random.rand(), torch.rand(1)
        sys.exit(7)
except SystemExit as left:
    print("left", left.code)
assert now() == before
"""
    done = script(1, code, tmp_path / "run")
    assert done.code == 0 and "left 7" in done.output, done.output


TRAIN = """
with Session(sys.argv[1], *sys.argv[2:], config=CONFIG) as run:
    model, optimizer = make(run)
    for epoch in run.epochs(2):
        for batch in run.batches(DATA, GLOBAL):
            step(run, model, batch)
            if STOP and run.steps == STOP:
                sys.exit(CODE)
        run.log(wer=0.5 / (epoch + 1), accuracy=0.25)
"""


def _train(run_dir: Path, *words: str, ranks: int = 1, **changes: object) -> Result:
    values = {"CONFIG": {"width": 8}, "GLOBAL": 8, "STOP": 0, "CODE": 0, **changes}
    head = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    return script(ranks, f"{head}\n{TRAIN}", run_dir, *words)


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    done = _train(run_dir, "log.every=2", ranks=2)
    assert done.code == 0, done.output
    about = yaml.safe_load((run_dir / "run.yaml").read_text())
    assert about["config"]["config"] == {"width": 8} and about["world"]["size"] == 2
    summary = summary_of(run_dir)
    assert (summary["steps"], summary["epochs"], summary["examples_seen"]) == (8, 2, 64)
    assert summary["logged"] == {"wer": 0.25, "accuracy": 0.25} and summary["accuracy"] == 0.25
    assert [event["values"]["wer"] for event in events(run_dir, "log")] == [0.5, 0.25]
    assert [event["step"] for event in events(run_dir, "step")] == [1, 2, 4, 6, 8], "the first and the last one, too"
    assert len(events(run_dir, "epoch")) == 2
    text = (run_dir / "metrics/rank-00001.prom").read_text()
    assert re.search(r'training_logged\{name="wer",rank="1",run="mine"\} 0.25', text), text
    assert 'training_steps_planned{rank="1",run="mine"} 8.0' in text and "training_sync_wait_seconds_count" in text


@pytest.mark.promise("session-refuses")
def test_another_script_or_other_settings_are_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert _train(run_dir).code == 0
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    rerun = _train(run_dir, CONFIG={"width": 9})
    assert rerun.code == 2 and "config: {'width': 8} → {'width': 9}" in rerun.output, rerun.output
    recipe = gang(1, "run", "smoke", "--run-dir", str(run_dir))
    assert recipe.code == 2 and "another config" in recipe.output, recipe.output
    scored = python("-m", "lockstep.training", "evaluate", str(run_dir))
    assert scored.code == 2 and "not of a recipe" in scored.output, scored.output
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before
    about = run_dir / "run.yaml"
    named = about.read_text()
    about.write_text(re.sub("script: .*", "script: before", named))
    renamed = _train(run_dir)
    assert renamed.code == 2 and "script: before → " in renamed.output, renamed.output
    about.write_text(named)
    assert _train(run_dir).code == 0
    words = _train(tmp_path / "words", "checkpoint.every_step=3")
    assert words.code == 2 and "did you mean 'checkpoint.every_steps'" in words.output, words.output


def test_an_epoch_resumes_with_the_batches_it_was_begun_with(tmp_path: Path) -> None:
    """A script leaves its loop in the middle of an epoch, and the session saves. The next start resumes with the remaining batches."""
    run_dir = tmp_path / "run"
    assert _train(run_dir, STOP=2).code == 0
    rerun = _train(run_dir, GLOBAL=4)
    assert rerun.code == 2 and "divided differently (global_batch_size: 8 → 4)" in rerun.output, rerun.output
    assert _train(run_dir).code == 0
    assert summary_of(run_dir)["steps"] == 8
    failed = _train(tmp_path / "failed", STOP=2, CODE=3)
    assert failed.code == 3
    assert status_of(tmp_path / "failed")["code"] == 1
