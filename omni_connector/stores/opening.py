# SPDX-License-Identifier: Apache-2.0
"""Opens the store that the configuration names."""

from omni_connector.config import FileStoreSettings, StoreSettings
from omni_connector.stores.block_store import BlockStore, MooncakeBlockStore
from omni_connector.stores.file_store import FileBlockStore


def open_block_store(settings: StoreSettings | FileStoreSettings, lends: int) -> BlockStore:
    """Open a client of the store that the settings name.

    Args:
        settings: which store.
        lends: bytes of memory that a client of a Mooncake Store lends to the store.

    Raises:
        ConfigError: the folder of a store of files cannot be used.
        MissingDependencyError: Mooncake is needed and not installed.
    """
    if isinstance(settings, FileStoreSettings):
        return FileBlockStore(settings)
    return MooncakeBlockStore(settings, lends)
