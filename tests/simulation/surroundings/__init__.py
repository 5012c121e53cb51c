# SPDX-License-Identifier: Apache-2.0
"""What engines of a simulation live in: time, threads, sockets, arenas, a store, and liars."""
