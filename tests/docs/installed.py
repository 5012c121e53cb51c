# SPDX-License-Identifier: Apache-2.0
"""`pip install`, for a reader who has all of it: says whether the packages and extras exist."""

import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement


def main(words: list[str]) -> int:
    """The exit status that pip would have, as far as this environment can tell."""
    for word in words:
        if word.startswith("git+"):
            print(f"Requirement already satisfied: {word}")
            continue
        wanted = Requirement(word)
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            print(f"ERROR: no distribution called {wanted.name}")
            return 1
        unknown = wanted.extras - set(found.metadata.get_all("Provides-Extra") or ())
        if unknown:
            print(f"WARNING: {wanted.name} does not provide the extra {', '.join(unknown)}")
            return 1
        print(f"Requirement already satisfied: {word}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
