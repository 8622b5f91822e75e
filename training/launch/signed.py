"""What the nodes of a job tell each other in the store where they meet: text, with an HMAC by a secret of the job.

The store itself asks nobody who he is: whoever reaches its port reads, writes and deletes what he likes. So nothing that comes
out of it is unpickled, and what does not carry the HMAC counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from lockstep.training.contract import ENV_SECRET

MOST_BYTES = 1 << 20
"""Of one value. The state of 4,096 nodes has about half of that."""
LOOK_SECONDS = 0.05
FOREIGN = (
    f"what stands there is not signed with this node's secret: set {ENV_SECRET} to the same value on every node, "
    "and see who else writes there"
)


class Secret:
    """Signs what this node says, and tells whether another node of the job has said something.

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
    """The store of one round: as much of torch's interface as torch's agent uses, and `read`.

    Args:
        name: of the round, with the job's in it.
    """

    def __init__(self, store: Store, name: str, secret: Secret) -> None:
        self._served, self._name, self._secret = store, name, secret
        self._store: Store = PrefixStore(name, store)
        self._timeout: timedelta = store.timeout  # type: ignore[attr-defined]

    def other_connection(self) -> SignedStore:
        """The same over another connection: an unanswered question there keeps no other question waiting."""
        return SignedStore(self._served.clone(), self._name, self._secret)

    def set(self, key: str, value: str | bytes) -> None:
        text = value.decode() if isinstance(value, bytes) else value
        self._store.set(key, self._secret.signed(self._place(key), text).decode())

    def read(self, key: str) -> str | None:
        """What a node of the job has set; None where none has."""
        # With "" for "": the value at once, also where there is none. `get` would wait for one.
        return self._secret.opened(self._place(key), self._store.compare_set(key, "", ""))

    def get(self, key: str) -> bytes:
        """Waits for a node of the job to set it. Raises `RendezvousStateError` when the store's timeout is over."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (text := self.read(key)) is None:
            if time.monotonic() > deadline:
                raise RendezvousStateError(f"no node has said {key!r} in time, or somebody else writes there")
            time.sleep(LOOK_SECONDS)
        return text.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values):
            self.set(key, value)

    def _place(self, key: str) -> str:
        return f"{self._name}/{key}"
