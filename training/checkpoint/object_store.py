"""Checkpoints in a bucket, for a run whose disks do not outlive their nodes.

    PREFIX/head                             a JSON object (`Head`): the attempt that may write, the settings, the commits that it names.
    PREFIX/<commit>/step-00000100/<file>    the files of a checkpoint, as on a disk.
    PREFIX/<commit>/run/files.zip           files of the run directory.

Each commit uploads files under new keys, so it overwrites nothing, and then swaps `head` for a head that names them. The store swaps
only the head that was read (If-Match; on GCS the generation). An attempt takes a run over by such a swap. From then on an earlier
attempt, on a node that was cut off, can commit nothing. No two heads are alike: after a lost answer, reading shows whether
the swap was done. Neither timestamps nor listings decide anything. A listing serves to remove the files that no head names.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field, ValidationError

from .. import files
from ..bucket import Bucket, Damaged, Tag, as_user_error, read_again
from ..config.settings import Section
from ..contract import CHECKPOINTS, EVENTS_FILE, METRICS, RUN_FILE, TIME_FILE, UserError
from . import store
from .store import KeepBest, Rule, checkpoint_name

RECORD = "bucket.json"
"""File of the run directory: the run in the bucket, and the token of the attempt that writes it."""
_HEAD = "head"
_MAX_HEAD_BYTES = 4 << 20
_KEY = re.compile(r"[0-9a-f]{32}/[a-z0-9./-]+")
"""The keys of files that attempts send."""
_FILES = (store.STATE, store.TENSORS, store.MANIFEST)
_RUN_FILE_NAME = re.compile(r"(events|time)\.jsonl|(status|summary)\.json|metrics/rank-\d{5,9}\.prom")
"""The files of the run directory that a commit holds, beside the settings."""
_UNUSABLE = "checkpoint.to cannot be used"
_Token = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class TakenOver(OSError):
    """The error after another attempt at this run has taken over the bucket."""


class CheckpointEntry(Section):
    """A checkpoint in the bucket, with its score by the rule `score_of`. Its manifest has the checksums of its files."""

    step: Annotated[int, Field(ge=0, lt=1 << 60)]
    commit: _Token
    seal: str
    """The manifest's sha256 of itself: two checkpoints with the same seal are equal."""
    score: float | None
    score_of: str

    def key(self, name: str) -> str:
        """Returns the key of a file."""
        return f"{self.commit}/{checkpoint_name(self.step)}/{name}"


