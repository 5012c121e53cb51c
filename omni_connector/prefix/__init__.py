# SPDX-License-Identifier: Apache-2.0
"""The shared prefix cache: full blocks under keys, in a store that engines share.

In come the block hashes of a prompt; out go how many of its tokens are held, and copy jobs. What
cannot be had in time is a miss, and never an error.
"""
