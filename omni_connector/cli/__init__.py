# SPDX-License-Identifier: Apache-2.0
"""The `omni-connector` command."""
