# SPDX-License-Identifier: Apache-2.0
"""Hand-off: the KV of a prompt from the engine that computed it to the engine that decodes.

In comes a prompt with `kv_transfer_params`; out go copy jobs for the workers, and the params of the
answer. A prefill engine offers slots and leases them (`sender`, `directory`, `server`); a decode
engine asks for a lease and loads (`receiver`, `client`, `loading`). `channel` is between them.
"""
