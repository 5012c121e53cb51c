# SPDX-License-Identifier: Apache-2.0
"""Memory that others read: arenas and their format, buffers, and what failed reads may still write.

In come bytes with a length and a checksum; out go slots with a generation, which readers compare
before and after a copy. Only the owner of an arena writes to it.
"""
