# SPDX-License-Identifier: Apache-2.0
"""Small models made on the spot, whose answers depend on every byte of their KV cache.

Weights are drawn from a normal distribution wide enough (standard deviation mostly 0.2) that
the attended past decides the next token: with the usual narrow initialisation a model answers
almost the same whatever its cache holds, and a test on it sees nothing. They are drawn once,
from a seed, and saved; a model that already lies at its path is not made again.

Needs torch, transformers and tokenizers, which vLLM brings; nothing is downloaded.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
_MADE = "omni_model.json"
_CORPUS = (
    "the cache of keys and values moves from the engine that reads the prompt to the engine "
    "that writes the answer, one block at a time, and never a wrong byte is served.",
    "a block holds the keys and the values of some tokens; a slot holds a block of all layers.",
    "every wait has its deadline, and nobody waits on a peer that is gone; a lease dies with its "
    "time, a session with its socket, and the kernel sweeps up memory which has no name.",
    "prefill reads quickly, decode answers slowly: between both lies a bridge of shared pages, "
    "checked against their digest before any request may trust what was found inside them.",
    "sliding windows forget old tokens, recurrent states fold history into one small matrix, "
    "latent heads compress it; full attention keeps everything and pays for that with memory.",
    "0123456789 +-*/=() [] {} <> .,;:!? ABCDEFGHIJKLMNOPQRSTUVWXYZ",
)

# What the layers behind the first add to the hidden state.
_BEHIND_THE_FIRST = re.compile(r"model\.layers\.[1-9]\d*\..*\.(o_proj|down_proj)\.")

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


_Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Recipe:
    """One model family: its transformers config and model classes, and how they are filled."""

    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    std: float = 0.2
    embedding_std: float = 0.2
    # The model is one of one layer with more behind it that add nothing, so that a drafter which is
    # a copy of that layer drafts what the model answers.
    one_layer_acts: bool = False
    # Makes another model of the one drawn, given its weights and its configuration.
    derived: Callable[[_Weights, dict[str, Any]], tuple[_Weights, dict[str, Any]]] | None = None
    # Special tokens of this family, from id 3 on.
    special_tokens: tuple[str, ...] = ()
    # Settings of its tokenizer beside those of all families.
    tokenizer_settings: dict[str, Any] = field(default_factory=dict)
    # Further files of the model's folder, by name.
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    version: int = 1

    def keywords(self) -> dict[str, Any]:
        common = {key: value for key, value in _COMMON.items() if key not in self.without}
        return {**common, **self.settings, "architectures": [self.model]}


def _first_layer(weights: _Weights) -> _Weights:
    """The weights of the first layer, without its prefix."""
    prefix = "model.layers.0."
    return {
        name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)
    }


def _eagle(weights: _Weights, config: dict[str, Any]) -> tuple[_Weights, dict[str, Any]]:
    """An EAGLE head that takes the embedding of the next token, and no hidden state."""
    layer = _first_layer(weights)
    layer.pop("input_layernorm.weight")  # it has none
    size = config["hidden_size"]
    fc = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    drafter = {f"layers.0.{name}": each for name, each in layer.items()} | {"fc.weight": fc}
    return drafter, {**config, "num_hidden_layers": 1}


def _eagle3(weights: _Weights, config: dict[str, Any]) -> tuple[_Weights, dict[str, Any]]:
    """An EAGLE-3 head that takes the embedding of the next token, and no hidden state."""
    size = config["hidden_size"]
    drafter = {"lm_head.weight": weights["lm_head.weight"], "norm.weight": torch.ones(size)}
    for name, each in _first_layer(weights).items():
        takes_both = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        taken = torch.cat([each, torch.zeros_like(each)], dim=1) if takes_both else each
        drafter[f"midlayer.{name}"] = taken
    drafter["midlayer.hidden_norm.weight"] = torch.ones(size)
    drafter["fc.weight"] = torch.zeros(size, 3 * size)
    # vLLM shares the target's embeddings only with a drafter that brings none.
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    return drafter, {**config, **settings}


def _draft_model(weights: _Weights, config: dict[str, Any]) -> tuple[_Weights, dict[str, Any]]:
    """The model's one layer that acts, as a model of its own."""
    behind = re.compile(r"model\.layers\.[1-9]")
    drafter = {name: each for name, each in weights.items() if not behind.match(name)}
    return drafter, {**config, "num_hidden_layers": 1}


