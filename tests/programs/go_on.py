"""Train converted Hugging Face models with the Trainer, from the start or from a checkpoint.

    go_on.py NAME CHECKPOINT OUT ...

goes on from each checkpoint and writes the state dict after the last step to OUT.
"""

import sys
import tempfile

import torch
import transformers

import threshold_gating as tg

SIZES = {"vocab_size": 67, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(3, 67, (16, 6), generator=torch.Generator().manual_seed(1))


def bert():
    config = transformers.BertConfig(**SIZES, intermediate_size=24)
    return transformers.BertForMaskedLM(config)


def gpt2():
    special = {"bos_token_id": 0, "eos_token_id": 0, "n_inner": 24}
    config = transformers.GPT2Config(vocab_size=67, n_embd=16, n_layer=2, n_head=2, **special)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


NETWORKS = {"bert": bert, "gpt2": gpt2, "llama": llama}


def network(name):
    """A small network with dropout and random weights, converted, with gates that learn."""
    torch.manual_seed(0)
    options = {"train": "tau", "share": "channel", "inputs": {"input_ids": IDS[:2]}}
    return tg.convert(NETWORKS[name](), strict=False, **options)  # other tests certify


def trainer(model, folder, **options):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **options,
    )
    data = [{"input_ids": row, "labels": row} for row in IDS]
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)


if __name__ == "__main__":
    words = iter(sys.argv[1:])
    for name, checkpoint, out in zip(words, words, words, strict=True):
        model = network(name)
        with tempfile.TemporaryDirectory() as folder:
            trainer(model, folder).train(resume_from_checkpoint=checkpoint)
        torch.save(model.state_dict(), out)
    print("ok")
