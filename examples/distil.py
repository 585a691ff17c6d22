"""Makes a D2F student of a diffusion language model, which then answers several times as fast.

1. Load the model. It is both: the teacher as it is, and the student with a LoRA adapter and block-causal attention.
2. Load the examples: a prompt and a response each, as `messages` or as `prompt` and `completion`.
3. Train the adapter.
4. Merge it and save the student, with its code and its tokenizer.
5. Load what was saved, and ask it a question.

Without arguments it distils the reference model of this repository on its word problems for a few steps, on a CPU, in
less than two minutes (too few steps to be always right):

    python examples/distil.py

LLaDA-8B on eight GPUs, with the settings of the paper (arXiv 2508.09192); `dataset.jsonl` has a chat per line, such as
`{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`:

    accelerate launch --num_processes 8 examples/distil.py \\
        --model GSAI-ML/LLaDA-8B-Instruct --dtype bfloat16 --bf16 \\
        --dataset dataset.jsonl --max_length 512 --block_size 16 --mask_ratio_low 0.3 \\
        --learning_rate 1e-5 --lr_scheduler_type constant --num_train_epochs 1 \\
        --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --activation_checkpointing \\
        --question "How many minutes are there in a day?" --output_dir llada-d2f

All other options of `D2FTrainingArguments` can be given, too.
"""

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from d2f_hf import D2FTrainer, D2FTrainingArguments, load_d2f_model

REFERENCE_MODEL = Path(__file__).resolve().parent / "reference_model"
sys.path.insert(0, str(REFERENCE_MODEL))
word_problems = importlib.import_module("word_problems")

# What is run without arguments.
QUICK_RUN = (
    "--use_cpu --max_steps 40 --per_device_train_batch_size 8 --learning_rate 2e-3 --warmup_steps 5 "
    "--lr_scheduler_type cosine --label_weight 0.8 --mask_ratio_high 1.0 --decoding_probability 0.7 "
    "--logging_steps 10 --save_strategy no --report_to none --output_dir runs/distil"
)


@dataclass
class ScriptArguments:
    """Which model learns from what. By default the reference model, from its word problems."""

    model: str = field(default=str(REFERENCE_MODEL / "teacher"), metadata={"help": "Folder or Hub id."})
    tokenizer: str | None = field(default=None, metadata={"help": "Folder or Hub id, if it is not with the model."})
    dtype: str = field(default="float32", metadata={"help": "dtype of the model."})
    dataset: str | None = field(default=None, metadata={"help": "A .jsonl file, or a dataset's folder or Hub id."})
    question: str | None = field(default=None, metadata={"help": "What the student is asked."})


def main(command: list[str]) -> str:
    """Runs the steps 1 to 5 and gives the answer."""
    parser = HfArgumentParser((ScriptArguments, D2FTrainingArguments), description=__doc__.split("\n")[0])
    script, args = parser.parse_args_into_dataclasses(command)
    is_reference = script.model == ScriptArguments.model
    test_problem = word_problems.make_problems("test", 1)[0]
    question = script.question or test_problem.question

    # 1. The model.
    model = load_d2f_model(script.model, dtype=script.dtype)
    tokenizer = script.tokenizer or (str(REFERENCE_MODEL / "tokenizer") if is_reference else script.model)
    # Without the configuration transformers would ask whether to run the code of an original checkpoint.
    tokenizer = AutoTokenizer.from_pretrained(tokenizer, config=model.config)

    # 2. The examples.
    if script.dataset is None:
        problems = word_problems.make_problems("train", 1000)
        dataset = Dataset.from_list([{"messages": problem.messages} for problem in problems])
    elif script.dataset.endswith((".json", ".jsonl")):
        dataset = load_dataset("json", data_files=script.dataset, split="train")
    else:
        dataset = load_dataset(script.dataset, split="train")

    # 3. The training.
    trainer = D2FTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    if not trainer.is_world_process_zero():
        return ""

    # 4. What is saved is a model like any other: `from_pretrained(folder, trust_remote_code=True)` is all it takes.
    student = trainer.model.merge_and_unload()
    student.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)

    # 5. The answer.
    student = AutoModelForCausalLM.from_pretrained(args.output_dir).to(args.device)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(args.device)
    output = student.generate(**inputs, max_new_tokens=128, return_dict_in_generate=True)
    answer = tokenizer.decode(output.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    print(f"\n{question}\n\n{answer}\n\n{float(output.tokens_per_forward[0]):.1f} tokens per forward")
    if question == test_problem.question:
        print(f"The right answer is {test_problem.answer}.")
    return answer


if __name__ == "__main__":
    main(sys.argv[1:] or QUICK_RUN.split())
