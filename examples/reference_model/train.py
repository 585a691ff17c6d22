"""Makes the reference models: an autoregressive twin, a diffusion teacher that starts from it, and its D2F student.

One resumable command; each stage is skipped when its weights are already there and resumes from its last checkpoint.

    python examples/reference_model/train.py                 # everything that is missing
    python examples/reference_model/train.py --stage twin    # one stage

Data order, initial weights and noise follow from SEED; the log of each stage is in logs/<stage>.jsonl.
"""

import argparse
import hashlib
import json
import random
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from d2f_hf import (
    D2FDataCollator,
    D2FLLaDAForBlockDiffusion,
    D2FTrainer,
    D2FTrainingArguments,
    diffusion_model_from_autoregressive,
)
from word_problems import make_problem

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "runs" / "reference_model"  # checkpoints; not committed
SEED = 0
BATCH_SIZE = 64
GROUP = 32 * BATCH_SIZE
TRAINING_BLOCK_SIZE = 16
DECODING_BLOCK_SIZE = 5  # in the configuration; docs/log.md says why it is another one
TWIN_PROBLEMS = 288_000
TEACHER_PROBLEMS = 147_200
STUDENT_PROBLEMS = 76_800
LONGEST_TAIL = 190  # EOS tokens behind a solution; with the solutions' 40 to 96 tokens, generation lengths up to 256


def load_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(HERE / "tokenizer")


def training_set(tokenizer: PreTrainedTokenizerBase, count: int, seed: int, tails: bool) -> Dataset:
    """`count` tokenised training problems: `input_ids`, and `prompt_length` tokens of them are the prompt.

    Batches hold problems of similar length, in random order: they are cut from shuffled runs of `GROUP` problems that
    are sorted by length. So the rows have to be read in order. `datasets` keeps them on disk once they are made. With
    `tails` the responses of each batch go on with the same random number of EOS tokens, mostly few of them; without
    that a diffusion model reads the length of the solution from the number of masks.
    """
    sources = (Path(__file__), HERE / "word_problems.py", HERE / "tokenizer" / "tokenizer.json")
    version = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    return Dataset.from_generator(
        _generate_in_batches,
        gen_kwargs={"tokenizer": tokenizer, "count": count, "seed": seed, "tails": tails},
        cache_dir=str(RUNS / "data"),
        fingerprint=f"problems-{count}-{seed}-{tails}-{version}",
    )


def _generate_in_batches(tokenizer: PreTrainedTokenizerBase, count: int, seed: int, tails: bool):
    rng = random.Random(seed)
    answer_starts = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for start in range(0, count, GROUP):
        problems = [make_problem("train", seed, index) for index in range(start, min(start + GROUP, count))]
        texts = tokenizer.apply_chat_template([problem.messages for problem in problems], tokenize=False)
        rows = sorted(tokenizer(texts, add_special_tokens=False)["input_ids"], key=len)
        batches = [rows[first : first + BATCH_SIZE] for first in range(0, len(rows), BATCH_SIZE)]
        rng.shuffle(batches)
        for batch in batches:
            tail = [tokenizer.eos_token_id] * (int(LONGEST_TAIL * rng.random() ** 4) if tails else 0)
            for input_ids in batch:
                yield {"input_ids": input_ids + tail, "prompt_length": input_ids.index(answer_starts) + 1}


