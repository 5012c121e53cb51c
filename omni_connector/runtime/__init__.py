# SPDX-License-Identifier: Apache-2.0
"""What all rooms run on: threads and their turns, calls that may hang, shared work, statistics,
a trace.
"""
