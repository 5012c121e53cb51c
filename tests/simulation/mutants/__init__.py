# SPDX-License-Identifier: Apache-2.0
"""Small faults in the sources, each of which the simulation has to find: its negative control."""
