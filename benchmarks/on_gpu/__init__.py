# SPDX-License-Identifier: Apache-2.0
"""What a GPU does with the connector's copies, without vLLM: `python -m benchmarks.on_gpu`."""
