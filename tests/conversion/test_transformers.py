"""Hugging Face architectures, from tiny configurations: converted, audited, verified, generating."""

import functools

import pytest
import torch
from zoo import check
from zoo.transformer_table import build, image, image_and_text, text, text_to_text, with_ids

import threshold_gating as tg

transformers = pytest.importorskip("transformers")

WRITES = "AutoModelForCausalLM"
TO_TEXT = "AutoModelForSeq2SeqLM"
CLIP = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "vocab_size": 99, "max_position_embeddings": 64,
}  # fmt: skip
SPEECH = {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32}
HEARD = {"input_features": torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))}

# name: (head, what differs from the zoo's tiny configuration, inputs, whether every site is exact)
DECODERS = {
    "llama": (WRITES, {}, text, True),
    "mistral": (WRITES, {"sliding_window": 3}, text, True),
    "qwen2": (WRITES, {}, text, True),
    "qwen3": (WRITES, {}, text, True),
    "gemma2": (WRITES, {"attn_logit_softcapping": 2.0, "sliding_window": 3}, text, False),
    "phi": (WRITES, {}, text, False),
    "gpt2": (WRITES, {}, text, False),
    "gpt_neox": (WRITES, {}, text, False),
    "opt": (WRITES, {"word_embed_proj_dim": 32}, text, True),
    "bloom": (WRITES, {}, text, True),
    "falcon": (WRITES, {"head_dim": None}, text, False),
    "mamba": (WRITES, {}, text, False),
}
BOTH = {
    "t5": (TO_TEXT, {"decoder_start_token_id": 0}, text_to_text, True),
    "bart": (TO_TEXT, {}, text_to_text, False),
    "whisper": ("AutoModelForSpeechSeq2Seq", SPEECH, with_ids(lambda: HEARD, decoder_input_ids=(2, 6)), False),
}  # fmt: skip
ENCODERS = {
    "bert": ("AutoModel", {}, text, False),
    "roberta": ("AutoModel", {}, text, False),
    "modernbert": ("AutoModel", {"local_attention": 8}, text, False),
    "vit": ("AutoModel", {}, image(), False),
    "clip": ("AutoModel", {"text_config": CLIP, "vision_config": CLIP, "projection_dim": 16}, image_and_text(), True),
}  # fmt: skip
NETWORKS = {**DECODERS, **BOTH, **ENCODERS}

IDS = torch.randint(3, 99, (2, 10), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, :4] = 0  # the first four places of the first text are empty


@functools.cache
def network(name, attention=None):
    """The original, converted on inputs by name, and these inputs; not to be changed."""
    head, differs, draw, _ = NETWORKS[name]
    torch.manual_seed(0)
    chosen = {} if attention is None else {"attn_implementation": attention}
    model, _ = build(name, head, {"use_cache": True, **chosen, **differs}, draw)
    inputs = draw()
    return model, tg.convert(model, inputs=inputs), inputs


@pytest.mark.parametrize("name", NETWORKS)
def test_every_nonlinearity_becomes_a_gate_and_nothing_is_lost(name):
    model, gated, inputs = network(name)  # converting raises if a site is beyond its class
    audit = tg.audit(gated, **inputs)
    assert audit.left == ()
    assert len(audit.sites) >= 4
    certificate = tg.verify(model, gated, **inputs)
    assert certificate.ok
    assert all(row.exact for row in certificate.rows) == NETWORKS[name][-1]
    with tg.kernels.use("reference"):
        have = check.run(gated, inputs)
    # against the network itself, where a GELU or Softplus is the function that was fitted to it
    assert check.distance(check.expected(model, gated, inputs), have) <= check.BOUND
    # that function is off by 5e-5 at most, which two layers take further
    assert certificate.output.relative <= (check.BOUND if NETWORKS[name][-1] else 1e-3)
    assert list(gated.state_dict()) == list(model.state_dict())


def written(model, name, **options):
    inputs = HEARD if name == "whisper" else {"input_ids": IDS, "attention_mask": PADDED}
    return model.generate(
        **inputs, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None, **options
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, *BOTH])
@pytest.mark.filterwarnings("default")  # transformers warns about its own settings
def test_greedy_generation_gives_the_same_tokens(name, cache):
    """Texts of two lengths, padded on the left; GELU's error of 5e-5 turns no choice here either."""
    if cache == "static" and name == "mamba":
        pytest.skip("it has a state and no cache")
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    model, gated, _ = network(name)
    with tg.kernels.use("reference"):
        have = written(gated, name, **options)
    want = written(model, name, **options)
    assert torch.equal(have, want)
    assert have.shape[-1] >= 8


# BLOOM and Mamba have one way, Gemma2 caps its logits, which only the eager way does.
WAYS = [(n, None) for n in ("bloom", "mamba", "gemma2")]
WAYS += [(n, way) for n in DECODERS for way in ("eager", "sdpa") if (n, None) not in WAYS]


@pytest.mark.parametrize(("name", "attention"), WAYS)
def test_the_future_stays_hidden(name, attention):
    _, gated, _ = network(name, attention)
    other = IDS.clone()
    other[:, 6] = (other[:, 6] + 1) % 99
    with torch.no_grad(), tg.kernels.use("reference"):
        before, after = gated(input_ids=IDS).logits, gated(input_ids=other).logits
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_padded_on_the_left_has_no_effect(name):
    model, gated, _ = network(name)
    filled = torch.where(PADDED.bool(), IDS, 7)
    at = PADDED.cumsum(-1).sub(1).clamp(min=0)
    positions = {} if name in ("bloom", "mamba") else {"position_ids": at}  # they have none
    with torch.no_grad(), tg.kernels.use("reference"):
        have = gated(input_ids=filled, attention_mask=PADDED, **positions).logits
        alone = gated(input_ids=IDS[:1, 4:]).logits
    with torch.no_grad():
        want = model(input_ids=filled, attention_mask=PADDED, **positions).logits
    seen = PADDED.bool()
    bound = check.BOUND if NETWORKS[name][-1] else 1e-3
    assert check.distance([want[seen]], [have[seen]]) <= bound
    assert check.distance([alone[0]], [have[0, 4:]]) <= check.BOUND


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_token_outside_the_window_has_no_effect(name):
    """Two layers that look back two tokens each; Gemma2's second one looks back to the beginning."""
    _, gated, _ = network(name)
    other = IDS.clone()
    other[:, 0] = (other[:, 0] + 1) % 99
    with torch.no_grad(), tg.kernels.use("reference"):
        before, after = gated(input_ids=IDS).logits, gated(input_ids=other).logits
    if name == "mistral":
        assert torch.equal(before[:, 5:], after[:, 5:])
    else:
        assert not torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, 4], after[:, 4])


def test_capped_logits_are_gates_too():
    _, gated, inputs = network("gemma2")
    kinds = [site.kind for site in tg.audit(gated, **inputs).sites]
    assert kinds.count("tanh") == 3  # one in each attention, one over the vocabulary


def test_an_activation_that_mamba_holds_and_never_calls_is_reported():
    _, gated, inputs = network("mamba")
    idle = [site.name for site in tg.audit(gated, **inputs).sites if site.calls == 0]
    assert idle == ["backbone.layers.0.mixer.act", "backbone.layers.1.mixer.act"]
