"""A tiny configuration of any model type of transformers, made by rules from its default one; no type has rules of its own.

A rule names options by a pattern and says how small they become. Widths that a model computes from others need not agree with
one set of rules, so there are several (`SIZES`), from the smallest up; the first with which a model runs is its size.
"""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

VOCABULARY = 40
TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "CTC",
)  # fmt: skip
"""The class of a type is that of the first task it has a class for, else its base model."""


HEAD = r".*head_dim|d_kv|.*head_size"
INNER = r".*ffn_dim|.*intermediate_size|d_ff|d_inner|n_inner|mlp_dim|ffn_hidden_size|feed_forward_size"
WIDTH = r".*hidden_size|.*_dim|dim|d_model|n_embd|embedding_size|.*embedding_size|d_embed"
CHANNELS = r".*_initial_channel|.*_channels(?<!num_channels)|.*_width"


@dataclass(frozen=True)
class Size:
    """How small the options of a configuration become; None: they stay.

    `scale`: widths are divided by it in place, and lists of widths always are, by 8 or by it."""

    width: int | None = None
    heads: int | None = None
    head: int | None = None
    inner: int | None = None
    image: int | None = 32
    scale: int = 1

    def small(self, option: str, value: int) -> int:
        """What becomes of one option."""
        if self.scale > 1 and re.fullmatch(f"{HEAD}|{INNER}|{WIDTH}|{CHANNELS}", option):
            return max(value // self.scale, min(value, 4))
        most = next((most for pattern, most in self.rules() if re.fullmatch(pattern, option)), None)
        return value if most is None else min(value, most)

    def smaller(self, option: str, values: list[int]) -> list[int]:
        """What becomes of an option with one number for each stage or layer."""
        if re.fullmatch(r"depths|.*num_blocks|layer_depths|.*_layers|.*repeats", option):
            return [min(value, 1) for value in values]
        by = max(self.scale, 8 if self.width else 1)
        space = re.search("image|input|kernel|patch|window|stride|grid", option)
        return values if space or max(values) < 16 else [max(value // by, min(value, 8)) for value in values]

    def rules(self) -> list[tuple[str, int | None]]:
        """(pattern of an option's whole name, its largest value), the first that matches counts."""
        return [
            (r".*vocab_size(_.*)?|vocabulary_size|n_vocab", VOCABULARY),
            (r".*num_key_value_heads|num_kv_heads|n_head_kv", self.heads),
            (r".*attention_heads|.*num_heads|.*n_heads?", self.heads),
            (r".*layers|n_layers?|depth|num_blocks|n_block|num_hidden_groups", 2),
            (r"qk_head_dim", self.head and 2 * self.head),
            (HEAD, self.head),
            (INNER, self.inner),
            (f"{WIDTH}|{CHANNELS}", self.width),
            (r".*max_position_embeddings|n_positions|n_ctx|max_.*_positions|max_seq.*|seq_length", 64),
            (r".*image_size|input_size", self.image),
            (r".*patch_size", 8),
            (r".*num_experts|num_local_experts|n_routed_experts", 4),
            (r".*experts_per_tok.*|moe_k|moe_top_k|top_k_experts", 2),
            (r"n_group|topk_group|.*expert_groups?", 1),
            (r".*lora_rank", 8),
            (r".*state_size|.*d_state", 4),
            (r"chunk_size|mamba_chunk_size", 8),
            (r".*num_mel_bins|feature_size", 16),
            (r"num_labels", 3),
        ]


SIZES = (
    Size(width=16, heads=2, head=8, inner=24),
    Size(width=32, heads=4, head=8, inner=48),
    Size(width=64, heads=2, head=32, inner=64),
    Size(width=64, inner=64),
    Size(scale=16),
    Size(scale=8),
    Size(width=256, heads=2, head=128, inner=64),
    Size(scale=4),
    Size(scale=4, image=None),
    Size(scale=2),
    Size(),
    Size(image=None),
)
RANDOM = re.compile(
    r".*(dropout|drop_path|drop_rate|layerdrop|pdrop|noise).*|mask_(time|feature)_prob|apply_spec_augment"
)
LISTS = ("layer_types", "block_types", "mlp_layer_types", "layers_block_type", "attn_types", "attention_layers")
"""Options with one entry a layer; as many layers stay as there are kinds of them."""


def model_types() -> list[str]:
    """Every type of the installed transformers that has a class of a model, in its own order."""
    return [name for name in CONFIG_MAPPING_NAMES if model_class(name) is not None]


def model_class(name: str) -> type[PreTrainedModel] | None:
    """The class that stands for a type: that of its first task of `TASKS`, else its base model."""
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in TASKS]
    for mapping in (*mappings, modeling_auto.MODEL_MAPPING_NAMES):
        found = mapping.get(name)
        found = found if isinstance(found, str) or not found else found[0]
        if found and hasattr(transformers, found):
            return getattr(transformers, found)
    return None


def tiny_config(name: str, size: Size) -> PretrainedConfig:
    """The default configuration of a type with every option that a rule of `size` names made small, and nothing random."""
    config = AutoConfig.for_model(name)
    _shrink(config, size, set())
    for one in _parts(config):
        one._experts_implementation = "eager"  # the other kernels have no float64
        _put(one, "use_cache", False)
    return config


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    own = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return [config, *(part for one in own for part in _parts(one))]


def _shrink(config: PretrainedConfig, size: Size, seen: set[int]) -> None:
    if id(config) in seen:
        return
    seen.add(id(config))
    for option, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _shrink(value, size, seen)
        elif option.startswith("_"):
            continue
        elif RANDOM.fullmatch(option) and isinstance(value, (int, float)):
            _put(config, option, type(value)(0))
        elif value is None and re.fullmatch(r".*experts_per_tok", option):
            _put(config, option, 2)
        elif option.endswith("token_id"):
            _put(config, option, _within_vocabulary(value))
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            _put(config, option, size.small(option, value))
        elif isinstance(value, (list, tuple)) and len(value) > 1 and all(type(one) is int for one in value):
            _put(config, option, size.smaller(option, list(value)))
    for option in LISTS:
        kinds = getattr(config, option, None)
        if isinstance(kinds, list) and kinds and isinstance(kinds[0], str):
            each = list(dict.fromkeys(kinds))
            layers = max(len(each), getattr(config, "num_hidden_layers", 2) or 2)
            _put(config, "num_hidden_layers", layers)
            _put(config, option, (each + kinds)[:layers])


def _within_vocabulary(value: Any) -> Any:
    if isinstance(value, list):
        return [_within_vocabulary(one) for one in value]
    return min(value, VOCABULARY - 1) if isinstance(value, int) else value


def _put(config: PretrainedConfig, option: str, value: Any) -> None:
    # an option that is derived from others, or checked against them, stays
    with contextlib.suppress(AttributeError, NotImplementedError, ValueError, TypeError):
        setattr(config, option, value)
