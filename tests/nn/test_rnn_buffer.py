"""Memory for folded weights: one buffer where cuDNN wants it."""

import pytest
import torch

from threshold_gating.nn import rnn_buffer

WEIGHTS = [torch.ones(6, 2), torch.ones(6, 3), torch.ones(6), torch.ones(6)]


def rooms(monkeypatch, length, starts):
    monkeypatch.setattr(rnn_buffer, "_are_in_one_buffer", lambda w: True)
    monkeypatch.setattr(rnn_buffer, "_offsets", lambda network: (length, starts))
    monkeypatch.setattr(rnn_buffer, "_layout", rnn_buffer._layout.__wrapped__)
    (found,) = rnn_buffer.rooms_for([WEIGHTS], "LSTM", 1)
    return found


def test_elsewhere_than_in_cudnn_weights_go_anywhere():
    assert rnn_buffer.rooms_for([WEIGHTS, WEIGHTS], "LSTM", 1) == [[None] * 4] * 2


@pytest.mark.parametrize(
    ("length", "starts"),
    [(42, (0, 12, 30, 36)), (42, (12, 24, 6, 0)), (50, (1, 20, 38, 44)), (50, (0, 13, 31, 37))],
)
def test_each_weight_has_its_place_and_gaps_are_0(monkeypatch, length, starts):
    found = rooms(monkeypatch, length, starts)
    flat = torch.empty(0).set_(found[0].untyped_storage())
    assert len(flat) == length
    want = torch.zeros(length)
    for k, (room, w, start) in enumerate(zip(found, WEIGHTS, starts, strict=True)):
        assert room.shape == w.shape
        assert room.is_contiguous()
        assert room.storage_offset() == start
        room.fill_(k + 1)
        want[start : start + w.numel()] = k + 1
    assert torch.equal(flat, want)


def test_what_is_written_to_one_is_no_change_of_another(monkeypatch):
    found = rooms(monkeypatch, 42, (0, 12, 30, 36))
    versions = [w._version for w in found[1:]]
    found[0].fill_(1)
    assert [w._version for w in found[1:]] == versions


def test_inference_has_rooms_as_well(monkeypatch):
    with torch.inference_mode():
        found = rooms(monkeypatch, 43, (0, 12, 30, 36))
        assert all(w.fill_(1).is_inference() for w in found)
