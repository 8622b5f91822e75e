#!/bin/bash
# In Apptainer's place: `apptainer exec --bind A:A,B:B IMAGE PROGRAM …` for an image that is a folder. PROGRAM runs in its
# file system, with the mounts, as the one who calls (root) and with the caller's environment but the image's PATH.
set -eu
[ "$1" = exec ] && [ "$2" = --bind ]
BINDS=$3 IMAGE=$4
shift 4
export BINDS IMAGE
exec unshare --mount bash -euc '
  IFS=, read -ra binds <<< "$BINDS"
  for bind in "${binds[@]}" /proc:/proc /sys:/sys /dev:/dev; do
    mkdir -p "$IMAGE${bind#*:}"
    mount --rbind "${bind%%:*}" "$IMAGE${bind#*:}"
  done
  mount --bind /etc/hosts "$IMAGE/etc/hosts"
  exec chroot "$IMAGE" env PATH=/opt/venv/bin:/opt/lockstep/bin:/usr/bin:/bin "$@"
' inside "$@"
