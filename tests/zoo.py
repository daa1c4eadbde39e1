"""The models that every promise is tested on: tiny, seeded, deterministic, fp32, sizes unlike each other.

An entry builds `(model, batch)`: a module in training mode and a dict batch of 8 rows with the loss inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from autoplan.models import MLP, UNet, resnet50

Built = tuple[nn.Module, dict[str, torch.Tensor]]
ROWS, SEQ, VOCAB, HIDDEN, FFN, LAYERS = 8, 20, 116, 64, 136, 2


def _tokens(num_ignored: int = 7) -> dict[str, torch.Tensor]:
    """Token ids and labels (8, 20); the ignored labels lie unevenly over the rows."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, VOCAB, (ROWS, SEQ), generator=generator)
    labels = torch.randint(2, VOCAB, (ROWS, SEQ), generator=generator)
    labels[0, :num_ignored] = -100
    labels[3, : num_ignored // 2] = -100
    return {"input_ids": ids, "labels": labels}


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().train()


def gpt2(**changes: Any) -> Built:
    sizes: dict[str, Any] = dict(
        bos_token_id=0, eos_token_id=0, vocab_size=VOCAB, n_positions=32, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_inner=FFN, use_cache=False
    )
    config = transformers.GPT2Config(**(sizes | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0) | changes))
    return _seeded(lambda: transformers.GPT2LMHeadModel(config)), _tokens()


def _decoder_sizes(**changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2
    )
    return sizes | dict(max_position_embeddings=32, use_cache=False, attention_dropout=0.0) | changes


def llama(**changes: Any) -> Built:
    config = transformers.LlamaConfig(**_decoder_sizes(**changes))
    return _seeded(lambda: transformers.LlamaForCausalLM(config)), _tokens()


def qwen3(**changes: Any) -> Built:
    config = transformers.Qwen3Config(**_decoder_sizes(head_dim=24, num_key_value_heads=4, num_attention_heads=8, tie_word_embeddings=True, **changes))
    return _seeded(lambda: transformers.Qwen3ForCausalLM(config)), _tokens()


def mixtral(**changes: Any) -> Built:
    config = transformers.MixtralConfig(**(_decoder_sizes() | dict(num_local_experts=4, num_experts_per_tok=2) | changes))
    return _seeded(lambda: transformers.MixtralForCausalLM(config)), _tokens()


def mixtral_aux() -> Built:
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.02)


def bert(**changes: Any) -> Built:
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=FFN, max_position_embeddings=32
    )
    config = transformers.BertConfig(**(sizes | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0) | changes))
    batch = _tokens()
    mask = torch.ones(ROWS, SEQ, dtype=torch.int64)
    mask[1, 15:] = 0
    mask[6, 11:] = 0
    return _seeded(lambda: transformers.BertForMaskedLM(config)), {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": batch["labels"]}


def t5(**changes: Any) -> Built:
    sizes: dict[str, Any] = dict(vocab_size=VOCAB, d_model=HIDDEN, d_ff=FFN, d_kv=12, num_layers=LAYERS, num_heads=4)
    config = transformers.T5Config(**(sizes | dict(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0) | changes))
    batch = _tokens()
    batch["labels"] = batch["labels"][:, :12].contiguous()
    return _seeded(lambda: transformers.T5ForConditionalGeneration(config)), batch


def vit(**changes: Any) -> Built:
    sizes: dict[str, Any] = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=FFN, image_size=24, patch_size=8)
    config = transformers.ViTConfig(**(sizes | dict(num_labels=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0) | changes))
    generator = torch.Generator().manual_seed(7)
    batch = {"pixel_values": torch.randn(ROWS, 3, 24, 24, generator=generator), "labels": torch.randint(0, 12, (ROWS,), generator=generator)}
    return _seeded(lambda: transformers.ViTForImageClassification(config)), batch


def resnet() -> Built:
    generator = torch.Generator().manual_seed(7)
    batch = {"images": torch.randn(ROWS, 3, 32, 32, generator=generator), "labels": torch.randint(0, 12, (ROWS,), generator=generator)}
    return _seeded(lambda: resnet50(width=8, num_classes=12)), batch


def unet() -> Built:
    generator = torch.Generator().manual_seed(7)
    batch = {"x": torch.randn(ROWS, 3, 16, 16, generator=generator), "target": torch.randn(ROWS, 4, 16, 16, generator=generator)}
    return _seeded(lambda: UNet(3, 4, width=8, depth=2)), batch


def mlp() -> Built:
    generator = torch.Generator().manual_seed(7)
    batch = {"x": torch.randn(ROWS, 24, generator=generator), "labels": torch.randint(0, 12, (ROWS,), generator=generator)}
    return _seeded(lambda: MLP((24, 64, 136, 64, 12))), batch


ZOO: dict[str, Callable[[], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "qwen3": qwen3,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "mixtral-aux": mixtral_aux,
    "vit": vit,
    "resnet50": resnet,
    "unet": unet,
    "mlp": mlp,
}
