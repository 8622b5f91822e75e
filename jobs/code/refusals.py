"""What must not travel: files that hold secrets, by name and by content, and names that Python would confuse.

An error names the path and the rule, never the value.
"""

from __future__ import annotations

import fnmatch
import re
import sys
import unicodedata
from collections.abc import Collection

from lockstep.training.contract import UserError

_NAMES = {
    ".env*": "a file of environment variables", "*.pem": "a key or a certificate", "id_*": "an SSH key",
    ".netrc": "passwords", "_netrc": "passwords", ".npmrc": "a registry's login", "kubeconfig*": "a cluster's login",
    "*.kubeconfig": "a cluster's login", "credentials*": "credentials",
}  # fmt: skip
"""Pattern of a file's name, in small letters → what such a file is."""
_PATHS = {".kube/config": "a cluster's login", ".docker/config.json": "a registry's login"}
"""The last two parts of a path."""
_HARMLESS = ".example"
"""End of the name of a file with sample values, not real ones."""
_CONTENTS = {
    "a private key": rb"-----BEGIN (?:[A-Z]{2,9} )?PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-[0-9]",
    "a cluster's login": rb"(?m)^[ \t-]{0,64}client-key-data:[ \t]{0,64}\S",
    "an AWS access key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an Azure storage key": rb"\bAccountKey=[A-Za-z0-9+/]{80,100}={0,2}",
    "a Google API key": rb"\bAIza[0-9A-Za-z_-]{35}\b",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{60,255})",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "a Hugging Face token": rb"\bhf_[A-Za-z0-9]{30,}\b",
    "an npm token": rb"\bnpm_[A-Za-z0-9]{36}\b",
    "a PyPI token": rb"\bpypi-AgE[A-Za-z0-9_-]{40,}",
    "a Docker token": rb"\bdckr_pat_[A-Za-z0-9_-]{20,}",
    "a Slack token": rb"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a secret key of an API": rb"\bsk[-_](?:ant|proj|live|svcacct)[-_][A-Za-z0-9_-]{20,}|\bsk-[A-Za-z0-9]{40,}\b",
}  # fmt: skip
"""What is found → how it is told. Each pattern is bounded, so that no file makes the search slow."""
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _CONTENTS.items()}
OURS = "lockstep"
_AT_START = ("sitecustomize", "usercustomize")
"""Modules that Python imports by itself when it starts, before anything of ours."""
_MODULE = re.compile(r"(?P<name>\w+)(?:\.\w[\w-]*)?\.(?:py|pyc|so|pyd)")
"""`name.py`, `name.cpython-311-x86_64-linux-gnu.so`."""
_LFS = b"version https://git-lfs.github.com/spec/"
_LFS_BYTES = 1024
"""No pointer is larger."""


def check_name(path: str, allow: Collection[str]) -> None:
    """Raises `UserError` for a file whose name says that it holds secrets."""
    if path in allow:
        return
    lower = path.lower()
    name = lower.rpartition("/")[2]
    if name.endswith(_HARMLESS):
        return
    found = [(rule, kind) for rule, kind in _NAMES.items() if fnmatch.fnmatchcase(name, rule)]
    found += [(rule, kind) for rule, kind in _PATHS.items() if f"/{lower}".endswith(f"/{rule}")]
    for rule, kind in found[:1]:
        raise UserError(f"code: {path} looks like {kind} (its name: {rule}): {_advice(path)}")


def check_content(path: str, data: bytes, allow: Collection[str]) -> None:
    """Raises `UserError` for a file with a secret in it, and for a pointer of git-lfs."""
    if len(data) <= _LFS_BYTES and data.startswith(_LFS):
        raise UserError(
            f"code: {path} is a pointer of git-lfs, not the file: git lfs pull, or name it in .lockstepignore"
        )
    if path in allow:
        return
    for kind, pattern in _PATTERNS.items():
        found = pattern.search(data)
        if found is not None:
            line = data.count(b"\n", 0, found.start()) + 1
            raise UserError(f"code: {path}, line {line}, holds {kind}: {_advice(path)}")


def _advice(path: str) -> str:
    return f"name it in .lockstepignore, or, if it is not a secret, in code.allow: [{path}]"


def check_names(paths: Collection[str]) -> None:
    """Raises `UserError` for two names that some file systems take for one, and for modules that hide others."""
    spelled: dict[tuple[str, str], str] = {}
    """Folder, and a name in it as such a file system compares it → the name. Each folder is looked at once, however deep it lies."""
    looked_at = {""}
    for path in sorted(paths):
        rest = path
        while rest:
            folder, _, name = rest.rpartition("/")
            known = spelled.setdefault((folder, unicodedata.normalize("NFC", name).casefold()), name)
            if known != name:
                first = f"{folder}/{known}" if folder else known
                raise UserError(f"code: {first} and {rest} differ only in case or spelling: rename one of them")
            if folder in looked_at:
                break
            looked_at.add(folder)
            rest = folder
        _check_module(path, path.split("/"))


def _check_module(path: str, parts: list[str]) -> None:
    """A module or a package at the top of the code comes first on Python's path."""
    match = _MODULE.fullmatch(parts[min(len(parts), 2) - 1])
    if match is None or len(parts) > 2:
        return
    name = match["name"] if len(parts) == 1 else parts[0]
    if name == OURS:
        raise UserError(
            f"code: {path} would hide the package {name} of Lockstep: rename it, or name it in .lockstepignore"
        )
    # A folder without __init__.py hides nothing.
    if name in {*sys.stdlib_module_names, *_AT_START} and (len(parts) == 1 or match["name"] == "__init__"):
        raise UserError(f"code: {path} would hide the standard module {name}: rename it, or name it in .lockstepignore")
