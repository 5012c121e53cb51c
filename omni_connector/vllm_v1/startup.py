# SPDX-License-Identifier: Apache-2.0
"""Checks of the configuration before vLLM loads the model.

vLLM makes a connector only when the model is loaded, which takes minutes for a large one. It has no
hook that shows a plugin the configuration before that. Every server and every `LLM` makes its
configuration by `EngineArgs.create_engine_config`, after vLLM has loaded the plugins. So the check
follows that call (`patches.watch_configurations`).

So does what changes vLLM's hashes of images, as it is servers that make them.
"""

import multiprocessing
from typing import TYPE_CHECKING, Final

from omni_connector.arena.arena import Arena
from omni_connector.arena.format import PAGE_BYTES
from omni_connector.config import OmniConfig
from omni_connector.net.keys import load_key
from omni_connector.net.listener import check_listen
from omni_connector.net.peers import parse_listen
from omni_connector.net.runtime import runtime_dir, socket_path
from omni_connector.net.status import check_loopback_key
from omni_connector.transports.choice import check_transports
from omni_connector.vllm_v1.patches import name_models, own_extra_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Of a model's configuration: what vLLM's hashes of images tell the model by.
_BY_CONTENT: Final = "_named_by_omni_connector"


def check_engine_config(vllm_config: "VllmConfig") -> None:
    """Refuse an engine that this connector would refuse once its model is loaded.

    An engine with another connector, or none, is left alone.

    Raises:
        ConfigError: a setting, the runtime folder, the key file, the parallel layout or the
            decoding method; the message names it and says what to do.
        TransportError: the kernel makes no arena.
        MissingDependencyError: as `check_transports`.
    """
    transfer = vllm_config.kv_transfer_config
    extra_config = own_extra_config(transfer)
    if transfer is None or extra_config is None:
        return
    config = OmniConfig.load(extra_config)
    # Ranks have ports of their own, and the first ones may be other hosts'. A further API server
    # starts when the engine has its port already.
    alone = vllm_config.parallel_config.data_parallel_size == 1
    main = multiprocessing.parent_process() is None
    hands_off = transfer.is_kv_producer and config.handoff
    check_settings(config, binds=hands_off and alone and main, arena=hands_off or config.share)
    # It imports what a vLLM may lack. Only an engine of ours is told so.
    from omni_connector.vllm_v1.specs import require_supported_engine

    require_supported_engine(vllm_config)


def name_media_by_content(vllm_config: "VllmConfig") -> None:
    """Have this engine's hashes of images and the like tell its model by configuration.

    vLLM's tell it by name or path. So engines of one model at two paths would share no KV of
    prompts with images. Which weights an engine has is compared anyway.

    vLLM's are left as they are for others that go by them: connectors of the encoder cache, and
    routers that follow KV events.
    """
    model, transfer = vllm_config.model_config, vllm_config.kv_transfer_config
    events = vllm_config.kv_events_config
    if model.multimodal_config is None or transfer is None:
        return
    if own_extra_config(transfer) is None or vllm_config.ec_transfer_config is not None:
        return
    if events is not None and events.enable_kv_cache_events:
        return
    if name_models(lambda each: getattr(each, _BY_CONTENT, None)):
        from omni_connector.vllm_v1.identity import configuration_id

        setattr(model, _BY_CONTENT, configuration_id(vllm_config))


def check_settings(config: OmniConfig, *, binds: bool, arena: bool) -> None:
    """Check settings against this host.

    Args:
        config: settings of an engine.
        binds: whether to try the port of `listen`, which nobody may have.
        arena: whether to try to make an arena.

    Raises:
        ConfigError: the runtime folder, a key, the address of `listen` or a transport cannot be
            used.
        TransportError: the kernel makes no arena.
        MissingDependencyError: as `check_transports`.
    """
    # Its longest path is as long as this one: a name is hashed, and no kind has more letters.
    socket_path(runtime_dir(config.namespace), "", kind="--")
    if config.key_file is not None:
        load_key(config.key_file)
    if config.needs_loopback_key:
        check_loopback_key()
    if arena:
        Arena.create(1, PAGE_BYTES).close()
    if config.listen is not None and binds:
        check_listen(parse_listen(config.listen))
    check_transports(config)
