"""Checkpoints in an object store: what a run needs where no disk outlives its node.

Data goes under keys that no other attempt has, so that nothing is overwritten, unconditionally and in parts. Only `head` is written on a
condition: that is the commit. It is swapped for the one that was read (If-Match; on GCS the generation). An attempt takes a run over by
one swap. An earlier one that still lives, on a node that was cut off, has an old tag from then on, and can commit nothing. No two heads
are alike, so where an answer is lost, reading tells whether the swap was done. Nothing is ordered by a time, and nothing is found by a
listing: that serves to remove what no head names.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from pydantic import ValidationError

from .. import files
from ..bucket import HEAD, KEY, MAX_HEAD_BYTES, TRIES, Bucket, File, Found, Head, Kept
from ..contract import CHECKPOINTS, EXIT_FAILED, RUN_FILE, UserError, checkpoint_name
from . import store
from .score import KeepBest, Rule, chosen
from .store import SaveResult, Worker

RECORD = "bucket.json"
"""In the run directory: which bucket, and which run there, it is a copy of; who has held it in this attempt, and from which step
that went on."""
_SENDING = Worker("checkpoint-send")


class TakenOver(OSError):
    """Another attempt at this run writes into the bucket from now on."""


def _token() -> str:
    return secrets.token_hex(16)


class ObjectStore(Bucket):
    """The checkpoints of one run under `url`, for the attempt that holds them: from `take` or `succeed` on."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._found: Found | None = None
        """The head as this rank has written it last."""
        self._run_dir = Path()
        self._ours = set[str]()
        """Holders that are this attempt."""
        self._began = 0
        """The step that this attempt went on from."""
        self._unsure = False
        """The last swap had no answer: it may be done, or be done yet."""
        self._number = 0
        self._unread = set[int]()
        """Steps in the head whose files this rank has not read in the bucket."""
        self._cleaned = False
        self.before_commit: Callable[[], None] = lambda: None
        """Sends the run directory: a checkpoint comes with all that was written down before it."""

    def _swap(self, head: Head, before: Found | None) -> None:
        """Puts `head` in the place of the one that was read. Raises `TakenOver`, `OSError`."""
        text = head.text()
        if len(text) > MAX_HEAD_BYTES:
            raise OSError(f"{self.url}/{HEAD} would have {len(text)} bytes: keep fewer checkpoints (checkpoint.keep)")
        self._unsure = True
        problem = ""
        for _ in range(TRIES):
            try:
                if not self.swap(HEAD, text, before and before.tag):
                    problem = (
                        "the store refuses the tag that it tells itself: lockstep doctor tries its conditional writes"
                    )
            except OSError as error:
                problem = str(error)  # also where it was done, and the answer was lost
            found = self.read_head()
            if found is not None and found.head.commit == head.commit:
                self._found, self._unsure = found, False
                return
            if found is not None and (before is None or found.head.commit != before.head.commit):
                if found.head.holder in self._ours:  # an earlier swap, without an answer, was done late
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
        with self.explained():
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

    def take(self, run_dir: Path, fresh: bool | str, keep_best: KeepBest, warn: Callable[[str], None]) -> Path | None:
        """Makes this attempt the one that writes, and brings what the bucket has and the run directory lacks: the newest checkpoint that
        can be read, and the best one. The directory is locked.

        Returns:
            The newest checkpoint of the run directory that verifies; every byte of it was read. None: there is none.

        Raises:
            UserError: the bucket cannot be read or written (exit code 1), or has no checkpoint that verifies.
        """
        with self.explained():
            for _ in range(TRIES):
                before = self.read_head()
                old = before.head if before is not None else None
                if old is not None and self._starts_over(old, fresh):
                    self.put(f"replaced/{old.commit}", old.text())
                    old = None
                head = Head(run=_token(), holder=_token(), commit=_token())
                self._ours = {head.holder}
                if old is not None:
                    begun = self._shown_by(old)
                    head = old.model_copy(update={"holder": head.holder, "commit": head.commit, "before": begun})
                try:
                    self._swap(head, before)
                except TakenOver:
                    continue  # by one that started at the same time: the last one has it
                break
            else:
                raise OSError(f"several attempts start at once with {self.url}")
            if not head.checkpoints:
                self.check_conditions(f"{head.holder}/0-probe/probe")
            newest = self._bring(run_dir, keep_best, warn)
            self._run_dir, self._began = run_dir, 0 if newest is None else store.step_of(newest)
            self._record(head.run)
            return newest

    def succeed(self, run_dir: Path) -> None:
        """Rank 0 was lost, and this one is in its place: what it saves is sent from here on, if nobody else has taken over. Asks the
        bucket for nothing yet: the other ranks wait."""
        record = files.read_json(run_dir / RECORD)
        with contextlib.suppress(TypeError, KeyError, ValueError):  # a damaged one: nobody can tell whose the bucket is
            self._ours, self._began = {str(holder) for holder in record["holders"]}, int(record["step"])
        self._run_dir = run_dir

    def _record(self, run: str) -> None:
        """For the rank that takes the place of this one, if it is lost."""
        record = {"url": self.url, "run": run, "holders": sorted(self._ours), "step": self._began}
        files.replace_json(self._run_dir / RECORD, record)

    @property
    def head(self) -> Head | None:
        """As this rank has written it last; None: it does not hold the run yet."""
        return None if self._found is None else self._found.head

    def bring_one(self, run_dir: Path, wanted: int | Rule | None, warn: Callable[[str], None]) -> None:
        """Brings a checkpoint for somebody who reads a run: the newest one that verifies, that of a step, or the best by a rule.

        Raises:
            UserError: there is none.
            OSError: the bucket cannot be read.
        """
        before = ""
        for _ in range(TRIES):
            found = self.read_head()
            if found is None or not found.head.checkpoints:
                raise UserError(f"{self.url} has no checkpoint yet")
            if found.head.commit == before:
                break
            before = found.head.commit
            kept = found.head.checkpoints if wanted is None else [_chosen(found.head.checkpoints, wanted, self.url)]
            if any(self._bring_one(one, run_dir / CHECKPOINTS, warn) for one in kept):
                return  # else the run may have removed them meanwhile
        raise UserError(f"no checkpoint in {self.url} that was asked for can be read and verified")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Another start may find the bucket again, so what is not the user's mistake ends with 1."""
        try:
            yield
        except (OSError, store.CorruptCheckpoint) as error:
            away = UserError(f"checkpoint.to cannot be used: {error}")
            away.code = EXIT_FAILED
            raise away from None

    def _shown_by(self, head: Head) -> str | None:
        """The attempt whose copy of the run directory counts. Raises `OSError`."""
        try:
            self.size(head.snapshots[0])
        except FileNotFoundError:
            return head.before
        return head.holder

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

    def _bring(self, run_dir: Path, keep_best: KeepBest, warn: Callable[[str], None]) -> Path | None:
        assert self._found is not None
        kept_there, checkpoints = self._found.head.checkpoints, run_dir / CHECKPOINTS
        self._unread = {kept.step for kept in kept_there[:1]}
        store.clean(checkpoints)
        newest = next((path for path in store.candidates(checkpoints) if _verifies(path)), None)
        newer = [kept for kept in kept_there if newest is None or kept.step > store.step_of(newest)]
        newest = next((path for kept in newer if (path := self._bring_one(kept, checkpoints, warn))), newest)
        if newer and newest is None:
            raise UserError(f"none of the {len(newer)} checkpoints in {self.url} can be read and verified")
        for kept in _retained(kept_there, 0, keep_best):
            if not (checkpoints / checkpoint_name(kept.step)).exists():
                self._bring_one(kept, checkpoints, warn, durable=True)
        return newest

    def _bring_one(
        self, kept: Kept, checkpoints: Path, warn: Callable[[str], None], durable: bool = False
    ) -> Path | None:
        """Whoever resumes verifies the newest one, so that need not be durable: after a crash it is fetched again."""
        checkpoints.mkdir(exist_ok=True)
        final = checkpoints / checkpoint_name(kept.step)
        try:
            with files.replacing(final) as staging:
                staging.mkdir()
                for name, file in kept.files.items():
                    self._fetch(file, staging / name, durable)
                if final.exists():  # it does not verify
                    files.rename(final, final.with_name(f".old-{final.name}.{os.getpid()}"))
        except FileNotFoundError as error:
            warn(f"checkpoint is missing in the bucket and not used: {error}")
        except store.CorruptCheckpoint as error:
            warn(f"checkpoint is corrupt in the bucket and not used: {error}")
        else:
            store.clean(checkpoints)
            self._unread.discard(kept.step)
            return final
        return None

    def _pieces(self, file: File) -> Iterator[memoryview]:
        return self.pieces(file.key, file.bytes, file.sha256, store.CorruptCheckpoint)

    def _fetch(self, file: File, path: Path, durable: bool = True) -> None:
        self.fetch(file.key, file.bytes, file.sha256, path, store.CorruptCheckpoint, durable)

    def commit(self, path: Path, keep: int, keep_best: KeepBest) -> int:
        """Sends a checkpoint of the run directory, and has the head name it beside those that are there: `prune` removes the older ones.

        Args:
            path: in the run directory's `checkpoints`. It may be removed there meanwhile.
            keep, keep_best: as of `Writer`.

        Returns:
            Bytes of it; 0: the bucket has it, or would not keep it.

        Raises:
            TakenOver: another attempt has started.
            FileNotFoundError: it is not in the run directory.
            OSError: it could not be sent.
        """
        before, sent = self._held(), list[File]()
        with contextlib.ExitStack() as stack:
            about, opened = _opened(path, stack)
            sealed = {name: str(entry["sha256"]) for name, entry in about["files"].items()}
            sealed[store.MANIFEST] = hashlib.sha256(opened[store.MANIFEST].read()).hexdigest()
            opened[store.MANIFEST].seek(0)
            kept = Kept(step=about["step"], files={}, score=about["score"], score_of=about["score_of"])
            others = []
            for other in self._standing(before.head):
                if other.step != kept.step:
                    others.append(other)
                elif {name: file.sha256 for name, file in other.files.items()} == sealed:
                    return 0
            if kept not in _retained([kept, *others], keep, keep_best):
                return 0
            self._number += 1
            try:
                settings = before.head.settings
                if settings is None:
                    file = stack.enter_context(files.regular(self._run_dir / RUN_FILE))
                    settings = self._send(file, RUN_FILE, RUN_FILE, files.sha256(self._run_dir / RUN_FILE), sent)
                    self._read_back(settings)
                entries = {name: self._send(opened[name], path.name, name, sealed[name], sent) for name in sealed}
            except (OSError, store.CorruptCheckpoint) as error:
                self.remove([file.key for file in sent])
                raise OSError(str(error)) from None
        self.before_commit()
        self._unread.add(kept.step)
        self._replace(before, [kept.model_copy(update={"files": entries}), *others], settings)
        return sum(file.bytes for file in entries.values())

    def prune(self, keep: int, keep_best: KeepBest) -> None:
        """Reads back what this attempt has committed, and then removes what need not be kept any more; the first time, also what earlier
        attempts have sent and not committed.

        Raises:
            TakenOver: another attempt has started.
            OSError: it could not be read, or is damaged. Then the older ones stay.
        """
        before = self._held()
        standing = list(self._standing(before.head))
        stay = _retained(standing, keep, keep_best)
        for kept in stay:
            if kept.step in self._unread and (self._sent(kept) or stay != before.head.checkpoints):
                try:
                    for file in kept.files.values():
                        self._read_back(file)
                except store.CorruptCheckpoint as error:
                    self._replace(before, [other for other in standing if other != kept], before.head.settings)
                    raise OSError(str(error)) from None
                self._unread.discard(kept.step)
        if stay != before.head.checkpoints:
            self._replace(before, stay, before.head.settings)
        if not self._cleaned:
            self._clean()
            self._cleaned = True

    def _read_back(self, file: File) -> None:
        for _ in self._pieces(file):
            pass

    def _replace(self, before: Found, checkpoints: list[Kept], settings: File | None) -> None:
        """The head names these. What it named before and does not now is removed."""
        newest_first = sorted(checkpoints, key=lambda kept: -kept.step)
        changes = {"commit": _token(), "settings": settings, "checkpoints": newest_first}
        head = before.head.model_copy(update=changes)
        self._swap(head, before)
        named = {file.key for file in head.files()}
        self.remove([file.key for file in before.head.files() if file.key not in named])

    def _standing(self, head: Head) -> Iterator[Kept]:
        """Without the newer ones of other attempts, which were passed over when this one began: they are damaged."""
        for kept in head.checkpoints:
            if kept.step <= self._began or self._sent(kept):
                yield kept

    def _sent(self, kept: Kept) -> bool:
        """Whether this attempt has sent it."""
        return {file.key.partition("/")[0] for file in kept.files.values()} <= self._ours

    def _held(self) -> Found:
        """The head that this rank has written last; of one that succeeds a lost one, the first time, swapped for its own. Raises
        `TakenOver`, `OSError`."""
        if self._found is not None and not self._unsure:
            return self._found
        found = self.read_head()
        if found is None or found.head.holder not in self._ours:
            raise TakenOver(f"another attempt has taken {self.url} over")
        if self._found is None:
            holder = _token()
            self._ours.add(holder)
            self._record(found.head.run)
            begun = self._shown_by(found.head)
            self._swap(found.head.model_copy(update={"holder": holder, "commit": _token(), "before": begun}), found)
            assert self._found is not None
            self._unread = {kept.step for kept in found.head.checkpoints[:1]}
        else:
            self._found, self._unsure = found, False
        return self._found

    def _send(self, file: BinaryIO, folder: str, name: str, sha256: str, sent: list[File]) -> File:
        assert self._found is not None
        key = f"{self._found.head.holder}/{self._number}-{folder}/{name}"
        self.send(file, key)
        sent.append(File(key=key, sha256=sha256, bytes=os.fstat(file.fileno()).st_size))
        return sent[-1]

    def _clean(self) -> None:
        """Removes what earlier attempts have sent and not committed. They can commit nothing any more, and this one sends nothing now."""
        assert self._found is not None
        with contextlib.suppress(OSError, ValidationError):
            sizes = self.keys()
            found = self.read_head()  # after the listing: what another attempt has sent since it took over is not in it
            if found is None or found.head.holder != self._found.head.holder:
                return
            named = found.head.keys
            for key in sizes:
                if key.startswith("replaced/"):
                    text, _ = self.read(key, MAX_HEAD_BYTES)
                    named |= Head.model_validate_json(text).keys
            self.remove([key for key in sizes if re.fullmatch(KEY, key) and key not in named])