def _with_mtp(weights: _Weights, config: dict[str, Any]) -> tuple[_Weights, dict[str, Any]]:
    """The model with a module for MTP that takes the embedding of the next token, and no hidden
    state."""
    size = config["hidden_size"]
    module = {f"model.mtp_layers.0.{name}": each for name, each in _first_layer(weights).items()}
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        module[f"model.mtp_layers.0.{norm}.weight"] = torch.ones(size)
    takes = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
    module["model.mtp_layers.0.input_proj.weight"] = takes
    settings = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return weights | module, {**config, **settings}


def _with_kv_scales(weights: _Weights, config: dict[str, Any]) -> tuple[_Weights, dict[str, Any]]:
    """The model with scales for an FP8 KV cache, others in each layer, as compressed-tensors saves
    them. Nothing else is quantized."""
    scales = {}
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        scales[f"{attention}.k_scale"] = torch.tensor([0.02 * (layer + 1)])
        scales[f"{attention}.v_scale"] = torch.tensor([0.01 * (layer + 2)])
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {},
        "kv_cache_scheme": {**scheme, "dynamic": False},
    }
    return weights | scales, {**config, "quantization_config": quantization}


# Embeddings of unit length, as norms leave them.
_DRAFTED: dict[str, Any] = {"embedding_std": 1.0, "one_layer_acts": True}

_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 4,
    "moe_intermediate_size": 128,
}

_PIXELS = 112
"""Of each side of a picture: 64 patches of 14 by 14 pixels, of which four make a token."""
_PICTURE = {"longest_edge": _PIXELS}
_PICTURE_TOKENS = 16
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": _PIXELS,
    "patch_size": 14,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)

_RECIPES: dict[str, _Recipe] = {
    "llama": _Recipe("LlamaConfig", "LlamaForCausalLM"),
    # Tensor parallel ranks all hold its one KV head.
    "llama-one-kv-head": _Recipe("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-fp8-kv": _Recipe("LlamaConfig", "LlamaForCausalLM", derived=_with_kv_scales),
    # 16 layers x 8 heads x 128 x (K, V) x 2 bytes: 64 KiB of KV a token for little compute.
    "llama-wide": _Recipe(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        dtype=torch.bfloat16,
    ),
    "gemma3": _Recipe(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "sliding_window": 128,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 64,
        },
        embedding_std=0.02,
    ),
    "gptoss": _Recipe(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        dtype=torch.bfloat16,
    ),
    "deepseek_v2": _Recipe(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        # With more heads vLLM's CPU prefill mixes up heads and tokens of its output: the KV of a
        # token then depends on how many others come with it.
        {**_DEEPSEEK, "num_attention_heads": 1, "num_key_value_heads": 1},
        without=("head_dim",),
        # Queries and keys of 192 numbers: with wider weights attention is so sharp that four
        # layers turn the last bit of a rounding into another answer.
        std=0.1,
        version=2,
    ),
    # One head a rank of two.
    "deepseek_v2-two-heads": _Recipe(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "num_attention_heads": 2, "num_key_value_heads": 2},
        without=("head_dim",),
        std=0.1,
    ),
    "qwen3_next": _Recipe(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        dtype=torch.bfloat16,
    ),
    "lfm2": _Recipe(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "conv_dim": 256,
            "conv_dim_out": 256,
            "block_dim": 256,
            "block_mlp_init_scale": 1.0,
            "block_ff_dim": 512,
            "layer_types": ["conv", "full_attention"] * 2,
        },
    ),
    # A Llama that sees pictures; vLLM's other models of pictures need torchvision.
    "idefics3": _Recipe(
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {
                **_COMMON,
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
            },
            "vision_config": _VISION,
            "scale_factor": 2,
            "image_token_id": 3,
            "pad_token_id": _COMMON["pad_token_id"],
            "tie_word_embeddings": False,
        },
        without=tuple(_COMMON),
        special_tokens=(
            "<image>",
            "<fake_token_around_image>",
            "<global-img>",
            "<end_of_utterance>",
        ),
        tokenizer_settings={"chat_template": _CHAT_TEMPLATE},
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Idefics3ImageProcessor",
                "do_image_splitting": False,
                "size": _PICTURE,
                "max_image_size": _PICTURE,
            },
            "processor_config.json": {
                "processor_class": "Idefics3Processor",
                "image_seq_len": _PICTURE_TOKENS,
            },
        },
    ),
    # A model, and what drafts for it. vLLM knows some drafters by the names of their folders.
    "llama-drafted": _Recipe("LlamaConfig", "LlamaForCausalLM", **_DRAFTED),
    "eagle-llama": _Recipe("LlamaConfig", "LlamaForCausalLM", **_DRAFTED, derived=_eagle),
    "eagle3-llama": _Recipe("LlamaConfig", "LlamaForCausalLM", **_DRAFTED, derived=_eagle3),
    "draft-llama": _Recipe("LlamaConfig", "LlamaForCausalLM", **_DRAFTED, derived=_draft_model),
    "mimo": _Recipe(
        "Qwen2Config", "Qwen2ForCausalLM", **_DRAFTED, without=("head_dim",), derived=_with_mtp
    ),
}

