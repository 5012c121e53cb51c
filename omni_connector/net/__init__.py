# SPDX-License-Identifier: Apache-2.0
"""Other processes and hosts: which of them are allowed, keys, names, sockets.

In come addresses, from settings and messages; they are checked before anything is opened. Out go
connected sockets whose peer is known: by its user on this host, by its key on another.
"""
