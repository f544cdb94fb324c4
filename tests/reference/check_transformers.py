"""Holds the numpy decoder to Hugging Face transformers: loads every tiny checkpoint as float64 with eager attention and
compares logits, and the tokenizer's ids. Not part of `make test`, as torch is large:

    pip install numpy torch transformers && python tests/reference/check_transformers.py [FOLDER]
"""

import json
import pathlib
import sys

import torch
import transformers

TEXT = "Hello, wörld: 3 snowmen ☃\n<|end|>"


def main():
    default = pathlib.Path(__file__).parents[2] / ".cache/tiny"
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for folder in sorted(path.parent for path in root.glob("*/reference.json")):
        print(f"{folder.name}: largest difference of a logit {difference(folder):.1e}, ids {ids(folder)}")


def difference(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    worst = 0.0
    for prompt in json.loads((folder / "reference.json").read_text())["prompts"]:
        with torch.no_grad():
            got = model(torch.tensor([prompt["ids"]])).logits[0, prompt["positions"]]
        worst = max(worst, (got - torch.tensor(prompt["logits"], dtype=torch.float64)).abs().max().item())
    return worst


def ids(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]


if __name__ == "__main__":
    main()
