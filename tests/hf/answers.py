"""What an export says to the same questions, in this process or, run as a script, where maglev cannot be imported."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TEXTS = ["The <|bos|> state  of\n a 1234 é\U0001f9ea model is bounded. " * 3, "Once", ""]
NEW = 20


@torch.no_grad()
def answers(model: Any, tokenizer: Any) -> dict[str, Tensor]:
    """What is asked and of which text -> logits (T, V) of a text, or the tokens written after it."""
    found = {}
    for side in ("left", "right"):
        batch = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side=side)
        logits = model(**batch).logits
        for row, real in enumerate(batch["attention_mask"].bool()):
            found[f"logits padded {side}, {row}"] = logits[row, real]
    for row, text in enumerate(TEXTS):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        found[f"logits, {row}"] = model(ids).logits[0]
        cache, parts = None, []
        for part in ids.split(ids.shape[1] // 3 + 1, dim=1):
            output = model(part, past_key_values=cache)
            cache = output.past_key_values
            parts.append(output.logits[0])
        found[f"logits continued, {row}"] = torch.cat(parts)
        found[f"tokens, {row}"] = write(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0]
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    # an end would be filled up with padding, which a mask of ones then covers
    whole = {"eos_token_id": None, "return_dict_in_generate": True}
    first = model.generate(**batch, max_new_tokens=NEW // 2, do_sample=False, **whole)
    covers = torch.cat((batch["attention_mask"], torch.ones(len(TEXTS), NEW // 2, dtype=torch.int64)), dim=1)
    again = {"input_ids": first.sequences, "attention_mask": covers, "past_key_values": first.past_key_values}
    for row, written in enumerate(write(model, batch)):
        found[f"tokens padded, {row}"] = written
    for row, rest in enumerate(write(model, again, NEW // 2)):
        found[f"tokens continued, {row}"] = torch.cat((first.sequences[row, -NEW // 2 :], rest))
    return {name: tensor.contiguous() for name, tensor in found.items()}


def write(model: Any, given: Any, count: int = NEW) -> Tensor:
    """The likeliest tokens, to the end of the document or as many. -> (B, up to count)"""
    written = model.generate(**given, max_new_tokens=count, do_sample=False)
    return written[:, given["input_ids"].shape[1] :]


class Blocked:
    def find_spec(self, name: str, *_: Any) -> None:
        if name.split(".")[0] == "maglev":
            raise ImportError("maglev is not here")


def main(out: str, *folders: str) -> None:
    """Write the answers of each folder and its loss in training to OUT/NAME.safetensors. The last one is saved, loaded
    and asked again."""
    sys.meta_path.insert(0, Blocked())
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        found = answers(model, tokenizer)
        save_file(found | {"loss": trained_loss(model, tokenizer)}, f"{out}/{Path(folder).name}.safetensors")
    model.save_pretrained(f"{out}/saved")
    again = answers(AutoModelForCausalLM.from_pretrained(f"{out}/saved", trust_remote_code=True), tokenizer)
    assert all(torch.equal(again[name], found[name]) for name in found)
    assert not any(name.split(".")[0] == "maglev" for name in sys.modules)


def trained_loss(model: Any, tokenizer: Any) -> Tensor:
    """That of the objective. It must have gradients."""
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    return loss.detach()


if __name__ == "__main__":
    main(*sys.argv[1:])
