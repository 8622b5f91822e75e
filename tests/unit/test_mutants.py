"""Every mutant still fits the code and the tests; that it is caught is shown at night (`make test-nightly`)."""

from __future__ import annotations

from tests.mutants.table import ROOT, load


def test_every_mutant_has_its_place_and_its_test() -> None:
    for mutant in load():
        mutant.applied((ROOT / mutant.file).read_text(encoding="utf-8"))
        assert (ROOT / mutant.tests.partition("::")[0]).is_file(), f"{mutant.name}: there is no {mutant.tests}"
