# SPDX-License-Identifier: Apache-2.0
"""Copies between KV blocks and slots in machine code, which makes checksums in the same pass."""
