"""What the decoding loop costs apart from the model: overhead, masked share, context, early end, memory, adapters.

None of this needs a trained model. `random_model` makes one of a named size, and a `ScriptedAcceptance` decides how
many tokens each forward decodes: the model runs in full, its choice is replaced. `record_forwards` keeps what the loop
gave to the model, so that the same forwards can be run again without the loop.
"""

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.cache_utils import Cache

from d2f_hf.benchmarking import (
    System,
    eos_token_ids,
    left_padded,
    replaced_method,
    response_tokens,
    timed_generate,
    wait_for,
    without_adapter,
)
from d2f_hf.modeling import D2FLLaDAConfig, D2FLLaDAForBlockDiffusion

# B batch, L sequence, W window, R response tokens (the limit), V vocabulary, M masked tokens in the window, all rows

# Options of D2FLLaDAConfig. The vocabulary is 32,768 except that of "5m", where the head would be most of the model,
# and of "8b", which is LLaDA-8B; "1b" has the shape of TinyLlama.
SIZES = {
    "5m": {"d_model": 256, "n_layers": 6, "n_heads": 4, "mlp_hidden_size": 704, "vocab_size": 1024},
    "100m": {"d_model": 768, "n_layers": 12, "n_heads": 12, "mlp_hidden_size": 2048, "weight_tying": True},
    "1b": {"d_model": 2048, "n_layers": 22, "n_heads": 32, "n_kv_heads": 4, "mlp_hidden_size": 5632},
    "8b": {"d_model": 4096, "n_layers": 32, "n_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464},
}
STEP = "d2f_denoising_step"  # marks the start of a forward among the profiler's events


@dataclass(frozen=True)
class RecordedForward:
    """One forward as the decoding loop called it.

    Args:
        kwargs (`dict`): Its arguments, tensors copied; the cache is the loop's own.
        window (`tuple`, *optional*): Arguments of the `cache.set_window` before it; `None` without a cache.
    """

    kwargs: dict[str, Any]
    window: tuple | None

    @property
    def num_positions(self) -> int:
        """Positions that went through the model, padding included: B * W."""
        return self.kwargs["input_ids"].numel()

    @property
    def num_masked(self) -> int:
        """Masked positions of live rows among them, M: those whose logits the loop wants."""
        return _num_logits(self.kwargs["logits_to_keep"])


@dataclass(frozen=True)
class LoopOverhead:
    """How much longer `generate` takes than its forwards alone.

    Args:
        ratio (`float`): Wall time of `generate` / wall time of its forwards run again; median over repetitions.
        generate_seconds, forward_seconds (`float`): Medians of the two.
        forwards (`list[RecordedForward]`): Those of one call.
        num_tokens (`int`): Response tokens of one call, all rows.
    """

    ratio: float
    generate_seconds: float
    forward_seconds: float
    forwards: list[RecordedForward]
    num_tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Response tokens of all rows / wall time of `generate`."""
        return self.num_tokens / self.generate_seconds


@dataclass(frozen=True)
class ContextGrowth:
    """How the time of a denoising step grows with the context, and how that of its forward alone does.

    Args:
        contexts (`tuple[int, int]`): The shorter and the longer prompt, in tokens.
        step_seconds (`tuple[float, float]`): Wall time of `generate` behind its first forward / steps, at each.
        forward_seconds (`tuple[float, float]`): The same of the forwards alone.
    """

    contexts: tuple[int, int]
    step_seconds: tuple[float, float]
    forward_seconds: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Growth of the step / growth of the forward: above 1 the loop's own work grows faster than the model's."""
        short, long = self.step_seconds
        bare_short, bare_long = self.forward_seconds
        return (long / short) / (bare_long / bare_short)


@dataclass(frozen=True)
class EarlyEnd:
    """What a high limit costs a response that ends early.

    Args:
        limits (`tuple[int, int]`): The two `max_new_tokens`.
        num_forwards (`tuple[int, int]`): Forwards with each.
        time_ratio (`float`): Wall time with the second / with the first limit; median over repetitions.
    """

    limits: tuple[int, int]
    num_forwards: tuple[int, int]
    time_ratio: float


@dataclass(frozen=True)
class StepMemory:
    """The denoising step that takes most memory.

    Args:
        peak_bytes (`int`): Most memory at a time, beyond weights and key/value cache.
        logits_bytes (`int`): The logits of the masked rows in the model's dtype: M * V * bytes of a value.
        num_masked (`int`): M.
        num_positions (`int`): Positions in the window of the batch, B * W.
    """

    peak_bytes: int
    logits_bytes: int
    num_masked: int
    num_positions: int

    @property
    def ratio(self) -> float:
        """Peak memory / logits."""
        return self.peak_bytes / self.logits_bytes


class ScriptedAcceptance:
    """Replaces a model's choice of tokens: in order of place, so many per forward.

    The model's `_predict` still runs, so that its cost counts. Then each row's first n masked tokens get probability 1
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
        self.rates = torch.tensor(tokens_per_forward, dtype=torch.float64)  # [B]
        self.last = None if response_lengths is None else torch.tensor(response_lengths) - 1  # [B], place of the EOS
        self.token_id = token_id
        self.seconds = 0.0
        self._response: Any = None
        self._steps = torch.zeros(len(self.rates), dtype=torch.long)

    @contextlib.contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Replaces the choice of this one `model` as long as the context lasts."""
        model = _block_diffusion_model(model)
        ends = eos_token_ids(System(model))
        if self.last is not None and not ends:
            raise ValueError(
                "`model.generation_config.eos_token_id` must be set for responses of a given length, but it is None. "
                "Set it, or leave out `response_lengths`."
            )
        if self.token_id in (*ends, model.config.mask_token_id):
            raise ValueError(
                f"`token_id` must be an ordinary token, but {self.token_id} is an EOS or the mask token. Take another."
            )

        def scripted(predict: Callable) -> Callable:
            def call(logits, row, index, response, *args, **kwargs):
                scores, tokens, probability, ranking = predict(logits, row, index, response, *args, **kwargs)
                start = time.perf_counter()
                if response is not self._response:  # another call of `generate`
                    self._response = response
                    self._steps.zero_()
                chosen = self._choose(row.cpu(), index.cpu(), response.max_new_tokens, ends)
                tokens, probability, ranking = (
                    own.to(its.device) for own, its in zip(chosen, (tokens, probability, ranking), strict=True)
                )
                self.seconds += time.perf_counter() - start
                return scores, tokens, probability, ranking

            return call

        with replaced_method(model, "_predict", scripted):
            try:
                yield
            finally:
                self._response = None

    def _choose(
        self, row: torch.LongTensor, index: torch.LongTensor, limit: int, ends: Sequence[int]
    ) -> tuple[torch.LongTensor, torch.FloatTensor, torch.FloatTensor]:
        """Token, probability and rank value of the masked tokens at places `index` of `row`, `(M,)` each."""
        is_masked = torch.zeros(len(self.rates), limit, dtype=torch.bool)  # [B, R]
        is_masked[row, index] = True
        is_asked = is_masked.any(-1)
        self._steps += is_asked
        # All before a row's first masked token are decoded, because it is decoded in order.
        num_decoded = is_masked.byte().argmax(-1)
        quota = (self._steps * self.rates + 1e-9).long() - num_decoded  # [B]; 3 steps of 4/3 tokens are 4
        place = is_masked.cumsum(-1)  # from 1, among the masked ones
        accepted = (place <= quota[:, None])[row, index]
        tokens = torch.full_like(index, self.token_id)
        if self.last is not None:
            tokens[index == self.last[row]] = ends[0]
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
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return [tokens_per_forward / (1 + spread * (2 * place / (num_rows - 1) - 1)) for place in order]


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
        return D2FLLaDAForBlockDiffusion._from_config(config, dtype=dtype).eval()


def random_prompts(config: D2FLLaDAConfig, lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of random ordinary tokens as one batch `(B, L)`, padded at the left: `input_ids`, `attention_mask`."""
    generator = torch.Generator().manual_seed(seed)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    specials = {config.mask_token_id, config.pad_token_id, *ends, 0}  # 0: what a script decodes
    ordinary = torch.tensor([token for token in range(config.vocab_size) if token not in specials])
    rows = [
        {"input_ids": ordinary[torch.randint(len(ordinary), (1, length), generator=generator)]} for length in lengths
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
        generator = torch.Generator().manual_seed(seed)
        shares = [0.5 + 0.5 * place / (batch_size - 1) for place in range(batch_size)]
        prompt_lengths, response_lengths = (
            [max(1, round(longest * shares[i])) for i in torch.randperm(batch_size, generator=generator).tolist()]
            for longest in (prompt_length, max_new_tokens)
        )
    config = without_adapter(model).config
    rates = row_rates(batch_size, tokens_per_forward, spread, seed)
    system = System(model, {"max_new_tokens": max_new_tokens, "do_sample": False, **options})
    return system, random_prompts(config, prompt_lengths, seed), ScriptedAcceptance(rates, response_lengths)


def record_forwards(
    system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance | None = None
) -> list[RecordedForward]:
    """All forwards of one call of `generate` with prompts `(B, L)`.

    Raises:
        ValueError: for a model that is not a block-diffusion model, or compiled steps, which do not go through the
            model's `forward`.
    """
    if system.options.get("compile_config") is not None:
        raise ValueError(
            "`compile_config` cannot be among the options of a system whose forwards are run again, because compiled "
            "steps cannot. Leave it out, and compare with `gain`."
        )
    model = _block_diffusion_model(system.model)
    recorded: list[RecordedForward] = []

    def recording(forward: Callable) -> Callable:
        def call(**kwargs):
            cache = kwargs.get("cache")
            recorded.append(RecordedForward(_copied(kwargs), None if cache is None else _copied(cache.window)))
            return forward(**kwargs)

        return call

    with replaced_method(model, "forward", recording):
        _generate(system, inputs, script)
    return recorded


@torch.inference_mode()
def replay_forwards(model: Any, forwards: Sequence[RecordedForward]) -> None:
    """Runs forwards again, with the window of the cache that each of them had.

    Which keys and values the cache holds is another matter than at first, and does not change the time.
    """
    model = without_adapter(model)
    for forward in forwards:
        if forward.window is not None:
            forward.kwargs["cache"].set_window(*forward.window)
        model.forward(**forward.kwargs)


def loop_overhead(
    system: System,
    inputs: Mapping[str, torch.Tensor],
    script: ScriptedAcceptance | None = None,
    repetitions: int = 5,
) -> LoopOverhead:
    """Wall time of `generate` against that of its forwards alone; the two take turns, and at going first too.

    The forwards are those of a call before, which warms up: same inputs, same window of the cache, which is set in
    their time too. Time in the script is taken off.

    Args:
        system (`System`): A block-diffusion model and the keywords of `generate`; it must decode the same each time.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens.
        repetitions (`int`): Pairs of times.

    Raises:
        ValueError: for a model that is not a block-diffusion model, or no repetitions.
    """
    _check_repetitions(repetitions)
    forwards = record_forwards(system, inputs, script)
    _replay_seconds(system.model, forwards)
    pairs = []
    for repetition in range(repetitions):
        first = _replay_seconds(system.model, forwards) if repetition % 2 else None
        output, seconds = _generate(system, inputs, script)
        pairs.append((seconds, first or _replay_seconds(system.model, forwards)))
    return LoopOverhead(
        ratio=statistics.median(loop / bare for loop, bare in pairs),
        generate_seconds=statistics.median(loop for loop, _ in pairs),
        forward_seconds=statistics.median(bare for _, bare in pairs),
        forwards=forwards,
        num_tokens=sum(len(row) for row in _responses(system, inputs, output)),
    )


def masked_share(forwards: Sequence[RecordedForward], without_prefill: bool = False) -> float:
    """Masked positions of live rows / all positions that went through the model, padding included, over a run.

    Args:
        forwards (`Sequence[RecordedForward]`): Of one call.
        without_prefill (`bool`): Leave out the first forward, which reads the prompts.

    Raises:
        ValueError: if nothing is left to count.
    """
    forwards = forwards[1:] if without_prefill else forwards
    num_positions = sum(forward.num_positions for forward in forwards)
    if num_positions == 0:
        raise ValueError(
            "`forwards` must hold a forward to count, besides the first one if that is left out, got none. Decode "
            "more tokens."
        )
    return sum(forward.num_masked for forward in forwards) / num_positions


def context_growth(
    model: Any,
    contexts: tuple[int, int] = (256, 4096),
    tokens_per_forward: float = 4.0,
    max_new_tokens: int = 32,
    repetitions: int = 3,
    **options,
) -> ContextGrowth:
    """How the time of a denoising step grows from a short prompt to a long one; batch size 1, medians.

    The first forward, which reads the prompt, is not counted: neither in `generate` nor in the forwards alone, which
    take turns.

    Args:
        model (`D2FForBlockDiffusion`): Has positions for prompt and response.
        contexts (`tuple[int, int]`): Tokens of the two prompts.
        tokens_per_forward (`float`): Of the script.
        max_new_tokens (`int`): Response tokens; they must take two forwards at least.
        repetitions (`int`): Times of each.
        options: More keywords of `generate`.

    Raises:
        ValueError: if all is decoded in one forward, or without repetitions.
    """
    _check_repetitions(repetitions)
    runs = []
    for context in contexts:
        run = scripted_run(model, 1, tokens_per_forward, context, max_new_tokens, **options)
        forwards = record_forwards(*run)[1:]
        if not forwards:
            raise ValueError(
                f"`max_new_tokens` must be more than the first forward decodes, got {max_new_tokens} for "
                f"{tokens_per_forward} tokens per forward. Raise it."
            )
        runs.append((run, forwards, [], []))
    for _ in range(repetitions):
        for run, forwards, steps, bare in runs:
            steps.append(_decode_seconds(*run) / len(forwards))
            bare.append(_replay_seconds(model, forwards) / len(forwards))
    step_seconds, forward_seconds = (
        (statistics.median(runs[0][kind]), statistics.median(runs[1][kind])) for kind in (2, 3)
    )
    return ContextGrowth(contexts, step_seconds, forward_seconds)


def early_end(
    model: Any,
    response_length: int = 20,
    limits: tuple[int, int] = (64, 2048),
    tokens_per_forward: float = 4.0,
    prompt_length: int = 64,
    repetitions: int = 5,
    **options,
) -> EarlyEnd:
    """What a limit far behind the end of the response costs; batch size 1, the two limits take turns.

    Args:
        model (`D2FForBlockDiffusion`): Has positions for the prompt and the larger limit.
        response_length (`int`): Tokens up to and including the EOS.
        limits (`tuple[int, int]`): Two `max_new_tokens`.
        tokens_per_forward (`float`): Of the script.
        prompt_length (`int`): Tokens of the prompt.
        repetitions (`int`): Pairs of times.
        options: More keywords of `generate`.

    Raises:
        ValueError: for a response that does not end before the limits, or without repetitions.
    """
    _check_repetitions(repetitions)
    if response_length > min(limits):
        raise ValueError(
            f"`response_length` must be within both `limits`, got {response_length} and {limits}. Lower it."
        )
    script = ScriptedAcceptance([tokens_per_forward], [response_length])
    systems, num_forwards, ratios = [], [], []
    for limit in limits:
        system, inputs, _ = scripted_run(model, 1, tokens_per_forward, prompt_length, limit, **options)
        systems.append(system)
        num_forwards.append(len(record_forwards(system, inputs, script)))
    for _ in range(repetitions):
        (_, first), (_, second) = (_generate(system, inputs, script) for system in systems)
        ratios.append(second / first)
    return EarlyEnd(limits, (num_forwards[0], num_forwards[1]), statistics.median(ratios))


def merged_adapter_gain(
    system: System,
    inputs: Mapping[str, torch.Tensor],
    script: ScriptedAcceptance | None = None,
    rank: int = 32,
    repetitions: int = 5,
) -> float:
    """Tokens per second with an adapter merged into the weights / with the adapter on top; the two take turns.

    The adapter is a random LoRA on the attention projections, as the paper's; on top it stays in the dtype that peft
    gives it. Both models are copies of that of `system`.

    Args:
        system (`System`): A block-diffusion model without an adapter, and the keywords of `generate`.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens. Without it the two models may decode
            different tokens, because rounding differs.
        rank (`int`): Of the adapter.
        repetitions (`int`): Pairs of times; the median of their ratios is returned.
    """
    from peft import LoraConfig, get_peft_model

    _check_repetitions(repetitions)
    projections = list(system.model.config.attention_projections)
    lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=projections, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(system.model), lora).eval()
    merged = copy.deepcopy(adapted).merge_and_unload()
    return gain(System(merged, system.options), System(adapted, system.options), inputs, script, repetitions)


def gain(
    system: System,
    baseline: System,
    inputs: Mapping[str, torch.Tensor],
    script: ScriptedAcceptance | None = None,
    repetitions: int = 5,
) -> float:
    """Tokens per second of `system` / those of `baseline` with the same prompts `(B, L)`; the two take turns.

    Args:
        system, baseline (`System`): Block-diffusion models and the keywords of `generate`.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens.
        repetitions (`int`): Pairs of times behind one that warms up; the median of their ratios is returned.
    """
    _check_repetitions(repetitions)
    ratios = []
    for repetition in range(repetitions + 1):
        rates = []
        for one in (system, baseline):
            output, seconds = _generate(one, inputs, script)
            rates.append(sum(len(row) for row in _responses(one, inputs, output)) / seconds)
        if repetition > 0:
            ratios.append(rates[0] / rates[1])
    return statistics.median(ratios)


def step_memory(
    system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance | None = None
) -> StepMemory:
    """The memory of the denoising step that takes the most, beyond weights and key/value cache.

    A step lasts from the start of a forward to the start of the next one, or to the end of the call; the first one is
    left out. On a CPU the allocator's events are added up in order of time, from the start of the call; what a kernel
    takes from elsewhere is not seen. On CUDA it is what the allocator says.

    Args:
        system (`System`): A block-diffusion model and the keywords of `generate`.
        inputs (`Mapping[str, torch.Tensor]`): Prompts `(B, L)`.
        script (`ScriptedAcceptance`, *optional*): Replaces the choice of tokens.

    Raises:
        ValueError: on another device, or if the call takes less than two forwards.
    """
    model = _block_diffusion_model(system.model)
    device = model.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"`system.model` must be on a CPU or on CUDA to count memory, but it is on {device}. Move it."
        )
    value_size = torch.empty((), dtype=model.dtype).element_size()
    steps: list[tuple[int, int]] = []  # positions and masked ones
    cache_bytes: list[int] = []  # at the start of each step
    peaks: list[int] = []  # on CUDA: up to the start of each step

    def marking(forward: Callable) -> Callable:
        def call(**kwargs):
            steps.append((kwargs["input_ids"].numel(), _num_logits(kwargs["logits_to_keep"])))
            caches.append(kwargs.get("cache"))
            cache_bytes.append(_cache_bytes(caches[-1]))
            if device.type == "cuda":
                peaks.append(torch.cuda.max_memory_allocated(device))
                torch.cuda.reset_peak_memory_stats(device)
            with record_function(STEP):
                return forward(**kwargs)

        return call

    caches: list[Cache | None] = []
    with replaced_method(model, "forward", marking):
        if device.type == "cuda":
            wait_for(device)
            before = torch.cuda.memory_allocated(device)
            _generate(system, inputs, script)
            peaks.append(torch.cuda.max_memory_allocated(device))
            totals = [peak - before for peak in peaks[1:]]
        else:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                _generate(system, inputs, script)
            events = profiler.profiler.kineto_results.events()
            totals = highest_totals(
                [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"],
                [event.start_ns() for event in events if event.name() == STEP],
            )
    if len(steps) < 2:
        raise ValueError(
            f"`inputs` and `script` must take two forwards at least, because the first one is left out, got "
            f"{len(steps)}. Decode more tokens."
        )
    # The cache may grow at the end of a step, for the next one.
    cache_bytes.append(_cache_bytes(caches[-1]))
    beyond = [total - max(cache_bytes[i : i + 2]) for i, total in enumerate(totals)]
    largest = max(range(1, len(beyond)), key=beyond.__getitem__)
    num_positions, num_masked = steps[largest]
    logits_bytes = num_masked * model.config.vocab_size * value_size
    return StepMemory(beyond[largest], logits_bytes, num_masked, num_positions)


def highest_totals(changes: Sequence[tuple[int, int]], starts: Sequence[int]) -> list[int]:
    """The highest running total of memory in each step.

    Args:
        changes (`Sequence[tuple[int, int]]`): Time and bytes, negative where memory is given back, in any order.
        starts (`Sequence[int]`): When each step starts. It lasts until the next one starts, the last one for ever.

    Returns:
        `list[int]`: Per step. What was taken before it counts as long as it is not given back.
    """
    # At the same time the start of a step comes first.
    points = sorted([(start, 0, 0) for start in starts] + [(moment, 1, size) for moment, size in changes])
    total, highest = 0, []
    for _, is_change, size in points:
        total += size
        if not is_change:
            highest.append(total)
        elif highest:
            highest[-1] = max(highest[-1], total)
    return highest


def _generate(
    system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance | None
) -> tuple[Any, float]:
    """One call: its output, and its wall time less the time in the script."""
    if script is None:
        return timed_generate(system, inputs)
    before = script.seconds
    with script.on(system.model):
        output, seconds = timed_generate(system, inputs)
    return output, seconds - (script.seconds - before)


def _decode_seconds(system: System, inputs: Mapping[str, torch.Tensor], script: ScriptedAcceptance) -> float:
    """Wall time of a call from the start of its second forward, less the time in the script."""
    model = _block_diffusion_model(system.model)
    starts: list[tuple[float, float]] = []  # of each forward, and time in the script before it

    def noting(forward: Callable) -> Callable:
        def call(**kwargs):
            if len(starts) == 1:
                wait_for(model.device)
            starts.append((time.perf_counter(), script.seconds))
            return forward(**kwargs)

        return call

    with replaced_method(model, "forward", noting):
        _generate(system, inputs, script)
    start, script_seconds = starts[1]
    return time.perf_counter() - start - (script.seconds - script_seconds)


def _replay_seconds(model: Any, forwards: Sequence[RecordedForward]) -> float:
    wait_for(model.device)
    start = time.perf_counter()
    replay_forwards(model, forwards)
    wait_for(model.device)
    return time.perf_counter() - start


def _responses(system: System, inputs: Mapping[str, torch.Tensor], output: Any) -> list[list[int]]:
    rows = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [response_tokens(row, eos_token_ids(system)) for row in rows]


def _block_diffusion_model(model: Any) -> Any:
    model = without_adapter(model)
    if not hasattr(model, "_predict"):
        raise ValueError(
            f"`system.model` must be a block-diffusion model, but it is a {type(model).__name__}: another one's cache "
            "grows as it is read, so its forwards cannot be run again. `benchmarking.measure` takes all models."
        )
    return model


def _check_repetitions(repetitions: int) -> None:
    if repetitions < 1:
        raise ValueError(f"`repetitions` must be at least 1, got {repetitions}. Five give a steady median.")


def _num_logits(logits_to_keep: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> int:
    """M: from rows and positions, `(M,)` each, or from a bool mask `(B, L)`."""
    return len(logits_to_keep[0]) if isinstance(logits_to_keep, tuple) else int(logits_to_keep.sum())


def _cache_bytes(cache: Cache | None) -> int:
    layers = [] if cache is None else [layer for layer in cache.layers if layer.is_initialized]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def _copied(value: Any) -> Any:
    """`value` with its tensors copied, because a loop may write its next window into the same ones."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_copied(item) for item in value)
    return value
