"""Makes the numbers the models are tested against: `python make.py [NAME...]`, with torch, torchvision
and transformers installed, writes NAME.json beside this file for each model below.

Nothing but results is stored. Weights, inputs and targets follow from a formula over names and indices
that `main.rs` has too: `value(name, i)` below is its `value`.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F

STEPS, LR, DECAY = 10, 1e-3, 0.1


def bits(name, n):
    """n numbers of 64 bits: the finaliser of splitmix64 over an FNV-1a hash of the name and the index."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        x = np.uint64(h) + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def values(name, *shape):
    """Uniform in [-1, 1)."""
    n = int(np.prod(shape))
    v = (bits(name, n) >> np.uint64(40)).astype(np.float64) / 2**23 - 1.0
    return torch.tensor(v, dtype=torch.float32).reshape(shape)


def numbers(name, below, *shape):
    n = int(np.prod(shape))
    return torch.tensor((bits(name, n) % np.uint64(below)).astype(np.int64)).reshape(shape)


@torch.no_grad()
def set_weights(model):
    for name, p in model.named_parameters():
        v = values(name, *p.shape)
        if p.dim() >= 2:  # variance one over the values behind the first dimension
            v *= (3 * p.shape[0] / p.numel()) ** 0.5
        else:  # scales near one, shifts near zero
            v = v * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        p.copy_(v)


def oracle(name, model, loss):
    torch.manual_seed(0)
    model.train()
    set_weights(model)
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, grads = [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        losses.append(value.item())
        if step == 0:
            for key, p in params.items():
                g = p.grad.double().flatten()
                at = [int(i) for i in numbers(key + "/at", g.numel(), 3)]
                grads[key] = {"norm": g.norm().item(), "at": at, "values": [g[i].item() for i in at]}
        optimizer.step()
    rows = ",\n".join(f'    "{key}": {json.dumps(g)}' for key, g in grads.items())
    text = f'{{\n  "losses": {json.dumps(losses)},\n  "grads": {{\n{rows}\n  }}\n}}\n'
    (pathlib.Path(__file__).parent / f"{name}.json").write_text(text)
    print(name, losses)


def next_token(batch, length, vocab):
    tokens = numbers("tokens", vocab, batch, length + 1)
    return lambda model: F.cross_entropy(
        model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
    )


def pictures(batch, height, width, channels, classes):
    """Pictures are (height, width, channels) by the formula, and turned to what torch takes."""
    x = values("pictures", batch, height, width, channels).permute(0, 3, 1, 2).contiguous()
    y = numbers("classes", classes, batch)
    return x, y


def gpt():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=37, n_positions=80, n_embd=24, n_layer=2, n_head=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
    )
    return GPT2LMHeadModel(config), next_token(3, 70, 37)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=80, rms_norm_eps=1e-6, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    return LlamaForCausalLM(config), next_token(3, 70, 37)


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=80, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
        pad_token_id=None,  # otherwise that token's row has no gradient, even where it is seen
    )
    tokens, classes = numbers("tokens", 37, 6, 70), numbers("classes", 5, 6)
    lengths = 1 + numbers("lengths", 70, 6)
    mask = (torch.arange(70)[None, :] < lengths[:, None]).long()
    return BertForSequenceClassification(config), lambda model: F.cross_entropy(
        model(tokens, attention_mask=mask).logits, classes
    )


def vit():
    from torchvision.models.vision_transformer import VisionTransformer

    x, y = pictures(4, 12, 12, 3, 5)
    model = VisionTransformer(
        image_size=12, patch_size=4, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=48, num_classes=5
    )
    return model, lambda model: F.cross_entropy(model(x), y)


MODELS = {f.__name__: f for f in (gpt, llama, bert, vit)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        oracle(name, *MODELS[name]())
