# SPDX-License-Identifier: Apache-2.0
"""What peers compare of an engine: its model, what changes the model's numbers, and its hashes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET, UnsetType
from vllm import envs
from vllm.logger import init_logger

from omni_connector.config import OmniConfig
from omni_connector.identity.weight_files import (
    NOT_THE_MODEL,
    ModelFiles,
    UnknownFilesError,
    configuration_files,
    digest_of_files,
    files_of,
    process_began,
)
from omni_connector.kv.compatibility import CompatibilityKey
from omni_connector.kv.numerics import digest, numerics_of, stored_as
from omni_connector.plugin import require_supported_vllm
from omni_connector.vllm_v1.drafter import drafter_id, layers_of_drafter
from omni_connector.vllm_v1.metadata import OmniHandshakeMetadata

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = init_logger("vllm.omni_connector.identity")

# Ways of vLLM to load weights that read them from the model's folder.
_FROM_FOLDER: Final = frozenset(
    {
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "instanttensor",
        "mistral",
        "pt",
        "npcache",
        "sharded_state",
        "runai_streamer",
        "runai_streamer_sharded",
        "bitsandbytes",
        "gguf",
    }
)
_ALL_FORMATS: Final = frozenset({"pt", "npcache"})  # they read these beside safetensors, too


def compatibility(
    config: OmniConfig,
    vllm_config: "VllmConfig",
    workers: Sequence[OmniHandshakeMetadata],
    weights: str | None = None,
    drafter: str | UnsetType = UNSET,
) -> CompatibilityKey:
    """The compatibility key of this engine.

    Args:
        workers: what each rank says of its caches, stage by stage. All ranks of a pipeline stage
            say the same.
        weights: of `weights_id`.
        drafter: of `drafter_of`.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    stages = [workers[first : first + ranks] for first in range(0, len(workers), ranks)]
    scales = [scales_of_engine([each.scales for each in stage]) for stage in stages]
    groups = [stage[0].groups for stage in stages]
    shards = workers[0].shards  # 1 where there are several stages
    stripes = tuple(1 if shards > 1 else stage[0].stripes for stage in stages)
    names = (name for stage in groups for group in stage for name in group.names or ())
    drafters = layers_of_drafter(vllm_config, names) if drafter else ()
    return CompatibilityKey(
        model=config.model_id or f"{model.model}@{model.revision or 'default'}",
        dtype=str(model.dtype),
        quantization=quantization_id(model),
        overrides=overrides_id(model),
        kv_dtype=stored_as(cache.cache_dtype, model.dtype),
        scales=scales_of_engine(scales),
        numerics=numerics_of(vllm_config, engram_tokens(model)),
        weights=weights or UNSET,
        drafter=drafter,
        drafter_layers=drafters or UNSET,
        integrity=config.integrity,
        kv_heads=model.get_total_num_kv_heads(),
        ranks=ranks,
        groups=groups[0],
        later_stages=tuple(groups[1:]) or UNSET,
        stripes=stripes if len(set(stripes)) > 1 else stripes[0],
        shards=shards,
    )


def weights_id(
    config: OmniConfig, vllm_config: "VllmConfig", unchanged_since: float | None = None
) -> str | None:
    """Which configuration and weights this engine has loaded, by their files.

    None where the operator says it with `model_id`, or where it is unknown, which is logged then.

    Args:
        unchanged_since: files that were written later may not be what vLLM has loaded; None takes
            the beginning of this process.
    """
    if config.model_id is not None:
        return None
    try:
        since = process_began() if unchanged_since is None else unchanged_since
        return _weights_id(vllm_config.model_config, vllm_config.load_config, vllm_config, since)
    except (UnknownFilesError, OSError) as error:
        logger.warning(
            "It is unknown which weights the files of this engine hold: %s. It hands off to "
            "engines whose model has the same name. "
            "Set `model_id` to the same name on all engines that have the same weights",
            error,
        )
        return None


def weight_files(config: OmniConfig, vllm_config: "VllmConfig") -> ModelFiles | str | None:
    """The files from which vLLM has loaded, or the digest of dummy weights, which have none.

    None where the operator says it with `model_id`.

    Raises:
        UnknownFilesError: it is not known which files these are.
        OSError: they cannot be looked at.
    """
    if config.model_id is not None:
        return None
    if vllm_config.load_config.load_format == "dummy":
        return _dummy_id(
            vllm_config.model_config, vllm_config.load_config, vllm_config, process_began()
        )
    if (pattern := _pattern(vllm_config.load_config)) is not None:
        raise UnknownFilesError(f"only files like {pattern} were loaded")
    return _loaded_files(vllm_config.model_config, vllm_config.load_config)


