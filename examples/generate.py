"""Answers a question with a D2F model, at once and while it is decoded.

1. Load the model and its tokenizer: a D2F folder, or an original checkpoint with a released D2F adapter.
2. Make the prompt.
3. Generate with pipelined decoding, and print the text, tokens per forward and tokens per second.
4. Generate again, and print the draft after each step: decoded tokens, and a shade for each one that is not.

Without arguments it makes the reference model of this repository and answers one of its word problems, on a CPU and in
a few seconds:

    python examples/generate.py

LLaDA-8B with the released adapter, on a GPU:

    python examples/generate.py \\
        --model GSAI-ML/LLaDA-8B-Instruct --adapter SJTU-Deng-Lab/D2F_LLaDA_Instruct_8B_Lora \\
        --dtype bfloat16 --device cuda --max-new-tokens 256 \\
        --question "How many minutes are there in a day?"
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from d2f_hf import load_d2f_model

sys.path.insert(0, str(Path(__file__).resolve().parent / "reference_model"))

import reference_models  # noqa: E402
from word_problems import make_problems  # noqa: E402

SHADE = "░"


def main(arguments: Sequence[str] | None = None) -> str:
    """Runs the steps 1 to 4 and gives the answer."""
    args = parse_arguments(arguments)
    logging.disable_progress_bar()
    question = args.question or make_problems("test", 1)[0].question

    # 1. The model.
    with tempfile.TemporaryDirectory() as temporary:
        if args.model is None:
            args.model = str(Path(temporary) / "my-d2f-model")
            reference_models.export(reference_models.HERE, Path(args.model))
        model = load_d2f_model(args.model, args.adapter, dtype=args.dtype).to(args.device)
        # Without the configuration transformers would ask whether to run the code of an original checkpoint.
        tokenizer = AutoTokenizer.from_pretrained(args.model, config=model.config)

    # 2. The prompt.
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(args.device)
    length = inputs["input_ids"].shape[1]

    # 3. All at once. The first call of a process is slow, so it is not timed.
    options = {"max_new_tokens": args.max_new_tokens, "confidence_threshold": args.confidence_threshold}
    model.generate(**inputs, **options)
    start = time.perf_counter()
    output = model.generate(**inputs, **options, decoding="d2f", return_dict_in_generate=True)
    response = output.sequences[0, length:].tolist()  # on the host, so a GPU has finished
    seconds = time.perf_counter() - start
    answer = tokenizer.decode(response, skip_special_tokens=True).strip()
    tokens_per_forward = float(output.tokens_per_forward[0])
    print(f"{question}\n\n{answer}\n")
    print(f"{tokens_per_forward:.1f} tokens per forward, {len(response) / seconds:.0f} tokens/s\n")

    # 4. Step by step. `add` takes more requests at any time; all are decoded in one batch.
    stream = model.open_stream(max_batch_size=1, max_prompt_length=length, **options)
    stream.add(inputs["input_ids"][0])
    tokens = inputs["input_ids"].new_empty(0)
    while stream.has_unfinished:
        for update in stream.step():
            tokens = torch.cat([tokens, update.tokens])
            print(draft_text(tokenizer, torch.cat([tokens, update.draft]).tolist()))
    return answer


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or Hub id; the reference model by default")
    parser.add_argument("--adapter", help="folder or Hub id of a D2F adapter for it")
    parser.add_argument("--question", help="a word problem by default")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--confidence-threshold", type=float, help="0.9 if neither this nor the model says otherwise")
    parser.add_argument("--dtype", default="auto", help="such as bfloat16; that of the weights by default")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args(arguments)


def draft_text(tokenizer, token_ids: Sequence[int]) -> str:
    """The tokens on one line, with a shade for each mask token."""
    pieces = [SHADE if token == tokenizer.mask_token_id else tokenizer.decode([token]) for token in token_ids
              if token == tokenizer.mask_token_id or token not in tokenizer.all_special_ids]  # fmt: skip
    return "".join(pieces).replace("\n", " ").strip()


if __name__ == "__main__":
    main()
