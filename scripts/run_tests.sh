#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs all tests in two parts, at the same time: those that start engines in one process, and those
# that start none in three, file by file, as they wait for threads and peers as long as they compute.
# The latter take what the engines leave idle of the cores; so does a check of types, where it is
# asked for. The lines of what runs beside the engines begin with "| ". Arguments go to pytest, for
# both parts; where they choose tests by marks (-m), there is one part. Ends with what failed and a
# line for each part, and fails if one failed.
#
#   VENV   the environment             (default: .venv)
#   ONLY   marks of the tests to run   (default: any)
#   TYPES  yes: check types, too       (default: no)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
pytest=("$python" -m pytest)
# Only there are tests of engines (see tests/test_contributing.py).
engines=(tests/e2e tests/simulation)
for argument in "$@"; do
    case $argument in -m | -m[!-]*) exec "${pytest[@]}" "$@" ;; esac
    if [ -e "${argument%%::*}" ]; then engines=(); fi
done
# What is written goes through a pipe.
if [ -t 1 ]; then pytest+=(--color=yes); fi

folder=$(mktemp -d)
beside=()  # process groups
end() {
    local group
    for group in "${beside[@]}"; do kill -"$1" -- -"$group" 2>/dev/null; done
}
trap 'end TERM; rm -rf "$folder"' EXIT

# Runs a command, whose status and output are kept under a name. Lines are printed whole, behind a
# mark, as those of another part come between them.
part() {
    local log=$folder/$1 mark=$2
    shift 2
    "$@" 2>&1 | tee -i "$log" | (trap '' INT; sed -u "s/^/$mark/")
    echo "${PIPESTATUS[0]}" >"$log.status"
}

# The same beside what follows, in a process group that can be interrupted.
begin() {
    local name=$1
    shift
    set -m
    part "$name" "| " nice -n 5 "$@" </dev/null &
    beside+=($!)
    set +m
}

closing=()
status=5  # no test was run
tell() {
    local name=$1 log=$folder/$1 last=$2 wrong=$3 code failed
    code=$(cat "$log.status" || echo 2)  # none where it was killed
    mapfile -t failed < <(grep -aE "$wrong" "$log" | cut -c1-300)
    closing+=("${failed[@]}" "$name: $(grep -aE "$last" "$log" | tail -n 1)")
    # 5 says that none was chosen here.
    if [ "$code" != 5 ] && [ "$status" = 0 -o "$status" = 5 ]; then status=$code; fi
}
# What ends after pytest may write behind its last line.
tell_tests() { tell "$1" ' in [0-9.]+s' '^(.\[[0-9;]*m)?(FAILED|ERROR) '; }

marked=${ONLY:+($ONLY) and }
# `tests/early.py` says which files begin first.
begin "without engines" "${pytest[@]}" -n 3 --dist loadfile --no-loadscope-reorder \
    -m "${marked}not e2e and not beside" "$@"
if [ "${TYPES:-no}" = yes ]; then begin "types" "$python" -m mypy; fi
part "with engines" "" "${pytest[@]}" -m "${marked}(e2e or beside)" "$@" "${engines[@]}"
if [ "$(<"$folder/with engines.status")" = 2 ]; then end INT; fi  # interrupted
wait
beside=()

if [ "${TYPES:-no}" = yes ]; then tell "types" . ': error: '; fi
tell_tests "without engines"
tell_tests "with engines"
printf '\n'
printf '%s\n' "${closing[@]}"
exit "$status"
