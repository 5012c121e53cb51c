# SPDX-License-Identifier: Apache-2.0
"""Heads of objects in a Mooncake Store, without one."""

import numpy as np
import pytest

from omni_connector.errors import IncompatiblePeerError, IntegrityError
from omni_connector.objects import manifest, object_store
from omni_connector.objects.manifest import Version

DIGEST = bytes(range(32))


def read(version: Version) -> Version:
    return Version.decode(np.frombuffer(version.encode(), np.uint8), DIGEST)


def test_the_hosts_memory_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in files, which would be read for each object."""
    version = Version.new(DIGEST, 5 << 20)
    assert read(version) == version
    for module in (manifest, object_store):
        monkeypatch.setattr(module, "memory_limit_bytes", lambda: 1 // 0, raising=False)
    assert read(version) == version


def test_an_object_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(IntegrityError, match="bytes in fragments of"):
        read(Version.new(DIGEST, 1 << 60))


def test_a_manifest_of_another_version_is_told_from_a_damaged_one() -> None:
    content = bytearray(Version.new(DIGEST, 1 << 30).encode())
    content[len(b"omniobj")] += 1
    with pytest.raises(IncompatiblePeerError, match="another version of omni-connector"):
        Version.decode(np.frombuffer(content, np.uint8), DIGEST)
    content[0] += 1
    with pytest.raises(IntegrityError):
        Version.decode(np.frombuffer(content, np.uint8), DIGEST)
