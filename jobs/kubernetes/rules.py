"""The rules of Kubernetes: protected paths, and rules about the job as a whole, about its pods, about what a pod may do."""

from __future__ import annotations

from lockstep.jobs.kubernetes import job_rules, pod_rules, protected, security_rules
from lockstep.jobs.kubernetes.subject import RULES

__all__ = ["RULES", "job_rules", "pod_rules", "protected", "security_rules"]
