# SPDX-License-Identifier: Apache-2.0
"""The names that other rooms may use."""

import pytest

import omni_connector.kv as kv


def test_the_exported_names_are_these():
    assert dir(kv) == [
        "BlockCopier",
        "BlockCopy",
        "BlockSpans",
        "CanonicalKVCacheRef",
        "CanonicalKVCacheTensor",
        "CanonicalKVCaches",
        "CpuCopier",
        "GroupSpan",
        "GroupSpec",
        "HeadSlice",
        "LayerSpec",
        "SlotConverter",
        "SlotLayout",
        "StagedCopier",
        "canonicalize",
        "canonicalize_cross_layers",
        "expand",
        "head_sources",
        "make_copier",
    ]
    for name in dir(kv):
        assert getattr(kv, name).__name__ == name


def test_any_other_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonesuch"):
        _ = kv.nonesuch
