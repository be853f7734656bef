"""Tiny networks of transformers' architectures, from their configurations alone.

`TRANSFORMERS[name]()` gives (network, function that draws keyword arguments). A row names the type of the
configuration, what it differs in from `TINY`, its inputs, and the class if that is not AutoModel.
"""

import torch

VOCABULARY, LENGTH = 99, 10
# Set where a configuration has them; a row's own come last.
TINY = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_inner"), 48),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,  # with 0.02 and 32 channels activations stay where they are straight
    "init_std": 0.2,
    "use_cache": False,
}


def text():
    return {"input_ids": torch.randint(3, VOCABULARY, (2, LENGTH))}


def text_to_text():
    return {**text(), "decoder_input_ids": torch.randint(3, VOCABULARY, (2, LENGTH - 2))}


def image(size=32, channels=3):
    return lambda: {"pixel_values": torch.randn(2, channels, size, size)}


def image_and_text(size=32):
    return lambda: {**text(), **image(size)()}


def video(frames=2, size=32):
    return lambda: {"pixel_values": torch.randn(1, frames, 3, size, size)}


def sound(samples=800):
    return lambda: {"input_values": torch.randn(2, samples)}


def features(**shapes):
    return lambda: {name: torch.randn(shape) for name, shape in shapes.items()}


def with_ids(inputs, **shapes):
    return lambda: {
        **inputs(),
        **{name: torch.randint(3, VOCABULARY, shape) for name, shape in shapes.items()},
    }


def _row(inputs, kind=None, model="AutoModel", **differs):
    return lambda name: build(kind or name, model, differs, inputs)


def build(kind, model, differs, inputs):
    import transformers

    known = transformers.AutoConfig.for_model(kind)
    has = {**{k: v for k, v in TINY.items() if hasattr(known, k)}, **differs}
    has = {k: v for k, v in has.items() if v is not None}
    config = transformers.AutoConfig.for_model(kind, **_without_twins(known, has, differs))
    made = getattr(transformers, model)
    net = made.from_config(config) if model.startswith("Auto") else made(config)
    return net.eval(), inputs


def _without_twins(config, given, differs):
    """One name for each setting: `hidden_size` is another name of GPT-2's `n_embd`."""
    twins = getattr(config, "attribute_map", {})
    return {k: v for k, v in given.items() if k in differs or twins.get(k) not in given}


CONV = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
CONV |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
CONV |= {"num_feat_extract_layers": 2}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SWIN = {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4, "patch_size": 2}

