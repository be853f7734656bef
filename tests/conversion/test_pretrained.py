"""Converted Hugging Face models: saved with their gates, loaded by everybody, or refused."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import threshold_gating as tg
from threshold_gating.conversion import CheckpointError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default:.*:ResourceWarning")

IDS = torch.randint(3, 67, (2, 6), generator=torch.Generator().manual_seed(1))
SIZES = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ACT = "model.layers.1.mlp.act_fn"
ATTENTION = "model.layers.0.self_attn.tg_scaled_dot_product_attention_0_rho"
BESIDE = {"README.md", "tg_config.json", "tg_gates.safetensors"}
OWN = {"config.json", "generation_config.json", "model.safetensors"}


def llama(seed=0, **options):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, **options)
    return transformers.LlamaForCausalLM(config).eval()


def converted(model, seed=0):
    """Gates that learn, activations per channel and attention per head, away from their start."""
    gated = tg.convert(model, train="tau", share="channel", inputs={"input_ids": IDS})
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in tg.conversion.gate_parameters(gated).values():
            p.normal_(0, 0.3, generator=draw)
    return gated


@pytest.fixture(scope="module")
def originals():
    """Two networks of one architecture, and what they are converted; not to be changed."""
    models = [llama(0), llama(1)]
    return [(m, converted(m, k)) for k, m in enumerate(models)]


@pytest.fixture
def model(originals):
    return originals[0][0]


@pytest.fixture
def gated(originals):
    return copy.deepcopy(originals[0][1])


@pytest.fixture
def other(originals):
    return copy.deepcopy(originals[1][1])


def logits(net, ids=IDS):
    with torch.no_grad(), tg.kernels.use("reference"):
        return net(input_ids=ids).logits


def same(a, b):
    return torch.equal(logits(a), logits(b))


def names(folder):
    return {path.name for path in Path(folder).iterdir()}


def keys(folder):
    found = [load_file(path) for path in Path(folder).glob("model*.safetensors")]
    return {key for each in found for key in each}


def quiet(kind, folder, **options):
    """from_pretrained with nothing missing, unexpected or of another shape."""
    net, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values())
    return net


# What lies in the folder, and who can read it


@pytest.mark.parametrize(
    ("tied", "options"),
    [(False, {}), (True, {}), (True, {"max_shard_size": "5KB"}), (False, {"variant": "fp16", "max_shard_size": "5KB"})],
    ids=str,
)  # fmt: skip
def test_the_files_hold_the_originals_keys_and_the_gates_lie_beside(tied, options, tmp_path):
    model = llama(tie_word_embeddings=tied)
    gated = converted(model)
    gated.save_pretrained(tmp_path, **options)
    assert names(tmp_path) >= BESIDE
    assert keys(tmp_path) == model.state_dict().keys() - ({"lm_head.weight"} if tied else set())
    assert (len(list(tmp_path.glob("model*-of-*"))) > 1) == ("max_shard_size" in options)
    variant = {k: v for k, v in options.items() if k == "variant"}
    assert same(quiet(transformers.AutoModelForCausalLM, tmp_path, **variant), model)
    back = tg.load(tmp_path)
    assert type(back).__name__ == "LlamaForCausalLM"
    assert same(back, gated)
    assert list(back.state_dict()) == list(gated.state_dict())
    assert not same(back, model)
    assert ATTENTION in load_file(tmp_path / "tg_gates.safetensors")
    assert tg.audit(back, IDS).left == ()


def test_frozen_gates_are_kept_with_what_was_chosen_for_them(model, tmp_path):
    gated = tg.convert(model, {ACT: "relu"}, inputs={"input_ids": IDS}, tol=9)
    gated.save_pretrained(tmp_path)
    assert names(tmp_path) == OWN | BESIDE
    assert load_file(tmp_path / "tg_gates.safetensors") == {}
    back = tg.load(tmp_path)
    assert same(back, gated)
    assert back.get_submodule(ACT).init == gated.get_submodule(ACT).init
    assert same(quiet(transformers.AutoModelForCausalLM, tmp_path), model)


def test_attention_as_it_was_chosen_comes_back(tmp_path):
    model = llama(attn_implementation="eager")
    gated = tg.convert(model, inputs={"input_ids": IDS})
    gated.save_pretrained(tmp_path)
    assert same(tg.load(tmp_path), gated)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(
        CheckpointError,
        match=r"converted with attn_implementation='eager', and LlamaForCausalLM has 'sdpa', which makes other calls; make it by from_pretrained\(\.\.\., attn_implementation='eager'\)",
    ):
        tg.load(tmp_path, onto=plain)


def test_sixteen_bits_stay_and_gates_stay_wide(model, tmp_path):
    gated = converted(copy.deepcopy(model).bfloat16())
    gated.save_pretrained(tmp_path)
    back = tg.load(tmp_path)
    assert {p.dtype for p in back.parameters()} == {torch.bfloat16, torch.float32}
    assert back.get_submodule(ACT).rho.dtype == torch.float32
    assert same(back, gated)
    gated.lm_head.float()  # transformers has one type for a network
    gated.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"makes 'lm_head.weight' torch.bfloat16, and it was saved as float32; make the network with these types yourself and pass it as onto=",
    ):
        tg.load(tmp_path)
    onto = copy.deepcopy(model).bfloat16()
    onto.lm_head.float()
    assert torch.equal(
        tg.load(tmp_path, onto=onto).get_submodule(ACT).rho, gated.get_submodule(ACT).rho
    )


def test_a_part_of_a_network_is_saved_with_its_gates(model, tmp_path):
    part = {"input_ids": IDS}
    for gated in (tg.convert(model, inputs=part), tg.convert(model)):  # named, or as they come
        gated.model.save_pretrained(tmp_path)
        back = tg.load(tmp_path)
        assert type(back).__name__ == "LlamaModel"
        assert tg.audit(back, IDS).left == ()
        assert torch.equal(back(**part)[0], gated.model(**part)[0])


def test_every_copy_keeps_its_own_gates_and_a_reverted_network_is_as_before(gated, model, tmp_path):
    for each in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
        with torch.no_grad():
            each.get_submodule(ACT).rho += 0.1
        each.save_pretrained(tmp_path)
        assert same(tg.load(tmp_path), each)
        assert not same(each, gated)
    again = tg.load(tmp_path)
    again.save_pretrained(tmp_path)  # what was loaded is saved as well
    assert same(tg.load(tmp_path), again)
    frozen = tg.convert(model, inputs={"input_ids": IDS})
    plain = tg.conversion.revert(frozen)
    assert not {"save_pretrained", "_upload_modified_files", "tg_report"} & vars(plain).keys()
    assert not plain._load_state_dict_pre_hooks
    plain.save_pretrained(tmp_path / "plain")
    assert names(tmp_path / "plain") == OWN


def test_a_state_dict_that_is_given_is_what_is_saved_gates_and_all(gated, other, tmp_path):
    state = {
        **gated.state_dict(),
        **{k: t + 1 for k, t in gated.state_dict().items() if "rho" in k},
    }
    given = dict(state)
    gated.save_pretrained(tmp_path, state_dict=state)
    assert state.keys() == given.keys()  # the caller's dict is the caller's
    back = tg.load(tmp_path)
    assert torch.equal(back.get_submodule(ACT).rho, gated.get_submodule(ACT).rho + 1)
    weights = {k: t for k, t in other.state_dict().items() if "act_fn" not in k and "tg_" not in k}
    gated.save_pretrained(tmp_path, state_dict=weights)  # weights of another, its own gates
    back = tg.load(tmp_path)
    assert torch.equal(back.lm_head.weight, other.lm_head.weight)
    assert torch.equal(back.get_submodule(ACT).rho, gated.get_submodule(ACT).rho)


def test_state_dicts_have_their_gates_again_after_a_save_and_after_one_that_failed(
    gated, tmp_path, monkeypatch
):
    before = list(gated.state_dict())
    gated.save_pretrained(tmp_path)
    assert list(gated.state_dict()) == before

    def fails(*_, **__):
        raise OSError("full")

    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", fails)
    with pytest.raises(OSError, match="full"):
        gated.save_pretrained(tmp_path)
    assert list(gated.state_dict()) == before
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_process_that_does_not_write_writes_nothing(gated, tmp_path):
    gated.save_pretrained(tmp_path, is_main_process=False)
    assert names(tmp_path) == set()


def test_what_would_lose_the_gates_is_refused(gated, tmp_path, monkeypatch):
    own = transformers.LlamaForCausalLM.save_pretrained

    def whole(self, save_directory, **_):  # a class that takes its tensors elsewhere
        state = {k: t.detach().clone() for k, t in self.named_parameters()}
        save_file(state, Path(save_directory) / "model.safetensors")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", whole)
    with pytest.raises(CheckpointError, match=r"wrote '.*rho', a gate, among the weights"):
        gated.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", own)
    with pytest.raises(CheckpointError, match=r"distributed_checkpoint=True\) writes the parts"):
        gated.save_pretrained(tmp_path, distributed_checkpoint=True)
    assert names(tmp_path) == set()


# Onto a network that is there


def test_gates_go_onto_the_weights_that_they_were_saved_with_and_no_others(
    gated, model, originals, tmp_path
):
    gated.save_pretrained(tmp_path / "whole")
    tg.conversion.save(gated, tmp_path / "gates", gates_only=True)
    for folder in ("whole", "gates"):
        net = copy.deepcopy(model)
        weight = net.lm_head.weight
        assert tg.load(tmp_path / folder, onto=net) is net
        assert net.lm_head.weight is weight
        assert same(net, gated)
        wrong = copy.deepcopy(originals[1][0])
        before = {k: (id(t), t.clone()) for k, t in wrong.state_dict(keep_vars=True).items()}
        with pytest.raises(
            CheckpointError,
            match=r"other weights than LlamaForCausalLM has: 'lm_head.weight' has other values \(\d+ of \d+ differ\); give the network with the weights of then, or pass other_weights=True"
            if folder == "whole"
            else r"'model.embed_tokens.weight' has other values",
        ):
            tg.load(tmp_path / folder, onto=wrong)
        after = wrong.state_dict(keep_vars=True)
        assert all(after[k] is not None and id(after[k]) == i for k, (i, _) in before.items())
        assert not any(isinstance(m, tg.Activation) for m in wrong.modules())
        asked = tg.load(tmp_path / folder, onto=wrong, other_weights=True)
        assert torch.equal(asked.get_submodule(ACT).rho, gated.get_submodule(ACT).rho)
        assert torch.equal(asked.lm_head.weight, before["lm_head.weight"][1])
    assert sum(p.stat().st_size for p in (tmp_path / "gates").iterdir()) < 20_000


def test_one_changed_value_is_another_network(gated, model, tmp_path):
    tg.conversion.save(gated, tmp_path, gates_only=True)
    net = copy.deepcopy(model)
    with torch.no_grad():
        net.model.norm.weight[3] = torch.nextafter(net.model.norm.weight[3], torch.tensor(9.0))
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has other values \(1 of"):
        tg.load(tmp_path, onto=net)
    with pytest.raises(CheckpointError, match=r"is bfloat16 and was float32"):
        tg.load(tmp_path, onto=copy.deepcopy(model).bfloat16())
    extra = copy.deepcopy(model)
    extra.more = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"'more.weight' is not on record \(2 of"):
        tg.load(tmp_path, onto=extra)


def test_gates_saved_into_a_models_own_folder_are_found_there(gated, model, other, tmp_path):
    model.save_pretrained(tmp_path)
    tg.conversion.save(gated, tmp_path, gates_only=True)
    assert same(tg.load(tmp_path), gated)
    save_file({**other.state_dict()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError):
        tg.load(tmp_path)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(4, 4), nn.SiLU()

    def forward(self, x):
        return torch.tanh(self.act(self.first(x)))


def test_a_network_that_is_no_hugging_face_model_is_given(tmp_path):
    x = torch.randn(3, 4)
    net = Plain()
    gated = tg.convert(net, inputs=x)
    for gates_only in (False, True):
        tg.conversion.save(gated, tmp_path, gates_only=gates_only)
        with pytest.raises(CheckpointError) as error:
            tg.load(tmp_path)
        assert str(error.value) == (
            f"{tmp_path} does not say how to make its network; it is of {Plain.__module__}.Plain; make that network and pass it on: tg.load('{tmp_path}', onto=Plain(...))."
        )
        onto = copy.deepcopy(net) if gates_only else Plain()
        assert torch.equal(tg.load(tmp_path, onto=onto)(x), gated(x))
    with pytest.raises(CheckpointError, match=r"'first.weight' has other values \(2 of 2 differ\)"):
        tg.load(tmp_path, onto=Plain())
    path = tmp_path / "tg_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "original": None}))
    with pytest.raises(CheckpointError, match="has no hash of the weights that its gates belong"):
        tg.load(tmp_path, onto=copy.deepcopy(net))


BAD = [
    ((3,), {}, TypeError, "source must be a folder or a name on the hub; got int"),
    (("F", "x"), {}, TypeError, "onto must be a torch.nn.Module; got str"),
    (("F",), {"revision": "main"}, ValueError, "is a folder, which has no revision='main'"),
    (("F",), {"other_weights": True}, ValueError, "other_weights=True needs onto="),
    (("nowhere",), {}, CheckpointError, "nowhere is not a folder; give the one that save_pretrained or"),
    (("./a/b",), {}, CheckpointError, "./a/b is not a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "options", "kind", "said"), BAD)
def test_what_cannot_be_meant_is_refused(args, options, kind, said, tmp_path):
    args = tuple(tmp_path if each == "F" else each for each in args)
    with pytest.raises(kind, match=said):
        tg.load(*args, **options)


def test_other_weights_are_for_gates_alone(tmp_path):
    tg.conversion.save(tg.convert(Plain()), tmp_path)
    with pytest.raises(ValueError, match="holds weights, which `onto` gets; other_weights is for"):
        tg.load(tmp_path, onto=Plain(), other_weights=True)


# Damage


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def edit(path, **changes):
    data = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**data, **changes}.items() if v != "gone"}))


def swap(path):
    """One value of one weight is another."""
    tensors = load_file(path)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] += 1
    save_file(tensors, path, {"format": "pt"})


DAMAGES = {
    "no gates": (lambda d: (d / "tg_gates.safetensors").unlink(), r"tg_gates.safetensors is missing, and tg_config.json was written with it; copy the whole"),
    "half of the gates": (lambda d: cut(d / "tg_gates.safetensors"), r"tg_gates.safetensors is truncated, \d+ of \d+ bytes; copy it again"),
    "other gates": (lambda d: swap(d / "tg_gates.safetensors"), r"tg_gates.safetensors is not the file that tg_config.json was written with \(sha256 differs\)"),
    "no config": (lambda d: (d / "tg_config.json").unlink(), r"tg_config.json cannot be read \(No such file"),
    "half a config": (lambda d: cut(d / "tg_config.json"), "tg_config.json is not valid JSON, so it is truncated"),
    "a newer schema": (lambda d: edit(d / "tg_config.json", schema=99), r"schema 99\); this is .* update threshold-gating"),
    "no hash of the gates": (lambda d: edit(d / "tg_config.json", weights=None), "the hashes of tg_gates.safetensors and of the weights are not in it"),
    "no word of the gates": (lambda d: edit(d / "tg_config.json", weights="gone"), "there is no 'weights'"),
    "no hash of the weights": (lambda d: edit(d / "tg_config.json", original=None), "the hashes of tg_gates.safetensors and of the weights are not in it"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), r"model.safetensors is missing, and tg_config.json was written with it"),
    "half of the weights": (lambda d: cut(d / "model.safetensors"), r"model.safetensors is not a complete safetensors file"),
    "other weights": (lambda d: swap(d / "model.safetensors"), r"the weights are not those that tg_config.json was written with: 'lm_head.weight' has other values \(1 of 21 differ\); copy the whole folder again, or put the gates on these weights: tg.load\(FOLDER, onto=from_pretrained\(FOLDER\), other_weights=True\)"),
    "files from elsewhere": (lambda d: edit(d / "tg_config.json", pretrained={"files": ["../model.safetensors"]}), r"must be .safetensors in the same directory; got '../model.safetensors'"),
    "no class": (lambda d: edit(d / "config.json", architectures=None), r"config.json names no architecture"),
    "a class that nobody has": (lambda d: edit(d / "config.json", architectures=["Llama9"]), r"transformers has no Llama9; it is of .*LlamaForCausalLM; make that network and pass it on: tg.load\(.*, onto=LlamaForCausalLM\(\.\.\.\)\)"),
    "a function for a class": (lambda d: edit(d / "config.json", architectures=["pipeline"]), r"transformers has no pipeline"),
    "another network": (lambda d: edit(d / "config.json", hidden_size=32), r"transformers does not load it as LlamaForCausalLM|not all that LlamaForCausalLM has"),
    "no config of the model": (lambda d: (d / "config.json").unlink(), r"does not say how to make its network; it is of .*LlamaForCausalLM"),
    "half a config of the model": (lambda d: cut(d / "config.json"), r"config.json names no architecture .* it is damaged"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(originals, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "net"
    copy.deepcopy(originals[0][1]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(saved, damage, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "net"))
    spoil, said = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(CheckpointError, match=said) as error:
        tg.load(folder)
    assert "\n" not in str(error.value)


def test_weights_of_another_network_with_the_gates_of_this_one_are_refused(saved, other, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "net"))
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' has other values \(\d+ of 21"):
        tg.load(folder)


@pytest.mark.parametrize("shards", [({}, {}), ({"max_shard_size": "5KB"}, {}), ({}, {"max_shard_size": "5KB"}), ({"max_shard_size": "5KB"}, {"max_shard_size": "9KB"})], ids=str)  # fmt: skip
def test_whatever_a_kill_leaves_is_the_old_network_or_the_new_one(
    gated, other, shards, tmp_path, monkeypatch
):
    """Every state of the folder between two renames is looked at."""
    folder, states, replace = tmp_path / "net", [], os.replace
    gated.save_pretrained(folder, **shards[0])

    def noting(*args):
        states.append(shutil.copytree(folder, tmp_path / f"state{len(states)}"))
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", noting)
        other.save_pretrained(folder, **shards[1])
    want = [logits(gated), logits(other)]
    found = [
        next(k for k, w in enumerate(want) if torch.equal(logits(tg.load(s)), w)) for s in states
    ]
    assert found == sorted(found)
    assert found[0] == 0
    assert len(states) > 6
    for state in (states[-3], states[0]):  # and a save goes on from there
        gated.save_pretrained(state, **shards[0])
        assert same(tg.load(state), gated)
        assert not [n for n in names(state) if n.endswith((".previous", ".tmp"))]
    assert same(tg.load(folder), other)
    assert len(list(folder.glob("model*"))) == (
        1 if not shards[1] else len(keys_of_index(folder)) + 1
    )


def keys_of_index(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return set(index["weight_map"].values())


def test_saves_into_one_folder_wait_for_each_other(gated, other, tmp_path):
    threads = [
        threading.Thread(target=lambda net=net: [net.save_pretrained(tmp_path) for _ in range(4)])
        for net in (gated, other)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    back = tg.load(tmp_path)
    assert same(back, gated) or same(back, other)
    assert names(tmp_path) == OWN | BESIDE


# The hub


class Hub:
    """What transformers asks of the hub; commits are folders."""

    def __init__(self, folder):
        self.folder = folder

    def create_repo(self, repo_id, **_):
        return type("Url", (), {"repo_id": f"me/{repo_id.rpartition('/')[2]}"})()

    def create_commit(self, repo_id, operations, **_):
        folder = self.folder / repo_id
        folder.mkdir(parents=True, exist_ok=True)
        for each in operations:
            shutil.copy(each.path_or_fileobj, folder / each.path_in_repo)
        return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import ModelCard
    from huggingface_hub.errors import EntryNotFoundError

    made = Hub(tmp_path / "hub")

    def load(repo_id, **_):
        path = made.folder / repo_id / "README.md"
        if not path.is_file():
            raise EntryNotFoundError.__new__(EntryNotFoundError)
        return ModelCard(path.read_text())

    for module in (transformers.utils.hub, transformers.modeling_utils):
        if hasattr(module, "hf_api"):
            monkeypatch.setattr(module, "hf_api", lambda: made)
    monkeypatch.setattr(ModelCard, "load", load)
    return made


@pytest.mark.parametrize("way", ["push_to_hub", "save_pretrained"])
def test_what_is_pushed_is_loaded_by_name_with_its_gates_and_a_card(
    gated, model, hub, way, tmp_path, monkeypatch
):
    if way == "push_to_hub":
        gated.push_to_hub("me/net")
    else:
        gated.save_pretrained(tmp_path / "net", push_to_hub=True)
        assert names(tmp_path / "net") == OWN | BESIDE
        assert same(tg.load(tmp_path / "net"), gated)
    pushed = hub.folder / "me" / "net"
    assert names(pushed) == OWN | BESIDE
    text = (pushed / "README.md").read_text()
    assert "tg.load" in text
    assert "The gates were trained" in text
    assert same(quiet(transformers.AutoModelForCausalLM, pushed), model)
    import huggingface_hub

    asked = []

    def snapshot_download(name, revision=None, allow_patterns=None):
        asked.append((name, revision, allow_patterns))
        return str(hub.folder / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert same(tg.load("me/net", revision="v1"), gated)
    assert [each[:2] for each in asked] == [("me/net", "v1")] * 2
    assert asked[0][2] == ["tg_config.json"]
    assert {"model.safetensors", "tg_gates.safetensors", "config.json"} <= {*asked[1][2]}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def cached(cache, name, folder):
    """Put a folder into the cache as the hub's client does."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    at = cache / f"models--{name.replace('/', '--')}"
    (at / "refs").mkdir(parents=True)
    (at / "refs" / "main").write_text(commit)
    shutil.copytree(folder, at / "snapshots" / commit)
    return at / "snapshots" / commit


