# SPDX-License-Identifier: Apache-2.0
"""The shared prefix cache: full blocks under keys, in arenas of this host and in a store.

In come the block hashes of a prompt; out go how many of its tokens are held, and copy jobs.
`neighbours` knows the other engines, `host_blocks` their blocks, `lookups` asks the store, and
`shared_prefix` decides. What cannot be had in time is a miss, and never an error.
"""
