"""Fig. 3(c) on AN4: the reader, the loss, the contenders and the lanes."""

import argparse
import math
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import threshold_gating as tg
from experiments import ctc, data, fig3_speech, speech_training
from experiments.record import Row
from experiments.speech_networks import ARMS, Listener, Stack
from experiments.speech_training import Lane, Recipe, corpus, planned, side_by_side

SHARED = Path(os.environ.get("TG_DATA", Path(__file__).parents[2] / "shared" / "data"))


def listener(arm, seed=0, hidden=6, channels=8):
    torch.manual_seed(seed)
    return Listener(hidden, ARMS[arm], layers=2, channels=channels)


def lane(*arms, seed=0, epochs=2, recipe=None, **more):
    models = [listener(arm, seed) for arm in arms]
    made = corpus(fig3_speech.made_up(), "cpu")
    recipe = recipe or Recipe(epochs, 1e-2, batch=8)
    return Lane(models, made, recipe, seed=seed, device="cpu", **more)


def singles(**more):
    """Each contender by itself, by the library's LSTM."""
    return [lane(arm, stacked=False, **more) for arm in ARMS]


def ended(*lanes):
    assert sorted(side_by_side(lanes)) == list(range(len(lanes)))
    return lanes


def test_texts_are_decoded_and_their_words_are_counted():
    assert ctc.decoded([2, 2, 0, 2, 1, 0, 3, 3, 1, 1]) == "AA B"
    assert ctc.decoded([0, 0]) == ""
    assert ctc.encoded("A B") == [2, 1, 3]
    with pytest.raises(ValueError, match="alphabet"):
        ctc.encoded("a")
    pairs = {("GO", "GO"): 0, ("GO ON", "GO"): 1, ("GO", "GO ON AND"): 2, ("A B C", "A X C D"): 2}
    for (said, heard), errors in pairs.items():
        assert ctc.word_errors(said, heard) == errors
    assert ctc.word_errors("A B", "") == 2


# Frames, texts: one symbol, one frame a symbol, repeats, as many frames as there have to be, none.
TEXTS = [(7, "A"), (5, "ABCDE"), (9, "AABBA"), (7, "AABBA"), (1, "Z"), (9, "A B BC"), (4, "")]


def losses(function, device, dtype):
    torch.manual_seed(0)
    frames = torch.tensor([n for n, _ in TEXTS], device=device)
    lengths = torch.tensor([len(text) for _, text in TEXTS], device=device)
    targets = torch.full((len(TEXTS), 6), 7, device=device)  # behind the end there may be anything
    for row, (_, text) in zip(targets, TEXTS, strict=True):
        row[: len(text)] = torch.tensor(ctc.encoded(text))
    x = 3 * torch.randn(len(TEXTS), 9, len(ctc.ALPHABET), dtype=torch.float64)
    x = x.to(device, dtype).requires_grad_()
    y = function(x.log_softmax(2), targets, frames, lengths)
    weight = torch.linspace(0.5, 2, len(TEXTS), device=device, dtype=dtype)
    return y.cpu(), torch.autograd.grad((weight * y).sum(), x)[0].cpu()


def torchs_loss(logp, targets, frames, lengths):
    return F.ctc_loss(logp.transpose(0, 1), targets, frames, lengths, reduction="none")


def test_the_loss_and_its_slope_equal_torchs():
    want = losses(torchs_loss, "cpu", torch.float64)
    assert want[0].isfinite().all()
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 2e-5)):  # 60 nats, 9 roundings
        for have, right in zip(losses(ctc.ctc_loss, "cpu", dtype), want, strict=True):
            assert (have - right).abs().max() <= bound


