#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs all tests in two parts: those that start no engine in three processes, file by file, as they
# wait for threads and peers as long as they compute; then those that do, in one, as engines need
# the cores themselves. Arguments go to pytest, for both; where they choose tests by marks (-m),
# there is one part. Ends with what failed and a line for each part, and fails if one failed.
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
trap 'rm -rf "$folder"' EXIT
closing=()
status=5  # no test was run
run() {
    local name=$1 code
    shift
    printf '\n== %s\n' "$name"
    "${pytest[@]}" "$@" 2>&1 | tee -i "$folder/log"
    code=${PIPESTATUS[0]}
    mapfile -t failed < <(grep -aE '^(.\[[0-9;]*m)?(FAILED|ERROR) ' "$folder/log" | cut -c1-300)
    closing+=("${failed[@]}" "$name: $(tail -n 1 "$folder/log")")
    # 5 says that none was chosen here.
    if [ "$code" != 5 ] && [ "$status" = 0 -o "$status" = 5 ]; then status=$code; fi
    [ "$code" != 2 ] || finish  # interrupted
}
finish() {
    printf '\n'
    printf '%s\n' "${closing[@]}"
    exit "$status"
}

marked=${ONLY:+($ONLY) and }
# `tests/early.py` says which files begin first.
shared=(-n 3 --dist loadfile --no-loadscope-reorder)
run "without engines" "${shared[@]}" -m "${marked}not e2e and not beside" "$@"
run "with engines" -m "${marked}(e2e or beside)" "$@"
finish
