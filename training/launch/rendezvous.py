"""Where the nodes of a job meet: a store that one of them serves. One node alone meets nobody.

A pod that pulls its image for twenty minutes is no failure of the others, so neither the connection nor the join
counts as one: both are tried until `--join-timeout`, and a line a minute says how many nodes are missing.

A store asks nobody who he is: everybody reads and writes there who reaches its port. So what nodes write is JSON with an HMAC by a
secret of the job. Nothing is unpickled, and what does not carry the HMAC counts as not there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import json
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from ..contract import ENV_SECRET, EXIT_FAILED, EXIT_USAGE, MASTER_PORT, UserError, say
from ..limits import MISSING_NODES_SECONDS, STORE_SECONDS
from ..parallel import stores

MOST_BYTES = 1 << 20
"""Of one value. The wanted state of 8,192 ranks has about half of that."""
UNSIGNED = (
    f"{ENV_SECRET} is not set: whoever reaches {{}} can stop the job or have its ranks meet elsewhere. "
    "Set it to the same long random word on every node"
)
FOREIGN = (
    f"what stands there is not signed with this node's secret: set {ENV_SECRET} to the same value on every node, "
    "and see who else writes there"
)


class NotMet(Exception):
    """The nodes did not meet in time. To start this one again would not help."""


class CannotMeet(Exception):
    """This node can neither serve nor use the store where the nodes meet."""

    code = EXIT_FAILED


class Foreign(CannotMeet):
    """What stands in the store is not signed with this node's secret: to start this one again would not help."""

    code = EXIT_USAGE


class Secret:
    """Signs what this node writes, and tells whether a node of the job has written a text.

    Args:
        text: the same on all nodes. Empty, everybody can sign: the launcher warns of that.
    """

    def __init__(self, text: str) -> None:
        self._key = text.encode(errors="surrogateescape")

    def signed(self, place: str, text: str) -> bytes:
        """What is kept at `place`. It is nothing worth elsewhere."""
        return f"{self._mark(place, text)} {text}".encode()

    def opened(self, place: str, data: bytes) -> str | None:
        """The inverse; None for what nobody with the secret has written for this place."""
        if len(data) > MOST_BYTES:
            return None
        with contextlib.suppress(UnicodeDecodeError):
            mark, _, text = data.decode().partition(" ")
            if hmac.compare_digest(mark.encode(), self._mark(place, text).encode()):
                return text
        return None

    def _mark(self, place: str, text: str) -> str:
        return hmac.new(self._key, json.dumps([place, text]).encode(), hashlib.sha256).hexdigest()


class SignedStore:
    """What the nodes of a job write, below the name of the job."""

    def __init__(self, store: Store, name: str, secret: Secret) -> None:
        self._name, self._secret = name, secret
        self._store = PrefixStore(name, store)

    def set(self, key: str, text: str) -> None:
        self._store.set(key, self._secret.signed(self._place(key), text).decode())

    def read(self, key: str) -> str | None:
        """What a node of the job has set; None where none has."""
        return self._secret.opened(self._place(key), self._raw(key))

    def foreign(self, key: str) -> bool:
        """Whether something is there that no node with this secret has written."""
        raw = self._raw(key)
        return bool(raw) and self._secret.opened(self._place(key), raw) is None

    def _raw(self, key: str) -> bytes:
        return stores.read(self._store, key)

    def _place(self, key: str) -> str:
        return f"{self._name}/{key}"


