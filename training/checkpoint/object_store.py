"""Checkpoints in an object store: what a run needs where no disk outlives its node.

Data goes under keys that no other attempt has, so that nothing is overwritten, unconditionally and in parts. Only `head` is written on a
condition: that is the commit, of a checkpoint and of the run directory's files at that moment. It is swapped for the one that was read
(If-Match; on GCS the generation). An attempt takes a run over by one swap. An earlier one that still lives, on a node that was cut off,
can commit nothing from then on. No two heads are alike, so where an answer is lost, reading tells whether the swap was done.
Neither timestamps nor listings decide anything; `head` names every object. A listing serves to remove what no head names.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml
from pydantic import ValidationError

from .. import bucket, files
from ..bucket import HEAD, TRIES, Bucket, CheckpointEntry, Damaged, File, Head, Tag, as_user_error
from ..contract import CHECKPOINTS, METRICS, RUN_FILE, UserError, checkpoint_name
from . import store
from .score import KeepBest, Rule, chosen

RECORD = "bucket.json"
"""File of the run directory: the run in the bucket, and the data with which another rank replaces a lost rank 0."""
_UNUSABLE = "checkpoint.to cannot be used"


class TakenOver(OSError):
    """Another attempt at this run writes into the bucket from now on."""


def _token() -> str:
    return secrets.token_hex(16)


class ObjectStore(Bucket):
    """The checkpoints of one run under `url`, for the attempt that holds them: from `acquire` or `take_over` on."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._run_dir = Path()
        self._found: tuple[Head, Tag] | None = None
        """The head as this rank has written it last; None: it does not know."""
        self._holders = [_token()]
        """The holders that are this attempt; the last one is this rank."""
        self._damaged = set[int]()
        """Steps of the checkpoints that could not be read as this attempt began."""
        self._number = 0

    def check(self, run_dir: Path, fresh: bool | str) -> None:
        """Fetches the settings of the run in the bucket, so that others are refused. Changes nothing there.

        Raises:
            UserError: the bucket holds another run, or cannot be read (exit code 1).
        """
        with as_user_error(_UNUSABLE):
            found = self.read_head()
            if found is None or not found[0].run_files or self._starts_over(found[0], fresh):
                return
            head, record = found[0], files.read_json(run_dir / RECORD)
            if not (run_dir / RUN_FILE).exists():
                files.replace_json(run_dir / RECORD, {"run": head.run})
                self.restore({RUN_FILE: head.run_files[RUN_FILE]}, run_dir)
            elif not isinstance(record, dict) or record.get("run") != head.run:
                raise UserError(
                    f"{self.url} has the checkpoints of another run than {run_dir}: choose another prefix, an empty run directory to "
                    "resume that one, or start over with --fresh"
                )

    def acquire(
        self, run_dir: Path, fresh: bool | str, keep_best: KeepBest, warn: Callable[[str], None]
    ) -> Path | None:
        """Makes this attempt the one that writes, and fetches what the bucket has and the run directory lacks: the newest checkpoint that
        can be read, the best one, and what earlier attempts have written down. The directory is locked.

        Returns:
            The newest checkpoint of the run directory that verifies; every byte of it was read. None: there is none.

        Raises:
            UserError: the bucket cannot be read or written (exit code 1), or has no checkpoint that verifies.
        """
        with as_user_error(_UNUSABLE):
            head, checkpoints = self._hold(fresh), run_dir / CHECKPOINTS
            if not head.checkpoints:
                self.check_conditions(f"{head.holder}/0-probe/probe")
            self._clean(head)
            store.clean(checkpoints)
            newest = None
            with contextlib.suppress(UserError):  # none of them verifies
                newest = store.newest_verified(checkpoints)
            newer = [entry for entry in head.checkpoints if newest is None or entry.step > store.step_of(newest)]
            newest = self._fetch_first(newer, checkpoints, warn) or newest
            if newer and newest is None:
                raise UserError(f"none of the {len(newer)} checkpoints in {self.url} can be read and verified")
            best = _retained(head.checkpoints, 0, keep_best)
            missing = [entry for entry in best if not (checkpoints / checkpoint_name(entry.step)).exists()]
            self._fetch_first(missing, checkpoints, warn)
            grown = {name: file for name, file in head.run_files.items() if name in bucket.GROWING}
            try:
                if not all(_begins_with(run_dir / name, file) for name, file in grown.items()):
                    self.restore(head.run_files, run_dir)
            except Damaged as error:
                warn(f"what earlier attempts have written down is lost: {error}; the run continues")
            self._run_dir = run_dir
            self._record(head.run)
            return newest

    def _hold(self, fresh: bool | str) -> Head:
        """Swaps the head for one of this attempt. Raises `OSError`."""
        for _ in range(TRIES):
            before = self.read_head()
            head = Head(run=_token(), holder=self._holders[-1], commit=_token())
            if before is not None and self._starts_over(before[0], fresh):
                self.put(f"replaced/{before[0].commit}", before[0].text())
            elif before is not None:
                head = before[0].model_copy(update={"holder": head.holder, "commit": head.commit})
            with contextlib.suppress(TakenOver):  # by one that started at the same time: the last one has it
                self._swap(head, before)
                return head
        raise OSError(f"several attempts start at once with {self.url}")

    def _starts_over(self, head: Head, fresh: bool | str) -> bool:
        """Whether `--fresh` replaces the run: not where it was begun with the same word. Raises `OSError`."""
        if isinstance(fresh, bool) or not fresh or not head.run_files:
            return bool(fresh)
        settings = head.run_files[RUN_FILE]
        with files.reading(f"{self.url}/{settings.key}", OSError):
            return bool(yaml.safe_load(self.content(settings)).get("fresh") != fresh)

    def take_over(self, run_dir: Path) -> None:
        """Makes this rank the sender after the loss of rank 0, unless another attempt has taken over. Sends no request yet: the other
        ranks wait."""
        self._run_dir, record = run_dir, files.read_json(run_dir / RECORD)
        with contextlib.suppress(TypeError, KeyError, ValueError):  # a damaged record does not say whose the bucket is
            self._damaged = {int(step) for step in record["damaged"]}
            self._holders = [*map(str, record["holders"]), *self._holders]
            self._record(record["run"])

    def _record(self, run: str) -> None:
        record = {"run": run, "holders": self._holders, "damaged": sorted(self._damaged)}
        files.replace_json(self._run_dir / RECORD, record)

    def download(self, run_dir: Path, wanted: int | Rule | None, warn: Callable[[str], None]) -> None:
        """Fetches a checkpoint for a reader of the run: the newest one that verifies, the one of a step, or the best by a rule.

        Raises:
            UserError: there is none.
            OSError: the bucket cannot be read.
        """
        for head in self.heads():
            entries = head.checkpoints
            if wanted is not None:
                entries = [_chosen(entries, wanted, self.url)]
            if self._fetch_first(entries, run_dir / CHECKPOINTS, warn) is not None:
                return
        raise UserError(f"{self.url} has no checkpoint yet, or none that can be read and verified")

    def _fetch_first(
        self, entries: Iterable[CheckpointEntry], checkpoints: Path, warn: Callable[[str], None]
    ) -> Path | None:
        """Fetches the first checkpoint that can be read and verified. Raises `OSError`."""
        checkpoints.mkdir(exist_ok=True)
        for entry in entries:
            final = checkpoints / checkpoint_name(entry.step)
            try:
                with files.replacing(final) as staging:
                    staging.mkdir()
                    for name, file in entry.files.items():
                        self.fetch(file.key, file.bytes, file.sha256, staging / name)
                    if final.exists():  # it does not verify
                        files.rename(final, final.with_name(f".old-{final.name}.{os.getpid()}"))
            except (FileNotFoundError, Damaged) as error:
                warn(f"checkpoint is corrupt in the bucket and not used: {error}")
                self._damaged.add(entry.step)
            else:
                store.clean(checkpoints)
                return final
        return None

    def commit(self, path: Path | None, keep: int, keep_best: KeepBest) -> int:
        """Sends a checkpoint and the current files of the run directory, and reads them back. Then the head names them. Checkpoints that
        are not kept are removed.

        Args:
            path: in the run directory's `checkpoints`. It may be removed there meanwhile. None: the files of the run directory alone.
            keep, keep_best: as of `Writer`.

        Returns:
            Bytes of the checkpoint; 0: the bucket has it, or would not keep it.

        Raises:
            TakenOver: another attempt has started.
            FileNotFoundError: it is not in the run directory.
            OSError: it could not be sent, or has arrived damaged. The head is the one before.
        """
        found = self._found or self.read_head()
        if found is None or found[0].holder not in self._holders:
            raise TakenOver(f"another attempt has taken {self.url} over")
        before, sent = found[0], list[File]()
        checkpoints = [entry for entry in before.checkpoints if entry.step not in self._damaged]
        self._number += 1
        try:
            if path is not None:
                checkpoints = self._send_checkpoint(path, checkpoints, keep, keep_best, sent)
                if not sent:
                    return 0
            size = sum(file.bytes for file in sent)
            run_files = self._send_run_files(before, sent)
            for file in sent:
                for _ in self.pieces(file.key, file.bytes, file.sha256):
                    pass
        except OSError:
            self.remove([file.key for file in sent])
            raise
        changes = {"holder": self._holders[-1], "commit": _token(), "checkpoints": checkpoints, "run_files": run_files}
        head = before.model_copy(update=changes)
        self._swap(head, found)
        self.remove(before.keys - head.keys)
        return size

    def _send_checkpoint(
        self, path: Path, others: list[CheckpointEntry], keep: int, keep_best: KeepBest, sent: list[File]
    ) -> list[CheckpointEntry]:
        """Sends a checkpoint, unless the bucket has it or would not keep it. Returns those that are kept with it."""
        with contextlib.ExitStack() as stack:
            try:
                with files.opened_folder(path) as folder:
                    about = store.manifest(folder, store.step_of(path))
                    sealed = {name: entry["sha256"] for name, entry in about["files"].items()}
                    sealed[store.MANIFEST] = files.sha256(folder / store.MANIFEST)
                    opened = {name: stack.enter_context(files.regular(folder / name)) for name in sealed}
            except (OSError, store.CorruptCheckpoint) as error:
                raise (OSError if path.exists() else FileNotFoundError)(str(error)) from None
            entry = CheckpointEntry(step=about["step"], files={}, score=about["score"], score_of=about["score_of"])
            same = next((other for other in others if other.step == entry.step), None)
            if same is not None and {name: file.sha256 for name, file in same.files.items()} == sealed:
                return others
            kept = _retained([entry, *(other for other in others if other != same)], keep, keep_best)
            if entry in kept:
                for name, file in opened.items():
                    key = f"{self._holders[-1]}/{self._number}-{path.name}/{name}"
                    self.put(key, file)
                    sent.append(File(key=key, sha256=sealed[name], bytes=os.fstat(file.fileno()).st_size))
                    entry.files[name] = sent[-1]
            return kept

    def _send_run_files(self, before: Head, sent: list[File]) -> dict[str, File]:
        """Sends the files of the run directory that have changed. Raises `OSError`."""
        result = dict[str, File]()
        for name, data in itertools.islice(_run_files(self._run_dir), bucket.MAX_RUN_FILES):
            file, sha256 = before.run_files.get(name), hashlib.sha256(data).hexdigest()
            if file is None or file.sha256 != sha256:
                key = f"{self._holders[-1]}/{self._number}-run/{name}"
                file = File(key=key, sha256=sha256, bytes=len(data))
                self.put(key, data)
                sent.append(file)
            result[name] = file
        if RUN_FILE not in result:
            raise OSError(f"{self._run_dir / RUN_FILE} cannot be read")
        return result

    def _swap(self, head: Head, before: tuple[Head, Tag] | None) -> None:
        """Puts `head` in the place of the one that was read. Raises `TakenOver`, `OSError`."""
        text, problem, self._found = head.text(), "", None
        if len(text) > bucket.MAX_HEAD_BYTES:
            raise OSError(f"{self.url}/{HEAD} would have {len(text)} bytes: keep fewer checkpoints (checkpoint.keep)")
        for _ in range(TRIES):
            try:
                if not self.swap(HEAD, text, before and before[1]):
                    problem = "the store refuses its own tag: lockstep doctor tries its conditional writes"
            except OSError as error:
                problem = str(error)  # also where it was done, and the answer was lost
            found = self.read_head()
            commit = found and found[0].commit
            if commit == head.commit:
                self._found = found
                return
            if commit != (before and before[0].commit):
                # An earlier swap of this attempt, which had no answer, may have been done late.
                late = found is not None and found[0].holder in self._holders
                raise (OSError if late else TakenOver)(f"another attempt has taken {self.url} over")
        raise OSError(f"the head could not be written: {problem}")

    def _clean(self, head: Head) -> None:
        """Removes files that earlier attempts have sent and not committed. They cannot commit any more, and this attempt has sent none."""
        with contextlib.suppress(OSError, ValidationError):
            keys = self.keys()
            found = self.read_head()  # after the listing: what another attempt has sent since it took over is not in it
            if found is not None and found[0].commit == head.commit:
                replaced = [self.read(key, bucket.MAX_HEAD_BYTES)[0] for key in keys if key.startswith("replaced/")]
                named = head.keys.union(*(Head.model_validate_json(text).keys for text in replaced))
                self.remove([key for key in keys if re.fullmatch(bucket.KEY, key) and key not in named])


