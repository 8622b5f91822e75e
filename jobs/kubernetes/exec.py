"""A command beside a rank, in the rank's container."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.jobs import command as commands
from lockstep.jobs.foreground import Streams
from lockstep.jobs.kubernetes.api import Api
from lockstep.jobs.kubernetes.channels import Conversation, connect
from lockstep.jobs.manifest import Manifest, get
from lockstep.training.contract import UserError


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a rank may be.

    Args:
        pod: the pod of a host, None where there is none.
        container: the one of its containers that the ranks run in.
        hosts: where it may be; in an elastic job it is looked for.
    """

    api: Api
    namespace: str
    pod: Callable[[str], Manifest | None]
    container: str
    hosts: list[str]
    rank: int

    def run(self, command: list[str], run_dir: str, streams: Streams) -> int:
        """The command's exit code. Raises `UserError`, `Unreachable`, `ApiError`."""
        pod, token = self._place(), uuid.uuid4().hex
        terminal = streams.terminal
        words = commands.execute("python", self.rank, command, run_dir, "--token", token)

        def interrupt(number: int) -> None:
            self._quietly(pod, commands.signal("python", token, number))

        client = connect(self.api.client, self.namespace, pod, self.container, words, terminal)
        return Conversation(client, pod, streams, terminal, interrupt).run()

    def _place(self) -> str:
        """The name of the rank's pod. Raises `UserError` where it does not run."""
        running, why = [], ""
        for host in self.hosts:
            found = self.pod(host)
            phase = get(found, "status", "phase") if found is not None else None
            if phase == "Running":
                running.append(str(get(found, "metadata", "name")))
            else:
                state = {"Succeeded": "has ended", "Failed": "has ended"}.get(str(phase), "has not started")
                why = f"rank {self.rank} does not run: the pod {host} {state if found is not None else 'is gone'}"
        if len(self.hosts) == 1 and running:
            return running[0]
        looks = commands.execute("python", self.rank, [], "", "--find")
        place = next((pod for pod in running if self._quietly(pod, looks) == 0), None)
        if place is None:
            raise UserError(why or f"rank {self.rank} does not run: no pod of the job has it")
        return place

    def _quietly(self, pod: str, words: list[str]) -> int:
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            client = connect(self.api.client, self.namespace, pod, self.container, words, terminal=False)
            return Conversation(client, pod, Streams(nowhere, nowhere, nowhere), False, _nobody).run()
        finally:
            os.close(nowhere)


def _nobody(number: int) -> None:
    """What ends in a moment is sent no signal."""
