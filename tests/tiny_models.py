"""Models that are small enough for tests: random ones, and one whose logits the test dictates."""

from collections.abc import Callable, Sequence

import torch
from d2f_hf.modeling.configuration_d2f import D2FConfig
from d2f_hf.modeling.generation_config_d2f import DECODING_MODES
from d2f_hf.modeling.modeling_d2f import D2FForBlockDiffusion
from d2f_hf.modeling.sampler import Sampler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from d2f_hf import (
    D2FDreamConfig,
    D2FDreamForBlockDiffusion,
    D2FLLaDAConfig,
    D2FLLaDAForBlockDiffusion,
    D2FLlamaConfig,
    D2FLlamaForBlockDiffusion,
    D2FQwen3Config,
    D2FQwen3ForBlockDiffusion,
)
from plain_models import DREAM_NAMES, LLADA_NAMES, block_causal_mask, plain_forward

# B batch, L sequence, T positions, V vocabulary

VOCAB_SIZE, PAD, EOS, MASK = 40, 37, 38, 39
LETTERS = "abcdefghijklmnopqrstuvwxyz .!"  # tokens 0 to 28 of `letter_tokenizer`


FAMILIES = {
    "llada": (D2FLLaDAConfig, D2FLLaDAForBlockDiffusion, LLADA_NAMES),
    "dream": (D2FDreamConfig, D2FDreamForBlockDiffusion, DREAM_NAMES),
    "llama": (D2FLlamaConfig, D2FLlamaForBlockDiffusion, DREAM_NAMES),
    "qwen3": (D2FQwen3Config, D2FQwen3ForBlockDiffusion, DREAM_NAMES),
}
# The decodings of models without a causal mode. The other one has the tests of test_autoregressive_decoding.py.
BLOCK_DECODINGS = tuple(mode for mode in DECODING_MODES if mode not in ("autoregressive", "verified"))
GOLDEN_FAMILIES = ("llada", "dream")  # those with tiny models of the original code in golden/
# Nothing as in the other tiny models: a width that is no power of 2, grouped heads, a tied head, low special ids.
OTHER = {
    "vocab_size": 50,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "tie_word_embeddings": True,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-3,
    "block_size": 3,
    "mask_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 4,
}


def tiny_config(family: str = "llada", **options) -> D2FConfig:
    """Two layers of width 32. Options by their usual names, or by those of the family."""
    config_class, _, _ = FAMILIES[family]
    options = {config_class.attribute_map.get(name, name): value for name, value in options.items()}
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": None,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "block_size": 4,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if family == "qwen3":
        defaults["head_dim"] = 12  # its heads have a width of their own
    defaults = {config_class.attribute_map.get(name, name): value for name, value in defaults.items()}
    return config_class(**{**defaults, **options})


def tiny_model(seed: int = 0, family: str = "llada", **options) -> D2FForBlockDiffusion:
    """A random model with weights large enough for its predictions to differ, and to depend on what it sees."""
    _, model_class, names = FAMILIES[family]
    model = model_class(tiny_config(family, **options)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" not in name and "ln_f" not in name:
            scale = 0.6 if name in (names["embedding"], names["head"]) else 0.25
            weight.data.normal_(0, scale, generator=generator)
    return model


def plain_logits(model: D2FForBlockDiffusion) -> Callable[..., torch.Tensor]:
    """The same model for the oracle: `logits_fn(ids, prompt_length=None, block_size=None)` gives `[L, V]`.

    `positions` and `memory` are those of `plain_forward`, with full attention.
    """
    config = model.config
    names = LLADA_NAMES if config.model_type == "d2f_llada" else DREAM_NAMES
    weights = {name: weight.detach().float() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def logits_fn(
        ids: Sequence[int],
        prompt_length: int | None = None,
        block_size: int | None = None,
        positions: torch.Tensor | None = None,
        memory: dict | None = None,
    ) -> torch.Tensor:
        if prompt_length is None or block_size is None:
            allowed = torch.ones((), dtype=torch.bool)
        else:
            allowed = block_causal_mask(len(ids), prompt_length, block_size)
        sizes = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
        rope_theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
        return plain_forward(
            weights, names, torch.tensor(ids), allowed, *sizes, rope_theta, eps, positions=positions, memory=memory
        )

    return logits_fn


class ScriptedModel(D2FLLaDAForBlockDiffusion):
    """A model that says what it is told, whatever it reads, and records what it was given.

    Args:
        script (`torch.Tensor` or `Callable`): Logits by position in the row, `(T, V)` or `(B, T, V)`, or a function of
            the number of forwards so far that gives them. They predict the token at their own position.
    """

    def __init__(self, script: torch.Tensor | Callable[[int], torch.Tensor], **options):
        super().__init__(tiny_config(d_model=4, n_heads=1, n_layers=1, mlp_hidden_size=4, **options))
        self.script = script
        self.calls: list[list[list[int]]] = []  # the ids of each forward

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **kwargs):
        script = self.script if isinstance(self.script, torch.Tensor) else self.script(len(self.calls))
        self.calls.append(input_ids.tolist())
        batch_size, length = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(length).expand(batch_size, -1)
        if script.dim() == 3:  # the sampler knows the rows; here some may have left, and equal ones go together
            script = script[0]
        logits = script[position_ids.clamp(max=len(script) - 1)].expand(batch_size, -1, -1).clone()  # [B, L, V]
        output = super().forward(input_ids[:, :1])
        output.logits = logits[logits_to_keep]
        return output

    @property
    def sampler_class(self):
        model = self

        class ScriptedSampler(Sampler):
            """Knows the rows of a script of the shape `(B, T, V)`."""

            def __call__(self, logits, row, index, response):
                script = model.script
                script = script if isinstance(script, torch.Tensor) else script(len(model.calls) - 1)
                if script.dim() == 3:
                    position = (response.prompt_lengths[row] + index).clamp(max=script.shape[1] - 1)
                    logits = script[row, position].clone()
                return super().__call__(logits, row, index, response)

        return ScriptedSampler


def sure_of(tokens: Sequence[int], unsure_until: dict[int, int] | None = None) -> Callable[[int], torch.Tensor]:
    """A script that predicts `tokens[p]` at position p, below any usual threshold before forward `unsure_until[p]`."""

    def script(call: int) -> torch.Tensor:
        logits = torch.zeros(len(tokens), VOCAB_SIZE)
        for position, token in enumerate(tokens):
            logits[position, token] = 15.0 if (unsure_until or {}).get(position, 0) <= call else 1.0
        return logits

    return script


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    specials = {"<pad>": PAD, "<eos>": EOS, "<mask>": MASK}
    fillers = {f"<{i}>": i for i in range(len(LETTERS), PAD)}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, **fillers, **specials}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>", padding_side="left"
    )


def tokenizer_of(size: int, *added: str, **named: str) -> PreTrainedTokenizerFast:
    """One of `size` words, with added special tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    if added:
        made.add_special_tokens({"additional_special_tokens": list(added)})
    made.chat_template = "{{ messages }}"
    return made