class Sender:
    """Brings the checkpoints of a run directory into the bucket while the training goes on: the newest one, then the best.

    It reads their files, so it holds no more in memory than the parts under way. Where the bucket is slower than the saves, a checkpoint
    that waits is passed over for the newer one: the training never waits for a bucket.
    """

    def __init__(self, objects: ObjectStore, directory: Path, keep: int, keep_best: KeepBest) -> None:
        self._objects, self._directory, self._keep, self._keep_best = objects, directory, keep, keep_best
        self._step = -1
        _SENDING.begin()

    def send(self, step: int, written: Future[SaveResult] | None = None) -> list[Future[SaveResult | None]]:
        """Sends in the background what the run has saved up to `step`, once that is written.

        Returns:
            Of the newest one, and of the best one: what was sent and read back; None where there was nothing to send, or a newer one
            waits by then.
            `OSError`: it could not be sent. `TakenOver`: nothing can be sent any more.
        """
        self._step = step
        newest = _SENDING.run(self._send, step, written, False)
        return [newest, _SENDING.run(self._send, step, newest, True)] if self._keep_best else [newest]

    def _send(self, step: int, after: Future[Any] | None, best: bool) -> SaveResult | None:
        failed = after is not None and after.exception() is not None
        if step < self._step or (best and failed):
            return None
        paths = [path for path in store.candidates(self._directory) if store.step_of(path) <= step]
        path = next(iter(paths), None)
        if best:
            found = store.best(paths, Rule.of(self._keep_best))
            path = found and found[0]
        elif after is not None and not failed:
            path = after.result().path
        if path is None:
            return None
        began = time.perf_counter()
        try:
            size = self._objects.commit(path, self._keep, self._keep_best)
            self._objects.prune(self._keep, self._keep_best)
        except FileNotFoundError:
            if step < self._step:
                return None  # it has made room for the newer one
            raise
        return SaveResult(path, time.perf_counter() - began, size) if size else None


