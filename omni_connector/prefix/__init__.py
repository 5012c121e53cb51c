# SPDX-License-Identifier: Apache-2.0
"""The shared prefix cache: full blocks under keys, in arenas of this host and in a store.

It takes the block hashes of a prompt; it returns how many tokens can be loaded, and copy jobs.
`neighbours` knows the other engines, `host_blocks` their blocks, and `lookups` asks the store.
`shared_prefix` decides; `loads` and `saves` start the copies. A block that does not come in time is
a miss, never an error. `keep` is a process of its own, which holds what engines leave; operators
ask `explainer` and `kept_prompts`.
"""
