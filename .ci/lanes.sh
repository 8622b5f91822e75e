# Sourced by .ci/run: two lanes of suites at once, each a function.
scratch=$(mktemp -d)
failed=$scratch/failed stopped=$scratch/stopped
front='' beside='' # the lanes that run

# suite COMMAND…: runs it, says how long it took, and notes in $failed if it failed. None begins when CI was stopped.
suite() {
  local began=$SECONDS code=0
  [ ! -e "$stopped" ] || return 0
  echo "=== $*"
  # A CI that was started in the background ignores INT, and so would all that it starts.
  env --default-signal=INT "$@" < /dev/null || code=$?
  echo "=== $* ended with $code after $(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s"
  [ "$code" = 0 ] || echo "$*" >> "$failed"
}

# lanes FRONT BESIDE: runs both functions. What the one beside says is printed whole when both have ended.
lanes() {
  trap end_lanes EXIT
  trap 'echo "stopped by HUP"; exit 129' HUP
  trap 'echo "stopped by INT"; exit 130' INT
  trap 'echo "stopped by TERM"; exit 143' TERM
  set -m # each in a process group of its own, so that all of it can be ended
  "$1" < /dev/null &
  front=$!
  "$2" > "$scratch/beside.log" 2>&1 < /dev/null &
  beside=$!
  set +m
  wait_for "$front" "the lane in front"
  front=''
  wait_for "$beside" "the lane beside"
  beside=''
  print_beside
  if [ -e "$failed" ]; then
    echo "failed:" && cat "$failed"
    return 1
  fi
  echo "all suites passed in $((SECONDS / 60)) min $((SECONDS % 60)) s"
}

# wait_for LANE NAME: suites that fail do not end a lane. One that ends with a code was killed, or could not write.
wait_for() {
  local code=0
  wait "$1" || code=$?
  [ "$code" != 0 ] || return 0
  echo "$2 ended with $code: not all of its suites have run" >> "$failed"
  kill -INT -- "-$1" 2> /dev/null || true # the suite that it has left
}

print_beside() {
  echo "=== the suites beside"
  cat "$scratch/beside.log"
}

# Whatever ends CI ends both lanes: with INT, on which pytest does its teardown, and where that takes too long with TERM and
# KILL.
end_lanes() {
  trap '' HUP INT TERM
  local left=($front $beside) signal tenth # not quoted: a lane that has ended is empty
  if [ ${#left[@]} -gt 0 ]; then
    touch "$stopped"
    for signal in INT TERM KILL; do
      kill "-$signal" -- "${left[@]/#/-}" 2> /dev/null || true
      for ((tenth = 0; tenth < ${LANES_GRACE:-90} * 10; tenth++)); do
        kill -0 -- "${left[@]/#/-}" 2> /dev/null || break # anybody of the lanes: their shells end first
        sleep 0.1
      done
    done
    print_beside || true # whoever read it may be gone
  fi
  rm -rf "$scratch"
}
