"""Random models, prompts and scripts: what the decoding loop runs on when it is measured apart from a trained model.

`random_model` makes a model of a named size, and a `ScriptedAcceptance` decides how many tokens each forward decodes:
the model runs in full, and its choice is replaced. `scripted_run` puts these together.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from d2f_hf.modeling import D2FGenerationConfig, D2FLLaDAConfig, D2FLLaDAForBlockDiffusion
from transformers import AutoModelForCausalLM

from benchmarks.probes import block_diffusion_model, replaced, without_adapter
from d2f_hf.benchmarking import System, eos_token_ids, left_padded, timed_generate

# B batch, R response tokens (the limit), M masked tokens in the window, all rows

# Options of D2FLLaDAConfig. The vocabulary is 32,768 except that of "5m", where the head would be most of the model,
# and of "8b", which is LLaDA-8B; "1b" has the shape of TinyLlama.
SIZES = {
    "5m": {"d_model": 256, "n_layers": 6, "n_heads": 4, "mlp_hidden_size": 704, "vocab_size": 1024},
    "100m": {"d_model": 768, "n_layers": 12, "n_heads": 12, "mlp_hidden_size": 2048, "weight_tying": True},
    "1b": {"d_model": 2048, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4, "mlp_hidden_size": 5632},
    "8b": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464},
}


# Options of `generate` that say which loop runs and which tokens it accepts, and the values that a script works with.
SCRIPTED_OPTIONS = {
    "decoding": ("d2f",),
    "acceptance_rule": ("threshold", "factor", "credit"),  # by entropy there is no "accept this one, not that one"
    "num_branches": (1,),
    "remask_threshold": (0,),
}


class ScriptedAcceptance:
    """Replaces a model's choice of tokens: in order of position, so many per forward.

    The model's sampler still runs, so that its cost counts. Then each row's first n masked tokens get probability 1
    and the others 0, where n keeps the row at its number of tokens per forward; a fraction adds up from step to step,
    and what a window was too short for is made up for in the next one.

    Args:
        tokens_per_forward (`Sequence[float]`): Of each row, at least 1.
        response_lengths (`Sequence[int]`, *optional*): Length of each row's response, its EOS included. Without it all
            go on to their limit.
        token_id (`int`): What is decoded everywhere else.

    Attributes:
        seconds (`float`): Time spent in the script itself, which is not the loop's.

    Raises:
        ValueError: for less than one token per forward, or as many lengths as there are no rows.
    """

    def __init__(
        self,
        tokens_per_forward: Sequence[float],
        response_lengths: Sequence[int] | None = None,
        token_id: int = 0,
    ):
        if not tokens_per_forward or min(tokens_per_forward) < 1:
            raise ValueError(
                f"`tokens_per_forward` must hold a number of at least 1 for each row, got {list(tokens_per_forward)}: "
                "a fully activated block accepts at least one. Ask for more, or spread the rows less."
            )
        if response_lengths is not None and (
            len(response_lengths) != len(tokens_per_forward) or min(response_lengths) < 1
        ):
            raise ValueError(
                f"`response_lengths` must hold a length of at least 1 for each of the {len(tokens_per_forward)} rows, "
                f"got {list(response_lengths)}. Leave it out to let all rows go on to their limit."
            )
        self.rates = torch.tensor(tokens_per_forward, dtype=torch.float64, device="cpu")  # [B]
        self.last = None  # [B], index of the EOS
        if response_lengths is not None:
            self.last = torch.tensor(response_lengths, device="cpu") - 1
        self.token_id = token_id
        self.seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Begins a new call of `generate`: nothing is decoded."""
        self.num_steps = torch.zeros(len(self.rates), dtype=torch.long, device="cpu")  # [B]
        self.num_decoded = torch.zeros_like(self.num_steps)

    @contextlib.contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Replaces the choice of this one `model` as long as the context lasts.

        Raises:
            ValueError: for a model that is not a block-diffusion model, without an EOS for responses of a given
                length, or for a `token_id` that is not an ordinary token. `generate` raises one for options under
                which tokens are not accepted as scripted.
        """
        model = block_diffusion_model(model)
        eos = eos_token_ids(System(model))
        if self.last is not None and not eos:
            raise ValueError(
                "`model.generation_config.eos_token_id` must be set for responses of a given length, but it is None. "
                "Set it, or leave out `response_lengths`."
            )
        if self.token_id in (*eos, model.config.mask_token_id):
            raise ValueError(
                f"`token_id` must be an ordinary token, but {self.token_id} is an EOS or the mask token. Take another."
            )
        with replaced(model, "sampler_class", self._around(model.sampler_class, eos)):
            yield

    def _around(self, sampler_class: type, eos: Sequence[int]) -> type:
        """A sampler whose choice is the script's; the loop makes one for each call of `generate`."""
        script = self

        class ScriptedSampler(sampler_class):
            def __init__(self, generation_config, *args, **kwargs):
                super().__init__(generation_config, *args, **kwargs)
                script.check(generation_config)
                script.restart()

            def __call__(self, logits, row, index, response):
                prediction = super().__call__(logits, row, index, response)
                start = time.perf_counter()
                if len(response.limits) != len(script.rates):
                    raise ValueError(
                        f"`tokens_per_forward` must hold a number for each of the {len(response.limits)} rows of the "
                        f"response, got {len(script.rates)}. Make the script for this batch."
                    )
                tokens, probability, ranking = script.choose(row.cpu(), index.cpu(), response.max_new_tokens, eos)
                script.seconds += time.perf_counter() - start
                return prediction._replace(tokens=tokens, probability=probability, ranking=ranking)

        return ScriptedSampler

    def check(self, generation_config: D2FGenerationConfig) -> None:
        """Refuses options of `generate` under which a row does not keep to its script.

        Raises:
            ValueError: for another loop than the pipelined one, or another rule than its threshold.
        """
        for name, scripted in SCRIPTED_OPTIONS.items():
            value = getattr(generation_config, name, None)
            if value not in (None, *scripted):
                raise ValueError(
                    f"`{name}` is not supported with a `ScriptedAcceptance`, got {value!r}: the script says how many "
                    "tokens a forward of the pipelined loop accepts. Leave it out, or measure without a script."
                )

    def choose(
        self, row: torch.LongTensor, index: torch.LongTensor, limit: int, eos: Sequence[int]
    ) -> tuple[torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
        """Token, probability and rank value of the masked tokens at positions `index` of `row`, `(M,)` each.

        Raises:
            ValueError: if a row has not decoded what was scripted for it before.
        """
        is_masked = torch.zeros(len(self.rates), limit, dtype=torch.bool, device="cpu")  # [B, R]
        is_masked[row, index] = True
        is_asked = is_masked.any(-1)
        self.num_steps += is_asked
        # All before a row's first masked token are decoded, because it is decoded in order.
        num_decoded = is_masked.byte().argmax(-1)
        if (is_asked & (num_decoded != self.num_decoded)).any():
            wrong = int((is_asked & (num_decoded != self.num_decoded)).nonzero()[0])
            raise ValueError(
                f"The options of `generate` must let tokens be accepted as scripted, but row {wrong} has decoded "
                f"{int(num_decoded[wrong])} tokens instead of {int(self.num_decoded[wrong])}. Leave out what holds "
                "tokens back or replaces rows: a threshold of 1, processors that depend on the token before, streams."
            )
        quota = (self.num_steps * self.rates + 1e-9).long() - num_decoded  # [B]; 3 steps of 4/3 tokens are 4
        rank = is_masked.cumsum(-1)  # from 1, among the masked ones
        accepted = (rank <= quota[:, None])[row, index]
        self.num_decoded.index_add_(0, row, accepted.long())
        tokens = torch.full_like(index, self.token_id)
        if self.last is not None:
            tokens[index == self.last[row]] = eos[0]
        return tokens, accepted.float(), -index.float()


def row_rates(num_rows: int, tokens_per_forward: float, spread: float = 0.0, seed: int = 0) -> list[float]:
    """Tokens per forward of each row, such that rows of equal length have `tokens_per_forward` together.

    Args:
        num_rows (`int`): Rows.
        tokens_per_forward (`float`): All response tokens / all forwards.
        spread (`float`): How unequal the rows are: their forwards per token reach from 1 - spread to 1 + spread times
            the mean, evenly, in random order.
        seed (`int`): Of the order.

    Raises:
        ValueError: for a spread that is not in [0, 1), or so large that a row has less than one token per forward.
    """
    if not 0.0 <= spread < 1.0:
        raise ValueError(f"`spread` must be in [0, 1), got {spread}. 0 makes all rows equal.")
    if tokens_per_forward < 1.0 + spread:
        raise ValueError(
            f"`tokens_per_forward` must be at least 1 + `spread`, so that each row decodes a token per forward, got "
            f"{tokens_per_forward} and {spread}. Ask for more, or for a smaller spread."
        )
    if num_rows == 1:
        return [float(tokens_per_forward)]
    order = torch.randperm(num_rows, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    return [tokens_per_forward / (1 + spread * (2 * rank / (num_rows - 1) - 1)) for rank in order]


def random_model(
    size: str, dtype: str | torch.dtype = "bfloat16", device: str | torch.device = "cpu", **changes
) -> D2FLLaDAForBlockDiffusion:
    """A model with random weights.

    Args:
        size (`str`): `"5m"`, `"100m"`, `"1b"` or `"8b"`: about so many parameters. See `SIZES`.
        dtype (`str` or `torch.dtype`): Of the weights.
        device (`str` or `torch.device`): Where they are made.
        changes: Options of [`D2FLLaDAConfig`] in place of those of the size.

    Raises:
        ValueError: for another size.
    """
    if size not in SIZES:
        raise ValueError(f"`size` must be one of {', '.join(SIZES)}, got {size!r}. Change one by `changes`.")
    options = {"vocab_size": 32768, "max_sequence_length": 8192, **SIZES[size], **changes}
    last = options["vocab_size"] - 1
    config = D2FLLaDAConfig(**{"mask_token_id": last, "eos_token_id": last - 1, "pad_token_id": last - 2, **options})
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_prompts(config: D2FLLaDAConfig, lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of random ordinary tokens as one batch `(B, L)`, padded at the left: `input_ids`, `attention_mask`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    specials = {config.mask_token_id, config.pad_token_id, *ends, 0}  # 0: what a script decodes
    ordinary = torch.tensor([t for t in range(config.vocab_size) if t not in specials], device="cpu")
    rows = [
        {"input_ids": ordinary[torch.randint(len(ordinary), (1, length), generator=generator, device="cpu")]}
        for length in lengths
    ]
    return left_padded(rows, config.pad_token_id)


def scripted_run(
    model: Any,
    batch_size: int = 1,
    tokens_per_forward: float = 4.0,
    prompt_length: int = 64,
    max_new_tokens: int = 128,
    ragged: bool = True,
    seed: int = 0,
    **options,
) -> tuple[System, dict[str, torch.Tensor], ScriptedAcceptance]:
    """A run of `generate` for the functions below: a system, its prompts and a script.

    A single row has a prompt of `prompt_length` and a response of `max_new_tokens`. The rows of a ragged batch differ:
    prompts and responses have between half and all of these lengths, evenly and in random order, and tokens per
    forward are spread by a quarter.

    Args:
        model (`D2FForBlockDiffusion`): As from [`random_model`].
        batch_size (`int`): Rows.
        tokens_per_forward, seed: See [`row_rates`].
        prompt_length, max_new_tokens (`int`): The longest prompt and response.
        ragged (`bool`): Whether the rows of a batch differ. Otherwise they are all like a single one.
        options: More keywords of `generate`.
    """
    prompt_lengths, response_lengths, spread = [prompt_length] * batch_size, None, 0.0
    if ragged and batch_size > 1:
        spread = 0.25
        generator = torch.Generator("cpu").manual_seed(seed)
        shares = [0.5 + 0.5 * rank / (batch_size - 1) for rank in range(batch_size)]
        orders = [torch.randperm(batch_size, generator=generator, device="cpu").tolist() for _ in range(2)]
        prompt_lengths, response_lengths = (
            [max(1, round(longest * shares[i])) for i in order]
            for longest, order in zip((prompt_length, max_new_tokens), orders, strict=True)
        )
    config = without_adapter(model).config
    rates = row_rates(batch_size, tokens_per_forward, spread, seed)
    system = System(model, {"max_new_tokens": max_new_tokens, "do_sample": False, **options})
    return system, random_prompts(config, prompt_lengths, seed), ScriptedAcceptance(rates, response_lengths)


def timed_call(
    system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance | None
) -> tuple[Any, float]:
    """One call: its output, and its wall time less the time in the script."""
    if script is None:
        return timed_generate(system, inputs)
    before = script.seconds
    with script.on(system.model):
        output, seconds = timed_generate(system, inputs)
    return output, seconds - (script.seconds - before)