def _opened(path: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Any], dict[str, BinaryIO]]:
    """What a checkpoint says of itself, and its files, which can be read also when it has made room for newer ones.

    Raises:
        FileNotFoundError: it has before.
        OSError: it cannot be read.
    """
    try:
        with files.opened_folder(path) as folder:
            about = store.manifest(folder, store.step_of(path))
            names = (*about["files"], store.MANIFEST)
            return about, {name: stack.enter_context(files.regular(folder / name)) for name in names}
    except (OSError, store.CorruptCheckpoint) as error:
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there any more") from None
        raise OSError(str(error)) from None


def _verifies(path: Path) -> bool:
    try:
        store.verify(path)
    except store.CorruptCheckpoint:
        return False
    return True


def _chosen(all_of_them: list[Kept], wanted: int | Rule, url: str) -> Kept:
    kept = {one.step: one for one in all_of_them}
    return kept[chosen(kept, wanted, lambda step, rule: kept[step].scored(rule.name), url)]


def _retained(all_of_them: list[Kept], keep: int, keep_best: KeepBest) -> list[Kept]:
    """The newest ones, and the best: what `Writer` keeps on a disk."""
    rule = Rule.of(keep_best)
    newest = sorted(all_of_them, key=lambda kept: -kept.step)
    stay = newest[:keep]
    best = rule.best({kept.step: score for kept in newest if (score := kept.scored(rule.name)) is not None})
    return [*stay, *(kept for kept in newest[keep:] if keep_best and kept.step == best)]