def drafter_of(vllm_config: "VllmConfig", unchanged_since: float | None = None) -> str | UnsetType:
    """Which drafter this engine has loaded, by its files, where it has a KV cache; else UNSET.

    Args:
        unchanged_since: as in `weights_id`.
    """

    def files_id(model: "ModelConfig") -> str | None:
        speculative = vllm_config.speculative_config
        own = None if speculative is None else speculative.draft_load_config
        load = own or vllm_config.load_config
        try:
            since = process_began() if unchanged_since is None else unchanged_since
            return _weights_id(model, load, vllm_config, since)
        except (UnknownFilesError, OSError) as error:
            logger.warning(
                "It is unknown which weights the drafter has: %s. It is known by its name: all "
                "engines with a drafter of this name and configuration must have the same weights",
                error,
            )
            return None

    return drafter_id(vllm_config, files_id)


def _weights_id(
    model: "ModelConfig", load: "LoadConfig", vllm_config: "VllmConfig", unchanged_since: float
) -> str:
    if load.load_format == "dummy":
        return _dummy_id(model, load, vllm_config, unchanged_since)
    found = digest_of_files(_loaded_files(model, load), unchanged_since)
    pattern = _pattern(load)
    return found if pattern is None else digest([found, pattern])


def _pattern(load: "LoadConfig") -> str | None:
    """What the names of the files look like that vLLM loads; None where it loads all."""
    extra = load.model_loader_extra_config
    return extra.get("pattern") if isinstance(extra, dict) else None


def _loaded_files(model: "ModelConfig", load: "LoadConfig") -> ModelFiles:
    """The files from which vLLM has loaded.

    Raises:
        UnknownFilesError: it is not known which files these are.
        OSError: they cannot be looked at.
    """
    path = model.model_weights or model.model
    how = load.load_format
    if how == "tensorizer":
        files = _tensorized(model, load.model_loader_extra_config)
    elif how not in _FROM_FOLDER:
        raise UnknownFilesError(f"load_format {how} does not say from which files it loads")
    else:
        place = _place(path, model, load)
        if place.is_file():
            configuration = configuration_files(place.parent)
            files = ModelFiles(place.parent, tuple(configuration), (place,))
        else:
            files = files_of(
                place, all_formats=how in _ALL_FORMATS, code=bool(model.trust_remote_code)
            )
    elsewhere = [
        name
        for name, value in model.hf_config.to_dict().items()
        if name.endswith("_model_id") and isinstance(value, str) and value
    ]
    if elsewhere:
        raise UnknownFilesError(f"the model loads weights from elsewhere, too ({elsewhere[0]})")
    return files


