"""Computes the reference numbers of the model tests: `python make.py [NAME...]`, with torch, torchvision
and transformers installed, writes NAME.json beside this file for each model below.

Only results are stored. Weights, inputs and targets come from a formula over names and indices that
`case.rs` implements too: `bits` below is its `bits`.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

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


def oracle(name, model, loss, lr=LR, wide=False):
    """`wide` computes in f64: a deep network of batch norms amplifies the last digit of f32 to a hundredth."""
    torch.manual_seed(0)
    model.train()
    set_weights(model)
    if wide:
        model.double()
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
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
    running = [(key, b.double()) for key, b in model.named_buffers() if "running" in key]
    stats = {key: {"norm": b.norm().item(), "first": b[0].item()} for key, b in running}
    parts = []
    for part, found in (("grads", grads), ("stats", stats)):
        rows = ",\n".join(f'    "{key}": {json.dumps(g)}' for key, g in found.items())
        parts.append(f'  "{part}": {{\n{rows}\n  }}')
    text = f'{{\n  "lr": {lr},\n  "losses": {json.dumps(losses)},\n' + ",\n".join(parts) + "\n}\n"
    (pathlib.Path(__file__).parent / f"{name}.json").write_text(text)
    print(name, losses)


def next_token(batch, length, vocab):
    tokens = numbers("tokens", vocab, batch, length + 1)
    return lambda model: F.cross_entropy(
        model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
    )


def pictures(batch, height, width, channels, classes):
    """The formula gives images as (height, width, channels); permuted to the (channels, height, width) of torch."""
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


def tell(batch, height, width, channels, classes):
    x, y = pictures(batch, height, width, channels, classes)
    return lambda model: F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y)


def resnet18():
    from torchvision.models import resnet18

    model = resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    return model, tell(2, 16, 16, 3, 10), 1e-5, True


def resnet50():
    from torchvision.models import resnet50

    return resnet50(num_classes=10), tell(2, 64, 64, 3, 10), 1e-5, True


def mobilenet():
    from torchvision.models import mobilenet_v2

    return mobilenet_v2(num_classes=10, width_mult=0.5, dropout=0.0), tell(3, 64, 64, 3, 10), 1e-4, True


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * 5 * 7, 33), nn.Linear(33, 17), nn.Linear(17, 5)])

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def mlp():
    return Mlp(), tell(6, 5, 7, 2, 5)


class Stage(nn.Conv2d):
    def __init__(self, inputs, outputs, kernel, stride, pool, norm):
        super().__init__(inputs, outputs, kernel, stride, kernel // 2, bias=norm is None)
        self.norm, self.pool = norm, pool

    def forward(self, x):
        x = super().forward(x)
        x = F.gelu(x if self.norm is None else self.norm(x))
        return x if self.pool == 1 else F.max_pool2d(x, self.pool)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([
            Stage(2, 8, 3, 1, 2, None),
            Stage(8, 12, 5, 2, 1, nn.BatchNorm2d(12)),
            Stage(12, 16, 3, 1, 2, nn.GroupNorm(16, 16)),
        ])
        self.layers = nn.ModuleList([nn.Linear(16 * 2 * 3, 20), nn.Linear(20, 5)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.layers[1](F.gelu(self.layers[0](x.flatten(1))))


def cnn():
    return Cnn(), tell(4, 19, 23, 2, 5), LR, True


class Group(nn.Module):
    """A residual block whose branch and shortcut are lists of layers."""

    def __init__(self, layers, shortcut):
        super().__init__()
        self.layers, self.shortcut = nn.Sequential(*layers), nn.Sequential(*shortcut)

    def forward(self, x):
        return F.relu(self.layers(x) + self.shortcut(x))


def layers():
    from torchvision.ops import SqueezeExcitation

    way = [
        nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.BatchNorm2d(8), nn.SiLU(),
        nn.Conv2d(8, 12, 1, bias=False), nn.GroupNorm(3, 12), SqueezeExcitation(12, 3),
    ]
    model = nn.ModuleDict({"layers": nn.Sequential(
        nn.Conv2d(2, 8, 3, 1, 2, dilation=2), nn.ReLU(), nn.AvgPool2d(2),
        Group(way, [nn.Conv2d(8, 12, 1, 2)]),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 5),
    )})
    # `global_pool` already returns vectors: without the flatten after it, later layers have indices one lower.
    sequence = model["layers"]
    del sequence[5]
    sequence[4] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    loss = tell(4, 13, 11, 2, 5)
    return model, lambda model: loss(model["layers"]), LR, True


MODELS = {f.__name__: f for f in (gpt, llama, bert, vit, mlp, cnn, resnet18, resnet50, mobilenet, layers)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or MODELS:
        oracle(name, *MODELS[name]())
