"""MkDocs' hook of `make docs SERVE=1`: puts the pages together anew before each build. What is made from the code stays."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
_serving = False


def on_startup(command: str, **_: object) -> None:
    global _serving
    _serving = command == "serve"


def on_pre_build(**_: object) -> None:
    if _serving:
        from docsite import ROOT, stage

        stage.write(ROOT / "build/docs")
