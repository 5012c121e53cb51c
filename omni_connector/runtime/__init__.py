# SPDX-License-Identifier: Apache-2.0
"""What all rooms use: turns, threads, statistics, machine code."""
