"""The scripts that run on the cluster's side: POSIX sh and coreutils, and flock, find and tar where they are named.

Each gets its words as `$1`, `$2`, … and its data as standard input. What a connection loses ends the data early, so each
script counts or looks for the last line before it changes anything. One that cleans up must survive that nobody hears it.
"""

from __future__ import annotations

WRITE = """
trap '' PIPE
new="$(dirname -- "$1")/.$(basename -- "$1").$$"
trap 'rm -f -- "$new"' EXIT
head -c "$2" > "$new" || exit 1
if [ "$(wc -c < "$new")" -ne "$2" ]; then echo "it is cut off" >&2; exit 1; fi
chmod 644 -- "$new" && { sync -- "$new" 2> /dev/null; mv -f -- "$new" "$1"; }
"""
"""$1: the file. $2: the number of bytes."""

FILES = """
set --
for name in {globs}; do [ -f "$name" ] && set -- "$@" "$name"; done
[ $# -gt 0 ] || exit 0
printf '%s\\0' "$@"
printf '\\0'
stat -L -c %s -- "$@"
printf '\\0'
head -q -c {most} -- "$@"
printf '\\0'
stat -L -c %s -- "$@"
"""
"""Names, sizes, contents of at most `most` bytes each, and the sizes again: where they differ a file was being replaced."""

SINCE = """
limit=$1; shift
while [ $# -gt 0 ]; do
  n=0
  if [ -f "$1" ]; then
    n=$(($(wc -c < "$1") - $2))
    if [ "$n" -lt 0 ]; then n=0; fi
    if [ "$n" -gt "$limit" ]; then n=$limit; fi
  fi
  printf '%s\\n' "$n"
  if [ "$n" -gt 0 ]; then tail -c "+$(($2 + 1))" -- "$1" | head -c "$n"; fi
  printf '\\n'
  shift 2
done
"""
"""$1: most bytes of each file. Then pairs: a file, and the offset to read from."""

ENDS = """
most=$1; without=$2; shift 2
LC_ALL=C; export LC_ALL
while [ $# -gt 0 ]; do
  size=0; at=0; n=0; window=65536
  if [ -f "$1" ]; then size=$(wc -c < "$1"); at=$size; fi
  while [ "$2" -gt 0 ] && [ "$size" -gt 0 ]; do
    from=$((size - window)); part=0
    if [ "$from" -le 0 ]; then from=0; part=none; fi
    found=$(tail -c "+$((from + 1))" -- "$1" | head -c "$((size - from))" | grep -a -b -v -E -e "$without" \\
      | cut -d : -f 1 | sed "/^$part\\$/d" | tail -n "$2" | sed -n -e 1p -e '$=' | paste -s -d ' ')
    n=${found#* }; n=${n:-0}
    if [ "$n" -ge "$2" ]; then at=$((from + ${found% *})); break; fi
    if [ "$from" -eq 0 ]; then at=0; break; fi
    if [ "$window" -eq "$most" ]; then [ "$n" -eq 0 ] || at=$((from + ${found% *})); break; fi
    window=$((window * 8))
    if [ "$window" -gt "$most" ]; then window=$most; fi
  done
  printf '%s %s\\n' "$at" "$n"
  shift 2
done
"""
"""$1: how many bytes of each file are looked at, at most. $2: lines of this pattern do not count. Then pairs: a file, and how
many of its last lines are wanted. A line that begins before what is looked at is not seen as one."""

ATTACHED = """
note=$1; shift
trap : INT QUIT TERM
"$@"
code=$?
[ $code -ne 255 ] || : > "$note"
exit $code
"""
"""Runs a program whose exit code 255, with which ssh itself fails, leaves a note. What the terminal sends is the program's."""

CHECK = """
kind=other
if [ -L "$1" ]; then kind=link; elif [ -d "$1" ]; then kind=directory; fi
stat -c "$kind|%u|%a" -- "$1" && id -u && place=$(cd -P -- "$1" && pwd) || exit 1
for place in "$1" "$place"; do
  while [ "$place" != / ]; do place=$(dirname -- "$place"); stat -L -c '%u|%a|%n' -- "$place"; done
done
"""
"""$1: an absolute path. What it is, who asks, and the folders above it: by its name, and where they really are."""
MAKE = f'umask 077; mkdir -p -m 700 -- "$1" || exit 1\n{CHECK}'

LOGIN = """
if ! command -v sbatch > /dev/null 2>&1 && [ -r /etc/profile ]; then
  lockstep_said=$( { . /etc/profile; } < /dev/null > /dev/null 2>&1; printf %s "$PATH")
  [ -z "$lockstep_said" ] || PATH=$lockstep_said
fi
"""
"""Where SLURM's commands are is often said for login shells alone."""
RUN = """
if ! command -v "$1" > /dev/null 2>&1; then echo 'lockstep: missing' >&2; exit 127; fi
exec "$@"
"""
PLACE = r"""
printf '%s\0' "$HOME" "$LOCKSTEP_HOME" "$(id -un)"
"""

LOCK = """
lockstep_said=busy
if ! command -v flock > /dev/null; then lockstep_said=missing
elif ! ( : >> "$1" ) 2> /dev/null; then lockstep_said=unwritable
else
  while exec 9>> "$1" && flock -w "$2" 9; do
    if [ "$(stat -L -c %d:%i /proc/self/fd/9)" = "$(stat -c %d:%i -- "$1")" ]; then lockstep_said=held; break; fi
  done
  [ $lockstep_said = held ] || exec 9>&-
fi
printf '%s' "$lockstep_said"
"""
"""It runs in the shell that stays: what it opens is held until the shell ends, or the lock is given back. Whoever gives the
lock back may remove its file: then the lock that was taken protects nothing, and it is tried again."""
UNLOCK = "exec 9>&-"

HOLDS = """
[ -d "$1" ] && [ ! -L "$1" ] && [ -O "$1" ] && cd "$1" || exit 1
own() { find . -name __pycache__ -prune -o "$@" -printf .; }
[ "$(own ! -type d | wc -c)" -eq "$2" ] && [ -z "$(own -type l)" ] || exit 1
[ "$(own -type f -perm -100 | wc -c)" -eq "$3" ] && sha256sum --check --status --strict
"""
"""$1: a folder. $2: how many files it holds, $3 of them executable; their sums come as data."""

UNPACK = """
trap '' PIPE
umask 077
new="$(dirname -- "$1")/.$(basename -- "$1").$$"
trap 'chmod -R u+w -- "$new" 2> /dev/null; rm -rf -- "$new" "$new.tar.gz"' EXIT
mkdir -- "$new" && head -c "$2" > "$new.tar.gz" || exit 1
[ "$(wc -c < "$new.tar.gz")" -eq "$2" ] || { echo "it is cut off" >&2; exit 1; }
tar -xzf "$new.tar.gz" -C "$new" --no-same-owner || exit 1
find "$new" -type f -perm -100 -exec chmod 555 {} + && find "$new" -type f ! -perm -100 -exec chmod 444 {} + || exit 1
find "$new" -depth -type d -exec chmod 555 {} + || exit 1
if [ -e "$1" ] || [ -L "$1" ]; then
  mv -T -- "$1" "$(dirname -- "$1")/.$(basename -- "$1").changed.$$" || exit 1
fi
mv -T -- "$new" "$1" && mv -f -- "$new.tar.gz" "$1.tar.gz"
"""
"""$1: the folder that the archive is unpacked to, whole or not at all. $2: bytes of the archive, the data."""
