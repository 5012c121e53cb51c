#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs all tests in two parts, at the same time: those that start engines in one process, as engines
# need the cores themselves; those that start none in two, file by file, on what the engines leave
# idle of the cores. The lines of the latter begin with "| ". Arguments go to pytest, for both; where
# they choose tests by marks (-m), there is one part. Ends with what failed and a line for each part,
# and fails if one failed.
#
#   VENV   the environment             (default: .venv)
#   ONLY   marks of the tests to run   (default: any)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pytest=("${VENV:-.venv}/bin/python" -m pytest)
for argument in "$@"; do
    case $argument in -m | -m[!-]*) exec "${pytest[@]}" "$@" ;; esac
done
# What is written goes through a pipe.
if [ -t 1 ]; then pytest+=(--color=yes); fi

folder=$(mktemp -d)
beside=  # the process group of the part beside this one
trap '[ -z "$beside" ] || kill -- -"$beside" 2>/dev/null; rm -rf "$folder"' EXIT

# Runs a command, whose status and output are kept under a name. Lines are printed whole, behind a
# mark, as those of another part come between them.
part() {
    local log=$folder/$1 mark=$2
    shift 2
    "$@" 2>&1 | tee -i "$log" | (trap '' INT; sed -u "s/^/$mark/")
    echo "${PIPESTATUS[0]}" >"$log.status"
}

closing=()
status=5  # no test was run
tell() {
    local name=$1 log=$folder/$1 code
    code=$(cat "$log.status" || echo 2)  # none where it was killed
    mapfile -t failed < <(grep -aE '^(.\[[0-9;]*m)?(FAILED|ERROR) ' "$log" | cut -c1-300)
    # What ends after pytest may write behind its last line.
    closing+=("${failed[@]}" "$name: $(grep -aE ' in [0-9.]+s' "$log" | tail -n 1)")
    # 5 says that none was chosen here.
    if [ "$code" != 5 ] && [ "$status" = 0 -o "$status" = 5 ]; then status=$code; fi
}

marked=${ONLY:+($ONLY) and }
# `tests/early.py` says which files begin first.
shared=(-n 2 --dist loadfile --no-loadscope-reorder)
set -m  # a process group of its own, which can be interrupted
part "without engines" "| " nice -n 5 "${pytest[@]}" "${shared[@]}" \
    -m "${marked}not e2e and not beside" "$@" </dev/null &
beside=$!
set +m
part "with engines" "" "${pytest[@]}" -m "${marked}(e2e or beside)" "$@"
if [ "$(<"$folder/with engines.status")" = 2 ]; then kill -INT -- -"$beside" 2>/dev/null; fi  # interrupted
wait "$beside"
beside=

tell "without engines"
tell "with engines"
printf '\n'
printf '%s\n' "${closing[@]}"
exit "$status"