def test_the_cache_is_enough_while_offline(saved, gated, cache):
    snapshot = cached(cache, "me/net", saved)
    assert same(tg.load("me/net"), gated)
    (snapshot / "tg_gates.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tg_gates.safetensors is missing"):
        tg.load("me/net")
    (snapshot / "tg_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"me/net has no tg_config.json on the hub, or none in the cache while offline, so there are no gates"):  # fmt: skip
        tg.load("me/net")


def test_a_name_that_nobody_has_is_said_to_be_neither_here_nor_there(cache):
    with pytest.raises(CheckpointError, match=r"me/nothing is not a folder, and the hub does not give it at 'v2' \(.+\); check the name and the connection, or give a folder"):  # fmt: skip
        tg.load("me/nothing", revision="v2")


def test_without_the_hubs_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'threshold-gating\[hub\]'"):
        tg.load("me/net")


# The Trainer and accelerate

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
import go_on  # noqa: E402


@pytest.mark.slow  # half a minute of processes
@pytest.mark.filterwarnings("default")  # the Trainer's own
def test_a_trainer_goes_on_bit_for_bit_in_another_process(tmp_path, programs):
    pytest.importorskip("accelerate")
    words = []
    for name in go_on.NETWORKS:
        model = go_on.network(name)
        go_on.trainer(model, tmp_path / name).train()
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
        words += [name, str(tmp_path / name / "checkpoint-3"), str(tmp_path / f"{name}-again.pt")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": ""}
    done = subprocess.run(
        [sys.executable, programs / "go_on.py", *words], env=env, capture_output=True, text=True
    )
    assert done.stdout.endswith("ok\n"), done.stderr[-3000:]
    for name in go_on.NETWORKS:
        whole, again = (torch.load(tmp_path / f"{name}{end}.pt") for end in ("", "-again"))
        assert whole.keys() == again.keys()
        assert [k for k in whole if not torch.equal(whole[k], again[k])] == [], name
        gates = [t.abs().max() for k, t in whole.items() if k.endswith("rho")]
        assert len(gates) >= 4
        assert min(gates) > 1e-3  # all have moved, functional ones too


@pytest.mark.filterwarnings("default")  # the Trainer's own
def test_the_best_checkpoint_comes_back_with_its_gates_and_a_foreign_one_is_told_of(
    saved, model, gated, tmp_path
):
    pytest.importorskip("accelerate")
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3}
    net = go_on.network("llama")
    trainer = go_on.trainer(net, tmp_path / "best", metric_for_best_model="loss", greater_is_better=True, **best)  # fmt: skip
    trainer.train()  # the worst is the best: it is the first
    first = tg.load(tmp_path / "best" / "checkpoint-3")
    last = tg.load(tmp_path / "best" / "checkpoint-6")
    rho = "model.layers.1.mlp.act_fn.rho"
    assert torch.equal(net.get_parameter(rho), first.get_parameter(rho))
    assert not torch.equal(net.get_parameter(rho), last.get_parameter(rho))
    folder = tmp_path / "best" / "checkpoint-3"
    shutil.copy(tmp_path / "best" / "checkpoint-6" / "model.safetensors", folder)
    with pytest.raises(CheckpointError, match=r"its gates were saved with other weights: .* go on from another checkpoint"):  # fmt: skip
        trainer.train(resume_from_checkpoint=str(folder))
    plain = transformers.LlamaForCausalLM(net.config)
    other = tg.convert(plain, train="tau", share="layer", inputs={"input_ids": IDS})
    with pytest.raises(CheckpointError, match=r"the gates there are not those of LlamaForCausalLM \(other sites, instances or sharing\); go on with the network that tg.load"):  # fmt: skip
        go_on.trainer(other, tmp_path / "best").train(resume_from_checkpoint=str(folder))
    for name in ("tg_config.json", "tg_gates.safetensors"):
        shutil.move(folder / name, tmp_path / "best")  # where a run's last save is, another network
    with pytest.warns(UserWarning, match=r"holds no gates \(no tg_config.json\), so \d+ learned tensors of gates stay as they are"):  # fmt: skip
        trainer.train(resume_from_checkpoint=str(folder))


def test_weights_that_anybody_else_loads_leave_the_gates_alone(saved, gated, other):
    """Where no Trainer is at work, a state dict is what it says."""
    path = str(saved / "model.safetensors")
    found = other.load_state_dict(load_file(path), strict=False)
    assert {*found.missing_keys} == {k for k in other.state_dict() if "rho" in k or "tau0" in k}
    assert torch.equal(other.lm_head.weight, gated.lm_head.weight)
    assert not torch.equal(other.get_submodule(ACT).rho, gated.get_submodule(ACT).rho)


def test_accelerate_saves_and_loads_gates_with_the_weights(gated, other, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(gated)
    accelerator.save_state(tmp_path)
    rho = gated.get_submodule(ACT).rho.detach().clone()
    with torch.no_grad():
        gated.get_submodule(ACT).rho.zero_()
        gated.lm_head.weight.zero_()
    accelerator.load_state(tmp_path)
    assert torch.equal(gated.get_submodule(ACT).rho, rho)
    assert gated.lm_head.weight.any()


# Other classes that save themselves


def test_a_class_of_its_own_that_saves_itself_keeps_its_gates_too(tmp_path):
    from huggingface_hub import PyTorchModelHubMixin

    class Mine(Plain, PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.alias = self.act  # its gate is in a state dict twice

    x = torch.randn(3, 4)
    net = Mine()
    gated = tg.convert(net, train="tau", inputs=x)
    gated.save_pretrained(tmp_path)
    assert keys(tmp_path) == net.state_dict().keys()
    assert "alias.rho" in gated.state_dict()
    assert names(tmp_path) >= BESIDE
    with pytest.raises(
        CheckpointError, match=r"make that network and pass it on: tg.load\(.*, onto=Mine\("
    ):
        tg.load(tmp_path)
    assert torch.equal(tg.load(tmp_path, onto=Mine.from_pretrained(tmp_path))(x), gated(x))
    with pytest.raises(
        CheckpointError, match=r"push_to_hub=True\) of Mine uploads before the gates"
    ):
        gated.save_pretrained(tmp_path, push_to_hub=True)


# The card


def test_the_card_says_what_was_converted_measured_and_trained(model, gated, tmp_path):
    fresh = tg.convert(model, train="tau", inputs={"input_ids": IDS})

    def right(output):
        return output.logits[:, -1].argmax(-1) == 5

    certificate = tg.verify(model, fresh, input_ids=IDS, metric=("accuracy", right))
    fresh.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| silu | 2 | 2 | exact |" in text
    assert "Inputs: input_ids: int64 2 x 6." in text
    row = max(r.max for r in certificate.rows if r.kind == "silu")
    assert f"| silu | 2 | 2 | {row:.1e} |" in text
    assert "accuracy: " in text
    assert "of 2 samples" in text
    assert "4 gates can learn and are where they started" in text
    assert "The gates were trained" not in text
    assert f"torch {torch.__version__}" in text
    back = tg.load(tmp_path)  # what was measured is on record
    back.save_pretrained(tmp_path / "again")
    assert "accuracy: " in (tmp_path / "again" / "README.md").read_text()
    gated.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "**The gates were trained.**" in text
    far = gated.get_submodule(ACT).rho.abs().max()
    assert f"| {ACT} | {far:.1e} |" in text
    certificate = tg.verify(model, gated, input_ids=IDS)
    assert f"after training: {certificate.trained}" in tg.conversion.card(gated)
    assert "Nothing was measured" in tg.conversion.card(tg.convert(model))


def test_a_readme_of_the_users_keeps_its_words_and_a_second_save_has_one_section(gated, tmp_path):
    mine = "---\nlicense: mit\n---\n# Mine\n\nNote: \\1 and $&.\n"
    (tmp_path / "README.md").write_text(mine)
    gated.save_pretrained(tmp_path)
    once = (tmp_path / "README.md").read_text()
    assert once.startswith(mine)
    (tmp_path / "README.md").write_text(once + "\nMore of mine.\n")
    gated.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == once + "\nMore of mine.\n"
