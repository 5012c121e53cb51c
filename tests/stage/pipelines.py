# SPDX-License-Identifier: Apache-2.0
"""Prints the connectors of all pipelines in vLLM-Omni's wheel, as vLLM-Omni itself reads them.

Its reader of YAML is a package that is not here, and is stood in for by PyYAML.
"""

import json
import sys
from pathlib import Path

import yaml

from .wheel import make_importable, make_loadable


def main(root: Path) -> None:
    make_importable(root)
    make_loadable()
    from vllm_omni.config import stage_config
    from vllm_omni.distributed.omni_connectors.utils.initialization import load_omni_transfer_config

    stage_config.load_yaml_config = lambda path: yaml.safe_load(Path(path).read_text())
    stage_config.to_dict = lambda content: content
    found = {}
    for path in (root / "vllm_omni" / "deploy").glob("*.yaml"):
        read = load_omni_transfer_config(config_dict=stage_config.resolve_deploy_yaml(path))
        found[path.name] = {
            " ".join(edge): [each.name, each.extra] for edge, each in read.connectors.items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
