# SPDX-License-Identifier: Apache-2.0
"""Used by all folders: threads and their turns, calls that may hang, shared work, statistics, a
trace.
"""
