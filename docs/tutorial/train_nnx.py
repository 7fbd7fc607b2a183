"""A flax nnx training script under a memory policy: python train_nnx.py [POLICY]"""

import glob
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import memopt


class Mlp(nnx.Module):
    def __init__(self, width, *, rngs):
        self.up_proj = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down_proj = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(nnx.gelu(self.up_proj(x)))


class Block(nnx.Module):
    def __init__(self, width, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=width, decode=False, rngs=rngs)
        self.mlp = Mlp(width, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        x = x + self.attention(y, mask=nnx.make_causal_mask(y[..., 0]))
        return x + self.mlp(x)


class Model(nnx.Module):
    def __init__(self, *, vocab=256, width=64, layers=3, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rngs=rngs) for _ in range(layers)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(model, optimizer, tokens):
    loss, gradients = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, gradients)
    return loss


def batches(num_steps):
    """Eight sequences of 65 bytes for each step."""
    file = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))[0]  # real text that every machine has
    text = np.frombuffer(open(file, "rb").read(), np.uint8)
    generator = np.random.default_rng(0)
    for starts in generator.integers(0, len(text) - 65, (num_steps, 8)):
        yield jnp.asarray(np.stack([text[start : start + 65] for start in starts]), jnp.int32)


def main(policy):
    model = Model(rngs=nnx.Rngs(0))
    example = jax.ShapeDtypeStruct((8, 64), jnp.int32)
    run = memopt.apply_policy(model, policy, example_inputs=(example,))
    optimizer = run.optimizer(optax.adamw(1e-3))
    step = run.step(train_step)
    for number, tokens in enumerate(batches(8)):
        print(f"step {number} loss {float(step(model, optimizer, tokens)):.9f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("policy.yaml"))
