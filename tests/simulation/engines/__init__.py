# SPDX-License-Identifier: Apache-2.0
"""The engines of a simulation: vLLM's scheduler, both halves of the connector, a toy model."""