def node_range(text: str) -> tuple[int, int]:
    """`--nodes`: a number, or MIN:MAX. Raises `UserError`."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UserError(f"--nodes must be a number, or MIN:MAX with MIN ≤ MAX; got {text!r}")
    return int(match[1]), int(match[2] or match[1])


@dataclass(frozen=True)
class Meeting:
    """Which nodes meet, and where."""

    endpoint: str
    """HOST:PORT; "" of one node alone."""
    secret: str
    job_id: str
    address: str
    """This node's, as the others see it."""
    min_nodes: int
    max_nodes: int
    join_seconds: float
    """How long to wait for the others."""
    host: bool | None
    """Whether this node serves the store; None: if the endpoint has its name."""

    @property
    def serves(self) -> bool:
        return _matches_machine_hostname(self.place[0]) if self.host is None else self.host

    @property
    def place(self) -> tuple[str, int]:
        """Raises `UserError`."""
        try:
            host, port = parse_rendezvous_endpoint(self.endpoint, MASTER_PORT)
            host.encode("idna")
        except ValueError as error:  # of the encoding, too
            raise UserError(f"--rendezvous {self.endpoint!r} is not HOST:PORT: {error}") from None
        return host, port


def meeting(args: argparse.Namespace, secret: str) -> Meeting:
    """Of the launcher's flags. Raises `UserError`."""
    low, high = node_range(args.nodes)
    if high == 1:
        return Meeting("", "", uuid.uuid4().hex, "127.0.0.1", 1, 1, args.join_timeout, host=True)
    if not args.rendezvous:
        raise UserError(f"--nodes {args.nodes} needs --rendezvous HOST:PORT, the same on every node")
    return Meeting(
        args.rendezvous, secret.strip(), args.job_id, args.address, low, high, args.join_timeout, host=args.serve
    )


Joined = TypeVar("Joined")


def reach(wanted: Meeting, served_here: bool, join: Callable[[TCPStore, Secret, bool], Joined]) -> Joined:
    """What `join` gives for the store where the nodes meet, as soon as that is served.

    Args:
        served_here: this node serves it.
        join: is called with the store, the job's secret, and whether the store is in this process. It may raise `RuntimeError`, by which
            the connection is lost.

    Raises:
        NotMet: no node has served it within the join timeout.
        CannotMeet: this node should serve it, and cannot.
    """
    timeout, (host, port) = wanted.join_seconds, wanted.place
    if served_here and not wanted.secret:
        say(f"launch: warning: {UNSIGNED.format(wanted.endpoint)}", sys.stderr)
    began = time.monotonic()
    last_report = began
    problem = ""
    while True:
        try:
            if not served_here:
                # Asked in Python first: a signal ends this wait at once, and not the one in torch's store.
                socket.create_connection((host, port), 5).close()
            return _joined(wanted, served_here, join)
        except OSError as error:
            problem = error.strerror or str(error)
        except (ValueError, RuntimeError) as error:  # torch's DistError among them
            problem = str(error).splitlines()[0]
            if served_here:
                raise CannotMeet(problem) from error
        now = time.monotonic()
        if now - began >= timeout:
            raise NotMet(f"there was no answer at {wanted.endpoint} for {timeout:g} s: {problem}")
        if now - last_report >= MISSING_NODES_SECONDS:
            last_report = now
            say(
                f"launch: no answer at {wanted.endpoint} yet ({problem}): {waiting(now - began, timeout)}",
                sys.stderr,
            )
        time.sleep(min(1.0, max(0.0, timeout - (now - began))))


def _joined(wanted: Meeting, served_here: bool, join: Callable[[TCPStore, Secret, bool], Joined]) -> Joined:
    """The store listens on the one address that was named."""
    (host, port), seconds = wanted.place, max(1.0, min(wanted.join_seconds, STORE_SECONDS))

    def joined(serves: bool) -> Joined:
        return join(stores.tcp_store(host, port, serves=serves, seconds=seconds), Secret(wanted.secret), serves)

    if served_here:
        try:
            return joined(serves=True)
        except (ValueError, RuntimeError) as error:
            if wanted.host is not None:  # else only the name matched; another process serves
                raise CannotMeet(str(error)) from error
    return joined(serves=False)


def waiting(elapsed: float, timeout: float) -> str:
    return f"waiting, {elapsed:.0f} s of {timeout:.0f} s"
