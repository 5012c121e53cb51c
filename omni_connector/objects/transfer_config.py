# SPDX-License-Identifier: Apache-2.0
"""`load_omni_transfer_config`: which connector serves which edge between stages."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from omni_connector.errors import ConfigError, MissingDependencyError
from omni_connector.objects.factory import SHARED_MEMORY, ConnectorSpec

logger = logging.getLogger(__name__)

Edge = tuple[str, str]

_StageId = int | str


class _Connector(msgspec.Struct, frozen=True):
    name: str
    extra: dict[str, Any] | None = None

    def spec(self) -> ConnectorSpec:
        return ConnectorSpec(self.name, dict(self.extra or {}))


_Connectors = dict[str, _Connector] | None
_References = dict[str, str | _Connector] | None


class _Stage(msgspec.Struct, frozen=True):
    stage_id: _StageId
    output_connectors: _References = None
    input_connectors: _References = None
    engine_input_source: list[_StageId] | None = None


class _Edge(msgspec.Struct, frozen=True, rename={"from_stage": "from", "to_stage": "to"}):
    from_stage: _StageId
    to_stage: _StageId


class _Runtime(msgspec.Struct, frozen=True):
    connectors: _Connectors = None
    edges: list[_Edge] | None = None


class _Pipeline(msgspec.Struct, frozen=True):
    """The parts of a pipeline's configuration that are about connectors; others are ignored.

    `runtime` and `stage_args` are the older places of `connectors`, `edges` and `stages`.
    """

    connectors: _Connectors = None
    edges: list[_Edge] | None = None
    stages: list[_Stage] | None = None
    runtime: _Runtime | None = None
    stage_args: list[_Stage] | None = None


@dataclass
class OmniTransferConfig:
    """The connectors of a pipeline.

    Attributes:
        connectors: (sending stage, receiving stage) -> connector.
        default_connector: the connector of all other edges, if they have one.
    """

    connectors: dict[Edge, ConnectorSpec] = field(default_factory=dict)
    default_connector: ConnectorSpec | None = None

    def get_connector_for_edge(
        self, from_stage: str | int, to_stage: str | int
    ) -> ConnectorSpec | None:
        """The connector of an edge; None where it has none."""
        return self.connectors.get((str(from_stage), str(to_stage)), self.default_connector)

    def has_connector_for_edge(self, from_stage: str | int, to_stage: str | int) -> bool:
        """Whether an edge has a connector."""
        return self.get_connector_for_edge(from_stage, to_stage) is not None


def load_omni_transfer_config(
    config_path: str | Path | None = None, config_dict: Mapping[str, Any] | None = None
) -> OmniTransferConfig | None:
    """Read the connectors of a pipeline from a file or a mapping; None where neither is given.

    An edge is named by the connectors of a stage, by `edges`, or by the `engine_input_source` of a
    stage. One without a connector gets shared memory.

    Args:
        config_path: a file .json, .yaml or .yml; it has precedence over `config_dict`. Another file
            that its `base_config` names is read first: its own connectors and stages then replace
            that file's, setting by setting.
        config_dict: the same as a mapping.

    Raises:
        ConfigError (a ValueError): a connector is not defined, an edge has connectors of two types,
            a value has the wrong type, a file is of another kind, or its own base.
        FileNotFoundError: there is no such file.
        MissingDependencyError: the file is YAML and PyYAML is not installed.
    """
    if config_path is not None:
        config_dict = _inherited(Path(config_path), ())
    if config_dict is None:
        return None
    try:
        pipeline = msgspec.convert(config_dict, _Pipeline)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ConfigError(f"the transfer configuration is malformed: {error}") from error
    runtime = pipeline.runtime or _Runtime()
    defined = dict(runtime.connectors or {}) | dict(pipeline.connectors or {})
    stages = pipeline.stages or pipeline.stage_args or []
    connectors: dict[Edge, ConnectorSpec] = {}
    for stage in stages:
        for edge, reference in _references(stage):
            _connect(connectors, edge, _resolve(edge, reference, defined))
    for edge in _plain_edges(stages, pipeline.edges or runtime.edges or []):
        if edge not in connectors:
            logger.info("Edge %s -> %s names no connector and gets %s", *edge, SHARED_MEMORY)
            connectors[edge] = ConnectorSpec(SHARED_MEMORY)
    return OmniTransferConfig(connectors)


def _inherited(path: Path, above: tuple[Path, ...]) -> Mapping[str, Any]:
    """What a file says, and what it leaves to its `base_config`, by vLLM-Omni's rules."""
    own = _read(path)
    base = own.get("base_config")
    if base is None:
        return own
    above = (*above, path.resolve())
    found = path.parent / str(base)
    if found.resolve() in above:
        raise ConfigError(f"{path} is based on itself, by way of {base}")
    other = _inherited(found, above)
    connectors = _merged(other.get("connectors"), own.get("connectors"))
    stages = {each["stage_id"]: each for each in _stages_of(path, other)}
    for each in _stages_of(path, own):
        stages[each["stage_id"]] = {**stages.get(each["stage_id"], {}), **each}
    return {**other, **own, "connectors": connectors, "stages": list(stages.values())}