FAMILIES: tuple[str, ...] = tuple(_RECIPES)


def make_model(family: str, path: Path, *, seed: int = 0) -> Path:
    """Make the model of `family` in the folder `path`, unless it is there already.

    Args:
        family: one of `FAMILIES`.
        path: the folder that will hold config, weights (safetensors) and tokenizer.
        seed: of the weights; the same seed gives the same bytes.

    Returns:
        `path`, ready for `vllm.LLM(model=...)` or `--model`.

    Raises:
        ValueError: the family is not known.
        FileExistsError: `path` holds something else, which is left as it is.
    """
    recipe = _RECIPES.get(family)
    if recipe is None:
        raise ValueError(f"unknown model family {family!r}; one of {', '.join(FAMILIES)}")
    stamp = {"family": family, "seed": seed, "recipe": recipe.version}
    if path.exists():
        _check_stamp(path, stamp)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        scratch.chmod(0o755)
        _write_weights(recipe, scratch, seed)
        _write_tokenizer(scratch, recipe)
        for name, content in recipe.files.items():
            (scratch / name).write_text(json.dumps(content))
        (scratch / _MADE).write_text(json.dumps(stamp))
        try:
            os.rename(scratch, path)
        except OSError:
            if not path.exists():
                raise
            # Another process was faster: its model is the same one.
            _check_stamp(path, stamp)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _check_stamp(path: Path, stamp: dict[str, object]) -> None:
    made = path / _MADE
    found = json.loads(made.read_text()) if made.is_file() else None
    if found != stamp:
        raise FileExistsError(f"{path} holds {found or 'something else'}, wanted {stamp}")


def _write_weights(recipe: _Recipe, folder: Path, seed: int) -> None:
    import transformers

    config_class: Callable[..., Any] = getattr(transformers, recipe.config)
    model_class: Any = getattr(transformers, recipe.model)
    config = config_class(**recipe.keywords(), dtype=recipe.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(recipe.dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                # Norms, biases and decay rates keep the values their architecture gives them.
                if parameter.ndim < 2 and not name.endswith("sinks"):
                    continue
                std = recipe.embedding_std if "embed_tokens" in name else recipe.std
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                drawn.normal_(0.0, std, generator=generator)
                silent = recipe.one_layer_acts and _BEHIND_THE_FIRST.match(name)
                parameter.copy_(torch.zeros_like(drawn) if silent else drawn)
    model.save_pretrained(folder)
    if recipe.derived is not None:
        weights = {name: each.contiguous() for name, each in model.state_dict().items()}
        _save_derived(folder, *recipe.derived(weights, json.loads(_config(folder).read_text())))


def _save_derived(folder: Path, weights: _Weights, config: dict[str, Any]) -> None:
    (folder / "model.safetensors").unlink()
    save_file(
        {name: each.clone().contiguous() for name, each in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    _config(folder).write_text(json.dumps(config))


def _config(folder: Path) -> Path:
    return folder / "config.json"


def _write_tokenizer(folder: Path, recipe: _Recipe) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>", "<pad>", *recipe.special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": _COMMON["max_position_embeddings"],
        **recipe.tokenizer_settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
