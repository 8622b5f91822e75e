"""Checkpoints in a bucket, for a run whose disks do not outlive their nodes.

Each commit uploads files under new keys, so it overwrites nothing, and then swaps `head` for a head that names them. The store swaps
only the head that was read (If-Match; on GCS the generation). An attempt takes a run over by such a swap. From then on an earlier
attempt, on a node that was cut off, can commit nothing. No two heads are alike: after a lost answer, reading shows whether
the swap was done. Neither timestamps nor listings decide anything. A listing serves to remove the files that no head names.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import bucket, files
from ..bucket import HEAD, Bucket, CheckpointEntry, Damaged, File, Head, Tag, as_user_error
from ..contract import CHECKPOINTS, EVENTS_FILE, METRICS, RUN_FILE, TIME_FILE, UserError
from . import store
from .store import KeepBest, Rule, checkpoint_name, chosen

RECORD = "bucket.json"
"""File of the run directory: the run in the bucket, and the data with which another rank replaces a lost rank 0."""
_RUN_FILE_NAME = re.compile(r"(events|time)\.jsonl|(status|summary)\.json|metrics/rank-\d{5,9}\.prom")
"""The files of the run directory that a commit holds, beside the settings."""
_MAX_RUN_FILE_BYTES = 256 << 20
_UNUSABLE = "checkpoint.to cannot be used"


class TakenOver(OSError):
    """The error after another attempt at this run has taken over the bucket."""


def _token() -> str:
    return secrets.token_hex(16)


class ObjectStore(Bucket):
    """The checkpoints of one run under `url`. The attempt that calls `acquire` or `take_over` writes them.

    Args:
        keep, keep_best: as in `Writer`.
    """

    def __init__(self, url: str, keep: int = 1, keep_best: KeepBest = False) -> None:
        super().__init__(url)
        self._keep, self.keep_best = keep, keep_best
        self._run_dir = Path()
        self._current: tuple[Head, Tag] | None = None
        """The head that this rank has written last; None: unknown."""
        self._holders = [_token()]
        """The tokens of this attempt's holders; the last is this rank's."""

    def check(self, run_dir: Path, fresh: bool | str) -> None:
        """Fetches the settings of the run in the bucket, so that `RunDirectory` can refuse other settings. Changes nothing in the bucket.

        Raises:
            UserError: the bucket holds another run, or a run that `fresh` would replace, or cannot be read (exit code 1).
        """
        self._run_dir = run_dir
        with as_user_error(_UNUSABLE):
            current = self._run_for(fresh)
            if current is None or not current[0].run_yaml:
                return
            head, record = current[0], files.read_json(run_dir / RECORD)
            if not (run_dir / RUN_FILE).exists():
                files.replace_json(run_dir / RECORD, {"run": head.run})
                files.replace(run_dir / RUN_FILE, head.run_yaml.encode())
            elif not isinstance(record, dict) or record.get("run") != head.run:
                raise UserError(
                    f"{self.url} has the checkpoints of another run than {run_dir}: choose another prefix, or an empty run "
                    "directory to resume that one"
                )

    def acquire(self, fresh: bool | str, warn: Callable[[str], None]) -> Path | None:
        """Makes this attempt the one that writes. Downloads what the locked run directory of `check` lacks: the newest readable
        checkpoint, the best one, and the records of earlier attempts.

        Returns:
            The newest checkpoint of the run directory, verified byte by byte. None: there is none.

        Raises:
            UserError: the bucket cannot be read or written (exit code 1), or has no checkpoint that verifies.
        """
        with as_user_error(_UNUSABLE):
            head, checkpoints, newest = self._hold(fresh), self._run_dir / CHECKPOINTS, None
            if not head.checkpoints:
                self.check_conditions(f"{head.commit}/probe/probe")
            self._clean(head)
            store.clean(checkpoints)
            with contextlib.suppress(UserError):  # none of them verifies
                newest = store.newest_verified(checkpoints)
            newer = [entry for entry in head.checkpoints if newest is None or entry.step > store.step_of(newest)]
            damaged = list[CheckpointEntry]()
            newest = self._fetch_first(newer, checkpoints, warn, damaged) or newest
            if newer and newest is None:
                raise UserError(f"none of the {len(newer)} checkpoints in {self.url} can be read and verified")
            best = _retained(head.checkpoints, 0, self.keep_best)
            missing = [entry for entry in best if not (checkpoints / checkpoint_name(entry.step)).exists()]
            self._fetch_first(missing, checkpoints, warn, damaged)
            if damaged:  # the same step may be saved again, with the same bytes
                self._replace(self._held(), checkpoints=[entry for entry in head.checkpoints if entry not in damaged])
            try:
                history = self._run_files(head)
                if not all(
                    _begins_with(self._run_dir / name, history.get(name, b"")) for name in (EVENTS_FILE, TIME_FILE)
                ):
                    _write(history, self._run_dir)
            except Damaged as error:
                warn(f"what earlier attempts have written down is lost: {error}; the run continues")
            self._record(head.run)
            return newest

    def take_over(self, run_dir: Path) -> None:
        """Makes this rank the sender after the loss of rank 0, unless another attempt has taken over. Sends no request yet: the other
        ranks wait."""
        self._run_dir, record = run_dir, files.read_json(run_dir / RECORD)
        with contextlib.suppress(TypeError, KeyError, ValueError):  # a damaged record does not say whose the bucket is
            self._holders = [*map(str, record["holders"]), *self._holders]
            self._record(record["run"])

    def _record(self, run: str) -> None:
        files.replace_json(self._run_dir / RECORD, {"run": run, "holders": self._holders})

    def download(self, run_dir: Path, wanted: Callable[[], int | Rule | None], warn: Callable[[str], None]) -> None:
        """Downloads the last commit: the files of the run directory, and a checkpoint.

        Args:
            wanted: returns which checkpoint, once the files are there: a step, the rule of the best, or None, the newest that verifies.

        Raises:
            UserError: there is no run, or no such checkpoint.
            OSError: the bucket cannot be read.
        """
        commit = ""
        # Again for each newer head: its commit may have removed files that the earlier head names.
        while (current := self.read_head()) is not None and current[0].run_yaml and current[0].commit != commit:
            commit, entries = current[0].commit, current[0].checkpoints
            with contextlib.suppress(FileNotFoundError):
                contents = {RUN_FILE: current[0].run_yaml.encode()}
                try:
                    contents |= self._run_files(current[0])
                except Damaged as error:
                    if not entries:
                        raise
                    warn(f"what the run has written down is lost: {error}")
                _write(contents, run_dir)
                if (which := wanted()) is not None:
                    if not entries:
                        raise UserError(f"{self.url} has no checkpoint yet: fetch it without --step and --best")
                    entries = [self._chosen(entries, which)]
                if not entries or self._fetch_first(entries, run_dir / CHECKPOINTS, warn, []) is not None:
                    return
        raise UserError(
            f"{self.url} has no run, or no checkpoint that can be read and verified: give what its checkpoint.to says"
        )

    def _chosen(self, entries: list[CheckpointEntry], which: int | Rule) -> CheckpointEntry:
        """Returns the checkpoint of a step, or the best by a rule. Raises `UserError`: there is none."""
        by_step = {entry.step: entry for entry in entries}
        return by_step[chosen(by_step, which, lambda step, rule: _score(by_step[step], rule), self.url)]

    def commit(self, path: Path | None) -> int:
        """Uploads a checkpoint and the current files of the run directory, and reads them back. Then it writes a head that names them, and
        removes checkpoints that are not kept.

        Args:
            path: a folder in the run directory's `checkpoints`, which may disappear meanwhile. None: only the files of the run directory.

        Returns:
            Bytes of the checkpoint; 0: the bucket has it already, or would not keep it.

        Raises:
            TakenOver: another attempt has started.
            FileNotFoundError: the checkpoint is not in the run directory.
            OSError: a file could not be sent, or arrived damaged. The head is unchanged.
        """
        current, commit, sent = self._held(), _token(), list[File]()
        checkpoints = current[0].checkpoints
        try:
            if path is not None:
                checkpoints = self._send_checkpoint(path, f"{commit}/{path.name}", checkpoints, sent)
                if not sent:
                    return 0
            size = sum(file.bytes for file in sent)
            run_yaml, data = (
                files.read(self._run_dir / RUN_FILE, 1 << 20).decode(errors="replace"),
                _zipped(self._run_dir),
            )
            run_files = File(key=f"{commit}/run/files.zip", sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
            sent.append(run_files)
            self.put(run_files.key, data)
            for file in sent:
                for _ in self.pieces(file.key, file.bytes, file.sha256):
                    pass
        except OSError:
            self.remove([file.key for file in sent])
            raise
        self._replace(current, commit=commit, checkpoints=checkpoints, run_yaml=run_yaml, run_files=run_files)
        return size

    def _replace(self, current: tuple[Head, Tag], **changes: Any) -> None:
        """Swaps the head for one with other checkpoints or files, and removes what it no longer names. Raises `TakenOver`, `OSError`."""
        new = current[0].model_copy(update={"holder": self._holders[-1], "commit": _token(), **changes})
        self._swap(new, current)
        self.remove(current[0].keys - new.keys)

    def _send_checkpoint(
        self, path: Path, folder: str, others: list[CheckpointEntry], sent: list[File]
    ) -> list[CheckpointEntry]:
        """Uploads a checkpoint, unless the bucket has it or would not keep it. Returns the checkpoints that the bucket keeps."""
        with contextlib.ExitStack() as stack:
            try:
                with files.opened_folder(path) as here:
                    about = store.manifest(here, store.step_of(path))
                    digests = {name: entry["sha256"] for name, entry in about["files"].items()}
                    digests[store.MANIFEST] = files.sha256(here / store.MANIFEST)
                    opened = {name: stack.enter_context(files.regular(here / name)) for name in digests}
            except (OSError, store.CorruptCheckpoint) as error:
                raise (OSError if path.exists() else FileNotFoundError)(str(error)) from None
            entry = CheckpointEntry(step=about["step"], files={}, score=about["score"], score_of=about["score_of"])
            same = next((other for other in others if other.step == entry.step), None)
            if same is not None and {name: file.sha256 for name, file in same.files.items()} == digests:
                return others
            kept = _retained([entry, *(other for other in others if other != same)], self._keep, self.keep_best)
            for name, file in opened.items() if entry in kept else ():
                size = os.fstat(file.fileno()).st_size
                sent.append(File(key=f"{folder}/{name}", sha256=digests[name], bytes=size))
                self.put(sent[-1].key, file)
                entry.files[name] = sent[-1]
            return kept

    def _run_files(self, head: Head) -> dict[str, bytes]:
        """Downloads the archive of a commit. Returns name → content. Raises `OSError`, `Damaged`."""
        if (file := head.run_files) is None:
            return {}
        data = io.BytesIO(b"".join(self.pieces(file.key, file.bytes, file.sha256)))
        with files.reading(f"{self.url}/{file.key}", Damaged), zipfile.ZipFile(data) as archive:
            return {name: archive.read(name) for name in archive.namelist() if _RUN_FILE_NAME.fullmatch(name)}

    def _fetch_first(
        self, entries: Iterable[CheckpointEntry], checkpoints: Path, warn: Callable[[str], None],
        damaged: list[CheckpointEntry],
    ) -> Path | None:  # fmt: skip
        """Downloads the first checkpoint that is readable and verifies, and lists those before it in `damaged`. Raises `OSError`."""
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
                damaged.append(entry)
            else:
                store.clean(checkpoints)
                return final
        return None

    def _held(self) -> tuple[Head, Tag]:
        """Returns the head. Raises `TakenOver` unless this attempt has written it, `OSError`."""
        current = self._current or self.read_head()
        if current is None or current[0].holder not in self._holders:
            raise TakenOver(f"another attempt has taken {self.url} over")
        return current

    def _hold(self, fresh: bool | str) -> Head:
        """Swaps the head for a head of this attempt. Raises `OSError`."""
        previous, word = self._run_for(fresh), fresh if isinstance(fresh, str) else ""
        head = Head(run=_token(), holder=self._holders[-1], commit=_token(), fresh=word)
        if previous is not None and not _starts_over(previous[0], fresh):
            head = previous[0].model_copy(update={"holder": head.holder, "commit": head.commit})
        self._swap(head, previous)
        return head

    def _run_for(self, fresh: bool | str) -> tuple[Head, Tag] | None:
        """Returns the head. Raises `UserError` if `fresh` would replace a run that has committed, `OSError`."""
        current = self.read_head()
        if current is not None and current[0].run_yaml and _starts_over(current[0], fresh):
            raise UserError(f"{self.url} has a run, which --fresh does not replace in a bucket: choose another prefix")
        return current

    def _swap(self, head: Head, previous: tuple[Head, Tag] | None) -> None:
        """Replaces the head `previous`, as it was read, by `head`. Raises `TakenOver`, `OSError`."""
        text, self._current = head.text(), None
        if len(text) > bucket.MAX_HEAD_BYTES:
            raise OSError(f"{self.url}/{HEAD} would have {len(text)} bytes: keep fewer checkpoints (checkpoint.keep)")
        problem = OSError("the store refuses the tag of the head: lockstep doctor tries its conditional writes")
        try:
            self.swap(HEAD, text, previous and previous[1])
        except OSError as error:
            problem = error
        current = self.read_head()  # after a lost answer only the head shows whether it was done
        commit = current and current[0].commit
        if commit == head.commit:
            self._current = current
        elif commit == (previous and previous[0].commit) or (current and current[0].holder in self._holders):
            raise problem
        else:
            raise TakenOver(f"another attempt has taken {self.url} over")

    def _clean(self, head: Head) -> None:
        """Removes files that earlier attempts have sent and not committed. They cannot commit any more; this attempt has sent none."""
        with contextlib.suppress(OSError):
            keys = self.keys()
            # After the listing: what another attempt has sent since it took over is not in it.
            current = self.read_head()
            if current is not None and current[0].commit == head.commit:
                self.remove([key for key in keys if re.fullmatch(bucket.KEY, key) and key not in head.keys])


def _starts_over(head: Head, fresh: bool | str) -> bool:
    """Returns whether `--fresh` asks for a new run, which it does not if the run was begun with the same word."""
    return bool(fresh) and fresh != head.fresh


def _zipped(directory: Path) -> bytes:
    """Returns an archive of the files of a run directory that a commit holds. Skips links."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for place in ("", METRICS):
            with contextlib.suppress(OSError), files.opened_folder(directory / place) as folder:
                for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                    name = f"{place}/{entry.name}".lstrip("/")
                    if _RUN_FILE_NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(OSError), files.regular(folder / entry.name) as file:
                            archive.writestr(zipfile.ZipInfo(name), file.read(_MAX_RUN_FILE_BYTES))
    return data.getvalue()


def _write(contents: Mapping[str, bytes], directory: Path) -> None:
    """Replaces files of a run directory. Raises `OSError`."""
    for name, data in contents.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        with files.opened_folder(path.parent) as folder:
            files.replace(folder / path.name, data)


def _begins_with(path: Path, data: bytes) -> bool:
    """Returns whether a file on the disk begins with `data`: then an attempt on this disk has written it."""
    with contextlib.suppress(OSError), files.regular(path) as file:
        return file.read(len(data)) == data
    return not data


def _score(entry: CheckpointEntry, rule: Rule) -> float | None:
    return entry.score if entry.score_of == rule.name else None


def _retained(entries: list[CheckpointEntry], keep: int, keep_best: KeepBest) -> list[CheckpointEntry]:
    """Returns the checkpoints that `Writer` keeps on a disk, the newest and the best. Newest first."""
    rule = Rule.of(keep_best)
    newest = sorted(entries, key=lambda entry: -entry.step)
    best = rule.best({entry.step: _score(entry, rule) for entry in newest})
    return [*newest[:keep], *(entry for entry in newest[keep:] if keep_best and entry.step == best)]