def test_cepstra_of_either_byte_order_are_read_and_others_refused(tmp_path):
    etc, feat = tmp_path / "an4" / "etc", tmp_path / "an4" / "feat" / "x"
    etc.mkdir(parents=True)
    feat.mkdir(parents=True)
    frames = torch.arange(26.0).view(2, 13).numpy()
    for part, order, line in (("train", "<", "<s> GO ON </s> (a)"), ("test", ">", "YES (b)")):
        name = line[-2]
        (etc / f"an4_{part}.fileids").write_text(f"x/{name}\n")
        (etc / f"an4_{part}.transcription").write_text(line + "\n")
        count = (26).to_bytes(4, "little" if order == "<" else "big")
        (feat / f"{name}.mfc").write_bytes(count + frames.astype(f"{order}f4").tobytes())
    read = data.an4(tmp_path)
    assert (read.train[1], read.test[1]) == (["GO ON"], ["YES"])
    assert torch.equal(read.train[0][0], torch.from_numpy(frames))
    assert torch.equal(read.test[0][0], read.train[0][0])
    (feat / "b.mfc").write_bytes(b"\0" * 12)
    with pytest.raises(ValueError, match="no file of cepstra"):
        data.an4(tmp_path)
    (etc / "an4_test.transcription").write_text("YES (c)\n")
    with pytest.raises(ValueError, match="not that of x/b"):
        data.an4(tmp_path)
    with pytest.raises(FileNotFoundError, match="an4/etc and an4/feat"):
        data.an4(tmp_path / "nowhere")


@pytest.mark.slow
@pytest.mark.skipif(
    not (SHARED / "speech" / "an4-mfcc13.tar.xz").exists(), reason="AN4 is not here"
)
def test_all_of_an4_is_read_and_cut_as_in_the_paper():
    read = data.an4(SHARED)
    assert (len(read.train[0]), len(read.test[0])) == (948, 130)
    assert [sum(len(t.split()) for t in texts) for _, texts in (read.train, read.test)] == [
        5442,
        773,
    ]
    made = corpus(read, "cpu")
    assert sum(len(p.x) for p in made.train) == 853
    assert (made.validation, len(made.texts)) == (95, 225)
    for part in made.judged:
        for k, own, n in zip(part.which, part.targets, part.lengths, strict=True):
            assert "".join(ctc.ALPHABET[s] for s in own[:n]) == made.texts[k]
    assert {p.x.shape[1] % speech_training.STRIDE for p in made.train} == {0}


def test_an_utterance_too_short_for_its_text_is_refused():
    with pytest.raises(ValueError, match="'AAB' needs 4 frames and has 3"):
        speech_training.parts([torch.randn(12, 13)], ["AAB"], [12], "cpu")


def test_contenders_start_from_the_same_function_and_see_the_same_batches():
    made = {arm: lane(arm) for arm in ARMS}
    part = made["standard"].data.judged[0]
    with torch.no_grad(), tg.kernels.use("reference"):
        outputs = {arm: own.models[0](part.x, part.frames) for arm, own in made.items()}
    for arm, y in outputs.items():  # sums of the same numbers in another order
        assert (y - outputs["standard"]).abs().max() <= 2e-5, arm
    batches = [planned(own.data.train, 8, 0, 3) for own in made.values()]
    for other in batches[1:]:
        assert all(torch.equal(a[1], b[1]) for a, b in zip(batches[0], other, strict=True))
    again = planned(made["standard"].data.train, 8, 1, 3)
    assert not all(torch.equal(a[1], b[1]) for a, b in zip(batches[0], again, strict=True))
    gates = {a: len(tg.training.gate_parameters(own.models[0])) for a, own in made.items()}
    assert gates["standard"] == 0 < gates["control"] == gates["constant"] < gates["released"]


def test_the_control_is_torchs_lstm_in_other_coordinates():
    (trained,) = ended(lane("control"))
    (model,) = trained.models
    moved = speech_training.moved(model)
    assert set(moved) == {f"{what} {site}" for what in ("rho", "dtheta") for site in "ifgo"}
    assert min(moved.values()) > 0
    x = torch.randn(7, 3, 8)
    plain = model.lstms[0].fold().to_torch()
    assert type(plain) is torch.nn.LSTM
    with tg.kernels.use("reference"):
        assert (plain(x)[0] - model.lstms[0](x)[0]).abs().max() <= 1e-5


