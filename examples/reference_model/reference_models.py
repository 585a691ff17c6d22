"""The three reference models, as demo and benchmarks use them.

The D2F model comes from a folder like those on the Hub, which is made first: the student's adapter is merged into the
teacher and saved with the remote code.

    python examples/reference_model/reference_models.py --output my-d2f-model    # make model

Loading it needs torch and transformers only:

    model = AutoModelForCausalLM.from_pretrained("my-d2f-model", trust_remote_code=True)
"""

import argparse
import copy
import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from d2f_hf import D2FLLaDAForBlockDiffusion, load_d2f_model
from d2f_hf.benchmarking import System

HERE = Path(__file__).parent
WEIGHTS = ("twin/model.safetensors", "teacher/model.safetensors", "student/adapter_model.safetensors")
MAX_NEW_TOKENS = 256
# Of the vanilla sampler with one token per step: the best one on validation problems (benchmarks.reference --search).
TEACHER_BLOCK_SIZE = 1
D2F, TWIN, VANILLA = "D2F", "autoregressive twin", "vanilla"
OWN_TWIN = "autoregressive twin, our loop"
VERIFIED, VERIFIED_BLOCK_SIZE = "D2F drafts, twin verifies", 16  # the block size that the student was trained with
BLOCK_BY_BLOCK = "block by block"
PREFIX, DUAL = "Fast-dLLM, prefix cache", "Fast-dLLM, dual cache"


@dataclass(frozen=True)
class ReferenceModels:
    """`student` is the D2F model, `teacher` its vanilla original, `twin` the autoregressive model of the same size.

    `own_twin` has the twin's weights in the class of this package, whose loop decodes it.
    """

    tokenizer: Any
    twin: Any
    own_twin: Any
    teacher: Any
    student: Any

    def prompt(self, question: str) -> BatchEncoding:
        """The prompt for a question: `input_ids` and `attention_mask`, `(1, L)`."""
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )

    def text(self, response_ids: list[int]) -> str:
        return self.tokenizer.decode(response_ids, skip_special_tokens=True).strip()

    def systems(
        self,
        max_new_tokens: int = MAX_NEW_TOKENS,
        teacher_block_size: int = TEACHER_BLOCK_SIZE,
        fast_dllm_block_size: int = 32,
    ) -> dict[str, System]:
        """The seven ways to answer a prompt, by name; all have the same limit and the same EOS.

        Args:
            max_new_tokens (`int`): Limit of a response.
            teacher_block_size (`int`): Of the vanilla sampler, which decodes one token per step.
            fast_dllm_block_size (`int`): Fast-dLLM's own is 32.
        """
        limit = {"max_new_tokens": max_new_tokens}
        fast_dllm = {
            **limit,
            "decoding": "fast_dllm",
            "block_size": fast_dllm_block_size,
            "confidence_threshold": 0.9,
        }
        return {
            TWIN: System(self.twin, {**limit, "do_sample": False, "use_cache": True}),
            OWN_TWIN: System(self.own_twin, {**limit, "decoding": "autoregressive"}),
            VANILLA: System(self.teacher, {**limit, "decoding": "vanilla", "block_size": teacher_block_size}),
            PREFIX: System(self.teacher, {**fast_dllm, "block_cache": "prefix"}),
            DUAL: System(self.teacher, {**fast_dllm, "block_cache": "dual"}),
            BLOCK_BY_BLOCK: System(self.student, {**limit, "block_add_threshold": 1.0}),
            D2F: System(self.student, limit),
        }

    def verified(self, max_new_tokens: int = MAX_NEW_TOKENS, dtype: torch.dtype | None = None) -> System:
        """The twin's own answers, verified decoding with two models: the student drafts; in another `dtype` if given.

        One forward drafts, and the next one verifies.
        """
        student, twin = self.student, self.own_twin
        if dtype is not None:
            student, twin = copy.deepcopy(student).to(dtype), copy.deepcopy(twin).to(dtype)
        options = {"decoding": "verified", "verifier": twin, "block_size": VERIFIED_BLOCK_SIZE}
        return System(student, {**options, "max_new_tokens": max_new_tokens})


def load(models: Path, dtype: str) -> ReferenceModels:
    """Exports the D2F model of the folder `models` and loads all three in `dtype`, with their tokenizer.

    Student and teacher run the code of the exported folder, as they would on a machine without this package.

    Raises:
        FileNotFoundError: if the weights of a model are not there.
    """
    missing = [name for name in WEIGHTS if not (models / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{models} lacks {', '.join(missing)}. `make reference-model` trains the models that are missing."
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "d2f-reference-model"
        export(models, folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # `AutoModelForCausalLM` would take the classes of d2f_hf, which are registered where it is imported.
        class_reference = json.loads((folder / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
        model_class: Any = get_class_from_dynamic_module(class_reference, str(folder))
        student = model_class.from_pretrained(folder, dtype=dtype).eval()
    return ReferenceModels(
        tokenizer=tokenizer,
        twin=AutoModelForCausalLM.from_pretrained(models / "twin", dtype=dtype).eval(),
        own_twin=load_d2f_model(models / "twin", dtype=dtype, mask_token_id=tokenizer.mask_token_id),
        teacher=model_class.from_pretrained(models / "teacher", dtype=dtype).eval(),
        student=student,
    )


def export(models: Path, output: Path) -> None:
    """Writes the D2F model to `output`: the teacher with the student's adapter merged, its code, the tokenizer."""
    teacher = D2FLLaDAForBlockDiffusion.from_pretrained(models / "teacher", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft looks up an attribute under its old name
        student = PeftModel.from_pretrained(teacher, str(models / "student")).merge_and_unload()
    student.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(models / "tokenizer").save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the D2F reference model as a folder for the Hub.")
    parser.add_argument("--models", type=Path, default=HERE, help="folder of the models")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    logging.disable_progress_bar()
    export(args.models, args.output)
    print(f"Wrote {args.output}. AutoModelForCausalLM.from_pretrained loads it with trust_remote_code=True.")


if __name__ == "__main__":
    main()
