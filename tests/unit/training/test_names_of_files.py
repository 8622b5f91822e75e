"""What a file is called until it takes its place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.training import files


@pytest.mark.promise("other-users")
@pytest.mark.parametrize("write", [files.publish, files.replace])
def test_no_name_can_be_foreseen_and_a_link_there_is_not_followed(
    write: Callable[[Path, bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may write in the folder does not know a file's name until it takes its place."""
    used_names, rename = [], os.rename
    for name in ("rename", "replace"):
        monkeypatch.setattr(
            os, name, lambda source, target: (used_names.append(Path(source).name), rename(source, target))
        )
    for _ in range(2):
        write(tmp_path / "status.json", b"ours")
    assert len(set(used_names)) == 2 and all(
        re.fullmatch(r"\.status\.json\.[0-9a-f]{16}", name) for name in used_names
    ), used_names
    victim, link = tmp_path / "victim", tmp_path / f".status.json.{'a' * 16}"
    victim.write_text("mine\n")
    monkeypatch.setattr("secrets.token_hex", lambda count: "aa" * count)  # had he guessed it
    for put in (link.symlink_to, link.hardlink_to):
        put(victim)
        with pytest.raises(FileExistsError):
            write(tmp_path / "status.json", b"other")
        assert (tmp_path / "status.json").read_bytes() == b"ours" and victim.read_text() == "mine\n"
        link.unlink(missing_ok=True)