def padded_length(longest: int) -> int:
    """Few different lengths, so that torch.compile makes few kernels."""
    return max(128, -(-longest // 32) * 32)


def collate_for_twin(examples: list[dict], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids` [B, L] and `labels` [B, L], -100 in prompt and padding."""
    length = padded_length(max(len(example["input_ids"]) for example in examples))
    input_ids = torch.full((len(examples), length), pad_token_id)
    labels = torch.full((len(examples), length), -100)
    for row, example in enumerate(examples):
        ids = torch.tensor(example["input_ids"])
        input_ids[row, : len(ids)] = ids
        labels[row, example["prompt_length"] : len(ids)] = ids[example["prompt_length"] :]
    return {"input_ids": input_ids, "labels": labels}


class JsonLinesLog(TrainerCallback):
    """Appends every log entry of the Trainer to logs/<stage>.jsonl. A resumed run goes on after its checkpoint's."""

    def __init__(self, stage: str):
        self.path = HERE / "logs" / f"{stage}.jsonl"

    def on_train_begin(self, args, state, control, **kwargs):
        self.path.parent.mkdir(exist_ok=True)
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        self.path.write_text("".join(line for line in lines if json.loads(line)["step"] <= state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": state.global_step, **(logs or {})}) + "\n")


def common_arguments(stage: str) -> dict:
    return {
        "output_dir": str(RUNS / stage),
        "per_device_train_batch_size": BATCH_SIZE,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.05},
        "adam_beta2": 0.98,
        "weight_decay": 0.05,
        "bf16": True,
        "torch_compile": True,
        "logging_steps": 50,
        "save_steps": 500,
        "save_total_limit": 1,
        "seed": SEED,
        "report_to": "none",
        "remove_unused_columns": False,
        "use_cpu": not torch.cuda.is_available(),
    }


def run(trainer: Trainer, stage: str) -> None:
    trainer.add_callback(JsonLinesLog(stage))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(RUNS / stage)) if (RUNS / stage).is_dir() else None)


def train_twin() -> None:
    """The autoregressive model: next-token prediction on the solutions."""
    tokenizer = load_tokenizer()
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Eager attention: on a CPU its backward pass is several times as fast as that of scaled_dot_product_attention.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    args = TrainingArguments(**common_arguments("twin"), learning_rate=2e-3, warmup_steps=200)
    trainer = Trainer(
        model,
        args,
        train_dataset=training_set(tokenizer, TWIN_PROBLEMS, seed=SEED, tails=False),
        data_collator=partial(collate_for_twin, pad_token_id=tokenizer.pad_token_id),
    )
    run(trainer, "twin")
    save(model, "twin")


def teacher_from_twin(tokenizer: PreTrainedTokenizerBase) -> D2FLLaDAForBlockDiffusion:
    """A LLaDA model with the twin's weights, whose logits at position i predict token i + 1 as the twin's do."""
    return diffusion_model_from_autoregressive(
        HERE / "twin",
        tokenizer,
        as_llada=True,
        block_size=DECODING_BLOCK_SIZE,
        dtype=torch.float32,
        attn_implementation="eager",
    )


def train_teacher() -> None:
    """The bidirectional diffusion model: LLaDA's objective, most rows as they look in decoding."""
    tokenizer = load_tokenizer()
    set_seed(SEED)
    args = D2FTrainingArguments(
        **common_arguments("teacher"),
        objective="masked_diffusion",
        block_size=TRAINING_BLOCK_SIZE,
        mask_ratio_low=0.2,
        decoding_probability=0.6,
        causal_probability=0.3,
        learning_rate=6e-4,  # higher ones destroy the arithmetic that comes with the weights
        warmup_steps=100,
    )
    trainer = D2FTrainer(
        teacher_from_twin(tokenizer),
        args,
        train_dataset=training_set(tokenizer, TEACHER_PROBLEMS, seed=SEED + 1, tails=True),
        data_collator=diffusion_collator(tokenizer),
    )
    run(trainer, "teacher")
    save(trainer.model, "teacher")


def train_student() -> None:
    """The D2F student: a LoRA adapter on all layers of the teacher, distilled with rising mask ratios."""
    tokenizer = load_tokenizer()
    set_seed(SEED)
    teacher = D2FLLaDAForBlockDiffusion.from_pretrained(
        HERE / "teacher", dtype=torch.float32, attn_implementation="eager"
    )
    args = D2FTrainingArguments(
        **{**common_arguments("student"), "torch_compile": False},  # two graphs, and few steps to pay for them
        block_size=TRAINING_BLOCK_SIZE,
        mask_ratio_low=0.2,
        mask_ratio_high=1.0,
        decoding_probability=0.7,
        label_weight=0.8,
        learning_rate=2e-3,
        warmup_steps=50,
    )
    trainer = D2FTrainer(
        teacher,
        args,
        train_dataset=training_set(tokenizer, STUDENT_PROBLEMS, seed=SEED + 2, tails=False),
        data_collator=diffusion_collator(tokenizer),
        peft_config=LoraConfig(
            r=32,
            lora_alpha=32,
            target_modules=r".*\.blocks\.\d+\.(q_proj|k_proj|v_proj|attn_out|ff_proj|up_proj|ff_out)",  # not the head
        ),
    )
    run(trainer, "student")
    trainer.model.config.block_size = DECODING_BLOCK_SIZE  # and not the one that it was trained with
    save(trainer.model, "student")


def diffusion_collator(tokenizer: PreTrainedTokenizerBase) -> D2FDataCollator:
    return D2FDataCollator(
        block_size=TRAINING_BLOCK_SIZE,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        pad_to_multiple_of=32,
    )


def save(model, stage: str) -> None:
    """Weights in bfloat16, as safetensors; neither code, which is in modeling/, nor paths. All share tokenizer/."""
    folder = HERE / stage
    if isinstance(model, PeftModel):
        model.peft_config["default"].base_model_name_or_path = "../teacher"
    model.config.use_cache = True  # the Trainer turns it off
    model.to(torch.bfloat16).save_pretrained(folder)
    for unwanted in (*folder.glob("*.py"), *folder.glob("README.md")):
        unwanted.unlink()
    config = folder / "config.json"
    if config.exists():
        without_code = {key: value for key, value in json.loads(config.read_text()).items() if key != "auto_map"}
        config.write_text(json.dumps(without_code, indent=2) + "\n")
    write_manifest()


def write_manifest() -> None:
    """SHA256SUMS of tokenizer and weights, as `sha256sum --check` reads it."""
    files = [HERE / "tokenizer" / "tokenizer.json", *sorted(HERE.glob("*/*.safetensors"))]
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(HERE)}\n" for file in files]
    (HERE / "SHA256SUMS").write_text("".join(lines))


def count_tokens() -> None:
    """Prints how many tokens each stage is trained on: all that its sequences hold, EOS tails included, no padding."""
    tokenizer = load_tokenizer()
    collate = diffusion_collator(tokenizer)
    for stage, count, seed in (
        ("twin", TWIN_PROBLEMS, SEED),
        ("teacher", TEACHER_PROBLEMS, SEED + 1),
        ("student", STUDENT_PROBLEMS, SEED + 2),
    ):
        rows = training_set(tokenizer, count, seed, tails=stage == "teacher")
        total = 0
        for first in range(0, count, BATCH_SIZE):
            batch = [
                {"input_ids": i, "prompt_length": p}
                for i, p in zip(*rows[first : first + BATCH_SIZE].values(), strict=True)
            ]
            if stage == "twin":
                total += sum(len(row["input_ids"]) for row in batch)
            else:
                total += int(collate(batch)["attention_mask"].sum())
        print(f"{stage}: {count} problems, {total} tokens")


STAGES = {"twin": train_twin, "teacher": train_teacher, "student": train_student}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all of them, in order")
    parser.add_argument("--count-tokens", action="store_true", help="only print how many tokens each stage sees")
    args = parser.parse_args()
    if args.count_tokens:
        count_tokens()
        return
    for stage in args.stage or STAGES:
        if (HERE / stage / "model.safetensors").exists() or (HERE / stage / "adapter_model.safetensors").exists():
            print(f"{stage}: already made")
        else:
            STAGES[stage]()


if __name__ == "__main__":
    main()
