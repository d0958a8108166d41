"""What each process of a pool runs: unmodified Hugging Face models from configs, untouched and divided, compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

import distributedtorch as dt
from distributedtorch.distribute import release

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 61}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, vocab_size=61, num_key_value_heads=2))


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, **NO_DROPOUT, vocab_size=61))


def vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**SMALL, **NO_DROPOUT, image_size=16, patch_size=8, num_labels=5))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "t5": t5}


def rows(name: str) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    if name == "vit":
        images = torch.randn(21, 3, 16, 16, generator=draw)
        return [{"pixel_values": image, "labels": torch.tensor(k % 5)} for k, image in enumerate(images)]
    words = torch.randint(1, 61, (21, 12), generator=draw)
    return [{"input_ids": row, "labels": row.roll(1)} for row in words]


def train(name: str, distribute: Callable[..., Any], order: int = 0) -> dict[str, Tensor]:
    """Train a few steps; `order` above 0: with the rows of every batch in another order."""
    torch.manual_seed(1)
    model = MODELS[name]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(rows(name), batch_size=5, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = distribute(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        if order:
            mixed = torch.randperm(len(batch["labels"]), generator=torch.Generator().manual_seed(order))
            batch = {key: value[mixed] for key, value in batch.items()}
        model(**batch).loss.backward()
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _untouched(*objects: Any) -> Any:
    return objects


def _gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """Largest difference of a parameter to its size, where that is not next to nothing (a bias whose gradient is 0)."""
    gaps = {k: float((other[k] - v).norm() / v.norm().clamp_min(1e-3)) for k, v in one.items()}
    return max((gap, name) for name, gap in gaps.items())


def main(done: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or MODELS:
        truth = train(name, _untouched)
        noise = max(_gap(truth, train(name, _untouched, order))[0] for order in (1, 2, 3))
        found = train(name, lambda *objects: dt.distribute(*objects, plan="zero3"))
        gap, where = _gap(truth, found)
        if dt.is_main():
            with done.open("a") as file:
                print(json.dumps({"model": name, "difference": gap, "noise": noise, "where": where}), file=file)
        release()


if __name__ == "__main__":
    dt.barrier()
    main(Path(sys.argv[1]), sys.argv[2:])
