"""Batches that `gramian doctor --model` makes for models of text, images and sound, from their configs alone."""

from pathlib import Path
from typing import Any

import pytest

import gramian
from gramian.verify.user_model.folder_model import load_model, make_batch
from tests.kit.refusals import refusal

D = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
SEQ = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
       "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}  # fmt: skip
IMAGE = {"image_size": 16, "patch_size": 4, **D}
SOUND = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "WhisperForConditionalGeneration": (
        {"vocab_size": 60, "max_source_positions": 12, "max_target_positions": 10, "num_mel_bins": 8,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, **SEQ},
        {"input_features": (3, 8, 24), "decoder_input_ids": (3, 10)}, "exact"),
    "ViTForImageClassification": (IMAGE, {"pixel_values": (3, 3, 16, 16)}, "exact"),
    "T5ForConditionalGeneration": (
        {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
        {"input_ids": (3, 16), "decoder_input_ids": (3, 16)}, "exact"),
    "BertForMaskedLM": ({"vocab_size": 60, "max_position_embeddings": 8, **D}, {"input_ids": (3, 8)}, "exact"),
    "Wav2Vec2ForCTC": ({"vocab_size": 20, **SOUND, **D}, {"input_values": (3, 4000)}, "refused"),
    "ASTForAudioClassification": (
        {"max_length": 32, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8, **D},
        {"input_values": (3, 32, 16)}, "exact"),
    "Speech2TextForConditionalGeneration": (
        {"vocab_size": 60, "conv_channels": 16, **SEQ}, {"input_features": (3, 64, 80), "decoder_input_ids": (3, 16)}, "exact"),
    "CLIPModel": (
        {"text_config": {"vocab_size": 60, "eos_token_id": 2, **D}, "vision_config": IMAGE, "projection_dim": 8},
        {"input_ids": (3, 16), "pixel_values": (3, 3, 16, 16)}, "refused"),
}  # fmt: skip
"""{architecture: (sizes, shapes of its batch, verdict on the private sum)}. What is refused depends on random numbers inside
the module whose own parameter is tapped (Wav2Vec2), or compares all samples (CLIP)."""


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_a_folder_gets_a_batch_that_its_forward_takes(name: str, tmp_path: Path) -> None:
    import transformers

    sizes, shapes, verdict = KINDS[name]
    kind = getattr(transformers, name)
    kind(kind.config_class(**sizes)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    batch = make_batch(model, str(tmp_path))
    assert type(model).__name__ == name and model.training
    assert {key: tuple(value.shape) for key, value in batch.items() if key != "use_cache"} == shapes
    report = gramian.check(model, batch, show=False)
    assert report.finding("private sum").verdict == verdict, str(report)
    assert name != "CLIPModel" or report.finding("samples apart").verdict == "coupled"


def test_an_architecture_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertOfMine"], "hidden_size": 16}')
    with refusal("argument --model: .* is a BertOfMine, which transformers does not have"):
        load_model(str(tmp_path))