def test_what_is_behind_the_end_of_an_utterance_is_not_heard_at_the_front():
    torch.manual_seed(0)
    model = Listener(6, {}, layers=1, channels=8)
    x, frames = torch.randn(1, 40, 13), torch.tensor([6])
    other = x.clone()
    other[:, 36:] = 9.0
    with torch.no_grad():  # convolutions reach five and ten frames beyond the end
        a, b = model(x, frames), model(other, frames)
    assert torch.equal(a, b)


def test_a_stack_is_its_networks():
    models = [listener(arm) for arm in ARMS]
    made = corpus(fig3_speech.made_up(), "cpu")
    part = made.judged[0]
    with torch.no_grad(), tg.kernels.use("reference"):
        want = torch.stack([model(part.x, part.frames) for model in models])
        counts = [sum(p.numel() for p in model.parameters()) for model in models]
        stack = Stack(models)
        assert (stack(part.x, part.frames) - want).abs().max() <= 2e-5  # as contenders differ
        assert all(
            torch.equal(m(part.x, part.frames), y) for m, y in zip(models, want, strict=True)
        )
    assert counts == [sum(p.numel() for p in model.parameters()) for model in models]
    for p in stack.parameters():
        p.data.fill_(0.5)
    assert all((p == 0.5).all() for model in models for p in model.parameters())


@pytest.mark.parametrize("clip", [400.0, 1.0])  # the second clips all of them
def test_a_step_of_a_stack_is_a_step_of_each(clip):
    recipe = Recipe(2, 1e-2, batch=8, clip=clip)
    together, apart = lane(*ARMS, recipe=recipe), singles(recipe=recipe)
    for own in (together, *apart):
        for group, base in zip(own.optimiser.param_groups, own.bases, strict=True):
            group["lr"].fill_(base)
        own.rows.copy_(torch.arange(8))
        own.learn[0]()
    for k, own in enumerate(apart):
        assert together.losses[k] == pytest.approx(own.losses.item(), rel=1e-5)
        pairs = zip(together.models[k].named_parameters(), own.models[0].parameters(), strict=True)
        norms = []
        for (name, ours), theirs in pairs:
            # sums of hundreds of float32 numbers in another order
            far = (ours.grad - theirs.grad).abs().max()
            assert far <= 1e-4 * theirs.grad.abs().max().clamp(min=0.01), name
            # the first step of AdamW is g / (|g| + 1e-8): of the size of the rate wherever g is
            # more than its own rounding
            sure = theirs.grad.abs() > 1e-4
            assert ((ours - theirs).abs()[sure] <= 1e-5).all(), name
            norms.append(ours.grad.norm())
        whole = torch.stack(norms).norm()
        assert whole == pytest.approx(1.0, rel=1e-4) if clip == 1.0 else whole > 1.0


def test_stacked_runs_have_the_curves_of_single_ones():
    (together,) = ended(lane(*ARMS))
    for k, own in enumerate(ended(*singles())):
        ours, theirs = together.figures(k), own.figures(0)
        assert ours.pop("stacked") == 4
        assert ours.keys() == theirs.keys()
        # AdamW makes a step of a gradient that is mere rounding, so paths part slowly
        assert ours["curve_loss"] == pytest.approx(theirs["curve_loss"], rel=2e-3)
        for name in ("parameters", "gate_parameters", "words", "curve_step"):
            assert ours[name] == theirs[name]
        assert ours["moved"] == pytest.approx(theirs["moved"], rel=0.05)


def test_what_a_contender_does_not_learn_stays_where_it_was():
    (own,) = ended(lane(*ARMS))
    first = Stack([listener(arm) for arm in ARMS]).gates
    changed = torch.cat([*own.net.gates.numbers()]) != torch.cat([*first.numbers()])
    changed = changed.unflatten(0, (2, 4, 2)).any(-1).any(2).any(0)  # [R, 5, 6]
    assert torch.equal(changed, first.learns[:, 0, 0, :, :, 0].bool())