def _run_files(directory: Path) -> Iterator[tuple[str, bytes]]:
    """The name and the content of each file of a run directory that is sent. No links."""
    for place in ("", METRICS):
        with contextlib.suppress(OSError), files.opened_folder(directory / place) as folder:
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                name = f"{place}/{entry.name}".lstrip("/")
                if re.fullmatch(bucket.RUN_FILE_NAME, name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError), files.regular(folder / entry.name) as file:
                        yield name, file.read(bucket.MAX_RUN_FILE_BYTES)


def _begins_with(path: Path, file: File) -> bool:
    """Whether a file on the disk has all of it, and perhaps more: an attempt on this very disk wrote it."""
    with contextlib.suppress(OSError), files.regular(path) as here:
        return hashlib.sha256(here.read(file.bytes)).hexdigest() == file.sha256
    return False


def _chosen(entries: list[CheckpointEntry], wanted: int | Rule, url: str) -> CheckpointEntry:
    by_step = {entry.step: entry for entry in entries}
    return by_step[chosen(by_step, wanted, lambda step, rule: by_step[step].scored(rule.name), url)]


def _retained(entries: list[CheckpointEntry], keep: int, keep_best: KeepBest) -> list[CheckpointEntry]:
    """The newest ones, and the best: what `Writer` keeps on a disk. Newest first."""
    rule = Rule.of(keep_best)
    newest = sorted(entries, key=lambda entry: -entry.step)
    best = rule.best({entry.step: score for entry in newest if (score := entry.scored(rule.name)) is not None})
    return [*newest[:keep], *(entry for entry in newest[keep:] if keep_best and entry.step == best)]
