# SPDX-License-Identifier: Apache-2.0
"""What an engine knows of each of its requests, in one object a request."""