def test_runs_side_by_side_are_the_runs_one_by_one():
    def three():
        yield from (lane("standard"), lane("constant"), lane("standard", seed=1))

    together = ended(*three())
    for a, own in zip(together, three(), strict=True):
        (b,) = ended(own)
        assert a.curves == b.curves
        assert a.figures(0)["errors"] == b.figures(0)["errors"]
    assert together[0].curves != together[2].curves


def test_a_stopped_lane_goes_on_to_the_same_curves(tmp_path):
    arms = ("standard", "released")
    (whole,) = ended(lane(*arms, epochs=12))
    kept = tmp_path / "state.pt"
    stopped = lane(*arms, epochs=12, kept=kept)
    while stopped.epoch < 11:
        next(stopped.course)
    (rest,) = ended(lane(*arms, epochs=12, kept=kept))
    assert rest.started_at > 0
    assert rest.curves == whole.curves
    assert not kept.exists()


def test_the_rate_rises_and_then_falls():
    recipe = Recipe(10, 1e-3, fall=0.9, rise=2)
    shares = [speech_training.schedule(recipe, epoch) for epoch in range(4)]
    assert shares == pytest.approx([0.5, 0.9, 0.81, 0.729])


@pytest.mark.slow
def test_it_learns_what_is_made_up():
    torch.manual_seed(0)
    model, made = Listener(24, ARMS["control"], layers=1, channels=24), fig3_speech.made_up()
    recipe = Recipe(60, 1e-2, batch=8, fall=0.98, every=20)
    (own,) = ended(Lane([model], corpus(made, "cpu"), recipe, seed=0, device="cpu"))
    (curve,) = own.curves
    assert curve[-1].loss < 0.1 * curve[0].loss
    assert curve[-1].test < 50


def test_a_run_that_diverges_ends_and_says_so():
    broken = lane("standard", epochs=8)
    with torch.no_grad():
        broken.models[0].symbols.bias.fill_(math.nan)
    ended(broken)
    assert broken.epoch == 2
    assert broken.figures(0)["wer"] == math.inf


def test_a_run_that_diverges_leaves_the_others_of_its_lane_unharmed(tmp_path):
    arms, kept = ("released", "standard", "constant"), tmp_path / "state.pt"
    (whole,) = ended(lane(*arms, epochs=12))
    broken = lane(*arms, epochs=12, kept=kept)
    with torch.no_grad():
        broken.models[0].lstms[0].gate_s_l0.fill_(math.nan)
    while broken.epoch < 11:
        next(broken.course)
    again = lane(*arms, epochs=12, kept=kept)  # goes on from a file with a broken run
    ended(broken, again)
    for own in (broken, again):
        assert len(own.curves[0]) == 1
        assert own.figures(0)["wer"] == math.inf
        assert own.curves[1:] == whole.curves[1:]
        assert own.figures(2)["errors"] == whole.figures(2)["errors"]


def test_cases_that_differ_in_the_contender_alone_share_a_lane():
    each = [(h, s, r, a) for h in (8, 16) for s in (0, 1) for r in (1e-3, 2e-3) for a in ARMS]
    cases = [{"kind": "train", "hidden": h, "seed": s, "rate": r, "arm": a} for h, s, r, a in each]
    lanes = fig3_speech.lane_cases(cases)
    assert [len(own) for own in lanes] == [4] * 8
    assert [case for own in lanes for case in own] == cases
    groups = [[own[0]["hidden"] for own in group] for group in fig3_speech.side_groups(lanes, 3)]
    assert groups == [[8] * 3, [8], [16] * 3, [16]]
    times = [{"kind": "time", "hidden": 8, "arm": arm} for arm in ARMS]
    assert [len(own) for own in fig3_speech.lane_cases(times)] == [1] * 4


