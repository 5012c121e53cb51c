#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tags the release that omni_connector/__init__.py names: `scripts/tag_release.sh 0.2.0`. It pushes nothing: pushing the
# tag is what publishes (.github/workflows/release.yml).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { printf 'tag_release: %s\n' "$*" >&2; exit 1; }

version=${1:?usage: scripts/tag_release.sh VERSION}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "$version is no version such as 0.2.0"
grep -qx "__version__ = \"$version\"" omni_connector/__init__.py \
    || die "omni_connector/__init__.py names another version"
grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md \
    || die "CHANGELOG.md has no heading '## $version (DATE)'"
[ -z "$(git status --porcelain)" ] || die "there are changes that are not committed"
[ "$(git branch --show-current)" = main ] || die "this is not the branch main"
git rev-parse -q --verify "refs/tags/v$version" >/dev/null && die "v$version exists already"
make wheel
git tag --annotate "v$version" --message "omni-connector $version"
printf 'v%s is tagged here. To publish it: git push origin v%s\n' "$version" "$version"
