# SPDX-License-Identifier: Apache-2.0
"""A part that fails."""

raise RuntimeError("the device has failed")
