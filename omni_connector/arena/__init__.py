# SPDX-License-Identifier: Apache-2.0
"""Memory that others read or write: arenas and their format, buffers, and pools for transfers.

Only the owner of an arena writes to it: bytes with a length and a checksum, in slots with a
generation. Readers compare the generation before and after a copy.
"""
