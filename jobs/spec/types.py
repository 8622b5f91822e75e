"""What the settings in job.yaml are made of. They are parsed strictly: a typing error must not become another amount."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from lockstep.training.config import settings
from lockstep.training.contract import BUCKET_URL

_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
SIZE = r"^[1-9][0-9]{0,6}(Ki|Mi|Gi|Ti)$"
DURATION = r"^(?=.)([1-9][0-9]{0,3}d)?([1-9][0-9]{0,4}h)?([1-9][0-9]{0,5}m)?([1-9][0-9]{0,6}s)?$"
LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
PATH = r"^/[A-Za-z0-9._/-]*$"
PATH_OR_BUCKET = f"{PATH}|^{BUCKET_URL}$"
LOCAL_PATH = r"^[A-Za-z0-9._/][A-Za-z0-9._/ -]*$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]{0,254}$"
IMAGE = r"^[a-z0-9]([a-zA-Z0-9._/:@-]{0,510}[a-zA-Z0-9])?$"
RESOURCE = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
WORD = r"^[A-Za-z0-9_][A-Za-z0-9_.,@+=-]{0,254}$"
HOST_LIST = r"^[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,1023}$"
CONSTRAINT = r"^[A-Za-z0-9_][A-Za-z0-9_.,@+=*&|()\[\]!-]{0,254}$"
LICENSES = r"^[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}(:[1-9][0-9]{0,5})?(,[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}(:[1-9][0-9]{0,5})?){0,15}$"
MODULE = r"^[A-Za-z0-9_][A-Za-z0-9_./+-]{0,254}$"
MOUNT = r"^/[A-Za-z0-9._/-]*(:/[A-Za-z0-9._/-]*(:ro)?)?$"
CONTAINER_IMAGE = r"^[A-Za-z0-9/.][A-Za-z0-9._/:@#+-]{0,511}$"
SSH_HOST = r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,99}@)?[A-Za-z0-9][A-Za-z0-9_.-]{0,149}(:/[A-Za-z0-9._/+-]{1,249})?$"
DEVICE = r"^[A-Za-z0-9_^=][A-Za-z0-9_,:.=-]{0,127}$"


class Section(settings.Section):
    """A group of settings: as those of a recipe, and frozen."""

    model_config = ConfigDict(frozen=True)


def size_in_bytes(text: str) -> int:
    """`32Gi` → 34359738368. Raises `ValueError` for anything but a whole number with Ki, Mi, Gi or Ti."""
    if not re.fullmatch(SIZE, text):
        raise ValueError(f"must be a size such as 512Mi or 32Gi (a whole number, then Ki, Mi, Gi or Ti), got {text!r}")
    return int(text[:-2]) * _UNITS[text[-2:]]


def seconds(text: str) -> int:
    """`1h30m` → 5400. Raises `ValueError` for anything but whole numbers with d, h, m, s in this order."""
    match = re.fullmatch(DURATION, text)
    if not match or "\n" in text:
        raise ValueError(f"must be a duration such as 90s, 30m, 2h or 1d12h, got {text!r}")
    return sum(int(part[:-1]) * factor for part, factor in zip(match.groups(), (86400, 3600, 60, 1)) if part)


def _check(pattern: str, expected: str, longest: int) -> AfterValidator:
    def validate(text: str) -> str:
        if len(text) > longest or not re.fullmatch(pattern, text) or "\n" in text:
            raise ValueError(f"must be {expected}, got {text[:60]!r}")
        return text

    return AfterValidator(validate)


def _size(text: str) -> str:
    size_in_bytes(text)
    return text


def _duration(text: str) -> str:
    seconds(text)
    return text


def _plain(text: str) -> str:
    if any((ord(letter) < 32 and letter not in "\n\t") or 127 <= ord(letter) < 160 for letter in text):
        raise ValueError("must not hold control characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode") from None
    return text


def _json_only(value: dict[str, Any]) -> dict[str, Any]:
    """Patches and overrides travel as JSON; YAML can also make dates, sets and keys that are numbers."""
    try:
        text = json.dumps(value, allow_nan=False)
        if json.loads(text) != value:
            raise ValueError("must hold names and plain values only")
        _plain(text.encode().decode("unicode_escape") if "\\u" in text else text)
    except (TypeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"must hold names and plain values only ({str(error)[:80]})") from None
    return value


def _schema(pattern: str, **more: Any) -> FieldInfo:
    field: FieldInfo = Field(json_schema_extra={"pattern": pattern, **more})
    return field


Size = Annotated[str, AfterValidator(_size), _schema(SIZE, examples=["32Gi"])]
Duration = Annotated[str, AfterValidator(_duration), _schema(DURATION, examples=["2h", "1d12h"])]
Label = Annotated[
    str, _check(LABEL, "lower-case letters, digits and -, a letter first, at most 63", 63), _schema(LABEL, maxLength=63)
]
Subdomain = Annotated[str, _check(SUBDOMAIN, "lower-case letters, digits, - and .", 253), _schema(SUBDOMAIN)]
AbsolutePath = Annotated[
    str,
    _check(PATH, "an absolute path of letters, digits, . _ - and /", 1024),
    _schema(PATH),
    AfterValidator(lambda path: _no_dots(path)),
]
AbsolutePathOrBucket = Annotated[
    str,
    _check(
        PATH_OR_BUCKET, "an absolute path of letters, digits, . _ - and /, or s3://BUCKET/PREFIX (gs://, az://)", 1024
    ),
    _schema(PATH_OR_BUCKET),
    AfterValidator(lambda path: path if "://" in path else _no_dots(path)),
]
AnyPath = Annotated[
    str, _check(LOCAL_PATH, "a path of letters, digits, spaces, . _ - and /", 1024), _schema(LOCAL_PATH)
]
Variable = Annotated[str, _check(VARIABLE, "a variable name of letters, digits and _", 255), _schema(VARIABLE)]
Image = Annotated[str, _check(IMAGE, "an image such as registry/name:tag or name@sha256:…", 512), _schema(IMAGE)]
Resource = Annotated[str, _check(RESOURCE, "a resource name such as rdma/hca_shared", 316), _schema(RESOURCE)]
LabelKey = Annotated[str, _check(RESOURCE, "a label key such as example.com/pool", 316), _schema(RESOURCE)]
LabelValue = Annotated[
    str, _check(LABEL_VALUE, "a label value of letters, digits, - _ and ., at most 63", 63), _schema(LABEL_VALUE)
]
Word = Annotated[str, _check(WORD, "one word of letters, digits and _ . , @ + = -", 255), _schema(WORD)]
Device = Annotated[str, _check(DEVICE, "a device list such as eth0 or mlx5_0,mlx5_1", 128), _schema(DEVICE)]
SshHost = Annotated[
    str,
    _check(SSH_HOST, "a host of ssh such as login.example, me@login.example or login.example:/venv/bin/python", 500),
    _schema(SSH_HOST),
]
HostList = Annotated[str, _check(HOST_LIST, "a list of nodes such as gpu[01-03],gpu7", 1024), _schema(HOST_LIST)]
Constraint = Annotated[str, _check(CONSTRAINT, "features such as a100&nvlink", 255), _schema(CONSTRAINT)]
Licenses = Annotated[str, _check(LICENSES, "licenses such as matlab:2,ansys", 1024), _schema(LICENSES)]
Module = Annotated[str, _check(MODULE, "an environment module such as cuda/12.4", 255), _schema(MODULE)]
Mount = Annotated[str, _check(MOUNT, "/path, /path:/inside or /path:/inside:ro", 2048), _schema(MOUNT)]
ContainerImage = Annotated[
    str, _check(CONTAINER_IMAGE, "an image such as registry/name:tag or /images/x.sqsh", 512), _schema(CONTAINER_IMAGE)
]
Text = Annotated[str, AfterValidator(_plain)]
ShellLine = Annotated[str, AfterValidator(_plain), AfterValidator(lambda line: _one_line(line))]
Values = Annotated[dict[str, Any], AfterValidator(_json_only)]


def _one_line(text: str) -> str:
    if "\n" in text:
        raise ValueError("must be one line: write one item per line")
    return text


def _no_dots(path: str) -> str:
    if ".." in path.split("/"):
        raise ValueError(f"must not hold .., got {path!r}")
    return path
