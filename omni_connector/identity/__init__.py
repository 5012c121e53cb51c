# SPDX-License-Identifier: Apache-2.0
"""Which weights and adapters KV was computed with, and until when it means what it meant."""