ROWS = {
    # encoders
    **dict.fromkeys(
        ("bert", "roberta", "electra", "xlm-roberta", "camembert", "ernie"), _row(text)
    ),
    **dict.fromkeys(("distilbert", "mpnet", "roformer", "megatron-bert", "rembert"), _row(text)),
    **dict.fromkeys(("deberta", "convbert", "data2vec-text", "ibert", "layoutlm"), _row(text)),
    "albert": _row(text, embedding_size=16),
    "deberta-v2": _row(text, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "fnet": _row(text),
    "funnel": _row(
        text,
        model="FunnelModel",
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_head=8,
        n_head=4,
        num_hidden_layers=None,
    ),
    "modernbert": _row(text, local_attention=8),
    "mobilebert": _row(text, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "nystromformer": _row(text, num_landmarks=5, segment_means_seq_len=10),
    "squeezebert": _row(text, embedding_size=32),
    "xlnet": _row(text, n_head=4, d_head=8, max_position_embeddings=None),
    "xlm": _row(text),
    "longformer": _row(text, attention_window=4),
    "big_bird": _row(text, attention_type="original_full"),
    "yoso": _row(text, use_expectation=True),
    "canine": _row(
        with_ids(dict, input_ids=(2, 16)), downsampling_rate=4, local_transformer_stride=8
    ),
    "lilt": _row(
        lambda: {**text(), "bbox": torch.zeros(2, LENGTH, 4, dtype=torch.long)}, hidden_size=48
    ),
    "esm": _row(text, position_embedding_type="rotary"),
    # decoders
    **dict.fromkeys(("gpt2", "opt", "bloom", "llama", "mistral", "gemma"), _row(text)),
    **dict.fromkeys(("gpt_neox", "qwen2", "qwen3", "phi", "phi3"), _row(text)),
    **dict.fromkeys(("stablelm", "cohere", "olmo", "olmo2", "granite", "starcoder2"), _row(text)),
    **dict.fromkeys(("nemotron", "persimmon", "mpt", "biogpt", "xglm"), _row(text)),
    **dict.fromkeys(("gpt_bigcode", "smollm3", "glm", "helium", "ctrl"), _row(text)),
    "gptj": _row(text, rotary_dim=4),
    "codegen": _row(text, rotary_dim=4),
    "falcon": _row(text, head_dim=None),
    "gpt_neo": _row(text, attention_types=[[["global", "local"], 1]], window_size=4),
    "gemma2": _row(text, attn_logit_softcapping=2.0),  # with 50 the tanh is a straight line
    "gemma3_text": _row(text, layer_types=["sliding_attention", "full_attention"]),
    # attention written out instead of torch's own
    "bert-eager": _row(text, "bert", attn_implementation="eager"),
    "llama-eager": _row(text, "llama", attn_implementation="eager"),
    "t5-eager": _row(text_to_text, "t5", attn_implementation="eager"),
    "vit-eager": _row(image(), "vit", attn_implementation="eager"),
    # mixture of experts
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe"), _row(text)),
    **dict.fromkeys(("granitemoe", "gpt_oss", "jetmoe"), _row(text)),
    "deepseek_v2": _row(
        text,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    "deepseek_v3": _row(
        text,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
    ),
    "switch_transformers": _row(text_to_text, expert_capacity=8),
    "nllb-moe": _row(text_to_text, expert_capacity=8),
    # state space, recurrence, linear attention
    "mamba": _row(text, state_size=4, time_step_rank=4),
    "mamba2": _row(text, num_heads=8, head_dim=8, state_size=4, n_groups=2, chunk_size=4),
    "falcon_mamba": _row(text, state_size=4, time_step_rank=4),
    "jamba": _row(
        text,
        mamba_d_state=4,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        use_mamba_kernels=False,
    ),
    "bamba": _row(
        text,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=4,
        mamba_chunk_size=4,
        attn_layer_indices=[1],
    ),
    "zamba2": _row(
        text,
        mamba_d_state=4,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=1,
        chunk_size=4,
        layers_block_type=["mamba", "hybrid"],
    ),
    "recurrent_gemma": _row(text, lru_width=32, block_types=["recurrent", "attention"]),
    "rwkv": _row(text, attention_hidden_size=32),
    "xlstm": _row(
        text,
        num_heads=4,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
    ),
    # encoder and decoder
    **dict.fromkeys(
        ("t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus"), _row(text_to_text)
    ),
    **dict.fromkeys(("blenderbot", "m2m_100", "plbart", "mvp"), _row(text_to_text)),
    "marian": _row(text_to_text, decoder_vocab_size=VOCABULARY),
    "fsmt": _row(
        text_to_text, langs=["a", "b"], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY
    ),
    "led": _row(
        text_to_text,
        attention_window=4,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "prophetnet": _row(
        text_to_text,
        num_encoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        num_hidden_layers=None,
    ),
    # vision
    **dict.fromkeys(("vit", "deit", "dinov2", "ijepa"), _row(image())),
    "vit_mae": _row(image()),
    "beit": _row(image(), use_relative_position_bias=True, use_mask_token=True),
    "data2vec-vision": _row(image(), use_relative_position_bias=True),
    "swin": _row(image(), **SWIN),
    "swinv2": _row(image(), **SWIN),
    "convnext": _row(image(), **STAGES, patch_size=4),
    "convnextv2": _row(image(), **STAGES, patch_size=4),
    "resnet": _row(image(), **STAGES, embedding_size=8),
    "regnet": _row(image(), **STAGES, embedding_size=8, groups_width=8),
    "bit": _row(image(), **STAGES, embedding_size=8, num_groups=4),
    "mobilenet_v1": _row(image(), depth_multiplier=0.25, min_depth=4),
    "mobilenet_v2": _row(image(), depth_multiplier=0.25, min_depth=4),
    "mobilevit": _row(
        image(64),
        image_size=64,
        patch_size=2,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
    ),
    "efficientnet": _row(image(), width_coefficient=0.1, depth_coefficient=0.1, hidden_dim=128),
    "poolformer": _row(image(), **STAGES),
    "segformer": _row(
        image(),
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=16,
    ),
    "pvt_v2": _row(
        image(), hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2]
    ),
    "levit": _row(
        image(64),
        image_size=64,
        hidden_sizes=[16, 24, 32],
        depths=[1, 1, 1],
        num_attention_heads=[2, 2, 2],
        key_dim=[4, 4, 4],
        patch_size=16,
    ),
    "cvt": _row(
        image(), embed_dim=[8, 16, 32], num_heads=[1, 2, 4], depth=[1, 2, 3], patch_sizes=[7, 3, 3]
    ),
    "focalnet": _row(
        image(), embed_dim=8, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], patch_size=4
    ),
    "swiftformer": _row(image(64), depths=[1, 1, 1, 1], embed_dims=[8, 16, 24, 32]),
    "hiera": _row(
        image(),
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        patch_size=[7, 7],
        image_size=[32, 32],
        query_stride=[2, 2],
        num_query_pool=1,
        masked_unit_size=[4, 4],
    ),
    "glpn": _row(
        image(), hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 2]
    ),
    "yolos": _row(image(), image_size=[32, 32], num_detection_tokens=4),
    "dpt": _row(
        image(),
        is_hybrid=False,
        backbone_out_indices=[0, 1, 1, 1],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
    ),
    "swin2sr": _row(
        image(), embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4, patch_size=1
    ),
    "timesformer": _row(video(), num_frames=2),
    "videomae": _row(video(), num_frames=2, tubelet_size=2),
    "vivit": _row(video(), num_frames=2, tubelet_size=[2, 8, 8]),
    # sound
    **dict.fromkeys(("wav2vec2", "hubert", "unispeech", "wavlm"), _row(sound(), **CONV)),
    "sew": _row(sound(), **CONV, squeeze_factor=2),
    "data2vec-audio": _row(sound(), **CONV, num_conv_pos_embeddings_layers=1),
    "whisper": _row(
        with_ids(features(input_features=(2, 8, 16)), decoder_input_ids=(2, 6)),
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
    ),
    "speech_to_text": _row(
        with_ids(features(input_features=(2, 16, 8)), decoder_input_ids=(2, 6)),
        input_feat_per_channel=8,
        conv_channels=16,
        max_source_positions=32,
        max_target_positions=16,
    ),
    "audio-spectrogram-transformer": _row(
        features(input_values=(2, 24, 16)),
        num_mel_bins=16,
        max_length=24,
        frequency_stride=8,
        time_stride=8,
    ),
    "encodec": _row(
        features(input_values=(1, 1, 320)),
        hidden_size=16,
        num_filters=4,
        codebook_size=16,
        codebook_dim=16,
        num_lstm_layers=1,
        upsampling_ratios=[4, 2],
    ),
    "univnet": _row(
        features(input_features=(1, 6, 16)),
        num_mel_bins=16,
        model_hidden_channels=8,
        model_in_channels=8,
        kernel_predictor_hidden_channels=8,
        resblock_stride_sizes=[2, 2, 2],
    ),
    "fastspeech2_conformer": _row(
        text,
        num_mel_bins=8,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        encoder_linear_units=48,
        decoder_linear_units=48,
        duration_predictor_channels=16,
        energy_predictor_channels=16,
        pitch_predictor_channels=16,
        speech_decoder_postnet_units=16,
    ),
    # images and text
    "clip": _row(
        image_and_text(),
        text_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
        projection_dim=16,
    ),
    "siglip": _row(
        image_and_text(),
        text_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    "vilt": _row(image_and_text()),
    # time series
    "patchtst": _row(
        features(past_values=(2, 16, 2)),
        num_input_channels=2,
        context_length=16,
        patch_length=4,
        patch_stride=4,
    ),
}
TRANSFORMERS = {name: (lambda row=row, name=name: row(name)) for name, row in ROWS.items()}
