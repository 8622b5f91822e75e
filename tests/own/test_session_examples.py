"""Every public method of `Session` has an example in its docstring, and the examples run as they stand."""

from __future__ import annotations

from pathlib import Path

from tests.processes import ROOT, clean_env
from tests.warm.gang import python

CODE = '''
import doctest, inspect, itertools, re, sys, torch, torch.nn.functional as F
from lockstep import Session

class Loader(list):
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

dataset = torch.utils.data.TensorDataset(torch.randn(1100, 4), torch.randint(0, 3, (1100,)))
scope = {
    "torch": torch, "F": F, "Session": Session, "Net": lambda: torch.nn.Linear(4, 3), "dataset": dataset,
    "loader": Loader(zip(*(column.split(220) for column in dataset.tensors))),
    "pretrained": lambda: torch.nn.Linear(4, 3), "predictions": torch.ones(3), "mine": torch.ones(3),
}
CHEAP = ("checkpoint.every_steps=1000",)
printed = []
scope["print"] = printed.append
sys.displayhook = lambda value: None if value is None else printed.append(repr(value))
ran = []

def show(name):
    """Runs the examples of a docstring; what they print must be what stands there."""
    of = Session if name == "Session" else getattr(Session, name)
    for example in doctest.DocTestParser().get_examples(inspect.getdoc(of) or ""):
        printed.clear()
        exec(compile(example.source, f"<example of {name}>", "single"), scope)
        assert "".join(f"{line}\\n" for line in printed) == example.want, (name, printed, example.want)
        ran.append((name, example.source))

public = [name for of in (Session, *Session.__bases__) for name in vars(of) if not name.startswith("_")]
before, after = public[:public.index("keep_of_rank")], public[public.index("epochs") + 1:]
within = ("batch", "loss")  # a loop over the batches of an epoch
between = [name for name in public[public.index("batch"):public.index("epochs") + 1] if name not in (*within, "stop")]
show("Session")
with Session("runs/of-rank", *CHEAP, config={"lr": 0.1}) as scope["run"]:
    for name in ("replicate", "optimizer", "keep_of_rank"):
        show(name)
with Session("runs/examples", "config.lr=0.1", *CHEAP, config={"lr": 0.01}) as run:
    scope["run"] = run
    for name in (*before, *between):
        show(name)
    done = run.steps
    for count, name in zip(itertools.count(11), (*within, *after, "stop")):  # the example of `epochs` trains ten
        for _ in run.epochs(count):
            show(name)
    assert run.steps > done + 10, "the examples of the loop have trained"
for name in public:
    own = any(of == name for of, _ in ran)
    assert own or isinstance(getattr(Session, name), property), f"{name} has no example"
    assert any(re.search(rf"\\brun\\.{name}\\b", source) for _, source in ran), f"no example uses {name}"
print("examples:", len(ran))
'''


def test_every_public_method_has_an_example_that_runs(tmp_path: Path) -> None:
    done = python("-c", CODE, env=clean_env(LOCKSTEP_THREADS="1", PYTHONPATH=str(ROOT)), cwd=tmp_path)
    assert done.code == 0 and "examples: " in done.output, done.output
