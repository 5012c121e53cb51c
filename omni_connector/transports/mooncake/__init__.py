# SPDX-License-Identifier: Apache-2.0
"""Arenas read over Mooncake's Transfer Engine: RDMA, or TCP where there is none."""
