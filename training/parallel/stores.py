"""Key-value stores (torch's TCPStore) for the rendezvous of ranks and nodes. They listen on one address, not on all of the machine's.

torch's TCPStore listens on all addresses and authenticates no client: a stranger who reaches the port reads, writes and deletes.
With a bound socket it listens on that socket alone. Lockstep unpickles no value. `said` validates a value before a message shows it.

torch is imported by the first store, not with this module: before that the launcher starts its ranks.
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
from typing import TYPE_CHECKING

from .. import extras
from ..limits import LISTEN_SECONDS

if TYPE_CHECKING:
    import torch.distributed as dist

BACKLOG = 4096
"""Length of the accept queue: the ranks of a large job connect at the same time."""

TEXT_LENGTH = 300
"""Largest length of a text from the store in a message to users."""

_ABSENT = "\0absent"


def tcp_store(
    host: str, port: int, serves: bool, seconds: float, size: int | None = None, socket: socket.socket | None = None
) -> dist.TCPStore:
    """Returns a client of the store at `host:port`. With `serves` this process also hosts the store. Port 0: any free port.

    If `host` resolves to one address, and it belongs to this machine, the store listens on that address alone. Otherwise torch listens
    on all addresses.

    Args:
        seconds: time limit of each request to the store.
        size: number of ranks that use the store; None: unknown.
        socket: the socket on which the store listens (`listening`), which this function closes; None: a new one.
    """
    with extras.importing():
        import torch.distributed as dist

    timeout = timedelta(seconds=seconds)
    if not serves:
        _until_it_listens(host, port, min(seconds, LISTEN_SECONDS))
    elif socket is None:
        socket = listening(host, port)
    if socket is None:
        return dist.TCPStore(host, port, size, serves, timeout, wait_for_workers=size is not None, multi_tenant=True)
    with socket:
        port = socket.getsockname()[1]
        descriptor = os.dup(socket.fileno())  # the store closes it
    return dist.TCPStore(
        host, port, size, True, timeout, wait_for_workers=size is not None, master_listen_fd=descriptor
    )


def lost() -> tuple[type[Exception], ...]:
    """Returns the class of torch's errors for a store that does not answer, and for a group that cannot be opened; () before the import."""
    known = getattr(sys.modules.get("torch.distributed"), "DistError", None)
    return () if known is None else (known,)


def _until_it_listens(host: str, port: int, seconds: float) -> None:
    """Waits until a process listens there, at most `seconds`. After that torch reports the error."""
    deadline, wait = time.monotonic() + seconds, 0.01
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left).close()
        except OSError:
            time.sleep(min(wait, left))
            wait = min(2 * wait, 0.25)  # many ranks poll
        else:
            return


def listening(host: str, port: int) -> socket.socket | None:
    """Returns a socket that listens on the only address of `host`: clients may connect before a store serves them. None: the name has
    several addresses, or one that means another machine elsewhere."""
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
    # A machine's /etc/hosts may map its own name to 127.0.1.1. Other machines resolve that name to another address.
    if ipaddress.ip_address(address).is_loopback and host not in ("localhost", address):
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last attempt's connections linger
    try:
        listener.bind((address, port))
    except OSError:  # not an address of this machine (a service's, a NAT's), or the port is taken: torch says which
        listener.close()
        return None
    listener.listen(BACKLOG)
    return listener


def ended(rank: int) -> str:
    """Returns the key where the launcher writes how a rank has ended. This key and the following ones have no prefix."""
    return f"lockstep/ended/{rank}"


def ready(rank: int) -> str:
    """Returns the key that a rank sets once its loop has begun. From then on the others can continue without it."""
    return f"lockstep/live/ready/{rank}"


def generation(number: int) -> str:
    """Returns the key of generation `number` (from 1): the list of ranks after a loss or an admission (JSON, in order)."""
    return f"lockstep/live/generation/{number}"


WAITING = "lockstep/live/waiting"
"""Counter of prepared replacements of lost ranks."""


def prepared(replacement: int) -> str:
    """Returns the key that replacement number `replacement` (from 1) sets when it waits for its admission."""
    return f"lockstep/live/prepared/{replacement}"


def admission(number: int) -> str:
    """Returns the key where the ranks ask, between two steps, to admit waiting replacements. At `…/answer` the launcher writes the
    generation with the admitted ranks."""
    return f"lockstep/live/admission/{number}"


def admitted(replacement: int) -> str:
    """Returns the key where the launcher writes the admission and the generation in which a replacement joins."""
    return f"lockstep/live/admitted/{replacement}"


LEAVING = "lockstep/live/leaving"
"""Counter of ranks that received a signal. Each rank first writes its signal (`leaving`)."""
ENDING = "lockstep/live/ending"
"""Key that the launcher sets if such a signal ends all ranks."""


AGAIN = "lockstep/live/again"
"""Key that a rank sets if it ends because the ranks cannot continue without a lost rank."""


def leaving(rank: int) -> str:
    """Returns the key where a rank writes its signal. The launcher sets `…/alone` if only this rank must leave."""
    return f"{LEAVING}/{rank}"


def read(store: dist.Store, key: str) -> bytes:
    """Returns the value of a key; b"": the store has none.

    `compare_set` with a value that no client writes never blocks, and sets nothing. `check` and then `get` may block: if another client
    deletes the key in between, `get` waits until the store's timeout. It also blocks all other threads that use the store.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return b"" if value == _ABSENT.encode() else value


def trained(rank: int) -> str:
    """Returns the key where a rank writes how often its trained parameters have changed between two steps, and the last new one."""
    return f"lockstep/trained/{rank}"


def text_at(store: dist.Store, key: str, shape: str, most: int = TEXT_LENGTH) -> str:
    """Returns the text of a key if it matches the regular expression `shape`, else "".

    Args:
        most: most characters of the text.
    """
    text = read(store, key).decode(errors="replace")
    return text if len(text) <= most and re.fullmatch(shape, text) else ""


def numbers(store: dist.Store, key: str) -> list[int]:
    """Returns the list of whole numbers at an existing key. Raises `ValueError` for another value."""
    return list(json.loads(text_at(store, key, r"\[[0-9, ]+\]", most=1 << 17)))


def without_prefix(store: dist.Store) -> dist.Store:
    """Returns the underlying store of a store that prefixes each key with the group's name."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def meet(store: dist.Store, key: str, count: int, seconds: float, waits: bool = True) -> None:
    """Adds 1 to the counter at the key. Returns when the counter is `count`, or after `seconds`.

    Args:
        waits: False returns at once. Rank 0 waits, since it may host the store, and the others must read it first.
    """
    counted, deadline = store.add(key, 1), time.monotonic() + seconds
    while waits and counted < count and time.monotonic() < deadline:
        time.sleep(0.05)
        counted = store.add(key, 0)
