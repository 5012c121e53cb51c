# SPDX-License-Identifier: Apache-2.0
"""Who holds what: slot directory, leases, wire messages, server and client."""
