"""What a lint rule is. Every footgun is a rule with an id, a message that says what to do, and a test.

Rules read the *final* manifest: `patch` can replace any part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from lockstep.jobs.manifest import Manifest
from lockstep.jobs.spec.model import JobSpec

Level = Literal["error", "warning"]
SECRET = re.compile(r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)($|_)")
"""Names of variables that look like a secret's."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One complaint: `message` says what was found and what to do. `submit` refuses errors, and prints warnings."""

    id: str
    level: Level
    message: str

    def __str__(self) -> str:
        return f"{self.id} {self.level}: {self.message}"


def errors(findings: list[Finding]) -> list[Finding]:
    """Those for which `submit` refuses the job."""
    return [finding for finding in findings if finding.level == "error"]


class Subject:
    """What the rules look at: the spec and the final manifests. A backend adds how its manifests are read."""

    kind: str = ""
    """Which of several kinds of manifest this is; empty where there is only one, or a patch has taken it away."""

    def __init__(self, spec: JobSpec, objects: list[Manifest]) -> None:
        self.spec, self.objects = spec, objects


S = TypeVar("S", bound=Subject)
Look = Callable[[S], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """`look` yields messages; its docstring is the rule's title. No `kinds`: for all."""

    id: str
    level: Level
    look: Look[S]
    kinds: tuple[str, ...]

    @property
    def title(self) -> str:
        return (self.look.__doc__ or "").strip()


class Rules(Generic[S]):
    """The rules of a backend; `subject` is how they see a job."""

    def __init__(self, subject: type[S]) -> None:
        self.subject = subject
        self._rules: dict[str, Rule[S]] = {}

    def rule(self, id: str, level: Level = "error", kinds: tuple[str, ...] = ()) -> Callable[[Look[S]], Look[S]]:
        """Registers a check under an id that never changes its meaning."""

        def register(look: Look[S]) -> Look[S]:
            assert id not in self._rules, id
            self._rules[id] = Rule(id, level, look, kinds)
            return look

        return register

    def all(self) -> list[Rule[S]]:
        """By id."""
        return [self._rules[id] for id in sorted(self._rules)]

    def apply(self, spec: JobSpec, objects: list[Manifest]) -> list[Finding]:
        """All findings, in the order of their ids. Manifests may be anything: `patch` can replace any part."""
        subject = self.subject(spec, objects)
        found = [
            Finding(rule.id, rule.level, message)
            for rule in self.all()
            if not rule.kinds or not subject.kind or subject.kind in rule.kinds
            for message in rule.look(subject)
        ]
        return list(dict.fromkeys(found))
