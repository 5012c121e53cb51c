# SPDX-License-Identifier: Apache-2.0
from ..kv.conftest import kv, make_copier

__all__ = ["kv", "make_copier"]
