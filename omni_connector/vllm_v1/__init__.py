# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls: `OmniKVConnector`, with one half beside vLLM's scheduler and one in each worker.

In come vLLM's requests, blocks and KV caches. Out go answers to vLLM, jobs for the workers, and
what `handoff` and `prefix` have to know of a request. What differs between versions is in `compat`.
"""
