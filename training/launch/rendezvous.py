"""Where the nodes of a job meet: torch's rules, which wait for a late node until the join timeout. One node alone meets nobody.

A pod that pulls its image for twenty minutes is no failure of the others, so neither the connection nor the join
counts as one: both are tried until `join_timeout`, and a line a minute says how many nodes are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from lockstep.training.contract import ENV_SECRET, MASTER_PORT, UserError
from lockstep.training.launch.lines import say
from lockstep.training.launch.nodes import Alone, Several
from lockstep.training.launch.signed import Secret
from lockstep.training.parallel import stores

SAID_EVERY = 60.0
"""Seconds between two lines about nodes that are missing."""
READ_SECONDS = 60.0
"""Bound on a question to the store."""

UNSIGNED = (
    f"{ENV_SECRET} is not set: whoever reaches {{}} can stop the job or have its ranks meet elsewhere. "
    "Set it to the same long random word on every node"
)


class NotMet(Exception):
    """The nodes did not meet in time. To start this one again would not help."""


def node_range(text: str) -> tuple[int, int]:
    """`--nodes`: a number, or MIN:MAX. Raises `UserError`."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UserError(f"--nodes must be a number, or MIN:MAX with MIN ≤ MAX; got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def parameters(args: argparse.Namespace, secret: str) -> RendezvousParameters:
    """Of the launcher's flags. Raises `UserError`."""
    low, high = node_range(args.nodes)
    endpoint, host = args.rendezvous, args.serve
    if high > 1 and not endpoint:
        raise UserError(f"--nodes {args.nodes} needs --rendezvous HOST:PORT, the same on every node")
    job_id = args.job_id if high > 1 else uuid.uuid4().hex
    if high == 1:
        endpoint, host = "127.0.0.1:0", True
    options = {"is_host": str(host).lower()} if host is not None else {}
    return RendezvousParameters(
        backend="lockstep", secret=secret.strip(), endpoint=endpoint, run_id=job_id, min_nodes=low, max_nodes=high,
        local_addr="127.0.0.1" if high == 1 else args.address,
        join_timeout=args.join_timeout, last_call_timeout=3 if low < high else 1,
        read_timeout=max(1, int(min(args.join_timeout, READ_SECONDS))), **options,
    )  # fmt: skip


def serves(wanted: RendezvousParameters) -> bool:
    """Whether this node serves the store where the nodes meet."""
    host = wanted.get_as_bool("is_host")
    return _matches_machine_hostname(_endpoint(wanted)[0]) if host is None else host


def _endpoint(wanted: RendezvousParameters) -> tuple[str, int]:
    """Raises `UserError`."""
    try:
        host, port = parse_rendezvous_endpoint(wanted.endpoint, MASTER_PORT)
        host.encode("idna")
    except ValueError as error:  # of the encoding, too
        raise UserError(f"--rendezvous {wanted.endpoint!r} is not HOST:PORT: {error}") from None
    return host, port


def connect(wanted: RendezvousParameters, served_here: bool) -> RendezvousHandler:
    """The rendezvous, as soon as it is served.

    Args:
        served_here: what `serves` has said.

    Raises:
        NotMet: no node has served it within the join timeout.
        RendezvousError: this node should serve it, and cannot.
    """
    if wanted.max_nodes == 1:
        return Alone(wanted.run_id, wanted.local_addr or "127.0.0.1")
    timeout = float(wanted.get("join_timeout"))
    host, port = _endpoint(wanted)
    if served_here and not wanted.get("secret"):
        say(f"launch: warning: {UNSIGNED.format(wanted.endpoint)}", sys.stderr)
    began = time.monotonic()
    last_report = began
    problem = ""
    while True:
        try:
            if not served_here:
                # Asked in Python first: a signal ends this wait at once, and not the one in torch's store.
                socket.create_connection((host, port), 5).close()
            return _handler(wanted, host, port, served_here)
        except RendezvousConnectionError as error:
            if served_here:
                raise
            problem = str(error)
        except OSError as error:
            problem = error.strerror or str(error)
        now = time.monotonic()
        if now - began >= timeout:
            raise NotMet(f"there was no answer at {wanted.endpoint} for {timeout:g} s: {problem}")
        if now - last_report >= SAID_EVERY:
            last_report = now
            say(
                f"launch: no answer at {wanted.endpoint} yet ({problem}): {_waiting(now - began, timeout)}",
                sys.stderr,
            )
        time.sleep(min(1.0, max(0.0, timeout - (now - began))))


def _handler(wanted: RendezvousParameters, host: str, port: int, served_here: bool) -> RendezvousHandler:
    """The store listens on the one address that was named."""
    seconds, secret = float(wanted.get("read_timeout")), Secret(wanted.get("secret"))

    def joined(serves: bool) -> Several:
        return Several(wanted, stores.tcp_store(host, port, serves=serves, seconds=seconds), secret, serves)

    if served_here:
        try:
            return joined(serves=True)
        except (ValueError, RuntimeError) as error:
            if wanted.get_as_bool("is_host") is not None:  # else only the name matched; another process serves
                raise RendezvousError(str(error)) from error
    try:
        return joined(serves=False)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error).splitlines()[0]) from error


@contextlib.contextmanager
def reporting_missing(handler: RendezvousHandler) -> Iterator[None]:
    """Inside the block, a line a minute says how many nodes are missing."""
    if not isinstance(handler, Several):
        yield
        return
    wanted, timeout = handler.settings.min_nodes, handler.settings.timeout.join.total_seconds()
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(SAID_EVERY):
            joined = handler.present
            if joined < wanted:
                more = _waiting(time.monotonic() - began, timeout)
                say(f"launch: {joined} of {wanted} nodes are here, {wanted - joined} missing: {more}", sys.stderr)

    thread = threading.Thread(target=tell, daemon=True)
    if wanted > 1:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if wanted > 1:
            thread.join()


def _waiting(elapsed: float, timeout: float) -> str:
    return f"waiting, {elapsed:.0f} s of {timeout:.0f} s"
