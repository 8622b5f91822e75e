#!/bin/bash
# Bring a cluster up, keep it for as long as somebody holds the other end of
# standard input, and take it down: whoever asked for it may end in any way, at
# any moment. Prints "up" once it is there, and before that what went wrong.
#   keep.sh DIR
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
"$HERE/up.sh" "$1" </dev/null 2>&1
came=$?
if [ $came = 0 ]; then
    echo up
    read -r _
fi
"$HERE/down.sh" "$1" --purge && exit $came
