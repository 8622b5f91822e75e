"""The training package: it trains a PyTorch model with data parallelism, in the process of each rank. Begin with docs/architecture.md,
which names the parts and follows one step through them. `session.py` has `Session`, the interface of scripts, and `recipe/loop.py`
is the script of every recipe. The launcher that starts the ranks is in `launch/`. Modules outside use the name `lockstep.training`.
"""

if __name__ != "lockstep.training":  # else each class would exist twice
    raise ImportError(f"the package {__name__} is imported as lockstep.training: from lockstep import Session")