class Head(Section):
    """The content of `head`: one commit. `commit` is drawn anew each time; `sha256` is the digest of the other fields."""

    format: Literal[5] = 5
    run: _Token
    holder: _Token
    commit: _Token
    fresh: str = ""
    """The word of `--fresh` with which the run was begun."""
    checkpoints: list[CheckpointEntry] = Field(default_factory=list)
    """Newest first."""
    run_yaml: str = ""
    """The settings of the run; empty: nothing is committed yet."""
    archive: str = ""
    """The key of an archive of other files of the run directory; empty: there is none."""
    sha256: str = ""

    def seal(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()

    def text(self) -> bytes:
        return self.model_copy(update={"sha256": self.seal()}).model_dump_json().encode()

    @property
    def keys(self) -> set[str]:
        """The keys of all files that it names."""
        return {entry.key(name) for entry in self.checkpoints for name in _FILES} | ({self.archive} - {""})


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
        self._holder = secrets.token_hex(16)
        """The token of this attempt. A rank that takes over has it from `RECORD`."""
        self._damaged: list[CheckpointEntry] = []
        """Checkpoints that this attempt could not read. Its next checkpoint replaces them."""

    def read_head(self) -> tuple[Head, Tag] | None:
        """Returns the head; None: there is none. Raises `OSError`."""
        try:
            text, tag = self.read(_HEAD, _MAX_HEAD_BYTES)
        except FileNotFoundError:
            return None
        with contextlib.suppress(ValidationError):
            head = Head.model_validate_json(text)
            if head.sha256 == head.seal():
                return head, tag
        raise OSError(f"{self.url}/{_HEAD} is not what a run writes: choose another prefix")

    def check(self, run_dir: Path, fresh: bool | str) -> None:
        """Fetches the settings of the run in the bucket, so that `RunDirectory` can refuse other settings. Changes nothing in the bucket.

        Raises:
            UserError: the bucket holds another run, or a run that `fresh` would replace, or cannot be read (exit code 1).
        """
        self._run_dir = run_dir
        with as_user_error(_UNUSABLE):
            current = self.read_head()
            if current is None or not (head := current[0]).run_yaml:
                return
            if fresh and fresh != head.fresh:  # else this is a restart of the job that began the run
                raise UserError(
                    f"{self.url} has a run, which --fresh does not replace in a bucket: choose another prefix"
                )
            if not (run_dir / RUN_FILE).exists():
                files.replace_json(run_dir / RECORD, {"run": head.run})
                files.replace(run_dir / RUN_FILE, head.run_yaml.encode())
            elif self._record().get("run") != head.run:
                raise UserError(
                    f"{self.url} has the checkpoints of another run than {run_dir}: choose another prefix, or an empty run "
                    "directory to resume that one"
                )

    def acquire(self, fresh: bool | str, warn: Callable[[str], None]) -> Path | None:
        """Makes this attempt the one that writes, and downloads what the locked run directory of `check` lacks.

        Returns:
            The newest checkpoint of the run directory, verified byte by byte. None: there is none.

        Raises:
            UserError: the bucket cannot be read or written (exit code 1), or has no checkpoint that verifies.
        """
        with as_user_error(_UNUSABLE):
            head = self._hold(fresh)
            if not head.checkpoints:
                self.check_conditions(f"{head.commit}/probe/probe")
            self._clean(head)
            newest = self._bring(head, self._run_dir, warn)
            files.replace_json(self._run_dir / RECORD, {"run": head.run, "holder": self._holder})
            return newest

    def take_over(self, run_dir: Path) -> None:
        """Makes this rank the sender after the loss of rank 0, unless another attempt has taken over. Sends no request yet: the other
        ranks wait."""
        self._run_dir = run_dir
        if record := self._record():  # a damaged record does not say whose the bucket is
            self._holder = str(record.get("holder"))

    def _record(self) -> dict[str, Any]:
        """Returns the content of the run directory's `RECORD`; {}: it has none, or a damaged one."""
        record = files.read_json(self._run_dir / RECORD)
        return record if isinstance(record, dict) else {}

    def download(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        """Downloads the last commit: the files of the run directory, and the checkpoints.

        Raises:
            UserError: there is no run, or none of its checkpoints can be read.
            OSError: the bucket cannot be read.
        """
        current = self.read_head()
        if current is None or not current[0].run_yaml:
            raise UserError(f"{self.url} has no run: give what its checkpoint.to says")
        files.replace(run_dir / RUN_FILE, current[0].run_yaml.encode())
        problems, error = list[str](), None
        try:
            self._bring(current[0], run_dir, problems.append, every=True)
        except UserError as caught:
            error = caught
        if problems and (newer := self.read_head()) is not None and newer[0].commit != current[0].commit:
            return self.download(run_dir, warn)  # its commit has removed what is missing
        for problem in problems:
            warn(problem)
        if error is not None:
            raise error

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
        current, commit, sent = self._held(), secrets.token_hex(16), list[str]()
        update: dict[str, Any] = {"holder": self._holder, "commit": commit, "archive": f"{commit}/run/files.zip"}
        size = 0
        try:
            if path is not None:
                update["checkpoints"], size = self._send_checkpoint(path, commit, current[0].checkpoints, sent)
                if not size:
                    return 0
            update["run_yaml"] = files.read(self._run_dir / RUN_FILE, 1 << 20).decode(errors="replace")
            data = _zipped(self._run_dir)
            self._send(update["archive"], data, hashlib.sha256(data).hexdigest(), sent)
        except OSError:
            self.remove(sent)
            raise
        new = current[0].model_copy(update=update)
        self._swap(new, current)
        self.remove(current[0].keys - new.keys)
        return size

    def _send(self, key: str, data: bytes | BinaryIO, sha256: str, sent: list[str]) -> None:
        """Uploads an object, and reads it back. Raises `Damaged`, `OSError`."""
        digest = hashlib.sha256()
        sent.append(key)
        self.put(key, data)
        for part in self.parts(key):
            digest.update(part)
        if digest.hexdigest() != sha256:
            raise Damaged(f"{self.url}/{key} is not what was written: its sha256 differs")

    def _send_checkpoint(
        self, path: Path, commit: str, entries: list[CheckpointEntry], sent: list[str]
    ) -> tuple[list[CheckpointEntry], int]:
        """Uploads a checkpoint. Returns the checkpoints that the bucket then keeps, and the bytes of this one; 0: the bucket has it, or
        would not keep it."""
        with contextlib.ExitStack() as stack:
            try:
                about = store.manifest(path)
                sums = {name: entry["sha256"] for name, entry in about["files"].items()}
                sums[store.MANIFEST] = files.sha256(path / store.MANIFEST)
                opened = {name: stack.enter_context(files.regular(path / name)) for name in sums}
            except (OSError, store.CorruptCheckpoint) as error:
                raise (OSError if path.exists() else FileNotFoundError)(str(error)) from None
            score, rule = about["score"], about["score_of"]
            entry = CheckpointEntry(
                step=about["step"], commit=commit, seal=store.seal(about), score=score, score_of=rule
            )
            others = [other for other in entries if other not in self._damaged]
            kept = _retained([entry, *(o for o in others if o.step != entry.step)], self._keep, self.keep_best)
            if entry not in kept or any((o.step, o.seal) == (entry.step, entry.seal) for o in others):
                return entries, 0
            for name, file in opened.items():
                self._send(entry.key(name), file, sums[name], sent)
            return kept, sum(int(file["bytes"]) for file in about["files"].values())

    def _bring(self, head: Head, run_dir: Path, warn: Callable[[str], None], every: bool = False) -> Path | None:
        """Downloads what a run directory lacks: the records of earlier attempts, the newest checkpoint that verifies, and the best one.

        Args:
            every: whether to download all checkpoints.

        Returns:
            The newest checkpoint of the run directory, verified; None: the run has none.

        Raises:
            UserError: no checkpoint can be read and verified.
            OSError: the bucket does not answer, or the disk is full.
        """
        checkpoints, newest = run_dir / CHECKPOINTS, None
        try:
            read_again((Damaged,), self._fetch_history, head, run_dir)
        except (FileNotFoundError, Damaged) as error:
            warn(f"what earlier attempts have written down is lost: {error}")
        checkpoints.mkdir(exist_ok=True)
        store.clean(checkpoints)
        with contextlib.suppress(UserError):  # none of them verifies
            newest = store.newest_verified(checkpoints)
        kept = head.checkpoints if every else _retained(head.checkpoints, 0, self.keep_best)
        for entry in head.checkpoints:
            path = checkpoints / checkpoint_name(entry.step)
            newer = newest is None or entry.step > store.step_of(newest)
            try:
                if newer or (entry in kept and not path.exists()):
                    read_again((Damaged, store.CorruptCheckpoint), self._fetch_checkpoint, entry, path)
                    newest = path if newer else newest
            except (FileNotFoundError, Damaged, store.CorruptCheckpoint) as error:
                warn(f"checkpoint is corrupt in the bucket and not used: {self.url}/{entry.key('')}: {error}")
                self._damaged.append(entry)
        if head.checkpoints and newest is None:
            raise UserError(f"none of the {len(head.checkpoints)} checkpoints in {self.url} can be read and verified")
        return newest

    def _fetch_checkpoint(self, entry: CheckpointEntry, path: Path) -> None:
        """Downloads a checkpoint in place of one that does not verify. Raises `OSError`, `CorruptCheckpoint`."""
        with files.replacing(path) as staging:
            staging.mkdir()
            for name in _FILES:
                self.fetch(entry.key(name), staging / name)
            if store.seal(store.verify(staging, entry.step)) != entry.seal:
                raise Damaged("it is another checkpoint")
            shutil.rmtree(path, ignore_errors=True)

    def _fetch_history(self, head: Head, run_dir: Path) -> None:
        """Raises `Damaged`, `OSError`."""
        if not head.archive:
            return
        data = io.BytesIO(b"".join(self.parts(head.archive)))
        with files.reading(f"{self.url}/{head.archive}", Damaged), zipfile.ZipFile(data) as archive:
            if sum(file.file_size for file in archive.infolist()) > data.getbuffer().nbytes:
                raise ValueError("it is compressed, which no run does: it may not fit into memory")
            history = {name: archive.read(name) for name in archive.namelist() if _RUN_FILE_NAME.fullmatch(name)}
        if not all(_begins_with(run_dir / name, history.get(name, b"")) for name in (EVENTS_FILE, TIME_FILE)):
            for name, content in history.items():
                (run_dir / name).parent.mkdir(exist_ok=True)
                files.replace(run_dir / name, content)

    def _held(self) -> tuple[Head, Tag]:
        """Returns the head. Raises `TakenOver` unless this attempt has written it, `OSError`."""
        current = self._current or self.read_head()
        if current is None or current[0].holder != self._holder:
            raise TakenOver(f"another attempt has taken {self.url} over")
        return current

    def _hold(self, fresh: bool | str) -> Head:
        """Swaps the head for a head of this attempt. Raises `OSError`."""
        previous = self.read_head()
        ours: dict[str, Any] = {"holder": self._holder, "commit": secrets.token_hex(16)}
        if previous is not None and previous[0].run_yaml:
            if self._record().get("run") != previous[0].run:
                raise UserError(f"{self.url} has another run, which began at the same time: choose another prefix")
            head = previous[0].model_copy(update=ours)
        else:
            head = Head(run=secrets.token_hex(16), fresh=fresh if isinstance(fresh, str) else "", **ours)
        self._swap(head, previous)
        return head

    def _swap(self, head: Head, previous: tuple[Head, Tag] | None) -> None:
        """Replaces the head `previous`, as it was read, by `head`. Raises `TakenOver`, `OSError`."""
        text, self._current = head.text(), None
        if len(text) > _MAX_HEAD_BYTES:
            raise OSError(f"{self.url}/{_HEAD} would have {len(text)} bytes: keep fewer checkpoints (checkpoint.keep)")
        problem = OSError("the store refuses the tag of the head: lockstep doctor tries its conditional writes")
        try:
            self.swap(_HEAD, text, previous and previous[1])
        except OSError as error:
            problem = error
        current = self.read_head()  # after a lost answer only the head shows whether it was done
        commit = current and current[0].commit
        if commit == head.commit:
            self._current = current
        elif commit == (previous and previous[0].commit) or (current and current[0].holder == self._holder):
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
                self.remove([key for key in keys if _KEY.fullmatch(key) and key not in head.keys])


def _zipped(run_dir: Path) -> bytes:
    """Returns an archive of the files of a run directory that a commit holds. Skips links."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path in sorted([*run_dir.iterdir(), *(run_dir / METRICS).glob("*")]):
            name = str(path.relative_to(run_dir))
            if _RUN_FILE_NAME.fullmatch(name) and not path.is_symlink():
                with contextlib.suppress(OSError), files.regular(path) as file:
                    archive.writestr(zipfile.ZipInfo(name), file.read())
    return data.getvalue()


def _begins_with(path: Path, data: bytes) -> bool:
    """Returns whether a file on the disk begins with `data`: then an attempt on this disk has written it."""
    with contextlib.suppress(OSError), files.regular(path) as file:
        return file.read(len(data)) == data
    return not data


def _retained(entries: list[CheckpointEntry], keep: int, keep_best: KeepBest) -> list[CheckpointEntry]:
    """Returns the checkpoints that `Writer` keeps on a disk, the newest and the best. Newest first."""
    rule = Rule.of(keep_best)
    newest = sorted(entries, key=lambda entry: -entry.step)
    best = rule.best({entry.step: entry.score if entry.score_of == rule.name else None for entry in newest})
    return [*newest[:keep], *(entry for entry in newest[keep:] if keep_best and entry.step == best)]
