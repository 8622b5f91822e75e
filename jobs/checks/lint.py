"""Every footgun a rule with an id, a message that says what to do, and a test. Rules read the *final* manifest.

findings = lint(spec, pytorchjob.render(spec))
errors(findings)        # submit refuses these, prints the rest as warnings
"""

from __future__ import annotations

from jobs.checks.rule import Finding, Subject, rules
from jobs.compose import rules as compose_rules
from jobs.kubernetes import job_rules, pod_rules, security_rules
from jobs.manifest import Manifest
from jobs.slurm import rules as slurm_rules
from jobs.spec.model import JobSpec

__all__ = [
    "Finding", "compose_rules", "errors", "job_rules", "lint", "pod_rules", "rules", "security_rules", "slurm_rules",
]  # fmt: skip


def lint(spec: JobSpec, objects: list[Manifest]) -> list[Finding]:
    """All findings, in the order of their ids. Manifests may be anything: `patch` can replace any part."""
    subject = Subject(spec, objects)
    found = [finding for rule in rules() for finding in rule.apply(subject)]
    return list(dict.fromkeys(found))


def errors(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "error"]