def _place(path: str, model: "ModelConfig", load: Any) -> Path:
    """The file or folder from which vLLM loads.

    Raises:
        UnknownFilesError: it is not in this host's files.
    """
    if "://" in path:
        raise UnknownFilesError(f"{path} is no path")
    place = Path(path)
    if place.exists():
        return place.absolute()
    if envs.VLLM_USE_MODELSCOPE:
        raise UnknownFilesError(f"{path} is loaded from ModelScope")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:  # the workers have downloaded it
        found: Any = snapshot_download(
            path, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise UnknownFilesError(f"there are no files of {path} on this host") from error
    snapshot = Path(found).absolute()
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit and commit != snapshot.name:
        raise UnknownFilesError(f"{path} was {commit} when it was loaded, and is {snapshot.name}")
    return snapshot


def _tensorized(model: "ModelConfig", extra: Any) -> ModelFiles:
    """The files of a tensorized model: of all ranks, where its name has a place for the rank."""
    uri = extra.get("tensorizer_uri") if isinstance(extra, dict) else extra.tensorizer_uri
    if not uri or "://" in str(uri):
        raise UnknownFilesError(f"tensorizer_uri {uri} is no path")
    path = Path(str(uri)).absolute()
    folder = path.parent
    beginning, place, end = path.name.partition("%")
    if place:
        ending = end.partition("d")[2]
        weights = [
            each
            for each in folder.iterdir()
            if each.name.startswith(beginning) and each.name.endswith(ending)
        ]
    else:
        weights = [path]
    configured = Path(model.model)
    configuration = configuration_files(configured) if configured.is_dir() else []
    return ModelFiles(folder, tuple(configuration), tuple(sorted(weights)))


def _dummy_id(
    model: "ModelConfig", load: "LoadConfig", vllm_config: "VllmConfig", unchanged_since: float
) -> str:
    """Dummy weights are drawn with one seed for each tensor, as large as one rank has it."""
    if quantization_id(model):
        raise UnknownFilesError("vLLM does not write all bytes of quantized dummy weights")
    place = _place(model.model, model, load)
    folder = place if place.is_dir() else place.parent
    configuration = configuration_files(folder, code=bool(model.trust_remote_code))
    said = digest_of_files(ModelFiles(folder, tuple(configuration), ()), unchanged_since)
    return digest(
        [
            "dummy",
            said,
            vllm_config.parallel_config.tensor_parallel_size,
            str(vllm_config.device_config.device_type),
            require_supported_vllm().version,
        ]
    )


def configuration_id(vllm_config: "VllmConfig") -> str:
    """The configuration that the model was made of, and what else lies beside it that changes
    results: how images, video and audio become inputs, and code.

    Names of files do not count. Where these cannot be read, the name of the model stands for them.
    """
    model = vllm_config.model_config
    try:
        place = _place(model.model, model, vllm_config.load_config)
        folder = place if place.is_dir() else place.parent
        files = configuration_files(folder, code=bool(model.trust_remote_code))
        beside = digest_of_files(ModelFiles(folder, tuple(files), ()), math.inf)
    except (UnknownFilesError, OSError):
        beside = f"{model.model}@{model.revision or 'default'}"
    return digest([_content(model.hf_config.to_dict()), beside])


def _content(value: Any) -> Any:
    """A part of a configuration, without what says where it lies and what wrote it."""
    if isinstance(value, dict):
        return {
            str(name): _content(each) for name, each in value.items() if name not in NOT_THE_MODEL
        }
    return [_content(each) for each in value] if isinstance(value, list | tuple) else value


def hash_id(vllm_config: "VllmConfig", hash_block_size: int) -> str:
    """How this engine hashes blocks; engines of equal ids give equal tokens equal hashes.

    "" where it does not hash blocks, or where no other process gets the same hashes.
    """
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching or not hash_block_size:
        return ""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    # vLLM seeds its hashes only after the connectors have started.
    algorithm = cache.prefix_caching_hash_algo
    hash_fn = get_hash_fn_by_name(algorithm)
    seed = resolve_none_hash_seed(hash_fn)
    if seed != resolve_none_hash_seed(hash_fn):  # drawn at random in each process
        return ""
    return f"{algorithm}:{hash_block_size}:{seed}"


def quantization_id(model: "ModelConfig") -> str:
    """Method and settings of quantization; "" where there is none."""
    method = model.quantization
    settings = [
        model.quantization_config,
        getattr(model.hf_config, "quantization_config", None),
    ]
    if method is None and not any(settings):
        return ""
    return f"{method} {digest(settings)}"


def engram_tokens(model: "ModelConfig") -> str | None:
    """Digest of the texts of all tokens, of a model that looks n-grams of them up; None of others.

    DeepSeek-V4.1 takes tokens of like texts for one there (`build_compressed_token_map` of vLLM),
    by whatever `--tokenizer` says.
    """
    if not getattr(model.hf_text_config, "engram_layer_ids", None):
        return None
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        model.tokenizer, trust_remote_code=model.trust_remote_code, revision=model.revision
    )
    texts = tokenizer.backend_tokenizer
    ids = range(len(tokenizer))
    return digest(
        [(texts.decode([each], skip_special_tokens=False), texts.id_to_token(each)) for each in ids]
    )


def overrides_id(model: "ModelConfig") -> str:
    """What was changed of the model's configuration; "" where nothing was."""
    overrides = model.hf_overrides
    if callable(overrides) or model.hf_config_path:  # what they do shows in what they have made
        made = model.hf_config.to_dict()
        overrides = {name: made[name] for name in made if name not in NOT_THE_MODEL}
    return digest(overrides) if overrides else ""


def scales_of_engine(ranks: list[str]) -> str:
    """The scales of quantized KV on all ranks of a stage, of which `kernels.scales_id` gives each;
    or on all pipeline stages, of which this gives each."""
    return ranks[0] if len(set(ranks)) == 1 else digest(ranks)
