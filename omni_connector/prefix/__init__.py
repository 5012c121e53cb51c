# SPDX-License-Identifier: Apache-2.0
"""The shared prefix cache: full blocks under keys, in arenas of this host and in a store.

In come the block hashes of a prompt; out go how many of its tokens are held, and copy jobs.
`neighbours` knows the other engines, `host_blocks` their blocks, and `lookups` asks the store.
`shared_prefix` decides, and has `loads` and `saves` start the copies. What cannot be had in time is
a miss, and never an error.
"""
