"""Key-value stores in which ranks and nodes meet. They listen on one address, not on every address of the machine.

torch's TCPStore listens on all addresses and authenticates no client: a stranger who reaches the port reads, writes and deletes.
With a bound socket it listens on that socket alone. No value is unpickled, and `said` checks a value before anything shows it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from ..limits import LISTEN_SECONDS

BACKLOG = 4096
"""Connections that may wait to be accepted; the ranks of a large job come at once."""

SAID = 300
"""Most characters of a store's text in a message to users."""

_ABSENT = "\0absent"


def tcp_store(host: str, port: int, serves: bool, seconds: float, size: int | None = None) -> dist.TCPStore:
    """Returns a store at `host:port`, which this process serves or only uses. Port 0: any free port.

    If `host` is an address of this machine, and the only one of that name, the store listens on it alone. Otherwise torch listens on all
    addresses.

    Args:
        seconds: time limit of each request to the store.
        size: number of ranks that use the store; None: unknown.
    """
    timeout = timedelta(seconds=seconds)
    listener = _bound(host, port) if serves else None
    if not serves:
        _until_it_listens(host, port, min(seconds, LISTEN_SECONDS))
    if listener is None:
        return dist.TCPStore(host, port, size, serves, timeout, wait_for_workers=size is not None, multi_tenant=True)
    with listener:
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        descriptor = os.dup(listener.fileno())  # the store closes it
    return dist.TCPStore(
        host, port, size, True, timeout, wait_for_workers=size is not None, master_listen_fd=descriptor
    )


def _until_it_listens(host: str, port: int, seconds: float) -> None:
    """Waits until a process listens there, for this many seconds at most: torch then reports the error."""
    deadline, wait = time.monotonic() + seconds, 0.01
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left).close()
        except OSError:
            time.sleep(min(wait, left))
            wait = min(2 * wait, 0.25)  # many ranks ask
        else:
            return


def _bound(host: str, port: int) -> socket.socket | None:
    """Returns a socket bound to the only address of `host`; None: it has several, or an address that means another machine elsewhere."""
    try:
        addresses = {
            (family, place[0]) for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        }
    except OSError:
        return None
    if host == "localhost":
        addresses = {(socket.AF_INET, "127.0.0.1")}
    if len(addresses) != 1:
        return None
    ((family, address),) = addresses
    # A host name that its own /etc/hosts maps to 127.0.1.1 means another address elsewhere.
    if ipaddress.ip_address(address).is_loopback and host not in ("localhost", address):
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last attempt's connections linger
    try:
        listener.bind((address, port))
    except OSError:  # not an address of this machine (a service's, a NAT's), or the port is taken: torch says which
        listener.close()
        return None
    return listener


def ended(rank: int) -> str:
    """Returns the key, in the store without a prefix, at which the launcher records how a rank has ended."""
    return f"lockstep/ended/{rank}"


def ready(rank: int) -> str:
    """Returns the key there at which a rank reports that its loop has begun: from then on the others can continue without it."""
    return f"lockstep/live/ready/{rank}"


def generation(number: int) -> str:
    """Returns the key there at which the launcher lists the ranks after a loss or an admission (JSON, in order); `number` is from 1."""
    return f"lockstep/live/generation/{number}"


WAITING = "lockstep/live/waiting"
"""The key there at which prepared replacements of lost ranks count themselves."""


def prepared(replacement: int) -> str:
    """Returns the key there at which a replacement, counted from 1, reports that it waits to be admitted."""
    return f"lockstep/live/prepared/{replacement}"


def admission(number: int) -> str:
    """Returns the key there at which the ranks ask, between two steps, for replacements that wait. At `…/answer` the launcher writes the
    generation in which it has admitted them."""
    return f"lockstep/live/admission/{number}"


def admitted(replacement: int) -> str:
    """Returns the key there at which the launcher tells a replacement by which admission, and in which generation, it is admitted."""
    return f"lockstep/live/admitted/{replacement}"


LEAVING = "lockstep/live/leaving"
"""The key there at which ranks with a signal count themselves, after each has written its signal (`leaving`)."""
ENDING = "lockstep/live/ending"
"""The key there at which the launcher announces that such a signal ends all ranks."""


AGAIN = "lockstep/live/again"
"""The key there at which a rank reports that it ends because the ranks cannot continue without a lost rank."""


def leaving(rank: int) -> str:
    """Returns the key there at which a rank reports its signal. At `…/alone` the launcher tells the rank to leave alone."""
    return f"{LEAVING}/{rank}"


def read(store: dist.Store, key: str) -> bytes:
    """Returns the value of a key; b"": the store has none.

    `get` after `check` waits for the store's timeout if another client deletes the key in between. All threads of this process that use
    the store wait with it. `compare_set` with a value that no client writes never waits, and sets nothing.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return b"" if value == _ABSENT.encode() else value


def said(store: dist.Store, key: str, shape: str, most: int = SAID) -> str:
    """Returns the text of a key, if it matches `shape`, a regular expression; "": another value or none.

    Args:
        most: most characters of the text.
    """
    text = read(store, key).decode(errors="replace")
    return text if len(text) <= most and re.fullmatch(shape, text) else ""


def numbers(store: dist.Store, key: str) -> list[int]:
    """Returns the list of whole numbers at an existing key. Raises `ValueError` for another value."""
    values: list[int] = json.loads(said(store, key, r"\[[0-9, ]+\]", most=1 << 17))
    return values


def without_prefix(store: dist.Store) -> dist.Store:
    """Returns the underlying store of a store that prefixes each key with the group's name."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def meet(store: dist.Store, key: str, count: int, seconds: float, waits: bool = True) -> None:
    """Counts this rank at the key. Returns when `count` ranks are counted there, or after `seconds`.

    Args:
        waits: whether to wait. Rank 0 may serve the store, so it waits until the others have read their keys.
    """
    counted, deadline = store.add(key, 1), time.monotonic() + seconds
    while waits and counted < count and time.monotonic() < deadline:
        time.sleep(0.05)
        counted = store.add(key, 0)


def stay_on_this_machine() -> None:
    """Makes gloo's and NCCL's sockets listen on the loopback interface, unless their variables are set: all ranks are on this machine."""
    interface = "lo" if sys.platform == "linux" else "lo0"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, interface)
