"""Talk to a trained model or adapter.

python recipes/chat.py --model runs/grpo                 # interactive, end with an empty line
python recipes/chat.py --model runs/grpo --prompt "45 + 41"
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Answer one prompt, or chat."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Folder or Hub id of a model or adapter.")
    parser.add_argument("--prompt", help="Answer this and exit.")
    parser.add_argument("--system", help="System message; unset: the opening the model was trained with, if saved.")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    options = parser.parse_args()
    # peft asks by the old name of a property that transformers renamed.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    is_adapter = (Path(options.model) / "adapter_config.json").exists()
    loader = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    model = loader.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    opening = Path(options.model) / "conversation.json"
    if options.system:
        history = [{"role": "system", "content": options.system}]
    else:
        history = json.loads(opening.read_text()) if opening.exists() else []

    def answer(text: str) -> str:
        history.append({"role": "user", "content": text})
        rendered = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(rendered, return_tensors="pt", add_special_tokens=False)
        output = model.generate(
            **inputs, max_new_tokens=options.max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        reply = str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        history.append({"role": "assistant", "content": reply})
        return reply

    if options.prompt is not None:
        print(answer(options.prompt))
        return
    while True:
        try:
            text = input("you> ").strip()
        except EOFError:
            return
        if not text:
            return
        print(answer(text))


if __name__ == "__main__":
    main()