def test_a_smoke_run_has_every_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(fig3_speech.record, "CHECKPOINTS", tmp_path)
    words = ["--smoke", "--device", "cpu", "--jobs", "4", "--out", str(tmp_path / "rows.jsonl")]
    two = ["--only", "arm=standard,constant"]
    rows = fig3_speech.main([*words, "--stage", "sweep", "runs", "time", *two])
    rows += fig3_speech.main([*words, "--stage", "start"])
    rows += fig3_speech.main([*words, "--stage", "continued", *two])
    kinds = [row.case["kind"] for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "train": 4, "time": 2, "start": 2, "continued": 2
    }  # fmt: skip
    first = [r.figures["curve_test"][0] for r in rows if r.case["kind"] == "continued"]
    assert first[0] == first[1]  # converted, it computes the same
    stacked = [row.figures.get("stacked") for row in rows if row.case["kind"] != "time"]
    assert stacked == [2, 2, 2, 2, 1, 1, 2, 2]
    assert all(row.smoke for row in rows)


def test_networks_that_go_on_have_the_best_rate_of_their_starts():
    asked = argparse.Namespace(smoke=False, epochs=60, after=20)
    starts = fig3_speech.cases("start", asked, [])
    assert [(case["hidden"], case["seed"]) for case in starts] == [(1024, 0)] * 3
    rows = [Row(case, {"validation": abs(case["rate"] - 3e-4)}, 1.0, False, {}) for case in starts]
    cases = fig3_speech.cases("continued", asked, rows)
    assert {case["rate"] for case in cases} == {3e-4}
    assert [case["kind"] for case in cases] == ["start"] * 3 + ["continued"] * 9
    with pytest.raises(SystemExit, match="run --stage start first"):
        fig3_speech.cases("continued", asked, rows[:2])


def test_runs_that_fail_together_stop_none_behind_them(monkeypatch):
    def failing(lanes, asked, data):
        for case in (case for own in lanes for case in own):
            if case["hidden"] == 8 and case["arm"] == "released":
                raise ValueError("no memory")
            yield case, {"wer": 1.0}

    monkeypatch.setattr(fig3_speech, "together", failing)
    cases = [
        {"kind": "train", "hidden": hidden, "seed": 0, "arm": arm}
        for hidden in (8, 16)
        for arm in ("standard", "released", "control")
    ]
    found = list(fig3_speech.run(cases, argparse.Namespace(jobs=1), None))
    assert [case for case, _, _ in found] == cases
    failed = ["no memory" in str(figures) for _, figures, _ in found]
    assert failed == [False, True, True, False, False, False]


def test_a_stage_without_rates_says_what_to_run_first(tmp_path):
    with pytest.raises(SystemExit, match="--stage sweep first"):
        fig3_speech.main(["--smoke", "--stage", "runs", "--out", str(tmp_path / "rows.jsonl")])


@pytest.mark.gpu
def test_the_loss_on_a_gpu_equals_torchs():
    pairs = (losses(ctc.ctc_loss, "cuda", torch.float32), losses(torchs_loss, "cpu", torch.float64))
    assert all((a - b).abs().max() <= 2e-5 for a, b in zip(*pairs, strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks at h
def test_recorded_steps_on_a_gpu_are_those_that_are_called(monkeypatch):
    def lanes():
        made, recipe = corpus(fig3_speech.made_up(), "cuda"), Recipe(4, 1e-2, batch=8)
        for arms, stacked in ((tuple(ARMS), True), *(((arm,), False) for arm in ARMS)):
            models = [listener(arm, hidden=16, channels=16) for arm in arms]
            yield Lane(models, made, recipe, seed=0, device="cuda", stacked=stacked)

    def losses(lanes):
        return [curve[-1].loss for own in lanes for curve in own.curves]

    recorded = ended(*lanes())
    assert all(own.recorded for own in recorded)
    assert losses(recorded[:1]) == pytest.approx(losses(recorded[1:]), rel=1e-2)  # TF32
    monkeypatch.setattr(Lane, "_record", lambda lane: None)
    called = ended(*lanes())
    assert not any(own.recorded for own in called)
    assert losses(recorded) == pytest.approx(losses(called), rel=1e-2)