def _merged(base: Any, own: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(own, dict)):
        return base if own is None else own
    return base | {key: _merged(base.get(key), value) for key, value in own.items()}


def _stages_of(path: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    stages = content.get("stages") or []
    if not isinstance(stages, list) or not all(
        isinstance(each, dict) and isinstance(each.get("stage_id"), int | str) for each in stages
    ):
        raise ConfigError(f"{path}: `stages` must be a list of mappings with a stage_id")
    return stages


def _read(path: Path) -> Mapping[str, Any]:
    kind = path.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{path} must be a .json, .yaml or .yml file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from error
    if kind == ".json":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
    else:
        try:
            yaml: Any = import_module("yaml")
        except ImportError as error:
            raise MissingDependencyError(
                f"reading {path} needs PyYAML: pip install 'omni-connector[yaml]'"
            ) from error
        try:
            found = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a mapping, not {type(found).__name__}")
    return found


def _references(stage: _Stage) -> Iterator[tuple[Edge, str | _Connector]]:
    own = str(stage.stage_id)
    for key, reference in (stage.input_connectors or {}).items():
        yield (_other(own, key, "from_stage_"), own), reference
    for key, reference in (stage.output_connectors or {}).items():
        yield (own, _other(own, key, "to_stage_")), reference


def _other(stage: str, key: str, prefix: str) -> str:
    other = key.removeprefix(prefix)
    if not other or other == key:
        raise ConfigError(f"stage {stage}: {key!r} should be {prefix}<stage id>")
    return other


def _resolve(
    edge: Edge, reference: str | _Connector, defined: Mapping[str, _Connector]
) -> ConnectorSpec:
    if isinstance(reference, _Connector):
        return reference.spec()
    if reference not in defined:
        raise ConfigError(
            f"edge {edge[0]} -> {edge[1]} refers to connector {reference!r}, which is not "
            f"defined; defined are: {', '.join(sorted(defined)) or 'none'}"
        )
    return defined[reference].spec()


def _connect(connectors: dict[Edge, ConnectorSpec], edge: Edge, spec: ConnectorSpec) -> None:
    present = connectors.setdefault(edge, spec)
    if present.name != spec.name:
        raise ConfigError(
            f"edge {edge[0]} -> {edge[1]} has two types of connector: {present.name!r} and "
            f"{spec.name!r}"
        )
    if present.extra != spec.extra:
        logger.warning(
            "edge %s -> %s: its two stages give different settings; those of the stage that is "
            "listed first count",
            *edge,
        )


def _plain_edges(stages: list[_Stage], edges: list[_Edge]) -> Iterator[Edge]:
    for edge in edges:
        yield str(edge.from_stage), str(edge.to_stage)
    for stage in stages:
        for source in stage.engine_input_source or []:
            yield str(source), str(stage.stage_id)
