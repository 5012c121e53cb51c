# SPDX-License-Identifier: Apache-2.0
"""One-line mutants that a library makes, a sample of them by seed, and which checks find them."""
