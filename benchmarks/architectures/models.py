"""Architectures of transformers in tiny configurations, built from their configs with random weights: `ARCHITECTURES[name]() -> (model, batch)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]
ROWS, SEQ, VOCAB, HIDDEN, HEADS, LAYERS, FFN, CLASSES = 8, 12, 96, 32, 4, 2, 72, 6

_WORDS = dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FFN, max_position_embeddings=64)
_QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, hidden_dropout=0.0, attention_dropout=0.0, use_cache=False, pad_token_id=0)
_DECODER = _WORDS | _QUIET | dict(num_key_value_heads=2, bos_token_id=1, eos_token_id=2)
_EXPERTS = _DECODER | dict(moe_intermediate_size=40, num_local_experts=4, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
_GPT = _QUIET | dict(vocab_size=VOCAB, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, bos_token_id=1, eos_token_id=2)
_GPT |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_ENCODER = _WORDS | _QUIET | dict(type_vocab_size=2)
_BART = _QUIET | dict(
    vocab_size=VOCAB, d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS
)
_BART |= dict(encoder_ffn_dim=FFN, decoder_ffn_dim=FFN, max_position_embeddings=64, dropout=0.0, activation_dropout=0.0, decoder_start_token_id=2)
_BART |= dict(bos_token_id=1, eos_token_id=2, encoder_layerdrop=0.0, decoder_layerdrop=0.0)
_T5 = dict(vocab_size=VOCAB, d_model=HIDDEN, d_ff=FFN, d_kv=8, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0, use_cache=False)
_T5 |= dict(decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
_VISION = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=FFN, image_size=32, patch_size=8, num_labels=CLASSES)
_VISION |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attention_dropout=0.0, drop_path_rate=0.0)
_SOUND = _WORDS | _QUIET | dict(conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
_SOUND |= dict(num_feat_extract_layers=2, mask_time_prob=0.0, layerdrop=0.0, num_labels=CLASSES, feat_proj_dropout=0.0, classifier_proj_size=16)
_TOWERS = dict(
    text_config=_WORDS | _QUIET | dict(eos_token_id=2, bos_token_id=1, pad_token_id=0), vision_config={k: v for k, v in _VISION.items() if k != "num_labels"}
)


@dataclass(frozen=True)
class Architecture:
    """`kind`: what its batch holds; `model`: class name in transformers; its config class is that of the model."""

    kind: str
    model: str
    config: dict[str, Any]

    def __call__(self) -> Built:
        cls = getattr(transformers, self.model)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = cls(cls.config_class(**self.config)).train()
        for module in model.modules():  # what a config calls by another name
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if self.kind == "two towers":  # the biases of their keys have no gradient but rounding, which float32 shows
            model = model.double()
        return model, _batch(self.kind)


def _batch(kind: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=draw)
    labels = ids.roll(1, 1)
    labels[0, :5] = -100
    classes = torch.randint(0, CLASSES, (ROWS,), generator=draw)
    pixels = torch.randn(ROWS, 3, 32, 32, generator=draw)
    if kind == "words":
        return {"input_ids": ids, "labels": labels}
    if kind == "pairs":
        return {"input_ids": ids, "labels": labels[:, :8].contiguous()}
    if kind == "sequence":
        return {"input_ids": ids, "labels": classes}
    if kind == "images":
        return {"pixel_values": pixels, "labels": classes}
    if kind == "two towers":
        return {"input_ids": ids, "pixel_values": pixels.double(), "return_loss": True}
    if kind == "sound":
        return {"input_values": torch.randn(ROWS, 400, generator=draw), "labels": classes}
    if kind == "spectrum":
        return {"input_values": torch.randn(ROWS, 24, 16, generator=draw), "labels": classes}
    assert kind == "speech", kind
    return {"input_features": torch.randn(ROWS, 16, 24, generator=draw), "labels": labels}


def _decoder(model: str, **changes: Any) -> Architecture:
    return Architecture("words", model, _DECODER | changes)


_LATENT: dict[str, Any] = dict(  # of DeepSeek: attention through a smaller space, and experts
    kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
    first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
)  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    # decoder-only
    "llama (GQA)": _decoder("LlamaForCausalLM"),
    "mistral (sliding window)": _decoder("MistralForCausalLM", sliding_window=4),
    "qwen2": _decoder("Qwen2ForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM", head_dim=8),
    "gemma (MQA)": _decoder("GemmaForCausalLM", num_key_value_heads=1, head_dim=8),
    "gemma2 (soft caps)": _decoder("Gemma2ForCausalLM", head_dim=8, sliding_window=4),
    "gemma3": _decoder("Gemma3ForCausalLM", head_dim=8, sliding_window=4),
    "phi (partial rotary)": _decoder("PhiForCausalLM", partial_rotary_factor=0.5),
    "phi3 (fused projections)": _decoder("Phi3ForCausalLM"),
    "stablelm": _decoder("StableLmForCausalLM"),
    "starcoder2": _decoder("Starcoder2ForCausalLM", residual_dropout=0.0, embedding_dropout=0.0),
    "olmo": _decoder("OlmoForCausalLM"),
    "olmo2": _decoder("Olmo2ForCausalLM"),
    "cohere": _decoder("CohereForCausalLM"),
    "granite": _decoder("GraniteForCausalLM"),
    "nemotron": _decoder("NemotronForCausalLM"),
    "glm": _decoder("GlmForCausalLM", head_dim=8),
    "smollm3": _decoder("SmolLM3ForCausalLM"),
    "gpt-neox": _decoder("GPTNeoXForCausalLM"),
    "falcon (MQA)": _decoder("FalconForCausalLM"),
    "bloom (ALiBi)": _decoder("BloomForCausalLM", n_layer=LAYERS, n_head=HEADS),
    "opt": _decoder("OPTForCausalLM", ffn_dim=FFN, word_embed_proj_dim=HIDDEN, dropout=0.0),
    "gpt2": Architecture("words", "GPT2LMHeadModel", _GPT),
    "gpt-bigcode (MQA)": Architecture("words", "GPTBigCodeForCausalLM", _GPT),
    "gpt-j": Architecture("words", "GPTJForCausalLM", _GPT | dict(rotary_dim=4)),
    "codegen": Architecture("words", "CodeGenForCausalLM", _GPT | dict(rotary_dim=4)),
    "deepseek-v3 (MLA, experts)": _decoder("DeepseekV3ForCausalLM", q_lora_rank=12, n_group=1, topk_group=1, **_LATENT),
    "mixtral (experts)": Architecture("words", "MixtralForCausalLM", _EXPERTS),
    "qwen3-moe (experts)": Architecture("words", "Qwen3MoeForCausalLM", _EXPERTS | dict(head_dim=8)),
    "olmoe (experts)": Architecture("words", "OlmoeForCausalLM", _EXPERTS),
    "mamba (state space)": Architecture(
        "words", "MambaForCausalLM", dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=4, use_cache=False)
    ),
    "deepseek-v2 (MLA, experts)": _decoder("DeepseekV2ForCausalLM", q_lora_rank=None, n_shared_experts=1, topk_method="greedy", **_LATENT),
    "mamba2 (state space)": Architecture(
        "words",
        "Mamba2ForCausalLM",
        dict(vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=4, use_cache=False),
    ),
    "recurrent gemma (linear recurrence)": _decoder(
        "RecurrentGemmaForCausalLM", num_hidden_layers=3, lru_width=HIDDEN, attention_window_size=4, num_key_value_heads=1, head_dim=8
    ),
    "gpt2 (sequence classes)": Architecture("sequence", "GPT2ForSequenceClassification", _GPT | dict(num_labels=CLASSES)),
    # encoders
    "bert": Architecture("words", "BertForMaskedLM", _ENCODER),
    "roberta": Architecture("words", "RobertaForMaskedLM", _ENCODER),
    "electra": Architecture("words", "ElectraForMaskedLM", _ENCODER | dict(embedding_size=HIDDEN)),
    "albert (shared layers)": Architecture("words", "AlbertForMaskedLM", _ENCODER | dict(embedding_size=16)),
    "distilbert": Architecture(
        "words", "DistilBertForMaskedLM", dict(vocab_size=VOCAB, dim=HIDDEN, n_layers=LAYERS, n_heads=HEADS, hidden_dim=FFN, dropout=0.0, attention_dropout=0.0)
    ),
    "mpnet": Architecture("words", "MPNetForMaskedLM", _ENCODER),
    "roformer": Architecture("words", "RoFormerForMaskedLM", _ENCODER | dict(embedding_size=HIDDEN)),
    "deberta-v2": Architecture("words", "DebertaV2ForMaskedLM", _ENCODER | dict(relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "fnet": Architecture("words", "FNetForMaskedLM", _ENCODER),
    "convbert": Architecture("words", "ConvBertForMaskedLM", _ENCODER | dict(embedding_size=HIDDEN)),
    # encoder-decoders
    "t5": Architecture("pairs", "T5ForConditionalGeneration", _T5),
    "mt5": Architecture("pairs", "MT5ForConditionalGeneration", _T5),
    "bart": Architecture("pairs", "BartForConditionalGeneration", _BART),
    "pegasus": Architecture("pairs", "PegasusForConditionalGeneration", _BART),
    "marian": Architecture("pairs", "MarianMTModel", _BART),
    "blenderbot-small": Architecture("pairs", "BlenderbotSmallForConditionalGeneration", _BART),
    # vision
    "vit": Architecture("images", "ViTForImageClassification", _VISION),
    "deit": Architecture("images", "DeiTForImageClassification", _VISION),
    "dinov2": Architecture("images", "Dinov2ForImageClassification", _VISION),
    "beit": Architecture("images", "BeitForImageClassification", _VISION),
    "swin (windows)": Architecture(
        "images",
        "SwinForImageClassification",
        dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES, drop_path_rate=0.0),
    ),
    "swinv2 (windows)": Architecture(
        "images",
        "Swinv2ForImageClassification",
        dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=CLASSES, drop_path_rate=0.0),
    ),
    "convnext": Architecture(
        "images", "ConvNextForImageClassification", dict(hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, num_labels=CLASSES, drop_path_rate=0.0)
    ),
    "resnet": Architecture("images", "ResNetForImageClassification", dict(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_labels=CLASSES)),
    "poolformer": Architecture(
        "images",
        "PoolFormerForImageClassification",
        dict(
            hidden_sizes=[16, 32],
            depths=[1, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
            padding=[2, 1],
            num_encoder_blocks=2,
            num_labels=CLASSES,
            drop_path_rate=0.0,
        ),
    ),
    # sound
    "wav2vec2": Architecture("sound", "Wav2Vec2ForSequenceClassification", _SOUND),
    "wavlm (relative positions)": Architecture("sound", "WavLMForSequenceClassification", _SOUND | dict(num_buckets=8, max_bucket_distance=16)),
    "audio spectrogram transformer": Architecture("spectrum", "ASTForAudioClassification", _VISION | dict(num_mel_bins=16, max_length=24)),
    "whisper": Architecture("speech", "WhisperForConditionalGeneration", _BART | dict(num_mel_bins=16, max_source_positions=12, max_target_positions=64)),
    # two towers
    "clip (contrastive)": Architecture("two towers", "CLIPModel", _TOWERS),
    "chinese-clip": Architecture("two towers", "ChineseCLIPModel", _TOWERS),
    "siglip": Architecture("two towers", "SiglipModel", _TOWERS),
}
