"""Converted Hugging Face models in use: 16 bits, training, dispatch, files, the attention "tg"."""

import copy

import pytest
import torch
from zoo import check
from zoo.transformer_table import build, text

import threshold_gating as tg
from threshold_gating import logits as gates
from threshold_gating.conversion import hugging_face

transformers = pytest.importorskip("transformers")

# transformers and accelerate warn about themselves
pytestmark = pytest.mark.filterwarnings("default")

IDS = torch.randint(3, 99, (2, 10), generator=torch.Generator().manual_seed(0))


def writer(kind="llama", **differs):
    torch.manual_seed(0)
    return build(kind, "AutoModelForCausalLM", {"use_cache": True, **differs}, text)[0]


@pytest.fixture
def model():
    return writer()


@pytest.fixture
def gated(model):
    return tg.convert(model, inputs={"input_ids": IDS})


def logits(model, **options):
    with torch.no_grad(), tg.kernels.use("reference"):
        return model(input_ids=IDS, **options).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_rounded_no_more_than_before(model, dtype):
    half = copy.deepcopy(model).to(dtype)
    gated = tg.convert(half, inputs={"input_ids": IDS})
    assert tg.audit(gated, IDS).left == ()
    exact, have, want = logits(model), logits(gated), logits(half)
    assert have.dtype == dtype
    # Both round to 16 bits after every operation, not after the same ones: 1.4 times measured.
    assert check.distance([exact], [have]) <= 2 * check.distance([exact], [want])


def gradients(model, checkpointed=False):
    model = copy.deepcopy(model).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    with tg.kernels.use("reference"):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradient_checkpointing_gives_the_same_gradients(model, gated):
    want, plain, checkpointed = gradients(model), gradients(gated), gradients(gated, True)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    for name, grad in want.items():
        assert check.distance([grad], [plain[name]]) <= check.BOUND


# "auto" puts everything on the one device there is; the map has accelerate's hooks load a layer.
LAYERS = {f"model.{part}": "cpu" for part in ("embed_tokens", "layers.0", "norm", "rotary_emb")}
MAPS = {"auto": "auto", "disk": {**LAYERS, "model.layers.1": "disk", "lm_head": "cpu"}}


@pytest.mark.parametrize("where", MAPS)
def test_a_dispatched_model_converts(model, where, tmp_path):
    pytest.importorskip("accelerate")
    model.save_pretrained(tmp_path)
    dispatched = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map=MAPS[where], offload_folder=tmp_path / "offloaded"
    )
    assert any(hasattr(m, "_hf_hook") for m in dispatched.modules()) == (where == "disk")
    gated = tg.convert(dispatched, inputs={"input_ids": IDS})
    assert tg.audit(gated, IDS).left == ()
    assert check.distance([logits(model)], [logits(gated)]) <= check.BOUND


def test_a_converted_model_is_saved_and_loaded_as_any_other(model, gated, tmp_path):
    """Its weights are those of the original; what the gates are stands in files beside them."""
    gated.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert torch.equal(logits(loaded), logits(model))
    again = tg.conversion.load(tmp_path, loaded)  # as tg.load, but onto any weights
    assert tg.audit(again, IDS).left == ()
    assert torch.equal(logits(again), logits(gated))


def test_the_trainer_trains_a_converted_model(model, gated, tmp_path):
    pytest.importorskip("accelerate")

    def losses(model):
        arguments = transformers.TrainingArguments(
            *(str(tmp_path),), max_steps=20, per_device_train_batch_size=2, learning_rate=1e-2,
            use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
            data_seed=0,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in IDS.repeat(4, 1)]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        with tg.kernels.use("reference"):
            trainer.train()
        return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])

    have, want = losses(gated), losses(copy.deepcopy(model))
    assert len(have) == 20
    assert have[-1] < have[0] / 10
    # Rounding grows from step to step; a wrong gradient is off by far more.
    torch.testing.assert_close(have, want, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("attention", ["flex_attention", "tg"])
def test_attention_that_no_call_of_torch_is_in_is_refused_by_name(model, attention):
    hugging_face.register()
    model.set_attn_implementation(attention)
    with pytest.raises(tg.conversion.ConversionError, match=rf"'{attention}'.*'sdpa'"):
        tg.convert(model, inputs={"input_ids": IDS})


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_attention_alone_becomes_gates_for_one_model(kind, cache):
    """Its function and its masks are registered together: windows, padding and caches are kept."""
    hugging_face.register()
    own = {"mistral": {"sliding_window": 3}, "gemma2": {"attn_logit_softcapping": 2.0}}
    model, other = (writer(kind, **own.get(kind, {})) for _ in range(2))
    was = other.config._attn_implementation
    model.set_attn_implementation("tg")
    assert other.config._attn_implementation == was
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    options |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with tg.kernels.use("reference"):
        have = model.generate(IDS, attention_mask=mask, **options)
    assert torch.equal(have, other.generate(IDS, attention_mask=mask, **options))
    assert check.distance([logits(other)], [logits(model)]) <= check.BOUND


def test_attention_alone_runs_gates_and_hides_the_future(model, monkeypatch):
    hugging_face.register()
    model.set_attn_implementation("tg")
    audit = tg.audit(model, IDS)
    assert sorted({op.op for op in audit.left}) == ["silu"]
    before = logits(model)
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 99
    with torch.no_grad(), tg.kernels.use("reference"):
        assert torch.equal(model(input_ids=changed).logits[:, :-1], before[:, :-1])
        # with other gates the output is another one: they are what runs
        sigma = gates._sigma
        monkeypatch.setattr(gates, "_sigma", lambda u: sigma(u + 0.1))
        assert not torch.allclose(model(input_ids=IDS).logits, before, atol=1e-3)
