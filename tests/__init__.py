# SPDX-License-Identifier: Apache-2.0
"""What only this repository needs to test the package; nothing of it is in the wheel."""
