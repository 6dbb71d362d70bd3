"""The target: refused when something is missing, by name; SmolLM2 out of its package is the model that its authors meant."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from eagle3lib import targets
from eagle3lib.errors import Eagle3Error


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "target")


def without_template(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(("harm", "word"), [
    (without_template, "chat template"),
    (pickled, "no \\*.safetensors"),
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
])
def test_a_folder_that_lacks_something_is_refused_by_name(copy, harm, word):
    harm(copy)
    with pytest.raises(Eagle3Error, match=word) as caught:
        targets.resolve(str(copy))
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize("name", ["./no/such/folder", "nobody/no-such-model", "smollm3"])
def test_a_name_that_leads_nowhere_says_what_would(name):
    with pytest.raises(Eagle3Error, match="smollm2"):
        targets.resolve(name)


def test_captured_streams_are_eagle3s_and_a_shallow_target_is_refused():
    assert targets.capture_layers(30) == [2, 15, 27] and targets.capture_layers(61) == [2, 30, 58]
    with pytest.raises(Eagle3Error, match="6 layers"):
        targets.capture_layers(6)


def test_the_fingerprint_names_weights_config_tokenizer_and_template(copy):
    before = targets.fingerprint(copy)
    assert before == targets.fingerprint(copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-5] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    (copy / "chat_template.jinja").write_text((copy / "chat_template.jinja").read_text() + " ")
    after = targets.fingerprint(copy)
    assert {k for k in before if before[k] != after[k]} == {"weights", "chat_template"}


def test_head_and_embeddings_are_read_without_the_model(tiny):
    head, embed = targets.head_weights(tiny)
    model = targets.load_model(tiny)
    assert torch.equal(head, model.lm_head.weight) and torch.equal(embed, model.model.embed_tokens.weight)
    assert not torch.equal(head, embed)


@pytest.fixture(scope="module")
def folder():
    return targets.resolve("smollm2")


class TestSmolLM2:
    """Facts of the published model that the conversion from GGUF loses unless it is put right."""

    def test_tokenizer(self, folder):
        tokenizer = targets.load_tokenizer(folder)
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2026 is")) == ["2", "0", "2", "6", "Ġis"]
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
        for text in ("12345  héllo\n\n\tdef f(x): return 2024 🙂", " leading", "trailing "):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_sizes_and_tied_head(self, folder):
        assert targets.describe(folder) == {"name": "SmolLM2-135M-Instruct", "architecture": "LlamaForCausalLM", "layers": 30,
                                            "hidden_size": 576, "vocab_size": 49152}
        head, embed = targets.head_weights(folder)
        assert head.shape == (49152, 576) and head.data_ptr() == embed.data_ptr()
        assert targets.text_config(folder).rope_parameters["rope_theta"] == 100000.0

    def test_it_answers_like_a_language_model(self, folder):
        tokenizer, model = targets.load_tokenizer(folder), targets.load_model(folder)
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France? Answer in one word."}],
                                            add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        reply = tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:])
        assert "Paris" in reply, reply
