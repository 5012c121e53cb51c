# SPDX-License-Identifier: Apache-2.0
"""Other processes and hosts: which of them are allowed, keys, names, sockets.

In come addresses, from settings and messages, checked before anything is opened; out go connected
sockets whose other end is known: by its user on this host, by its key beyond.
"""
