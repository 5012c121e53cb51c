# SPDX-License-Identifier: Apache-2.0
"""What is known of the bytes that kernels put in a page."""

import pytest

from omni_connector.kv.page_orders import kernel_order

VIEW = "H2.N32.C256"


@pytest.mark.parametrize("kernel", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "CPU_MLA"])
def test_rows_of_tokens_are_what_the_view_says(kernel: str) -> None:
    assert kernel_order(VIEW, kernel, item=2, own_heads=True) == VIEW


@pytest.mark.parametrize(
    ("kernel", "own_heads"),
    [
        ("FLASHINFER.fa2", False),
        ("FLASHINFER.trtllm", False),
        ("FLASHINFER", False),
        ("FLASH_ATTN", False),  # on ROCm, where tokens may be shuffled
        ("ROCM_ATTN", False),
        ("DEEPSEEK_V32_INDEXER", True),
        ("FLASHMLA_SPARSE_DSV4", True),
        ("OF_ANOTHER_PACKAGE", True),
        ("CPU_ATTN.neon", True),
        ("CPU_ATTN.amx_fp8", True),
        ("CPU_ATTN.unknown", True),
    ],
)
def test_an_order_that_is_not_known_is_never_taken_from_the_view(
    kernel: str, own_heads: bool
) -> None:
    assert kernel_order(VIEW, kernel, item=1, own_heads=own_heads) == f"{VIEW}?"


@pytest.mark.parametrize(
    ("isa", "item", "view", "order"),
    [
        ("vec", 4, "H2.N32.C256", "H2.(C32.N32.C4|N32.C128)"),
        ("vec", 1, "N32.C256", "H1.(C128.N32.C1|N32.C128)"),
        ("vec16", 2, "H2.N16.C320", "H2.(C80.N16.C2|N16.C160)"),
        ("amx", 2, "H2.N32.C256", "H2.(N2.C32.N16.C4|C4.N16.C16.N2.C2)"),
        ("amx", 1, "H2.N32.C128", "H2.(N2.C32.N16.C2|C4.N16.C16.N2.C1)"),
        ("amx", 4, "H2.N32.C256", "H2.N32.C256?"),
        ("amx", 2, "H2.N24.C256", "H2.N24.C256?"),
        ("vec", 2, "N32.H2.C256", "N32.H2.C256?"),
    ],
)
def test_kernels_on_cpus_keep_keys_and_values_apart(
    isa: str, item: int, view: str, order: str
) -> None:
    assert kernel_order(view, f"CPU_ATTN.{isa}", item=item, own_heads=True) == order
