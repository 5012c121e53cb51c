# SPDX-License-Identifier: Apache-2.0
"""Pastes what README and docs/ tell a reader to paste, and looks for what they promise."""
