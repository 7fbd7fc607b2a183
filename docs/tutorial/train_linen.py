"""A flax linen training script under a memory policy: python train_linen.py [POLICY]"""

import glob
import sys
import sysconfig
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import memopt


class Mlp(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(4 * self.width, name="up_proj")(x))
        return nn.Dense(self.width, name="down_proj")(y)


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(y, mask=nn.make_causal_mask(y[..., 0]))
        return x + Mlp(self.width, name="mlp")(x)


class Model(nn.Module):
    vocab: int = 256
    width: int = 64
    num_layers: int = 3

    def setup(self):
        self.embed = nn.Embed(self.vocab, self.width)
        self.layers = [Block(self.width) for _ in range(self.num_layers)]
        self.head = nn.Dense(self.vocab)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batches(num_steps):
    """Eight sequences of 65 bytes for each step."""
    file = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))[0]  # real text that every machine has
    text = np.frombuffer(open(file, "rb").read(), np.uint8)
    generator = np.random.default_rng(0)
    for starts in generator.integers(0, len(text) - 65, (num_steps, 8)):
        yield jnp.asarray(np.stack([text[start : start + 65] for start in starts]), jnp.int32)


def main(policy):
    example = jnp.zeros((8, 64), jnp.int32)
    variables = Model().init(jax.random.key(0), example)
    run = memopt.apply_policy(Model(), policy, params=variables, example_inputs=(example,))
    optimizer = run.optimizer(optax.adamw(1e-3))

    def train_step(params, opt_state, tokens):
        def loss_fn(params):
            logits = run.model.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        params, opt_state = optimizer.update_and_apply(gradients, opt_state, params)
        return params, opt_state, loss

    step = run.step(train_step)
    params, opt_state = variables, optimizer.init(variables)
    for number, tokens in enumerate(batches(8)):
        params, opt_state, loss = step(params, opt_state, tokens)
        print(f"step {number} loss {float(loss):.9f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("policy.yaml"))
