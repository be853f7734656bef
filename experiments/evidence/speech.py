"""Voice activity: Silero VAD."""

import wave

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.evidence.common import (
    DATA,
    Loaded,
    Outcome,
)

SILERO, SPEECH = "weights/silero-vad-16k-relu-lstm.safetensors", "speech/silero-vad-test.wav"


class Silero(nn.Module):
    """One step of voice activity detection: 512 samples, with the 64 before them."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, 128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, 1, 1)
        self.conv2 = nn.Conv1d(128, 64, 3, 2, 1)
        self.conv3 = nn.Conv1d(64, 64, 3, 2, 1)
        self.conv4 = nn.Conv1d(64, 128, 3, 1, 1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, samples: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        real, imaginary = self.stft_conv(F.pad(samples[:, None], (0, 64), "reflect")).chunk(2, 1)
        x = (real.square() + imaginary.square()).sqrt()
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = F.relu(convolution(x))
        h, c = self.lstm_cell(x.squeeze(-1), (h, c))
        return torch.sigmoid(self.final_conv(F.relu(h)[:, :, None])).flatten(), h, c


def silero(smoke: bool) -> Loaded:
    from safetensors.torch import load_file

    model = Silero().eval()
    model.load_state_dict(load_file(DATA / SILERO))
    with wave.open(str(DATA / SPEECH)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    sound = F.pad(torch.from_numpy(samples.astype(np.float32)) / 32768, (64, 0))
    steps = sound.unfold(0, 576, 512)[: 100 if smoke else None]
    silence = torch.zeros(1, 128)

    def evaluate(model: nn.Module) -> Outcome:
        h, c, curve = silence, silence, []
        for step in steps:
            p, h, c = model(step[None], h, c)
            curve.append(p)
        probability = torch.cat(curve)
        speech = probability > 0.5
        return Outcome({"speech %": 100 * speech.double().mean().item()}, speech, probability)

    return Loaded(model, (steps[50:51], silence, silence), evaluate)
