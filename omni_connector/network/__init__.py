# SPDX-License-Identifier: Apache-2.0
"""Other hosts: who may be asked, and ask; keys, names, and ZeroMQ over TCP."""
