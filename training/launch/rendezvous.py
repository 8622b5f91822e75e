"""Where the nodes of a job meet: torch's own rendezvous, which waits for a late node until the join timeout.

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

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname, parse_rendezvous_endpoint

from training.contract import MASTER_PORT, UserError
from training.launch.lines import say
from training.parallel import stores

SAID_EVERY = 60.0
"""Seconds between two lines about nodes that are missing."""
READ_SECONDS = 60.0
"""Bound on a question to the store."""


class NotMet(Exception):
    """The nodes did not meet in time. To start this one again would not help."""


def node_range(text: str) -> tuple[int, int]:
    """`--nodes`: a number, or MIN:MAX. Raises `UserError`."""
    match = re.fullmatch(r"([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise UserError(f"--nodes must be a number, or MIN:MAX with MIN ≤ MAX; got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def parameters(args: argparse.Namespace) -> RendezvousParameters:
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
        backend="c10d", endpoint=endpoint, run_id=job_id, min_nodes=low, max_nodes=high,
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
    timeout = float(wanted.get("join_timeout"))
    host, port = _endpoint(wanted)
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
    """torch's own rendezvous, but its store listens on the one address that was named."""
    if not served_here:
        return get_rendezvous_handler(wanted)
    try:
        store = stores.tcp_store(host, port, serves=True, seconds=float(wanted.get("read_timeout")))
    except (ValueError, RuntimeError) as error:
        if wanted.get_as_bool("is_host") is None:  # only the name matched; another process serves
            return get_rendezvous_handler(wanted)
        raise RendezvousError(str(error)) from error
    return create_handler(store, C10dRendezvousBackend(store, wanted.run_id), wanted)


def present(handler: RendezvousHandler) -> int:
    """Nodes that have joined this round and were alive when it was last asked about."""
    return len(handler._state_holder.state.participants)  # type: ignore[attr-defined]


def own_connection(handler: RendezvousHandler, store: Store) -> Store:
    """Another connection to the store of this round: an unanswered question there keeps no other question waiting."""
    if hasattr(store, "clone"):
        return store.clone()
    # torch 2.6, perhaps 2.7 and 2.8. It does not tell the prefix of `store` either, so this one has its own for each round.
    served = stores.without_prefix(store)
    assert isinstance(served, TCPStore)
    timeout = store.timeout  # type: ignore[attr-defined]
    client = TCPStore(served.host, served.port, None, False, timeout, wait_for_workers=False)
    return PrefixStore(f"lockstep/round/{handler._state_holder.state.round}", client)  # type: ignore[attr-defined]


@contextlib.contextmanager
def reporting_missing(handler: RendezvousHandler) -> Iterator[None]:
    """Inside the block, a line a minute says how many nodes are missing."""
    wanted, timeout = handler.settings.min_nodes, handler.settings.timeout.join.total_seconds()  # type: ignore[attr-defined]
    over, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(SAID_EVERY):
            joined = present(handler)
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
