"""`train_ddp.py` with its DDP line replaced by three of ours: torchrun --nproc-per-node 2 train_torch.py"""

import glob
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import memopt

file = sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py"))[0]  # real text that every machine has
text = torch.frombuffer(bytearray(open(file, "rb").read()), dtype=torch.uint8)


def batches(rank, num_steps):
    """Four sequences of 64 bytes for each rank and step."""
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        starts = torch.randint(len(text) - 64, (4,), generator=generator)
        yield torch.stack([text[start : start + 64] for start in starts]).long()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    policy = Path(__file__).with_name("policy.yaml")
    run = memopt.apply_policy(model, policy, optimizer=optimizer)
    model = run.model
    for step, tokens in enumerate(batches(dist.get_rank(), num_steps=8)):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach().clone())
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
