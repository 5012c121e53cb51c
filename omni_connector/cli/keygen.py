# SPDX-License-Identifier: Apache-2.0
"""`omni-connector keygen`: the key file of a cluster."""

from pathlib import Path

from omni_connector.net.keys import write_new_key


def keygen(path: Path) -> int:
    """Write a new key file and print its public key; return 0.

    Raises:
        ConfigError: the file exists already, or cannot be made.
    """
    key = write_new_key(path)
    print(f"{path}: public key {key.public.decode()}")
    print("Copy the file to every host of the cluster, mode 600, and set key_file to it.")
    return 0
