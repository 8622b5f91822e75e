"""PodSecurity's verdict on a pod, after https://kubernetes.io/docs/concepts/security/pod-security-standards/."""

from __future__ import annotations

from typing import Any

# What `baseline` lets a container add to its capabilities; IPC_LOCK is not among them.
BASELINE = {
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETGID",
    "SETPCAP", "SETUID", "SYS_CHROOT",
}  # fmt: skip
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def violations(pod: dict[str, Any], level: str) -> list[str]:
    """What is wrong with a pod's spec at `baseline` or `restricted`."""
    found = [f"host namespaces ({name}=true)" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    found += ["hostPath volumes" for volume in pod.get("volumes", []) if "hostPath" in volume]
    whole = pod.get("securityContext") or {}
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own, name = container.get("securityContext") or {}, container["name"]
        added, dropped = (set((own.get("capabilities") or {}).get(key) or []) for key in ("add", "drop"))
        if own.get("privileged"):
            found.append(f"privileged ({name})")
        if added - BASELINE:
            found.append(f'non-default capabilities (container "{name}" must not include {sorted(added - BASELINE)})')
        if level == "baseline":
            continue
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(f'allowPrivilegeEscalation != false (container "{name}")')
        if "ALL" not in dropped or added - {"NET_BIND_SERVICE"}:
            found.append(f'unrestricted capabilities (container "{name}" must set drop=["ALL"])')
        if (own.get("runAsNonRoot", whole.get("runAsNonRoot"))) is not True:
            found.append(f'runAsNonRoot != true (container "{name}")')
        seccomp = own.get("seccompProfile") or whole.get("seccompProfile") or {}
        if seccomp.get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(f'seccompProfile (container "{name}")')
    if level == "restricted":
        kinds = {key for volume in pod.get("volumes", []) for key in volume if key != "name"}
        found += [f"restricted volume types ({kind})" for kind in sorted(kinds - VOLUMES)]
        found += ["runAsUser=0" for _ in (1,) if whole.get("runAsUser") == 0]
    return found
