"""`compile=true` on GPUs that nobody has here: every kernel of a recipe's step compiles for each generation, and none spills.

The project has no kernel of its own: those of torch.compile are all there are.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_rehearsal.rehearsal import rehearsing
from tests.gpu_rehearsal.test_matrix import RECIPES
from tests.imports import imported, modules

GENERATIONS = ("80", "90", "100")
MOST_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a block may have: the table "Technical Specifications per Compute Capability" of CUDA's Programming Guide."""
MOST_REGISTERS = 255


def _compiled(folder: Path, *words: str, timeout: float = 90) -> list[dict[str, Any]]:
    program = ["-m", "tests.gpu_rehearsal.kernels"]
    with rehearsing(folder, words, ranks=1, devices=1, program=program, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
                    TRITON_CACHE_DIR=str(folder / "triton")) as gang:  # fmt: skip
        assert gang.wait(timeout) == [0], gang.output
    rows = [json.loads(line) for line in gang.ranks[0].output.splitlines() if line.startswith("{")]
    print(f"{words[0]}: {len(rows)} kernels, at most {max(row['registers'] for row in rows)} registers")
    return rows


def _assert_fits(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["spilled"]] == []
    assert [row for row in rows if row["shared"] > MOST_SHARED[row["capability"]]] == []
    assert [row for row in rows if not 0 < row["registers"] <= MOST_REGISTERS] == []


def test_the_kernels_of_a_compiled_step(tmp_path: Path) -> None:
    rows = _compiled(tmp_path, "mlp", "float16", "90")
    names = [row["kernel"] for row in rows]
    assert any("tanh_backward" in name for name in names) and any("tanh_2" in name for name in names), names
    _assert_fits(rows)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_kernels_of_every_recipe_for_every_generation(tmp_path: Path, recipe: str, precision: str) -> None:
    rows = _compiled(tmp_path, recipe, precision, *GENERATIONS, timeout=900)
    assert {str(row["capability"]) for row in rows} == set(GENERATIONS)
    _assert_fits(rows)


def test_there_is_no_kernel_of_ours() -> None:
    """One that is written is to be compiled here, too."""
    known = modules("training")
    users = [
        name
        for name, path in known.items()
        if any("triton" in what for what in imported(ast.parse(path.read_text()), known))
    ]
    assert users == ["lockstep.training.models.arithmetic"]  # asks whether it is there
