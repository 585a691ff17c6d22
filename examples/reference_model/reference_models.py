"""The three reference models as `bench.py` and `demo.py` use them. The D2F model comes from a folder like on the Hub.

The folder is made first: the student's adapter is merged into the teacher and saved with the remote code.

    python examples/reference_model/reference_models.py --output my-d2f-model

Loading it needs torch and transformers only:

    model = AutoModelForCausalLM.from_pretrained("my-d2f-model", trust_remote_code=True)
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding

HERE = Path(__file__).parent
WEIGHTS = ("twin/model.safetensors", "teacher/model.safetensors", "student/adapter_model.safetensors")
# Of the vanilla sampler with one token per step: the best one on validation problems (bench.py --search).
TEACHER_BLOCK_SIZE = 1


@dataclass(frozen=True)
class ReferenceModels:
    """`student` is the D2F model, `teacher` its vanilla original, `twin` the autoregressive model of the same size."""

    tokenizer: Any
    twin: Any
    teacher: Any
    student: Any

    def prompt(self, question: str) -> BatchEncoding:
        """The prompt for a question: `input_ids` and `attention_mask`, `(1, L)`."""
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )

    def text(self, response_ids: list[int]) -> str:
        return self.tokenizer.decode(response_ids, skip_special_tokens=True).strip()


def load(models: Path, dtype: str) -> ReferenceModels:
    """Exports the D2F model of the folder `models` and loads all three in `dtype`, with their tokenizer.

    Raises:
        FileNotFoundError: if the weights of a model are not there.
    """
    missing = [name for name in WEIGHTS if not (models / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{models} lacks {', '.join(missing)}. `make reference-model` trains the models that are missing."
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "d2f-reference-model")
        # In a process of its own: where d2f_hf is imported, its classes would be taken instead of those in the folder.
        # The warning is about an attribute that peft looks up under its old name.
        command = [
            sys.executable,
            "-W",
            "ignore::FutureWarning",
            __file__,
            "--models",
            str(models),
            "--output",
            folder,
        ]
        subprocess.run(command, check=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        student = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)
    if not type(student).__module__.startswith("transformers_modules."):
        raise RuntimeError("The code of the exported folder was not used. Load the models before importing d2f_hf.")
    return ReferenceModels(
        tokenizer=tokenizer,
        twin=AutoModelForCausalLM.from_pretrained(models / "twin", dtype=dtype).eval(),
        teacher=type(student).from_pretrained(models / "teacher", dtype=dtype).eval(),
        student=student.eval(),
    )


def export(models: Path, output: Path) -> None:
    """Writes the D2F model to `output`: the teacher with the student's adapter merged, its code, the tokenizer."""
    from peft import PeftModel

    from d2f_hf import D2FLLaDAForBlockDiffusion

    teacher = D2FLLaDAForBlockDiffusion.from_pretrained(models / "teacher", dtype=torch.float32)
    student = PeftModel.from_pretrained(teacher, str(models / "student")).merge_and_unload()
    student.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(models / "tokenizer").save_pretrained(output)


def main() -> None:
    from transformers.utils import logging

    parser = argparse.ArgumentParser(description="Writes the D2F reference model as a folder for the Hub.")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    logging.disable_progress_bar()
    export(args.models, args.output)


if __name__ == "__main__":
    main()
