"""Hugging Face networks, from tiny configurations: encoders, decoders, state space, speech."""

import pytest
import torch

import threshold_gating as tg

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "vocab_size": 64, "intermediate_size": 48}
LLAMA = {**TEXT, "num_key_value_heads": 2}
WHISPER = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64,
    "num_mel_bins": 8, "max_source_positions": 50, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# (configuration, arguments, network, inputs, whether every site is exact)
NETWORKS = [
    ("Llama", LLAMA, "LlamaForCausalLM", {"input_ids": IDS}, True),
    ("Mistral", LLAMA, "MistralForCausalLM", {"input_ids": IDS}, True),
    ("Qwen2", LLAMA, "Qwen2ForCausalLM", {"input_ids": IDS}, True),
    ("Mamba", {**SMALL, "vocab_size": 64, "state_size": 4}, "MambaForCausalLM", {"input_ids": IDS}, False),
    ("GPT2", GPT2, "GPT2LMHeadModel", {"input_ids": IDS}, False),
    ("Bert", TEXT, "BertModel", {"input_ids": IDS}, False),
    ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}, "T5EncoderModel", {"input_ids": IDS}, True),
    ("ViT", {**SMALL, "intermediate_size": 48, "image_size": 32, "patch_size": 8}, "ViTModel", {"pixel_values": torch.randn(2, 3, 32, 32)}, False),
    ("Whisper", WHISPER, "WhisperForConditionalGeneration", {"input_features": torch.randn(1, 8, 100), "decoder_input_ids": IDS[:1]}, False),
]  # fmt: skip


def build(config, arguments, network):
    torch.manual_seed(0)
    made = getattr(transformers, f"{config}Config")(**arguments)
    return getattr(transformers, network)._from_config(made).eval()


@pytest.mark.parametrize(
    ("config", "arguments", "network", "inputs", "exact"), NETWORKS, ids=[n[0] for n in NETWORKS]
)
def test_every_nonlinearity_becomes_a_gate_and_nothing_is_lost(
    config, arguments, network, inputs, exact
):
    model = build(config, arguments, network)
    gated = tg.convert(model, inputs=inputs)  # raises if a site is beyond its class
    audit = tg.audit(gated, **inputs)
    assert audit.left == ()
    assert len(audit.sites) >= 4
    certificate = tg.verify(model, gated, **inputs)
    assert certificate.ok
    assert all(row.exact for row in certificate.rows) == exact
    # rounding for exact networks; elsewhere GELU's and Softplus' 5e-5 through two layers
    assert certificate.output.relative <= (3e-6 if exact else 1e-3)
    assert list(gated.state_dict()) == list(model.state_dict())


def test_an_activation_that_mamba_holds_and_never_calls_is_reported():
    config, arguments, network, inputs, _ = next(n for n in NETWORKS if n[0] == "Mamba")
    gated = tg.convert(build(config, arguments, network), inputs=inputs)
    idle = [site.name for site in tg.audit(gated, **inputs).sites if site.calls == 0]
    assert idle == ["backbone.layers.0.mixer.act", "backbone.layers.1.mixer.act"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_future_stays_hidden(attention):
    made = transformers.LlamaConfig(**LLAMA)
    model = transformers.LlamaForCausalLM._from_config(made, attn_implementation=attention).eval()
    gated = tg.convert(model, inputs=IDS)
    other = IDS.clone()
    other[:, -1] = (other[:, -1] + 1) % 60
    with torch.no_grad(), tg.kernels.use("reference"):
        before, after = gated(IDS).logits, gated(other).logits
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_greedy_generation_gives_the_same_tokens():
    model = build("Llama", LLAMA, "LlamaForCausalLM")
    gated = tg.convert(model, inputs=IDS)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    mask = torch.ones_like(IDS)
    with tg.kernels.use("reference"):
        have = gated.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(have, model.generate(IDS, attention_mask=mask, **options))
