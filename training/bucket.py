"""A bucket, and how a run lies in it. Imports no torch.

    PREFIX/head                                   a JSON object: which attempt may write, and which checkpoints there are
    PREFIX/<holder>/<n>-step-00000100/<file>      the files of a checkpoint, as on a disk
    PREFIX/<holder>/<n>-run.yaml/run.yaml         the settings that the run was begun with
    PREFIX/replaced/<commit>                      the head of a run that `--fresh` has replaced

`checkpoint/object_store.py` writes them, and says what holds there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lockstep.training import extras
from lockstep.training.contract import UserError, printable

HEAD = "head"
MAX_HEAD_BYTES = 4 << 20
TRIES = 5
Tag: TypeAlias = Any
"""What the store compares: an entity tag, a generation."""
KEY = r"[0-9a-f]{32}/\d{1,12}-[a-z0-9.-]{1,40}/[a-z][a-z.]{0,40}"
"""Of what attempts have sent."""
_Token = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Size = Annotated[int, Field(ge=0, lt=1 << 60)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class File(_Strict):
    """A file in the bucket."""

    key: Annotated[str, Field(pattern=f"^{KEY}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: _Size


class Kept(_Strict):
    """A checkpoint in the bucket: its files by their names on a disk, and its score, if it has one, by which rule."""

    step: _Size
    files: dict[Annotated[str, Field(pattern=r"^[a-z][a-z.]{0,40}$")], File]
    score: float | None
    score_of: str


class Head(_Strict):
    """What `head` holds. `commit` is drawn anew each time; `sha256` is that of the rest."""

    format: Literal[1] = 1
    run: _Token
    holder: _Token
    commit: _Token
    settings: File | None = None
    checkpoints: list[Kept] = []
    """Newest first."""
    sha256: str = ""

    def text(self) -> bytes:
        sealed = self.model_copy(update={"sha256": self.seal()})
        return sealed.model_dump_json().encode()

    def seal(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()

    def files(self) -> Iterator[File]:
        if self.settings is not None:
            yield self.settings
        for kept in self.checkpoints:
            yield from kept.files.values()


@dataclass(frozen=True, slots=True)
class Found:
    head: Head
    tag: Tag


class Bucket:
    """What is under `url`.

    Args:
        url: `s3://BUCKET/PREFIX`, `gs://…`, `az://CONTAINER/PREFIX`. Endpoint and credentials come from the environment, or from the
            identity of the node or pod.

    Raises:
        UserError: obstore is not installed, or it does not know this URL.
    """

    def __init__(self, url: str) -> None:
        with extras.explained():
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
            from obstore.store import from_url
        self.url = url.rstrip("/")
        self._obstore, self._error = obstore, BaseError
        self._refused = (AlreadyExistsError, PreconditionError)
        plain = any(value.startswith("http://") for name, value in os.environ.items() if "ENDPOINT" in name)
        try:
            self._store = from_url(
                self.url,
                client_options={"timeout": "60s", "connect_timeout": "10s", "allow_http": plain},
                retry_config={"max_retries": 6, "retry_timeout": timedelta(seconds=60)},
            )
        except (BaseError, ValueError) as error:
            raise UserError(f"{self.url} cannot be used: {reason(error)}") from None

    @contextlib.contextmanager
    def asking(self, key: str) -> Iterator[None]:
        """Raises `OSError` for whatever goes wrong, `FileNotFoundError` where there is no such object."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (self._error, OSError, ValueError) as error:
            raise OSError(f"{self.url}/{key}: {reason(error)}") from None

    def read_head(self) -> Found | None:
        """The head as it is now; None: there is none. Read again where it was damaged on the way. Raises `OSError`."""
        for _ in range(TRIES):
            with self.asking(HEAD):
                try:
                    answer = self._obstore.get(self._store, HEAD)
                except FileNotFoundError as error:
                    if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                        raise OSError("there is no such bucket") from None
                    return None
                tag = {name: answer.meta[name] for name in ("e_tag", "version") if answer.meta[name] is not None}
                text = bytes(answer.bytes()) if answer.meta["size"] <= MAX_HEAD_BYTES else b""
            with contextlib.suppress(ValidationError):
                head = Head.model_validate_json(text)
                if head.sha256 == head.seal():
                    return Found(head, tag)
        raise OSError(f"{self.url}/{HEAD} is not what a run writes: choose another prefix")


def reason(error: BaseException) -> str:
    """The line of an error of obstore that says what happened: after it come those of its source in Rust."""
    return printable(str(error).partition("\n")[0][:300]) or type(error).__name__
