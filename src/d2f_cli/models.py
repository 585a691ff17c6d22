"""From the argument MODEL to a model and its tokenizer, and from a prompt to tokens."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from d2f_hf.modeling.modeling_d2f import D2FForBlockDiffusion
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import d2f_hf
from d2f_cli.console import waiting
from d2f_hf import load_d2f_model
from d2f_hf.architectures import ARCHITECTURES
from d2f_hf.checkpoint_files import find_file, read_json

REFERENCE = "reference"
# The models that the repository ships, by name: their folder, that of their adapter, and whether it is ours.
OF_THE_REPOSITORY = {
    REFERENCE: ("teacher", "student"),
    "reference-teacher": ("teacher", None),
    "reference-twin": ("twin", None),
}


class Loaded(NamedTuple):
    """A model and its tokenizer, and how it was named."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def is_block_diffusion(self) -> bool:
        """Whether it has the decodings of this package."""
        return isinstance(self.model, D2FForBlockDiffusion)

    def prompt(self, prompt: str | Sequence[Mapping[str, str]], system: str | None = None) -> torch.LongTensor:
        """The tokens `(1, L)` of a text or a chat, on the model's device.

        A text is what a user says, if the tokenizer has a chat template; otherwise it is taken as it is.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        if self.tokenizer.chat_template is None:
            if not isinstance(prompt, str) or system is not None:
                raise ValueError(f"{self.name} has no chat template, so it takes a text alone. Leave out the rest.")
            ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        else:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )["input_ids"]
        if ids.shape[1] == 0:
            raise ValueError("The prompt must not be empty. Say something.")
        return ids.to(self.model.device)

    def text(self, token_ids: Sequence[int]) -> str:
        """A response as text."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True).strip()


def load(
    name: str, adapter: str | None = None, dtype: str = "auto", device: str | None = None, as_it_is: bool = False
) -> Loaded:
    """Loads MODEL with its tokenizer.

    Args:
        name (`str`): Folder, Hub id, or a model of the repository: `"reference"`.
        adapter (`str`, *optional*): Folder or Hub id of its adapter.
        dtype, device (`str`): Where `device` is `None`, an accelerator if there is one.
        as_it_is (`bool`): An autoregressive checkpoint is loaded as transformers does it, rather than as one of ours.
    """
    logging.disable_progress_bar()
    try:
        return load_found(name, adapter, dtype, device, as_it_is)
    except OSError as error:  # the Hub's own messages may leave the name out
        raise OSError(f"MODEL {name} or its adapter could not be loaded: {error}") from error


def load_found(name: str, adapter: str | None, dtype: str, device: str | None, as_it_is: bool) -> Loaded:
    """What `load` gives, with the errors of the Hub as they are."""
    base, own_adapter, tokenizer_folder = found(name)
    adapter = adapter or own_adapter
    device = device or (str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu")
    with waiting(f"loading {name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft looks up an attribute under its old name
        if as_it_is and adapter is None and is_autoregressive(base):
            model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
        else:
            model = load_d2f_model(base, adapter, dtype=dtype)
        # Without the configuration transformers would ask whether to run the code of an original checkpoint.
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, config=model.config)
        return Loaded(model.to(device), tokenizer, name)


def is_autoregressive(base: str) -> bool:
    """Whether a checkpoint is of no diffusion model that we know, by its config.json."""
    file = find_file(base, "config.json", {})
    architecture = None if file is None else ARCHITECTURES.get(read_json(file).get("model_type"))
    return file is not None and (architecture is None or architecture.is_autoregressive)


def found(name: str) -> tuple[str, str | None, str]:
    """Folder or Hub id of the model, of its adapter if it brings one, and of its tokenizer."""
    if name not in OF_THE_REPOSITORY:
        return name, None, name
    folder = reference_folder()
    base, adapter = OF_THE_REPOSITORY[name]
    return str(folder / base), None if adapter is None else str(folder / adapter), str(folder / "tokenizer")


def reference_folder() -> Path:
    """`examples/reference_model` of the repository: that of the working directory, or that d2f-hf is run from.

    Raises:
        ValueError: where neither is a clone of the repository.
    """
    tops = [Path.cwd(), *Path.cwd().parents, *Path(d2f_hf.__file__).resolve().parents]
    for folder in (top / "examples" / "reference_model" for top in tops):
        if (folder / "teacher" / "model.safetensors").is_file():
            return folder
    raise ValueError(
        "MODEL must be a folder or a Hub id here, got 'reference': that model is in the repository of d2f-hf and not "
        "in the package. Call d2f in a clone of it, or name a folder."
    )
