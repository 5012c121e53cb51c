# SPDX-License-Identifier: Apache-2.0
"""Hand-off: the KV of a prompt from the engine that computed it to the engine that decodes.

A prompt comes in with `kv_transfer_params` (`params`); copy jobs for the workers (package `copy`)
and the params of the answer go out. A prefill engine offers slots (`sender`); `SlotDirectory`
(`leases`) gives, counts and ends the leases, and `server` answers for it. A decode engine decides
what to fetch (`receiver`) and asks with a deadline (`client`). `channel` is the thread between
engines; `periodic_tasks` does what is due on it.
"""
