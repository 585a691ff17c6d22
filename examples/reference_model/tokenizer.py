"""Trains the reference model's tokenizer: a byte-pair tokenizer of 1,024 entries with one token for each number 0-199.

python examples/reference_model/tokenizer.py --output examples/reference_model/tokenizer
"""

import argparse

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from word_problems import make_problems

VOCAB_SIZE = 1024
SPECIAL_TOKENS = {"pad_token": "<|pad|>", "eos_token": "<|eos|>", "unk_token": "<|unk|>", "mask_token": "<|mask|>"}
TURNS = ["<|user|>", "<|assistant|>"]
# A space belongs to the word or number after it. The template therefore writes one before each turn's text.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ '<|eos|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(count: int = 20_000, seed: int = 0) -> PreTrainedTokenizerFast:
    """Trains on the text of `count` training problems."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    pieces = Regex(r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS.values(), *TURNS],
        initial_alphabet=[chr(code) for code in range(32, 127)] + ["\n"],
        show_progress=False,
    )
    texts = [f" {text}" for p in make_problems("train", count, seed) for text in (p.question, p.solution)]
    # Far more frequent than anything else, so that the first merges make each of these numbers a single token.
    numbers = [f" {number}" for number in range(200)] * len(texts)
    tokenizer.train_from_iterator(texts + numbers, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        additional_special_tokens=TURNS,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", default="examples/reference_model/tokenizer")
    args = parser.parse_args()
    train_tokenizer().save_pretrained(args.output)


if __name__ == "__main__":
    main()
