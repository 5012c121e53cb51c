# SPDX-License-Identifier: Apache-2.0
"""Stores of KV blocks under keys: a Mooncake Store, or a folder of files.

Keys and rows of bytes go in and out: `block_store` has the interface, `shared_blocks` says what
keys and rows the engines agree on. Every call ends by its timeout, and what a store cannot give in
time is missing, never an error.
"""
