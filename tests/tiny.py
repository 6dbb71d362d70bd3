"""A tiny random Llama with a real tokenizer and a ChatML template: real SGLang serves it in seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Every byte is one token (ids 3..258), so any text survives; ids 0..2 are the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def tiny_config(layers: int = 8, hidden: int = 64, vocab: int = 320) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, rope_theta=10000.0,
                       bos_token_id=0, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)


def tiny_target(folder: Path, *, layers: int = 8, hidden: int = 64, seed: int = 0, template: str = CHATML, branch: float = 1.0) -> Path:
    """Write the tiny target into `folder`. Weights are large enough that neighbouring layers differ clearly.

    branch: factor on what the layers write into the residual stream. Below 1 the next token hangs on the current one more
    than on anything else, so that a draft can learn it from a few rows.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(layers, hidden))
    for name, weight in model.requires_grad_(False).named_parameters():
        if weight.dim() == 1:  # norm weights of all ones would hide a norm that is applied twice
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else hidden**-0.5)
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(branch)
    folder = Path(folder)
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder
