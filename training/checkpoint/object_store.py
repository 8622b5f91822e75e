"""Checkpoints in an object store: what a run needs where no disk outlives its node.

Data goes under keys that no other attempt has, so that nothing is overwritten, unconditionally and in parts. Only `head` is written on a
condition: that is the commit. It is swapped for the one that was read (If-Match; on GCS the generation). An attempt takes a run over by
one swap. An earlier one that still lives, on a node that was cut off, has an old tag from then on, and can commit nothing. No two heads
are alike, so where an answer is lost, reading tells whether the swap was done. Nothing is ordered by a time, and nothing is found by a
listing: that serves to remove what no head names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError

from lockstep.training import files
from lockstep.training.bucket import HEAD, KEY, MAX_HEAD_BYTES, TRIES, Bucket, File, Found, Head, Kept
from lockstep.training.checkpoint import store
from lockstep.training.checkpoint.score import KeepBest, Rule
from lockstep.training.contract import CHECKPOINTS, EXIT_FAILED, RUN_FILE, UserError, checkpoint_name

RECORD = "bucket.json"
"""In the run directory: which bucket, and which run there, it is a copy of."""


class TakenOver(OSError):
    """Another attempt at this run writes into the bucket from now on."""


def _token() -> str:
    return secrets.token_hex(16)


class ObjectStore(Bucket):
    """The checkpoints of one run under `url`, for the attempt that holds them: from `take` on."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._found: Found | None = None
        """The head as this attempt has written it last."""
        self._unsure = False
        """The last swap had no answer: it may be done, or be done yet."""
        self._number = 0

    def _swap(self, head: Head, before: Found | None) -> None:
        """Puts `head` in the place of the one that was read. Raises `TakenOver`, `OSError`."""
        text = head.text()
        if len(text) > MAX_HEAD_BYTES:
            raise OSError(f"{self.url}/{HEAD} would have {len(text)} bytes: keep fewer checkpoints (checkpoint.keep)")
        self._unsure = True
        problem = ""
        for _ in range(TRIES):
            try:
                self.swap(HEAD, text, before and before.tag)
            except OSError as error:
                problem = str(error)  # also where it was done, and the answer was lost
            found = self.read_head()
            if found is not None and found.head.commit == head.commit:
                self._found, self._unsure = found, False
                return
            if found is not None and (before is None or found.head.commit != before.head.commit):
                # Of this attempt: an earlier swap, without an answer, was done late.
                if found.head.holder == head.holder:
                    raise OSError(f"{self.url}/{HEAD} has changed meanwhile")
                raise TakenOver(f"another attempt has taken {self.url} over")
            if found is None and before is not None:
                raise TakenOver(f"{self.url}/{HEAD} was removed")
        raise OSError(f"the head could not be written: {problem}")

    def settle(self, run_dir: Path, fresh: bool | str) -> None:
        """Brings the settings of the run in the bucket, so that others are refused before anything is changed there. Changes nothing there.

        Raises:
            UserError: the bucket holds another run, or cannot be read (exit code 1).
        """
        with self._explained():
            found = self.read_head()
            if found is None or found.head.settings is None or self._starts_over(found.head, fresh):
                return
            record = files.read_json(run_dir / RECORD)
            if not (run_dir / RUN_FILE).exists():
                files.replace_json(run_dir / RECORD, {"url": self.url, "run": found.head.run})
                with files.replacing(run_dir / RUN_FILE) as place:
                    self._fetch(found.head.settings, place)
            elif not isinstance(record, dict) or record.get("run") != found.head.run:
                raise UserError(
                    f"{self.url} has the checkpoints of another run than {run_dir}: choose another prefix, an empty run directory to "
                    "resume that one, or start over with --fresh"
                )

    def take(self, run_dir: Path, fresh: bool | str, keep_best: KeepBest, warn: Callable[[str], None]) -> None:
        """Makes this attempt the one that writes, and brings what the bucket has and the run directory lacks: the newest checkpoint that
        can be read, and the best one. The directory is locked.

        Raises:
            UserError: the bucket cannot be read or written (exit code 1), or has no checkpoint that verifies.
        """
        with self._explained():
            for _ in range(TRIES):
                before = self.read_head()
                old = before.head if before is not None else None
                if old is not None and self._starts_over(old, fresh):
                    self.put(f"replaced/{old.commit}", old.text())
                    old = None
                new = Head(run=_token(), holder=_token(), commit=_token())
                head = new if old is None else old.model_copy(update={"holder": new.holder, "commit": new.commit})
                try:
                    self._swap(head, before)
                except TakenOver:
                    continue  # by one that started at the same time: the last one has it
                break
            else:
                raise OSError(f"several attempts start at once with {self.url}")
            files.replace_json(run_dir / RECORD, {"url": self.url, "run": head.run})
            if not head.checkpoints:
                self.check_conditions(f"{head.holder}/0-probe/probe")
            self._bring(run_dir, keep_best, warn)
            self._clean()

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint in the bucket; -1 without one."""
        assert self._found is not None
        return max((kept.step for kept in self._found.head.checkpoints), default=-1)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Another start may find the bucket again, so what is not the user's mistake ends with 1."""
        try:
            yield
        except (OSError, store.CorruptCheckpoint) as error:
            away = UserError(f"checkpoint.to cannot be used: {error}")
            away.code = EXIT_FAILED
            raise away from None

    def _starts_over(self, head: Head, fresh: bool | str) -> bool:
        """Whether `--fresh` replaces the run: not where it was begun with the same word. Raises `OSError`, `CorruptCheckpoint`."""
        if isinstance(fresh, bool) or not fresh or head.settings is None:
            return bool(fresh)
        if head.settings.bytes > MAX_HEAD_BYTES:
            raise OSError(f"{self.url}/{head.settings.key} is too large for the settings of a run")
        text = b"".join(self._pieces(head.settings))
        with files.reading(f"{self.url}/{head.settings.key}"):
            saved = yaml.safe_load(text)
            return bool(saved.get("fresh") != fresh)

    def _bring(self, run_dir: Path, keep_best: KeepBest, warn: Callable[[str], None]) -> None:
        assert self._found is not None
        kept_there, checkpoints = self._found.head.checkpoints, run_dir / CHECKPOINTS
        store.clean(checkpoints)
        here = next((store.step_of(path) for path in store.candidates(checkpoints) if _verifies(path)), -1)
        newer = [kept for kept in kept_there if kept.step > here]
        brought = any(self._bring_one(kept, checkpoints, warn) for kept in newer)
        if newer and not brought and here < 0:
            raise UserError(f"none of the {len(newer)} checkpoints in {self.url} can be read and verified")
        for kept in _retained(kept_there, 0, keep_best):
            if not (checkpoints / checkpoint_name(kept.step)).exists():
                self._bring_one(kept, checkpoints, warn)

    def _bring_one(self, kept: Kept, checkpoints: Path, warn: Callable[[str], None]) -> bool:
        checkpoints.mkdir(exist_ok=True)
        final = checkpoints / checkpoint_name(kept.step)
        try:
            with files.replacing(final) as staging:
                staging.mkdir()
                for name, file in kept.files.items():
                    self._fetch(file, staging / name)
                files.fsync_directory(staging)
                if final.exists():  # it does not verify
                    files.rename(final, final.with_name(f".old-{final.name}.{os.getpid()}"))
        except FileNotFoundError as error:
            warn(f"checkpoint is missing in the bucket and not used: {error}")
        except store.CorruptCheckpoint as error:
            warn(f"checkpoint is corrupt in the bucket and not used: {error}")
        else:
            store.clean(checkpoints)
            return True
        return False

    def _pieces(self, file: File) -> Iterator[memoryview]:
        return self.pieces(file.key, file.bytes, file.sha256, store.CorruptCheckpoint)

    def _fetch(self, file: File, path: Path) -> None:
        self.fetch(file.key, file.bytes, file.sha256, path, store.CorruptCheckpoint)

    def commit(self, path: Path, keep: int, keep_best: KeepBest) -> None:
        """Sends a checkpoint of the run directory, reads it back, and makes it the newest. Older ones go after that.

        Args:
            path: verified, in the run directory's `checkpoints`.
            keep, keep_best: as of `Writer`.

        Raises:
            TakenOver: another attempt has started.
            OSError: it could not be sent.
        """
        before, sent = self._held(), list[File]()
        try:
            about = store.manifest(path)
            settings = before.head.settings
            if settings is None:
                settings = self._send(path.parent.parent / RUN_FILE, RUN_FILE, sent)
            self._number += 1
            known = {name: entry["sha256"] for name, entry in about["files"].items()}
            entries = {
                name: self._send(path / name, path.name, sent, known.get(name)) for name in (*known, store.MANIFEST)
            }
            for file in sent:
                for _ in self._pieces(file):
                    pass
        except (OSError, ValueError, store.CorruptCheckpoint) as error:
            self.remove([file.key for file in sent])
            raise OSError(str(error)) from None
        kept = Kept(step=about["step"], files=entries, score=about["score"], score_of=about["score_of"])
        # Newer ones were passed over when this attempt started: they are damaged.
        others = [other for other in before.head.checkpoints if other.step < kept.step]
        checkpoints = _retained([kept, *others], keep, keep_best)
        head = before.head.model_copy(update={"commit": _token(), "settings": settings, "checkpoints": checkpoints})
        self._swap(head, before)
        named = {file.key for file in head.files()}
        self.remove([file.key for file in before.head.files() if file.key not in named])

    def _held(self) -> Found:
        """The head that this attempt has written last. Raises `TakenOver`, `OSError`."""
        assert self._found is not None
        if self._unsure:
            found = self.read_head()
            if found is None or found.head.holder != self._found.head.holder:
                raise TakenOver(f"another attempt has taken {self.url} over")
            self._found, self._unsure = found, False
        return self._found

    def _send(self, path: Path, folder: str, sent: list[File], sha256: str | None = None) -> File:
        assert self._found is not None
        size, digest = path.stat().st_size, sha256 or files.sha256(path)
        key = f"{self._found.head.holder}/{self._number}-{folder}/{path.name}"
        self.send(path, key)
        sent.append(File(key=key, sha256=digest, bytes=size))
        return sent[-1]

    def _clean(self) -> None:
        """Removes what earlier attempts have sent and not committed. They can commit nothing any more."""
        assert self._found is not None
        with contextlib.suppress(OSError, ValidationError):
            sizes = self.keys()
            found = self.read_head()  # after the listing: what another attempt has sent since it took over is not in it
            if found is None or found.head.holder != self._found.head.holder:
                return
            named = {file.key for file in found.head.files()}
            for key in sizes:
                if key.startswith("replaced/"):
                    text, _ = self.read(key, MAX_HEAD_BYTES)
                    named.update(file.key for file in Head.model_validate_json(text).files())
            self.remove([key for key in sizes if re.fullmatch(KEY, key) and key not in named])


def _verifies(path: Path) -> bool:
    try:
        store.verify(path)
    except store.CorruptCheckpoint:
        return False
    return True


def _retained(all_of_them: list[Kept], keep: int, keep_best: KeepBest) -> list[Kept]:
    """The newest ones, and the best: what `Writer` keeps on a disk."""
    rule = Rule.of(keep_best)
    newest = sorted(all_of_them, key=lambda kept: -kept.step)
    stay = newest[:keep]
    best = rule.best({k.step: k.score for k in newest if k.score is not None and k.score_of == rule.name})
    return [*stay, *(kept for kept in newest[keep:] if keep_best and kept.step == best)]
